"""The denoiser of PixArt-Sigma (https://arxiv.org/abs/2403.04692): forward pass, sizes, sharding rules.

Its modules have the names of diffusers' `PixArtTransformer2DModel`. The steps, with the published sizes and latents
`[rows, 4, h, w]`:

    patches    [rows, N, 4 * 2 * 2] -> [rows, N, 1152], N = h/2 * w/2, plus sinusoids of row and column
    time       sinusoids [rows, 256] -> [rows, 1152] -> modulation [rows, 6, 1152], one for all blocks
    text       T5's states [rows, 300, 4096] -> [rows, 300, 1152]
    28 blocks  self-attention with 16 heads of 72, cross-attention to the text, feed-forward of 4608
    output     norm, shift and scale, then a projection [rows, N, 2 * 2 * 8] -> noise [rows, 4, h, w]
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....sharding.rules import BLOCK_GATHERED, GATHERED, REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig
from ..common import layers

if TYPE_CHECKING:
    # ComfyUI imports this file when it starts, so slow imports are inside the functions that use them.
    import torch

    from ...programs.sharded_ops import ShardedOps


def forward(
    dit: Any, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the noise in `sample` `[rows, 4, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `PixArtTransformer2DModel`. run: operations on the mesh.
    inputs: `text` `[rows, tokens, caption_channels]`, and `text_length` `[rows]`, its number of valid tokens.
    """
    x = run.tokens(dit.pos_embed(sample))  # [rows, tokens, dim]
    modulation, time = dit.adaln_single(timestep.expand(len(sample)), hidden_dtype=sample.dtype)
    modulation = modulation.unflatten(1, (6, -1))
    text = dit.caption_projection(inputs["text"])  # [rows, tokens, dim]

    def body(block: Any, x: "torch.Tensor") -> "torch.Tensor":
        return run_block(block, run, x, modulation, text, inputs["text_length"])

    x = run.remove_padding(run.scan(dit.transformer_blocks, x, body))
    shift, scale = (dit.scale_shift_table + time[:, None]).chunk(2, dim=1)
    x = dit.proj_out(dit.norm_out(x) * (1 + scale) + shift)
    size = dit.config.patch_size
    patches = x.unflatten(1, (sample.shape[2] // size, -1)).unflatten(3, (size, size, -1))
    noise = patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
    return noise[:, : sample.shape[1]]  # the other channels are the variance, which no solver uses


def run_block(
    block: Any,
    run: "ShardedOps",
    x: "torch.Tensor",
    modulation: "torch.Tensor",
    text: "torch.Tensor",
    text_length: "torch.Tensor",
) -> "torch.Tensor":
    """Run one `BasicTransformerBlock`: self-attention, cross-attention to the text without a norm, feed-forward.

    block: diffusers' module. run: operations on the mesh. x: `[rows, tokens, dim]`. modulation: `[rows, 6, dim]`.
    text: `[rows, tokens, dim]`. text_length: valid text tokens `[rows]`.
    """
    norm = partial(run.residual_norm, eps=block.norm1.eps)
    look = partial(run.cross_attention, text_length=text_length)
    vectors = (block.scale_shift_table + modulation.float()).chunk(6, dim=1)
    shift, scale, gate, ff_shift, ff_scale, ff_gate = vectors
    _, y = norm(x, None, None, 1 + scale, shift)
    x = run.add_gated(x, attend(block.attn1, run, y, y, run.self_attention), gate)
    x, y = norm(x, attend(block.attn2, run, x, text, look), None, 1 + ff_scale, ff_shift)
    return run.add_gated(x, block.ff(y), ff_gate)


def attend(
    attn: Any, run: "ShardedOps", x: "torch.Tensor", source: "torch.Tensor", attention: "Callable[..., torch.Tensor]"
) -> "torch.Tensor":
    heads = partial(layers.project_heads, run, attn)
    (query,), (key, value) = heads(x, attn.to_q), heads(source, attn.to_k, attn.to_v)
    return attn.to_out[0](attention(query, key, value).flatten(2))


TRANSFORMER = Component(
    name="transformer",
    folder="transformer",
    library="diffusers",
    class_name="PixArtTransformer2DModel",
    class_aliases=("Transformer2DModel",),
    config={
        "attention_head_dim": 72,
        "caption_channels": 4096,
        "cross_attention_dim": 1152,
        "in_channels": 4,
        "interpolation_scale": 2,
        "num_attention_heads": 16,
        "num_layers": 28,
        "out_channels": 8,
        "patch_size": 2,
        "sample_size": 128,
        "use_additional_conditions": False,
    },
    tiny={
        "attention_head_dim": 12,
        "caption_channels": 40,
        "cross_attention_dim": 72,
        "num_attention_heads": 6,
        "num_layers": 3,
    },
    needs={
        "caption_channels": EqualsConfig("text_encoder", "d_model"),
        "in_channels": ConfigRequirement((4,)),
        "norm_elementwise_affine": ConfigRequirement((False,)),
        "norm_type": ConfigRequirement(("ada_norm_single",)),
        "patch_size": ConfigRequirement((2,)),
        # True in PixArt-Alpha at 1024 pixels, which embeds the image's size.
        "use_additional_conditions": ConfigRequirement((False,), required=True),
    },
    blocks=("transformer_blocks",),
    rules=(
        Rule("transformer_blocks.**.bias", REPLICATED),
        Rule("transformer_blocks.*.scale_shift_table", REPLICATED),
        Rule("transformer_blocks.**.weight", *BLOCK_GATHERED),
        Rule("adaln_single.**.weight", *GATHERED),
        Rule("caption_projection.*.weight", *GATHERED),
    ),
)
