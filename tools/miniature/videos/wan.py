"""The tiny model of Wan 2.1: text to video."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common.t5 import write_umt5_tokenizer
from comfyui_tpu.tpu_runtime.models.wan.spec import SCHEDULER
from comfyui_tpu.tpu_runtime.models.wan.text_encoder import MAX_TOKENS
from comfyui_tpu.tpu_runtime.tokenization import load_tokenizer
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from .. import denoisers
from ..autoencoders import wan as autoencoder
from ..autoencoders.wan import CHANNELS, FRAMES, encode_clips, latents_of
from ..denoisers import rotated, scheduler
from ..moving import MOTIONS, Scene, show
from ..shapes import COLOURS, HEIGHT, SHAPES, WIDTH
from ..training import upstream, without_case

TAG, SOURCE = "text-to-video", "moving"
SHARED: dict[str, str] = {}  # parts that another miniature has
CARD = """\
A small model with the classes of Wan 2.1's text-to-video model, trained from scratch by `tools/train_miniature.py`.
It is meant for demonstrations and tests of prompts, guidance, seeds and previews, on machines that cannot hold the
real model.

It understands sentences such as "a red circle moves right on blue" and "a white square turns and a green circle grows
on black": one or two shapes ({shapes}) in {colours}. A shape does one of these: {motions}. If there are two, at most
one moves sideways. Videos are {width}x{height} with up to 33 frames. It knows no other words."""

CLIPS, STEPS, RATE = 2000, 8400, 1.5e-3
# Latent frames in a step, however long its clips are.
LATENT_FRAMES = 72
# Until which part of the training clips are of how many latent frames: pictures first, which teach colours, shapes and
# places soonest, and most of the rest for clips of 17 frames, which is what the miniature's defaults ask for.
LENGTHS = ((0.3, (1,)), (0.5, (3,)), (0.75, (5,)), (1.0, (5, 3, 5, 9)))

# Heads are no multiple of eight, so that chips get uneven shares as they do of some real models.
TRANSFORMER = {
    "attention_head_dim": 24,
    "cross_attn_norm": True,
    "ffn_dim": 320,
    "freq_dim": 64,
    "in_channels": CHANNELS,
    "num_attention_heads": 6,
    "num_layers": 5,
    "out_channels": CHANNELS,
    "patch_size": (1, 2, 2),
    "qk_norm": "rms_norm_across_heads",
    "text_dim": 64,
}
TEXT_ENCODER = {
    "d_ff": 128,
    "d_kv": 12,
    "d_model": 64,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "num_heads": 5,
    "num_layers": 2,
}
WORDS = (*COLOURS, *SHAPES, *MOTIONS, "a and on")


class Attention:
    """`WanAttnProcessor` for short sequences, whose text ends in one token that stands for all that follow."""

    def __init__(self, bias: Tensor | None = None) -> None:
        self.bias = bias

    def __call__(
        self, attn: Any, x: Tensor, text: Tensor | None = None, mask: None = None, rotary: Any = None
    ) -> Tensor:
        source = x if text is None else text
        q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
        q, k, v = (part.unflatten(2, (attn.heads, -1)) for part in (q, k, v))
        if rotary is not None:
            q, k = (rotated(part, *rotary) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if self.bias is not None:
            scores = scores + self.bias
        return attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2, 3))


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe, of the second block unless a transformer is given."""

    def __init__(self, text: nn.Module, transformer: Any = None) -> None:
        super().__init__()
        self.text = text
        self.transformer: Any = transformer or upstream.WanTransformer3DModel(**TRANSFORMER)
        self.probe: denoisers.Probe | None = None
        if transformer is None:
            width = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]
            grid = (1 + (FRAMES - 1) // 4, HEIGHT // 16, WIDTH // 16)
            self.probe = denoisers.Probe(self.transformer.blocks[1], width, grid)
            for block in self.transformer.blocks:
                nn.init.zeros_(block.scale_shift_table)
            silent = (self.transformer.proj_out, self.transformer.condition_embedder.time_proj)
            denoisers.begin(self.transformer.blocks, silent)

    def quicken(self, longest: int) -> None:
        """Use faster attention processors and products for training; `longest` is the longest prompt in tokens."""
        bias = torch.zeros(longest + 1)
        bias[-1] = math.log(MAX_TOKENS - longest)
        for block in self.transformer.blocks:
            block.attn1.set_processor(Attention())
            block.attn2.set_processor(Attention(bias))
        denoisers.quicken(self.transformer.blocks)

    def forward(
        self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity of `[clips, channels, frames, height, width]`, and how badly the probe knows the places.

        What is `given` is more channels.
        """
        states = self.text(ids, mask).last_hidden_state * mask[..., None]
        states = F.pad(states, (0, 0, 0, 1))
        sample = noisy if given is None else torch.cat([noisy, given], 1)
        (velocity,) = self.transformer(sample, sigma * 1000, states, return_dict=False)
        if self.probe is None:
            return velocity, torch.zeros(())
        return velocity, self.probe(self.probe.asked, (noisy.shape[2], *self.probe.grid[1:]))


def tokenizer_in(folder: Path) -> Any:
    if not folder.is_dir():
        write_umt5_tokenizer(folder, WORDS)
        without_case(folder)
    return load_tokenizer(folder)


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae = autoencoder.train(out, seed)
    clips = encode_clips(
        partial(latents_of, vae), out / "latents.pt", seed, CLIPS, lambda index: FRAMES if index % 4 == 0 else 17
    )
    prompts, latents = clips["prompts"], clips["latents"]
    torch.manual_seed(seed)
    tokenizer = tokenizer_in(out / "tokenizer")
    tokens = tokenizer([*prompts, ""], padding="longest", return_tensors="pt")
    ids, masks = tokens["input_ids"], tokens["attention_mask"]
    denoiser = Denoiser(UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **TEXT_ENCODER)))
    averaged = denoisers.average_of(denoiser)
    denoiser.quicken(ids.shape[1])
    long = [index for index, clip in enumerate(latents) if clip.shape[1] == 1 + (FRAMES - 1) // 4]

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        lengths = next(lengths for end, lengths in LENGTHS if step < end * STEPS or end == 1.0)
        length = lengths[step % len(lengths)]
        count = LATENT_FRAMES // length
        chosen = random.choice(len(latents) if length <= 5 else long, count, replace=False)
        clean = torch.stack([latents[index][:, :length] for index in chosen])
        texts = denoisers.texts_of(random, chosen, len(prompts))
        return clean, denoisers.usual_sigmas(random, count), {"ids": ids[texts], "mask": masks[texts]}

    def look() -> None:
        make = partial(sample, assemble(averaged.module, vae, tokenizer), frames=9, steps=16)
        show(make, out, seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    pipeline = upstream.WanPipeline(tokenizer, denoiser.text, vae, scheduler(SCHEDULER), denoiser.transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, scene: Scene, seed: int, *, frames: int, steps: int, **more: Any) -> np.ndarray:
    """Return uint8 frames `[frames, HEIGHT, WIDTH, 3]` of upstream's pipeline at guidance 5."""
    inputs = {"guidance_scale": 5.0, "negative_prompt": "", "output_type": "np", "max_sequence_length": MAX_TOKENS}
    (video,) = pipeline(
        prompt=str(scene),
        height=HEIGHT,
        width=WIDTH,
        num_frames=frames,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        **{**inputs, **more},
    ).frames
    return np.round(video * 255).astype(np.uint8)
