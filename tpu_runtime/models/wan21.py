"""Wan 2.1 text to video: Wan-AI/Wan2.1-T2V-14B-Diffusers. The oracle is `diffusers.WanPipeline`."""

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule
from ..limits import FloatLimit, IntLimit
from ..spec import Call, Component, LatentGeometry, ModelSpec, Need, Report, Same, Settings, TextEncoding, has_length
from . import video_vae
from .layers import embed_patches, rotate

PROMPT = "A cat and a dog baking a cake together in a kitchen."
MAX_TOKENS = 512
# The makers' own, as they publish it (`sample_neg_prompt`).
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

if TYPE_CHECKING:
    # ComfyUI imports this file at its start: what is slow to import is imported where it is used.
    import jax
    import numpy as np
    import torch


def clean_prompt(prompt: str) -> str:
    """Mended encoding, resolved HTML entities, single spaces: as upstream does it."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return re.sub(r"\s+", " ", text).strip()


def write_tokenizer(folder: Path) -> None:
    from . import t5

    t5.write_umt5_tokenizer(folder, (PROMPT,))


def tokenize(tokenizer: Any, prompts: Sequence[str]) -> "tuple[np.ndarray, np.ndarray]":
    """Ids and mask, `[rows, 512]` int32."""
    import numpy as np

    tokens = tokenizer(
        [clean_prompt(prompt) for prompt in prompts],
        padding="max_length",
        max_length=MAX_TOKENS,
        truncation=True,
        return_tensors="np",
    )
    return tokens["input_ids"].astype(np.int32), tokens["attention_mask"].astype(np.int32)


def encode_text(encoder: "torch.nn.Module", ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """`[rows, length]` tokens to `[rows, length, dim]` states, zero after each prompt's end."""
    states = encoder(ids, mask).last_hidden_state
    return states * mask.unsqueeze(-1).to(states.dtype), None


def forward(
    transformer: "torch.nn.Module", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The flow (velocity) of `[rows, 16, latent_frames, latent_height, latent_width]` at one timestep."""
    return transformer(sample, timestep.expand(sample.shape[0]), inputs["text"], return_dict=False)[0]


class WanProcessor:
    """`diffusers`' `WanAttnProcessor` with rotary embedding and attention in JAX."""

    def __init__(self, attend: Callable[..., "jax.Array"]) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: "torch.Tensor",
        encoder_hidden_states: "torch.Tensor | None" = None,
        attention_mask: None = None,
        rotary_emb: "tuple[torch.Tensor, torch.Tensor] | None" = None,
    ) -> "torch.Tensor":
        from ..programs import torch_bridge

        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source))
        heads = [x.unflatten(2, (attn.heads, -1)) for x in (query, key, attn.to_v(source))]
        if rotary_emb is not None:
            heads[:2] = [torch_bridge.call_jax(rotate, x, *rotary_emb) for x in heads[:2]]
        return attn.to_out[0](torch_bridge.call_jax(self.attend, *heads).flatten(2, 3))


def prepare_denoiser(network: Any, sequence: Any) -> None:
    """Puts our attention, token placement and patch embedding where upstream lets us."""
    import types

    blocks = network.blocks("blocks")
    blocks.block.attn1.set_processor(WanProcessor(sequence.self_attention))
    blocks.block.attn2.set_processor(WanProcessor(sequence.cross_attention))

    def enter(values: dict[str, Any]) -> dict[str, Any]:
        tables = tuple(sequence.pad_tokens(table) for table in values["rotary_emb"])
        return {**values, "hidden_states": sequence.shard_tokens(values["hidden_states"]), "rotary_emb": tables}

    blocks.scan = sequence.scan("blocks", enter)
    embedding = network.module.patch_embedding
    embedding.forward = types.MethodType(embed_patches, embedding)


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[Any]":
    """One latent frame a call, what later ones look back at carried from one to the next: 1 frame, then 4 each."""
    return video_vae.decode_by_frame(call, latents, report, before_first=before_first, decode_next=decode_next)


