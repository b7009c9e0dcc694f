"""The tiny model of CogVideoX 1.5: text to video."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.cogvideox.i2v import OFS
from comfyui_tpu.tpu_runtime.models.cogvideox.spec import SCHEDULER, SPEC
from comfyui_tpu.tpu_runtime.models.cogvideox.text_encoder import MAX_TOKENS
from comfyui_tpu.tpu_runtime.models.cogvideox.transformer import GEOMETRY
from comfyui_tpu.tpu_runtime.models.common.t5 import write_t5_tokenizer
from comfyui_tpu.tpu_runtime.tokenization import load_tokenizer
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

from .. import denoisers
from ..autoencoders import cogvideox as autoencoder
from ..autoencoders.wan import encode_clips
from ..denoisers import rotated, scheduler
from ..moving import Scene, show
from ..shapes import HEIGHT, WIDTH
from ..training import upstream, without_case
from .wan import WORDS

TAG, SOURCE = "text-to-video", "moving"
SHARED: dict[str, str] = {}  # parts that another miniature has
CARD = """\
A small model with the classes of CogVideoX 1.5's text-to-video model, trained from scratch by
`tools/train_miniature.py`. It is meant for demonstrations and tests of prompts, guidance and seeds, on machines that
cannot hold the real model.

It understands sentences such as "a red circle moves right on blue" and "a white square turns and a green circle grows
on black": one or two shapes ({shapes}) in {colours}. A shape does one of these: {motions}. If there are two, at most
one moves sideways. Videos are {width}x{height} with 9 frames. Corners are often rounded, and some later frames have
coloured specks. It knows no other words."""

CLIPS, STEPS, RATE = 4000, 10200, 1.5e-3
# Tokens of a step's videos, in latent frames: pictures first, which teach colours, shapes and places soonest.
TOKEN_FRAMES = 56
PICTURES = 0.25  # of the steps
# From this part of the steps on, clips alone, and how much oftener those with what is learnt last.
HARDER, HARDEST = 0.82, {"turns": 2.5, "square": 1.5, " and ": 1.5}

TRANSFORMER = {
    "attention_head_dim": 32,
    "in_channels": autoencoder.CHANNELS,
    "num_attention_heads": 4,
    "num_layers": 6,
    "out_channels": autoencoder.CHANNELS,
    "patch_bias": False,
    "patch_size": 2,
    "patch_size_t": 2,
    "sample_frames": 9,
    "sample_height": HEIGHT // 8,
    "sample_width": WIDTH // 8,
    "text_embed_dim": 48,
    # Of it are the modulations of all blocks: what there is to say of one number needs no more.
    "time_embed_dim": 8,
    "use_rotary_positional_embeddings": True,
}
TEXT_ENCODER = {
    "d_ff": 64,
    "d_kv": 12,
    "d_model": 48,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "num_heads": 5,
    "num_layers": 1,
}


def text_encoder(vocabulary: int) -> Any:
    """Its heads look back at one token each, the last five: nothing else is asked of attention, for the transformer
    attends to text too. So tokens far behind a prompt are all the same, and one of them stands for all in training.
    """
    encoder = T5EncoderModel(T5Config(vocab_size=vocabulary, **TEXT_ENCODER))
    block: Any = encoder.encoder.block[0]
    attention = block.layer[0].SelfAttention
    for module in (attention.q, attention.k):
        nn.init.zeros_(module.weight.requires_grad_(False))
    places = nn.init.zeros_(attention.relative_attention_bias.weight.requires_grad_(False))
    places[torch.arange(5) + 1, torch.arange(5)] = 20.0
    nn.init.xavier_uniform_(attention.v.weight)
    nn.init.xavier_uniform_(attention.o.weight)
    return encoder


class Attention:
    """`CogVideoXAttnProcessor2_0` with a bias of keys."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def __call__(
        self,
        attn: Any,
        x: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        length = encoder_hidden_states.shape[1]
        joined = torch.cat([encoder_hidden_states, x], 1)
        q, k, v = (
            part(joined).unflatten(2, (attn.heads, -1)).transpose(1, 2) for part in (attn.to_q, attn.to_k, attn.to_v)
        )
        q, k = (
            torch.cat([part[:, :, :length], rotated(part[:, :, length:], *image_rotary_emb)], 2)
            for part in (attn.norm_q(q), attn.norm_k(k))
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        scores = scores + F.pad(self.bias, (0, x.shape[1]))
        found = attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2, 3))
        return found[:, length:], found[:, :length]


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe of the first block unless a transformer is given.

    Of a text of `length` tokens the last stands for all that follow it.
    """

    def __init__(self, text: nn.Module, length: int, transformer: Any = None) -> None:
        super().__init__()
        self.text: Any = text
        self.transformer: Any = transformer or upstream.CogVideoXTransformer3DModel(**TRANSFORMER)
        self.head_dim = TRANSFORMER["attention_head_dim"]
        self.probe: denoisers.Probe | None = None
        if transformer is None:
            blocks = self.transformer.transformer_blocks
            width = self.head_dim * TRANSFORMER["num_attention_heads"]
            grid = (2 + (autoencoder.FRAMES - 1) // 4) // 2, HEIGHT // 16, WIDTH // 16
            self.probe = denoisers.Probe(blocks[0], width, grid)
            modulations = [norm.linear for block in blocks for norm in (block.norm1, block.norm2)]
            denoisers.begin(blocks, [*modulations, self.transformer.norm_out.linear, self.transformer.proj_out])
        self.bias = torch.zeros(length)
        self.bias[-1] = math.log(MAX_TOKENS - length + 1)

    def quicken(self) -> None:
        """Use faster attention processors and products for training."""
        for block in self.transformer.transformer_blocks:
            block.attn1.set_processor(Attention(self.bias))
        denoisers.quicken(self.transformer.transformer_blocks)

    def states(self, ids: Tensor) -> Tensor:
        """What the text encoder gives, `[rows, tokens, dim]`."""
        attention, forward = self.text.encoder.block[0].layer
        heads = attention.SelfAttention
        weights = (heads.compute_bias(*ids.shape[1:] * 2) + self.bias).softmax(-1)
        x = self.text.shared(ids)
        v = heads.v(attention.layer_norm(x)).unflatten(2, (heads.n_heads, -1)).transpose(1, 2)
        x = x + heads.o((weights @ v).transpose(1, 2).flatten(2))
        return self.text.encoder.final_layer_norm(forward(x))

    def forward(self, noisy: Tensor, time: Tensor, ids: Tensor, picture: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Velocity of `[clips, channels, frames, height, width]`, and how badly the probe knows the places.

        A `picture` is more channels.
        """
        sizes = tuple(side // patch for side, patch in zip(noisy.shape[2:], GEOMETRY.patch_thw, strict=True))
        rotary = get_3d_rotary_pos_embed(
            self.head_dim, None, sizes[1:], sizes[0], grid_type="slice", max_size=sizes[1:]
        )
        sample = noisy if picture is None else torch.cat([noisy, picture], 1)
        ofs = None if picture is None else torch.full((1,), OFS)
        (velocity,) = self.transformer(
            sample.transpose(1, 2), self.states(ids), time, ofs=ofs, image_rotary_emb=rotary, return_dict=False
        )
        velocity = velocity.transpose(1, 2)
        if self.probe is None:
            return velocity, torch.zeros(())
        return velocity, self.probe(self.probe.asked[0], sizes)


def tokenizer_in(folder: Path) -> Any:
    if not folder.is_dir():
        write_t5_tokenizer(folder, WORDS)
        without_case(folder)
    return load_tokenizer(folder)


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae, basis = autoencoder.train(out, seed)
    encode = partial(autoencoder.latents_of, vae)
    clips = encode_clips(encode, out / "latents.pt", seed, CLIPS, lambda _: 9)
    prompts, latents = clips["prompts"], torch.stack(clips["latents"])
    latents = filled(latents)
    torch.manual_seed(seed)
    tokenizer = tokenizer_in(out / "tokenizer")
    ids, length = ids_of(tokenizer, prompts)
    denoiser = Denoiser(text_encoder(len(tokenizer)), length)
    averaged = denoisers.average_of(denoiser)
    rates = [denoisers.rates_of(prompts, hardest) for hardest in ({}, HARDEST)]
    denoiser.quicken()

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        length = 2 if step < PICTURES * STEPS or (step % 5 == 0 and step < HARDER * STEPS) else latents.shape[2]
        count = 2 * TOKEN_FRAMES // length
        seen = denoisers.chosen(random, rates[step >= HARDER * STEPS], count)
        texts = denoisers.texts_of(random, seen, len(prompts))
        return latents[seen, :, :length], times(random, count), {"ids": ids[texts]}

    # What is always the same tells nothing.
    embedder = denoiser.transformer.patch_embed.proj.weight.data
    embedder.copy_((embedder.unflatten(1, (len(basis), -1)).transpose(1, 2) @ basis @ basis.T).mT.flatten(1))

    def look() -> None:
        show(partial(sample, assemble(averaged.module, vae, tokenizer), steps=12), out, seed)

    file = out / "denoiser.pt"
    denoisers.learn(denoiser, averaged, file, seed, STEPS, RATE, batch, look, partial(counted, basis), path)
    return assemble(averaged.module, vae, tokenizer)


def filled(latents: Tensor) -> Tensor:
    """Clips `[clips, channels, frames, height, width]` with what fills up the first patch, which nobody sees: what it
    stands before.
    """
    return torch.cat([latents[:, :, :1], latents], 2)


def ids_of(tokenizer: Any, prompts: Sequence[str]) -> tuple[Tensor, int]:
    """The tokens of prompts and of an empty one, and how many each has: no head looks beyond the last one."""
    length = max(map(len, tokenizer(list(prompts))["input_ids"])) + TEXT_ENCODER["num_heads"] + 1
    texts = tokenizer([*prompts, ""], padding="max_length", max_length=length, return_tensors="pt")
    return texts["input_ids"], length


def times(random: np.random.Generator, count: int) -> Tensor:
    """More of the noise, where it is decided what there is and where."""
    return torch.from_numpy((SCHEDULER["num_train_timesteps"] * random.random(count) ** 0.7).astype(int))


def counted(basis: Tensor, velocity: Tensor) -> Tensor:
    """What of a velocity counts: the directions of `basis`, `[channels, kept]`."""
    return torch.einsum("ncthw,ck->nkthw", velocity, basis)


def path(time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shares of latents and noise in what is seen at a time, and in the velocity."""
    alphas = scheduler(SCHEDULER).alphas_cumprod.float()
    kept, added = alphas[time].sqrt(), (1 - alphas[time]).sqrt()
    return kept, added, -added, kept


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    pipeline = upstream.CogVideoXPipeline(tokenizer, denoiser.text, vae, denoiser.transformer, scheduler(SCHEDULER))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, scene: Scene, seed: int, *, steps: int, **more: Any) -> np.ndarray:
    """Return uint8 frames `[frames, HEIGHT, WIDTH, 3]` of upstream's pipeline at its default guidance."""
    (video,) = pipeline(
        prompt=str(scene),
        negative_prompt="",
        **SPEC.miniature.inputs,
        num_inference_steps=steps,
        guidance_scale=SPEC.inputs["guidance_scale"].default,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **more,
    ).frames
    return np.round(video * 255).astype(np.uint8)
