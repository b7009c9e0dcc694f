"""The tiny model of HunyuanVideo 1.5: one network for text to video and image to video."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common import qwen25
from comfyui_tpu.tpu_runtime.models.hunyuan15 import i2v, spec, transformer
from comfyui_tpu.tpu_runtime.models.hunyuan15 import text_encoder as texts
from torch import Tensor, nn
from transformers import ByT5Tokenizer, Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, T5Config, T5EncoderModel

from .. import denoisers
from ..autoencoders import hunyuan15 as autoencoder
from ..autoencoders.hunyuan15 import CHANNELS, FRAMES, latents_of
from ..autoencoders.wan import encode_clips
from ..denoisers import rotated, scheduler
from ..moving import Scene, show
from ..shapes import HEIGHT, WIDTH
from ..training import qwen_tokenizer, upstream, without_capitals
from .wan import WORDS

TAG, SOURCE = "text-to-video", "moving"
SHARED: dict[str, str] = {}  # parts that another miniature has
CARD = """\
A small model with the classes of HunyuanVideo 1.5's text-to-video model, trained from scratch by
`tools/train_miniature.py`. It is meant for demonstrations and tests of prompts, guidance and seeds, on machines that
cannot hold the real model. Its nine blocks use three sets of weights; only their modulation differs. The colours of
previews differ from those of the video.

