"""The denoiser of CogVideoX 1.5 (https://arxiv.org/abs/2408.06072): forward pass, sizes, sharding, keys.

Its modules have the names of diffusers' `CogVideoXTransformer3DModel`. The steps, with the published sizes and latents
`[rows, 16, T, h, w]`:

    patches    [rows, N, 16 * 2 * 2 * 2] -> [rows, N, 3072], N = T/2 * h/2 * w/2, the width counted fastest
    text       T5's states [rows, 226, 4096] -> [rows, 226, 3072]
    time       sinusoids [rows, 3072] -> [rows, 512]; each block projects it to modulations of both streams
    42 blocks  joint attention with 48 heads of 64, then a feed-forward of 12288; both streams share all weights except
               those of the modulation (expert adaptive layer norm)
    output     two norms, the second with shift and scale, then a projection [rows, N, 16 * 2 * 2 * 2] -> velocity
               [rows, 16, T, h, w]

Of a head's 64 channels, 16 are rotated by frame, 24 by row and 24 by column, with a base of 10000.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from ....sharding.rules import BLOCK_PRODUCT, GATHERED, REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig, LatentGeometry
from ...model_spec.upstream import Net
from ..common import layers
from ..common.layers import Modulation
from .text_encoder import MAX_TOKENS

if TYPE_CHECKING:
    import torch

    from ...programs.sharded_ops import ShardedOps
    from ..common.layers import Pair

# Latents `[1, 16, T, height / 8, width / 8]`, T = 1 + (frames - 1) / 4, rounded up to whole patches of 2 x 2 x 2.
GEOMETRY = LatentGeometry(channels=16, stride_t=4, stride_hw=8, patch_thw=(2, 2, 2))

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the velocity of `sample` `[rows, 16, frames, height, width]` at one `timestep` `[1]`, 999 to 0.

    It is that of v-prediction (https://arxiv.org/abs/2202.00512).

    dit: diffusers' `CogVideoXTransformer3DModel`. run: operations on the mesh.
    inputs: `text` `[rows, 226, text_embed_dim]`.
    """
    return predict_velocity(dit, run, sample, embed_time(dit, sample, timestep), inputs["text"])


def predict_velocity(
    dit: Net, run: "ShardedOps", latents: "torch.Tensor", temb: "torch.Tensor", text: "torch.Tensor"
) -> "torch.Tensor":
    """Return the velocity of `latents` `[rows, channels, frames, height, width]`.

    dit: diffusers' module. run: operations on the mesh. temb: time embedding `[rows, time_embed_dim]`.
    text: `[rows, 226, text_embed_dim]`; its padding is attended to, as upstream.
    """
    cosines, sines = (run.tokens(table[None]) for table in rotary_tables(dit.config, latents))
    x = run.tokens(dit.patch_embed.proj(layers.cut_patches(latents, GEOMETRY.patch_thw)))  # [rows, tokens, dim]
    text = run.replicate(dit.patch_embed.text_proj(text))  # [rows, 226, dim]

    def body(block: Net, streams: "Pair") -> "Pair":
        return run_block(block, run, *streams, temb, (cosines, sines))

    x, _ = run.scan(dit.transformer_blocks, (x, text), body)
    x = dit.norm_out(dit.norm_final(run.remove_padding(x)), temb=temb)
    return layers.join_patches(dit.proj_out(x), latents, GEOMETRY.patch_thw)


def embed_time(dit: Net, sample: "torch.Tensor", timestep: "torch.Tensor") -> "torch.Tensor":
    """Return the time embedding `[rows, time_embed_dim]` of `timestep` `[1]` for every row of `sample` `[rows, ...]`.

    dit: diffusers' module.
    """
    return dit.time_embedding(dit.time_proj(timestep.expand(len(sample))).to(sample.dtype))