def before_first(vae: Any, latent: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The memory before the first latent frame; of its result nothing is used."""
    import torch

    from ..programs import torch_bridge

    shapes = torch_bridge.shapes(lambda latent: decode_next(vae, latent, [])[1], latent)
    is_first, *caches = [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]
    return latent[:, :1], [is_first + 1, *caches]


def decode_next(
    vae: Any, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """A latent frame `[1, 16, 1, h, w]` to frames `[4, 8h, 8w, 3]` in 0..1, and the memory after it.

    `memory` is an image of ones before the first frame and of zeros later, then the last two inputs of each causal
    convolution in the order of use. Of the first latent frame, whose time upstream does not double, only the first of
    the four frames is meant, and it alone is remembered.
    """
    import torch
    from torch.nn.functional import silu

    given = iter(memory[1:])
    is_first = memory[0].amax() > 0 if memory else torch.ones((), dtype=torch.bool, device=latent.device)
    kept = [torch.zeros_like(latent[:, :1])]

    def convolve(conv: Any, x: "torch.Tensor") -> "torch.Tensor":
        blank = torch.zeros_like(x[:, :, :1])
        past = next(given, torch.cat([blank, blank], dim=2))
        alone = torch.cat([blank, x[:, :, :1]], dim=2)
        kept.append(torch.where(is_first, alone, torch.cat([past, x], dim=2)[:, :, -2:]))
        return conv(x, past)

    def residual(block: Any, x: "torch.Tensor") -> "torch.Tensor":
        out = convolve(block.conv1, silu(block.norm1(x)))
        return convolve(block.conv2, silu(block.norm2(out))) + block.conv_shortcut(x)

    def upsample(sampler: Any, x: "torch.Tensor") -> "torch.Tensor":
        if sampler.mode == "upsample3d":
            doubled = convolve(sampler.time_conv, x).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            # Nor is the first frame remembered here.
            kept[-1] = torch.where(is_first, torch.zeros_like(kept[-1]), kept[-1])
            x = torch.where(is_first, x.repeat_interleave(2, dim=2), doubled)
        return sampler.resample(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (1, -1)).transpose(1, 2)

    decoder = vae.decoder
    x = convolve(decoder.conv_in, vae.post_quant_conv(latent))
    (before, after), (attention,) = decoder.mid_block.resnets, decoder.mid_block.attentions
    x = residual(after, attention(residual(before, x)))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = residual(resnet, x)
        for sampler in block.upsamplers or ():
            x = upsample(sampler, x)
    frames = convolve(decoder.conv_out, silu(decoder.norm_out(x)))
    return video_vae.pixels(frames[0].permute(1, 2, 3, 0)), kept


def denormalize_latents(sample: "torch.Tensor", settings: Settings, vae_config: Mapping[str, Any]) -> "torch.Tensor":
    """Normalised latents in the VAE's own scale; upstream's own arithmetic, to the bit."""
    mean, std = latent_stats(vae_config)
    return sample / (1.0 / std) + mean


def latent_stats(config: Mapping[str, Any]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Mean and standard deviation of the latent channels, `[1, 16, 1, 1, 1]` each, from the VAE's config."""
    import torch

    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    return mean, std


TEXT_ENCODER = Component(
    name="text_encoder",
    folder="text_encoder",
    library="transformers",
    class_name="UMT5EncoderModel",
    config=MappingProxyType(
        {
            "d_ff": 10240,
            "d_kv": 64,
            "d_model": 4096,
            "feed_forward_proj": "gated-gelu",
            "num_heads": 64,
            "num_layers": 24,
            "relative_attention_max_distance": 128,
            "relative_attention_num_buckets": 32,
            "vocab_size": 256384,
        }
    ),
    tiny=MappingProxyType(
        {
            "d_ff": 72,
            "d_kv": 8,
            "d_model": 40,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "num_heads": 5,
            "num_layers": 2,
            "relative_attention_max_distance": 128,
            "relative_attention_num_buckets": 32,
            "vocab_size": 200,
        }
    ),
    needs=MappingProxyType({"feed_forward_proj": Need(("gated-gelu",), required=True)}),
    blocks=("encoder.block",),
    # Checkpoints hold the one embedding under either name; T5 with a head has all of it under `transformer`.
    aliases=MappingProxyType({"encoder.embed_tokens.weight": "shared.weight", "transformer.": ""}),
    rules=(
        Rule("shared.weight", (None, "all_embed")),
        Rule("encoder.block.*.layer.0.SelfAttention.q.weight", (None, "all_heads", None)),
        Rule("encoder.block.*.layer.0.SelfAttention.k.weight", (None, "all_heads", None)),
        Rule("encoder.block.*.layer.0.SelfAttention.v.weight", (None, "all_heads", None)),
        Rule("encoder.block.*.layer.0.SelfAttention.o.weight", (None, None, "all_heads")),
        Rule("encoder.block.*.layer.1.DenseReluDense.wi_0.weight", (None, "all_mlp", None)),
        Rule("encoder.block.*.layer.1.DenseReluDense.wi_1.weight", (None, "all_mlp", None)),
        Rule("encoder.block.*.layer.1.DenseReluDense.wo.weight", (None, None, "all_mlp")),
    ),
)

TRANSFORMER_RULES = (
    # Biases, norms and modulation tables of a block are rows of `[layers, dim]`: at most 2.4 MB in bfloat16.
    Rule("blocks.**.bias", REPLICATED),
    Rule("blocks.*.*.norm_q.weight", REPLICATED),
    Rule("blocks.*.*.norm_k.weight", REPLICATED),
    Rule("blocks.*.norm2.weight", REPLICATED),
    Rule("blocks.*.scale_shift_table", REPLICATED),
    Rule("blocks.*.*.to_out.0.weight", (None, "fsdp", None), fallbacks=((None, None, "fsdp"),)),
    Rule("blocks.*.*.*.weight", (None, "fsdp", None), fallbacks=((None, None, "fsdp"),)),
    Rule("blocks.*.ffn.net.0.proj.weight", (None, "fsdp", None), fallbacks=((None, None, "fsdp"),)),
    Rule("blocks.*.ffn.net.2.weight", (None, "fsdp", None), fallbacks=((None, None, "fsdp"),)),
    Rule("condition_embedder.time_proj.weight", ("fsdp", None), fallbacks=((None, "fsdp"),)),
    Rule("condition_embedder.*.*.weight", ("fsdp", None), fallbacks=((None, "fsdp"),)),
)

TRANSFORMER = Component(
    name="transformer",
    folder="transformer",
    library="diffusers",
    class_name="WanTransformer3DModel",
    config=MappingProxyType(
        {
            "attention_head_dim": 128,
            "cross_attn_norm": True,
            "eps": 1e-6,
            "ffn_dim": 13824,
            "freq_dim": 256,
            "in_channels": 16,
            "num_attention_heads": 40,
            "num_layers": 40,
            "out_channels": 16,
            "patch_size": (1, 2, 2),
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
            "text_dim": 4096,
        }
    ),
    tiny=MappingProxyType(
        {
            "attention_head_dim": 24,
            "cross_attn_norm": True,
            "eps": 1e-6,
            "ffn_dim": 200,
            "freq_dim": 32,
            "in_channels": 16,
            "num_attention_heads": 6,
            "num_layers": 3,
            "out_channels": 16,
            "patch_size": (1, 2, 2),
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 1024,
            "text_dim": 40,
        }
    ),
    needs=MappingProxyType(
        {
            # Set where pictures are attended to, as in Wan 2.1's image to video.
            "added_kv_proj_dim": Need((None,)),
            "cross_attn_norm": Need((True,)),
            "image_dim": Need((None,)),
            "in_channels": Need((16,)),
            "out_channels": Need((16,)),
            "patch_size": Need(((1, 2, 2),)),
            "pos_embed_seq_len": Need((None,)),
            "qk_norm": Need(("rms_norm_across_heads",)),
            "text_dim": Same("text_encoder", "d_model"),
        }
    ),
    blocks=("blocks",),
    rules=TRANSFORMER_RULES,
)

# The published VAE's, which are upstream's defaults too.
LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

VAE_DECODER = Component(
    name="vae_decoder",
    folder="vae",
    library="diffusers",
    class_name="AutoencoderKLWan",
    config=MappingProxyType({"base_dim": 96, "z_dim": 16, "latents_mean": LATENTS_MEAN, "latents_std": LATENTS_STD}),
    tiny=MappingProxyType({"base_dim": 8, "z_dim": 16, "num_res_blocks": 1}),
    # Wan 2.2's 5B model has a VAE of another form by the same name.
    needs=MappingProxyType(
        {
            "is_residual": Need((False,)),
            "latents_mean": Need(fits=has_length(16), wording="16 numbers"),
            "latents_std": Need(fits=has_length(16), wording="16 numbers"),
            "patch_size": Need((None,)),
            "scale_factor_spatial": Need((8,)),
            "scale_factor_temporal": Need((4,)),
            "temperal_downsample": Need(((False, True, True),)),
            "z_dim": Need((16,)),
        }
    ),
    only=("decoder.", "post_quant_conv."),
    # 0.1 GiB in all: whole on every chip.
    rules=(Rule("decoder.**.weight", REPLICATED),),
)

# As the published checkpoint configures it; `flow_shift` is overridden by the sampler's widget.
SCHEDULER = MappingProxyType(
    {
        "_class_name": "UniPCMultistepScheduler",
        "final_sigmas_type": "zero",
        "flow_shift": 3.0,
        "lower_order_final": True,
        "num_train_timesteps": 1000,
        "predict_x0": True,
        "prediction_type": "flow_prediction",
        "solver_order": 2,
        "solver_type": "bh2",
        "timestep_spacing": "linspace",
        "use_flow_sigmas": True,
    }
)

SPEC = ModelSpec(
    name="wan2.1-t2v-14b",
    family="Wan21",
    title="Wan 2.1 T2V 14B",
    category="Wan2.1",
    hub_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
    tiny_id="tiny/wan21",
    latent_format="Wan21",
    pipeline_classes=("WanPipeline",),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(1, 2, 2)),
    text_encoders=(
        TextEncoding(
            name="text",
            component="text_encoder",
            tokenizer_folder="tokenizer",
            tokenizer_class="T5TokenizerFast",
            max_length=MAX_TOKENS,
            width_key="text_dim",
            tokenize=tokenize,
            encode=encode_text,
            write_tokenizer=write_tokenizer,
        ),
    ),
    inputs=MappingProxyType(
        {
            "height": IntLimit(default=720, low=64, high=1920, multiple_of=16),
            "width": IntLimit(default=1280, low=64, high=1920, multiple_of=16),
            "num_frames": IntLimit(default=81, low=1, high=241, multiple_of=4, plus=1),
            "num_inference_steps": IntLimit(default=50, low=1, high=100),
            "guidance_scale": FloatLimit(default=5.0, low=0.0, high=20.0),
            "seed": IntLimit(default=2025, low=0, high=2**64 - 1),
            "flow_shift": FloatLimit(default=5.0, low=0.1, high=20.0, step=0.5),
            "fps": IntLimit(default=16, low=1, high=120),
        }
    ),
    texts=MappingProxyType({"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT}),
    tiny_inputs=MappingProxyType({"height": 80, "width": 112}),
    scheduler=SCHEDULER,
    shift_key="flow_shift",
    prepare_denoiser=prepare_denoiser,
    forward=forward,
    decode=decode,
    denormalize_latents=denormalize_latents,
)