It understands sentences such as "a red circle moves right on blue" and "a white square turns and a green circle grows
on black": one or two shapes ({shapes}) in {colours}. A shape does one of these: {motions}. If there are two, at most
one moves sideways. Videos are {width}x{height} with 9 frames. It knows no other words, and ignores quoted text."""

EACH = " ".join(WORDS).split()
CLIPS, STEPS, RATE = 5000, 5400, 1.5e-3
LATENT_FRAMES = 72
PICTURES = 0.25  # of the steps: pictures first, which teach colours, shapes and places soonest
# Latent frames of the clips of a step, and whether their first frame is given, in turn.
KINDS = ((3, False), (3, True), (3, False), (1, False))
HARDER, HARDEST = 0.6, {"turns": 2.0, " and ": 1.5}

TIED = 3  # blocks, which come one after the other until all layers are full
TRANSFORMER = {
    "attention_head_dim": 20,
    "image_embed_dim": 28,
    "in_channels": 2 * CHANNELS + 1,
    "mlp_ratio": 2.0,
    "num_attention_heads": 5,
    "num_layers": 9,
    "num_refiner_layers": 1,
    "out_channels": CHANNELS,
    "rope_axes_dim": (4, 8, 8),
    "target_size": 96,
    "task_type": "t2v",
    "text_embed_2_dim": 44,
    "text_embed_dim": 48,
}
TEXT_ENCODER = {
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_size": TRANSFORMER["text_embed_dim"],
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 1 + texts.NUM_SKIPPED_LAYERS,
    "num_key_value_heads": 2,
    "rope_scaling": {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"},
    "tie_word_embeddings": True,
}
GLYPH_ENCODER = {
    "d_ff": 64,
    "d_kv": 8,
    "d_model": TRANSFORMER["text_embed_2_dim"],
    "feed_forward_proj": "gated-gelu",
    "num_heads": 2,
    "num_layers": 1,
    "vocab_size": 384,
}
# Of each block: what learns. The text is the same before every block, for nothing is added to it.
LEARNS = ("norm1.", "attn.to_", "attn.norm_", "attn.add_k_proj", "attn.add_v_proj", "ff.")
BLOCKS = "transformer_blocks."


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe of the second block."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text: Any = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(vocab_size=vocabulary, **TEXT_ENCODER))
        self.transformer: Any = upstream.HunyuanVideo15Transformer3DModel(**TRANSFORMER)
        dit = self.transformer
        width = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]
        blocks = dit.transformer_blocks
        denoisers.begin(blocks[:TIED], [dit.norm_out.linear, dit.proj_out])
        for one in blocks[:TIED]:
            nn.init.zeros_(one.norm1.linear.weight)
            nn.init.zeros_(one.norm1.linear.bias)
        # A third of what a block says alone.
        for number, block in enumerate(blocks):
            if number >= TIED:
                first = blocks[number % TIED]
                for name in ("attn", "ff"):
                    setattr(block, name, getattr(first, name))
                block.norm1.linear.weight = first.norm1.linear.weight
                nn.init.zeros_(block.norm1.linear.bias)
        self.probe: denoisers.Probe | None = denoisers.Probe(nn.Identity(), width, (3, HEIGHT // 16, WIDTH // 16))
        nn.init.normal_(self.text.embed_tokens.weight)
        learning = (*(f"{BLOCKS}{n}.{part}" for n in range(len(blocks)) for part in LEARNS), "x_embedder", "time_embed")
        learning = (*learning, "context_embedder.proj_in", "cond_type_embed", "norm_out", "proj_out")
        for name, parameter in self.transformer.named_parameters():
            if not name.startswith(learning):
                parameter.data.zero_()
                parameter.requires_grad_(False)
        for name, parameter in self.text.named_parameters():
            if not name.startswith(("embed_tokens", "layers.0.")):
                parameter.data.zero_()
                parameter.requires_grad_(False)

    def quicken(self) -> None:
        denoisers.quicken(self.transformer.transformer_blocks[:TIED])

    def states(self, ids: Tensor) -> Tensor:
        """What the text encoder gives of what follows the prefix, `[rows, tokens, dim]`."""
        x = self.text.embed_tokens(ids)
        rotary = self.text.rotary_emb(x, torch.arange(x.shape[1]).expand(3, 1, -1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        x = self.text.layers[0](x, attention_mask=seen, position_embeddings=rotary)
        return (x[0] if isinstance(x, tuple) else x)[:, texts.PREFIX :]

    def forward(
        self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity of `[clips, channels, frames, height, width]`, and how badly the probe knows the places.

        Of a picture that is `given` all 729 tokens are the same, and one stands for them.
        """
        dit, size = self.transformer, noisy.shape[2:]
        more = torch.zeros_like(noisy[:, :1]).expand(-1, CHANNELS + 1, -1, -1, -1) if given is None else given
        x = dit.x_embedder(torch.cat([noisy, more], 1))
        temb = F.silu(dit.time_embed(sigma * 1000))
        text = dit.context_embedder.proj_in(self.states(ids)) + dit.cond_type_embed.weight[transformer.TEXT]
        bias = torch.where(mask.bool(), 0.0, -torch.inf)
        if given is not None:
            image = dit.cond_type_embed.weight[transformer.IMAGE].expand(len(x), 1, -1)
            text = torch.cat([image, text], 1)
            bias = F.pad(bias, (1, 0), value=math.log(i2v.VISION_TOKENS))
        bias = F.pad(bias, (x.shape[1], 0))[:, None, None]
        text = F.layer_norm(text, text.shape[-1:], eps=1e-6)
        rotary = [one[None, :, None] for one in dit.rope(noisy)]
        asked = x
        for number, block in enumerate(dit.transformer_blocks):
            attn = block.attn
            shift, scale, gate, ff_shift, ff_scale, ff_gate = block.norm1.linear(temb)[:, None].chunk(6, -1)
            y = block.norm1.norm(x) * (1 + scale) + shift
            q, k, v = (part(y).unflatten(2, (attn.heads, -1)) for part in (attn.to_q, attn.to_k, attn.to_v))
            q, k = (rotated(part, *rotary) for part in (attn.norm_q(q), attn.norm_k(k)))
            text_k, text_v = (part(text).unflatten(2, (attn.heads, -1)) for part in (attn.add_k_proj, attn.add_v_proj))
            k, v = torch.cat([k, attn.norm_added_k(text_k)], 1), torch.cat([v, text_v], 1)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
            x = x + gate * attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + ff_gate * block.ff(block.norm2(x) * (1 + ff_scale) + ff_shift)
            if number == 2:
                asked = x
        velocity = dit.proj_out(dit.norm_out(x, dit.time_embed(sigma * 1000)))
        velocity = velocity.transpose(1, 2).unflatten(2, size)
        if self.probe is None:
            return velocity, torch.zeros(())
        return velocity, self.probe(asked, tuple(size))


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae = autoencoder.train(out, seed)
    clips = encode_clips(partial(latents_of, vae), out / "latents.pt", seed, CLIPS, lambda _: FRAMES)
    prompts, latents = clips["prompts"], torch.stack(clips["latents"])
    given = latents[:, :, :1]  # the encoder looks back only
    given = F.pad(torch.cat([given, torch.ones_like(given[:, :1])], 1), (0, 0, 0, 0, 0, latents.shape[2] - 1))
    torch.manual_seed(seed)
    # Upstream cuts the system message off after so many tokens: each of its words is one.
    tokenizer = qwen_tokenizer(
        out / "tokenizer",
        EACH,
        (texts.system_message(), "user assistant"),
        special=("<|im_start|>", "<|im_end|>"),
        chat_template=qwen25.CHAT_TEMPLATE,
    )
    ids, masks = map(torch.from_numpy, texts.tokenize(tokenizer, [*prompts, ""]))
    longest = int(masks.sum(1).max())
    ids, masks = ids[:, : texts.PREFIX + longest], masks[:, :longest]
    denoiser = Denoiser(len(tokenizer))
    averaged = denoisers.average_of(denoiser)
    denoiser.quicken()
    rates = [denoisers.rates_of(prompts, hardest) for hardest in ({}, HARDEST)]

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        length, is_given = (1, False) if step < PICTURES * STEPS else KINDS[step % len(KINDS)]
        count = LATENT_FRAMES // length
        seen = denoisers.chosen(random, rates[step >= HARDER * STEPS], count)
        chosen = denoisers.texts_of(random, seen, len(prompts))
        more = {"ids": ids[chosen], "mask": masks[chosen], "given": given[seen] if is_given else None}
        return latents[seen, :, :length], denoisers.usual_sigmas(random, count), more

    def look() -> None:
        show(partial(sample, assemble(averaged.module, vae, tokenizer), steps=12), out, seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    """Return the pipeline, with separate weights for each block."""
    without_capitals(tokenizer, denoiser.text.embed_tokens.weight.data, EACH)
    glyphs = T5EncoderModel(T5Config(**GLYPH_ENCODER))
    for parameter in glyphs.parameters():
        parameter.data.zero_()
    transformer = upstream.HunyuanVideo15Transformer3DModel(**TRANSFORMER)
    transformer.load_state_dict(denoiser.transformer.state_dict())
    guider: Any = upstream.ClassifierFreeGuidance(guidance_scale=6.0)
    config = {**spec.SCHEDULER, "shift": 3.0}  # so small a picture is made with less noise
    pipeline = upstream.HunyuanVideo15Pipeline(
        denoiser.text, tokenizer, transformer, vae, scheduler(config), glyphs, ByT5Tokenizer(), guider
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, scene: Scene, seed: int, *, steps: int, **more: Any) -> np.ndarray:
    """Return uint8 frames `[frames, HEIGHT, WIDTH, 3]` of upstream's pipeline at its default guidance."""
    (video,) = pipeline(
        prompt=str(scene),
        negative_prompt="",
        **spec.SPEC.miniature.inputs,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **more,
    ).frames
    return np.round(video * 255).astype(np.uint8)