def rotary_tables(config: Any, latents: "torch.Tensor") -> "Pair":
    """Return cosines and sines `[tokens, head_dim]` of the tokens of `latents`.

    config: the transformer's. latents: `[rows, channels, frames, height, width]`. Positions count from 0. Upstream's
    tables end at `sample_height` and `sample_width`; larger latents continue them.
    """
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    frames, height, width = (side // patch for side, patch in zip(latents.shape[2:], GEOMETRY.patch_thw, strict=True))
    grid = height, width
    cosines, sines = get_3d_rotary_pos_embed(
        config.attention_head_dim, None, grid, frames, grid_type="slice", max_size=grid, device=latents.device
    )
    return cosines, sines


def run_block(
    block: Net, run: "ShardedOps", x: "torch.Tensor", text: "torch.Tensor", temb: "torch.Tensor", rotary: "Pair"
) -> "Pair":
    """Run one `CogVideoXBlock`: joint attention, then a shared feed-forward. Returns both streams.

    block: diffusers' module. run: operations on the mesh. x, text: `[rows, tokens, dim]`.
    temb: `[rows, time_embed_dim]`. rotary: cosines and sines `[1, tokens, head_dim]` of the video.

    Each update is `x + gate * f(norm(x) * (1 + scale) + shift)`, with a layer norm with weights.

    Upstream concatenates video and text for both updates. Here they stay apart, so that tokens stay on their chips.
    """
    norm = partial(run.residual_norm, eps=block.norm1.norm.eps)
    text_norm = partial(norm, placement="replicated")
    (msa, text_msa), (mlp, text_mlp) = modulate(run, block.norm1, temb), modulate(run, block.norm2, temb)

    _, y = norm(x, None, None, msa.scale, msa.shift)
    _, text_y = text_norm(text, None, None, text_msa.scale, text_msa.shift)
    update, text_update = joint_attention(block.attn1, run, y, text_y, rotary)
    x, y = norm(x, update, msa.gate, mlp.scale, mlp.shift)
    x = run.add_feed_forward(x, block.ff, y, mlp.gate)
    text, text_y = text_norm(text, text_update, text_msa.gate, text_mlp.scale, text_mlp.shift)
    return x, run.add_feed_forward(text, block.ff, text_y, text_mlp.gate, "replicated")


def modulate(run: "ShardedOps", norm: Net, temb: "torch.Tensor") -> "tuple[Modulation, Modulation]":
    """Return the modulation of the video and of the text, `[rows, dim]` each, as `CogVideoXLayerNormZero` `norm` does.

    run: operations on the mesh. temb: time embedding `[rows, time_embed_dim]`.
    """
    chunks = run.gather_vector(norm.linear(norm.silu(temb))).chunk(6, dim=1)
    return layers.make_modulation(*chunks[:3], norm=norm.norm), layers.make_modulation(*chunks[3:], norm=norm.norm)


def joint_attention(attn: Net, run: "ShardedOps", x: "torch.Tensor", text: "torch.Tensor", rotary: "Pair") -> "Pair":
    """Return the joint-attention updates of `x` and `text`, `[rows, tokens, dim]` each.

    attn: diffusers' module. run: operations on the mesh. rotary: cosines and sines `[1, tokens, head_dim]` of the
    video. Both streams share projections and layer norms of queries and keys; the text has no positions.
    """
    prologues = layers.make_prologue(attn.norm_q, attn.norm_k, rotary), layers.make_prologue(attn.norm_q, attn.norm_k)
    qkv = attn.to_q, attn.to_k, attn.to_v
    latent_heads = layers.project_heads(run, attn, x, *qkv)
    text_heads = layers.project_heads(run, attn, text, *qkv, placement="replicated")
    attended, text_attended = run.joint_attention(latent_heads, text_heads, prologues=prologues)
    (update,) = run.products(attended.flatten(2), attn.to_out[0])
    (text_update,) = run.products(text_attended.flatten(2), attn.to_out[0], placement="replicated")
    return update, text_update


# --- the component ----------------------------------------------------------------------------------------------------

# ComfyUI's keys; adapters for this model have these or diffusers'.
ORIGINAL_KEYS = {
    "time_embedding_linear_1": "time_embedding.linear_1",
    "time_embedding_linear_2": "time_embedding.linear_2",
    "blocks.*.norm1.linear": "transformer_blocks.*.norm1.linear",
    "blocks.*.norm1.norm": "transformer_blocks.*.norm1.norm",
    "blocks.*.norm2.linear": "transformer_blocks.*.norm2.linear",
    "blocks.*.norm2.norm": "transformer_blocks.*.norm2.norm",
    "blocks.*.q": "transformer_blocks.*.attn1.to_q",
    "blocks.*.k": "transformer_blocks.*.attn1.to_k",
    "blocks.*.v": "transformer_blocks.*.attn1.to_v",
    "blocks.*.norm_q": "transformer_blocks.*.attn1.norm_q",
    "blocks.*.norm_k": "transformer_blocks.*.attn1.norm_k",
    "blocks.*.attn_out": "transformer_blocks.*.attn1.to_out.0",
    "blocks.*.ff_proj": "transformer_blocks.*.ff.net.0.proj",
    "blocks.*.ff_out": "transformer_blocks.*.ff.net.2",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="CogVideoXTransformer3DModel",
    config={
        "attention_bias": True,
        "attention_head_dim": 64,
        "in_channels": 16,
        "max_text_seq_length": MAX_TOKENS,
        "num_attention_heads": 48,
        "num_layers": 42,
        "out_channels": 16,
        "patch_bias": False,
        "patch_size": 2,
        "patch_size_t": 2,
        "sample_frames": 81,
        "sample_height": 96,
        "sample_width": 170,
        "text_embed_dim": 4096,
        "time_embed_dim": 512,
        "use_rotary_positional_embeddings": True,
    },
    tiny={
        "attention_head_dim": 16,
        "num_attention_heads": 6,
        "num_layers": 3,
        "text_embed_dim": 40,
        "time_embed_dim": 36,
    },
    needs={
        "in_channels": ConfigRequirement((16,)),
        "max_text_seq_length": ConfigRequirement((MAX_TOKENS,)),
        "ofs_embed_dim": ConfigRequirement((None,)),
        "out_channels": ConfigRequirement((16,)),
        "patch_size": ConfigRequirement((2,)),
        # Absent in CogVideoX 1.0.
        "patch_size_t": ConfigRequirement((2,), required=True),
        "text_embed_dim": EqualsConfig("text_encoder", "d_model"),
        "use_learned_positional_embeddings": ConfigRequirement((False,)),
        "use_rotary_positional_embeddings": ConfigRequirement((True,), required=True),
    },
    blocks=("transformer_blocks",),
    original_keys=ORIGINAL_KEYS,
    rules=(
        Rule("transformer_blocks.**.bias", REPLICATED),
        Rule("transformer_blocks.*.attn1.norm_*.weight", REPLICATED),
        Rule("transformer_blocks.*.*.norm.weight", REPLICATED),
        # Modulation applies to one vector: it is computed on the chips that hold its weights, then gathered.
        Rule("transformer_blocks.*.*.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.attn1.**.weight", *BLOCK_PRODUCT),
        Rule("transformer_blocks.*.ff.net.**.weight", *BLOCK_PRODUCT),
        Rule("patch_embed.*.weight", *GATHERED),
        Rule("time_embedding.linear_*.weight", *GATHERED),
        Rule("norm_out.linear.weight", *GATHERED),
        Rule("proj_out.weight", *GATHERED),
    ),
)
