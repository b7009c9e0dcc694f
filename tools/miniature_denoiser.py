"""The miniature's denoiser and text encoder, which learn together."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.text_encoders.t5 import write_umt5_tokenizer
from comfyui_tpu.tpu_runtime.models.text_encoders.wan import MAX_TOKENS
from comfyui_tpu.tpu_runtime.models.wan.wan import SCHEDULER
from comfyui_tpu.tpu_runtime.tokens import load_tokenizer
from miniature_vae import CHANNELS, FRAMES, encode_clips, upstream
from moving_shapes import COLOURS, HEIGHT, MOTIONS, SHAPES, WIDTH, Scene, judge, scenes
from torch import Tensor, nn
from tqdm import tqdm
from training import optimize, save_sheet
from transformers import UMT5Config, UMT5EncoderModel

CLIPS, STEPS, RATE = 2000, 8400, 1.5e-3
UNCONDITIONED = 0.1  # of the prompts are empty: what guidance is measured from
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


class HalfLinear(nn.Linear):
    """A product in bfloat16 between float32 activations: twice as fast here, where autocast's norms are slower."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16(), bias).float()


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


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, as in `WanAttnProcessor`."""
    one, two = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe that asks blocks where their token is.

    Positions reach the transformer as differences only. Where something begins it must find from the borders, and it
    does so much sooner when it is asked (an auxiliary head, dropped afterwards).
    """

    ASKED = 1

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text = UMT5EncoderModel(UMT5Config(vocab_size=vocabulary, **TEXT_ENCODER))
        self.transformer: Any = upstream.WanTransformer3DModel(**TRANSFORMER)
        width = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]
        self.grid = (1 + (FRAMES - 1) // 4, HEIGHT // 16, WIDTH // 16)
        self.probe = nn.Linear(width, sum(self.grid))
        self.asked: Tensor | None = None
        self.transformer.blocks[self.ASKED].register_forward_hook(self._keep)
        for block in self.transformer.blocks:
            nn.init.zeros_(block.scale_shift_table)
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        for module in (self.transformer.proj_out, self.transformer.condition_embedder.time_proj):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    def _keep(self, block: nn.Module, arguments: Any, result: Tensor) -> None:
        self.asked = result

    def quicken(self, longest: int) -> None:
        """Processors and products for training; `longest` is that of a prompt in tokens."""
        bias = torch.zeros(longest + 1)
        bias[-1] = math.log(MAX_TOKENS - longest)
        for block in self.transformer.blocks:
            block.attn1.set_processor(Attention())
            block.attn2.set_processor(Attention(bias))
            for module in block.modules():
                if type(module) is nn.Linear:
                    module.__class__ = HalfLinear

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity of `[clips, channels, frames, height, width]`, and how badly the probe knows the places."""
        states = self.text(ids, mask).last_hidden_state * mask[..., None]
        states = F.pad(states, (0, 0, 0, 1))
        (velocity,) = self.transformer(noisy, sigma * 1000, states, return_dict=False)
        frames = noisy.shape[2]
        places = torch.stack(
            torch.meshgrid(torch.arange(frames), *(torch.arange(n) for n in self.grid[1:]), indexing="ij"), -1
        )
        assert self.asked is not None
        answers = self.probe(self.asked).split(self.grid, dim=-1)
        wanted = places.flatten(0, 2).expand(len(noisy), -1, -1)
        where: Any = sum(F.cross_entropy(a.flatten(0, 1), wanted[..., n].flatten()) for n, a in enumerate(answers))
        return velocity, where


def train(vae: Any, out: Path, seed: int, steps: int = STEPS, clips: int = CLIPS) -> Any:
    prompts, latents = encode_clips(vae, out, seed, clips)
    torch.manual_seed(seed)
    if not (out / "tokenizer").is_dir():
        write_umt5_tokenizer(out / "tokenizer", WORDS)
    tokenizer = load_tokenizer(out / "tokenizer")
    tokens = tokenizer([*prompts, ""], padding="longest", return_tensors="pt")
    ids, masks = tokens["input_ids"], tokens["attention_mask"]
    denoiser = Denoiser(len(tokenizer))
    averaged = torch.optim.swa_utils.AveragedModel(
        denoiser, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998)
    )
    denoiser.quicken(ids.shape[1])
    long = [index for index, clip in enumerate(latents) if clip.shape[1] == 1 + (FRAMES - 1) // 4]

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        averaged.update_parameters(denoiser)
        random = np.random.default_rng((seed, step))
        lengths = next(lengths for end, lengths in LENGTHS if step < end * steps or end == 1.0)
        length = lengths[step % len(lengths)]
        count = LATENT_FRAMES // length
        chosen = random.choice(len(latents) if length <= 5 else long, count, replace=False)
        clean = torch.stack([latents[index][:, :length] for index in chosen])
        texts = torch.from_numpy(np.where(random.random(count) < UNCONDITIONED, len(prompts), chosen))
        noise = torch.from_numpy(random.standard_normal(clean.shape, np.float32))
        sigma = torch.from_numpy(1 / (1 + np.exp(-random.standard_normal(count, np.float32))))
        # More of the noise, where it is decided what there is and where.
        sigma = 3 * sigma / (1 + 2 * sigma)
        at = sigma[:, None, None, None, None]
        velocity, where = denoiser((1 - at) * clean + at * noise, sigma, ids[texts], masks[texts])
        error = F.mse_loss(velocity, noise - clean)
        return error + 0.05 * where, {"error": error.item(), "where": where.item()}

    def look() -> None:
        pipeline = assemble(averaged.module, vae, tokenizer)
        rows, right = [], []
        for number, scene in enumerate(itertools.islice(scenes(seed, held_out=True), 8)):
            frames = sample(pipeline, scene, frames=9, steps=16, seed=number)
            rows.append(frames[::4])
            right.append(judge(frames, scene))
        save_sheet(rows, out / "preview.png")
        shares = {part: sum(getattr(one, part) for one in right) for part in ("colour", "shape", "motion", "all")}
        tqdm.write(f"of {len(right)} held-out prompts: {shares}")

    optimize(out / "denoiser.pt", [denoiser, averaged], steps, RATE, loss, look, every=1000)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    scheduler = upstream.UniPCMultistepScheduler.from_config({k: v for k, v in SCHEDULER.items() if k != "_class_name"})
    pipeline = upstream.WanPipeline(tokenizer, denoiser.text, vae, scheduler, denoiser.transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, scene: Scene, *, frames: int, steps: int, seed: int) -> np.ndarray:
    """Frames `[frames, HEIGHT, WIDTH, 3]` uint8 of upstream's pipeline at guidance 5."""
    (video,) = pipeline(
        str(scene),
        negative_prompt="",
        height=HEIGHT,
        width=WIDTH,
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        max_sequence_length=MAX_TOKENS,
    ).frames
    return np.round(video * 255).astype(np.uint8)
