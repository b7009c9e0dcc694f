"""Wan 2.1 and 2.2 text to video: Wan-AI/Wan2.1-T2V-14B-Diffusers, Wan2.1-T2V-1.3B-Diffusers and
Wan2.2-T2V-A14B-Diffusers. The oracle is `diffusers.WanPipeline`.
"""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule
from ..limits import FloatLimit, IntLimit
from ..spec import Component, LatentGeometry, ModelSpec, Need, Same, TextEncoding
from . import layers
from .autoencoders.wan import VAE_DECODER, decode, denormalize_latents
from .layers import embed_patches
from .text_encoders import t5

PROMPT = "A cat and a dog baking a cake together in a kitchen."
MAX_TOKENS = 512
# The makers' own, as they publish it (`sample_neg_prompt`).
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch


def clean_prompt(prompt: str) -> str:
    """Mended encoding, resolved HTML entities, single spaces: as upstream does it."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return re.sub(r"\s+", " ", text).strip()


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int = MAX_TOKENS) -> "tuple[np.ndarray, np.ndarray]":
    """Ids and mask, `[rows, length]` int32."""
    return t5.tokens(tokenizer, [clean_prompt(prompt) for prompt in prompts], length)


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
    """`diffusers`' `WanAttnProcessor` with norms, rotary embedding and attention in JAX."""

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
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return attn.to_out[0](self.attended(attn, attn.to_q(hidden_states), source, rotary_emb))

    def attended(self, attn: Any, query: "torch.Tensor", source: "torch.Tensor", rotary_emb: Any) -> "torch.Tensor":
        """Attention of projected queries to `source`, all `[rows, tokens, dim]`."""
        return self.attend_to(attn, query, attn.to_k(source), attn.to_v(source), attn.norm_k, rotary_emb)

    def attend_to(
        self,
        attn: Any,
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        key_norm: Any,
        rotary_emb: Any,
    ) -> "torch.Tensor":
        """Attention of projections `[rows, tokens, dim]`."""
        from ..programs import torch_bridge

        heads = [x.unflatten(2, (attn.heads, -1)) for x in (query, key, value)]
        attend = partial(self.attend, prologue=layers.prologue(attn.norm_q, key_norm, rotary_emb))
        return torch_bridge.call_jax(attend, *heads).flatten(2, 3)


def run_block(
    fuse: Any,
    add_gated: Any,
    block: Any,
    hidden_states: "torch.Tensor",
    encoder_hidden_states: "torch.Tensor",
    temb: "torch.Tensor",
    rotary_emb: "tuple[torch.Tensor, torch.Tensor]",
) -> "torch.Tensor":
    """`WanTransformerBlock` with each residual and the norm after it as one (see `residual_norm`).

    `temb` is `[rows, 6, dim]`, or of pairs `[rows, 2, 6, dim]`.
    """
    modulation = (block.scale_shift_table + temb.float()).chunk(6, dim=-2)
    (scale, shift, gate), (ffn_scale, ffn_shift, ffn_gate) = (layers.modulated(*modulation[n : n + 3]) for n in (0, 3))
    _, normed = fuse(hidden_states, None, None, scale, shift)
    update = block.attn1(normed, None, None, rotary_emb)
    hidden_states, normed = fuse(hidden_states, update, gate, block.norm2.weight, block.norm2.bias)
    update = block.attn2(normed, encoder_hidden_states, None, None)
    hidden_states, normed = fuse(hidden_states, update, None, ffn_scale, ffn_shift)
    return add_gated(hidden_states, block.ffn(normed), ffn_gate)


def prepare_denoiser(network: Any, sequence: Any) -> None:
    """Puts our attention, token placement and patch embedding where upstream lets us."""
    import types

    blocks = network.blocks("blocks")
    blocks.block.attn1.set_processor(WanProcessor(sequence.self_attention))
    blocks.block.attn2.set_processor(WanProcessor(sequence.cross_attention))
    fuse, _ = layers.fused_norms(sequence, blocks.block.norm1.eps)
    blocks.block.forward = partial(run_block, fuse, layers.add_gated, blocks.block)

    def enter(values: dict[str, Any]) -> dict[str, Any]:
        tables = tuple(sequence.pad_tokens(table) for table in values["rotary_emb"])
        return {**values, "hidden_states": sequence.shard_tokens(values["hidden_states"]), "rotary_emb": tables}

    blocks.scan = sequence.scan("blocks", enter)
    embedding = network.module.patch_embedding
    embedding.forward = types.MethodType(embed_patches, embedding)
    embedder = network.module.condition_embedder.time_embedder
    embedder.forward = layers.unrounded(embedder.forward)


TEXT_ENCODER = t5.encoder(
    class_name="UMT5EncoderModel",
    config={"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 256384},
    tiny={"d_ff": 72, "d_kv": 8, "d_model": 40, "num_heads": 5, "num_layers": 2, "vocab_size": 200},
    blocks=("encoder.block",),
)

TRANSFORMER_RULES = (
    # Biases, norms and modulation tables of a block are rows of `[layers, dim]`: at most 2.4 MB in bfloat16.
    Rule("blocks.**.bias", REPLICATED),
    Rule("blocks.*.*.norm_q.weight", REPLICATED),
    Rule("blocks.*.*.norm_k.weight", REPLICATED),
    Rule("blocks.*.norm2.weight", REPLICATED),
    Rule("blocks.*.scale_shift_table", REPLICATED),
    Rule("blocks.*.*.to_out.0.weight", *layers.BLOCK_GATHERED),
    Rule("blocks.*.*.*.weight", *layers.BLOCK_GATHERED),
    Rule("blocks.*.ffn.net.0.proj.weight", *layers.BLOCK_GATHERED),
    Rule("blocks.*.ffn.net.2.weight", *layers.BLOCK_GATHERED),
    Rule("condition_embedder.time_proj.weight", *layers.GATHERED),
    Rule("condition_embedder.*.*.weight", *layers.GATHERED),
    # 5120 wide: over the limit of what needs no rule in float32, or of more channels.
    Rule("patch_embedding.weight", REPLICATED),
    Rule("proj_out.weight", REPLICATED),
)

# Those of Wan-Video/Wan2.1; as in `diffusers.loaders.single_file_utils.convert_wan_transformer_to_diffusers`.
MAKERS_NAMES = {
    "blocks.*.self_attn.q": "blocks.*.attn1.to_q",
    "blocks.*.self_attn.k": "blocks.*.attn1.to_k",
    "blocks.*.self_attn.v": "blocks.*.attn1.to_v",
    "blocks.*.self_attn.o": "blocks.*.attn1.to_out.0",
    "blocks.*.self_attn.norm_q": "blocks.*.attn1.norm_q",
    "blocks.*.self_attn.norm_k": "blocks.*.attn1.norm_k",
    "blocks.*.cross_attn.q": "blocks.*.attn2.to_q",
    "blocks.*.cross_attn.k": "blocks.*.attn2.to_k",
    "blocks.*.cross_attn.v": "blocks.*.attn2.to_v",
    "blocks.*.cross_attn.o": "blocks.*.attn2.to_out.0",
    "blocks.*.cross_attn.norm_q": "blocks.*.attn2.norm_q",
    "blocks.*.cross_attn.norm_k": "blocks.*.attn2.norm_k",
    "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
    "blocks.*.ffn.2": "blocks.*.ffn.net.2",
    "blocks.*.norm3": "blocks.*.norm2",
    "blocks.*.modulation": "blocks.*.scale_shift_table",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="WanTransformer3DModel",
    class_aliases=("SkyReelsV2Transformer3DModel",),
    config={
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
    },
    tiny={
        "attention_head_dim": 24,
        "ffn_dim": 200,
        "freq_dim": 32,
        "num_attention_heads": 6,
        "num_layers": 3,
        "text_dim": 40,
    },
    needs={
        # Set where pictures are attended to, as in Wan 2.1's image to video.
        "added_kv_proj_dim": Need((None,)),
        "cross_attn_norm": Need((True,)),
        "image_dim": Need((None,)),
        "in_channels": Need((16,)),
        # SkyReels V2's: the frame rate as an input, and frames that see earlier ones alone.
        "inject_sample_info": Need((False,)),
        "num_frame_per_block": Need((1,)),
        "out_channels": Need((16,)),
        "patch_size": Need(((1, 2, 2),)),
        "pos_embed_seq_len": Need((None,)),
        "qk_norm": Need(("rms_norm_across_heads",)),
        "text_dim": Same("text_encoder", "d_model"),
    },
    blocks=("blocks",),
    rules=TRANSFORMER_RULES,
    makers_names=MAKERS_NAMES,
)

# As the published checkpoint configures it; `flow_shift` is overridden by the sampler's widget.
SCHEDULER = {
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

SPEC = ModelSpec(
    name="wan2.1-t2v-14b",
    family="Wan21",
    title="Wan 2.1 T2V 14B",
    category="Wan2.1",
    hub_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
    tiny_id="tiny/wan21",
    latent_format="Wan21",
    # FastVideo's (FastWan, few steps) and diffusers' of SkyReels V2 (not diffusion forcing) run the same network.
    pipeline_classes=("WanPipeline", "WanDMDPipeline", "SkyReelsV2Pipeline"),
    components=(TEXT_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(1, 2, 2)),
    text_encoders=(
        TextEncoding(
            tokenizer_class="T5TokenizerFast",
            max_length=MAX_TOKENS,
            width_key="text_dim",
            tokenize=tokenize,
            encode=encode_text,
            write_tokenizer=partial(t5.write_umt5_tokenizer, texts=(PROMPT,)),
        ),
    ),
    inputs={
        "height": IntLimit(default=720, low=64, high=1920, multiple_of=16),
        "width": IntLimit(default=1280, low=64, high=1920, multiple_of=16),
        "num_frames": IntLimit(default=81, low=1, high=241, multiple_of=4, plus=1),
        "num_inference_steps": IntLimit(default=50, low=1, high=100),
        "guidance_scale": FloatLimit(default=5.0, low=0.0, high=20.0),
        "seed": IntLimit(default=2025, low=0, high=2**64 - 1),
        "flow_shift": FloatLimit(default=5.0, low=0.1, high=20.0, step=0.5),
        "fps": IntLimit(default=16, low=1, high=120),
        # For those of the family with two experts. 0: the same as the first's; where the checkpoint says.
        "guidance_scale_2": FloatLimit(default=0.0, low=0.0, high=20.0),
        "high_noise_steps": IntLimit(default=0, low=0, high=100),
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    tiny_inputs={"height": 80, "width": 112, "num_frames": 17},
    tiny_texts={"prompt": "a red circle moves right on blue", "negative_prompt": ""},
    scheduler=SCHEDULER,
    shift_key="flow_shift",
    prepare_denoiser=prepare_denoiser,
    forward=forward,
    decode=decode,
    denormalize_latents=denormalize_latents,
)

# Siblings: another size, and two experts.
_SMALL = replace(
    TRANSFORMER,
    config={**TRANSFORMER.config, "ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30},
    tiny={**TRANSFORMER.tiny, "attention_head_dim": 12, "ffn_dim": 130, "num_attention_heads": 12, "num_layers": 2},
)

SMALL = replace(
    SPEC,
    name="wan2.1-t2v-1.3b",
    title="Wan 2.1 T2V 1.3B",
    hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    tiny_id="tiny/wan21_1.3b",
    components=(TEXT_ENCODER, _SMALL, VAE_DECODER),
    inputs={
        **SPEC.inputs,
        # As its makers run it.
        "height": replace(SPEC.whole_numbers("height"), default=480),
        "width": replace(SPEC.whole_numbers("width"), default=832),
        "guidance_scale": FloatLimit(default=6.0, low=0.0, high=20.0),
        "flow_shift": FloatLimit(default=8.0, low=0.1, high=20.0, step=0.5),
    },
)

EXPERTS = (TRANSFORMER, replace(TRANSFORMER, name="transformer_2", folder="transformer_2"))

TWO_EXPERTS = replace(
    SPEC,
    name="wan2.2-t2v-a14b",
    title="Wan 2.2 T2V A14B",
    hub_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    tiny_id="tiny/wan22t2v",
    components=(TEXT_ENCODER, *EXPERTS, VAE_DECODER),
    inputs={
        **SPEC.inputs,
        "num_inference_steps": IntLimit(default=40, low=1, high=100),
        "guidance_scale": FloatLimit(default=4.0, low=0.0, high=20.0),
        "guidance_scale_2": FloatLimit(default=3.0, low=0.0, high=20.0),
        # The makers'; the checkpoint's scheduler says 3.
        "flow_shift": FloatLimit(default=12.0, low=0.1, high=20.0, step=0.5),
    },
    experts=tuple(expert.name for expert in EXPERTS),
    # The first expert composes: it runs while the timestep is at least this share of the training timesteps.
    index={"boundary_ratio": 0.875},
)

SIBLINGS = (SMALL, TWO_EXPERTS)
