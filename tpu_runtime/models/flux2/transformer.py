"""The denoiser of FLUX.2: forward pass, sizes, sharding rules, splits of fused weights, key names of other formats.

It is that of https://github.com/black-forest-labs/flux2, `src/flux2/model.py`; its modules have the names of diffusers'
`Flux2Transformer2DModel`. The steps, with the sizes of dev, L text tokens and latents `[rows, 128, h, w]`:

    time              sinusoids [rows, 256] of the timestep and of the guidance scale -> [rows, 6144] each, added
    modulations       [rows, 6144] -> shift, scale and gate, the same for all blocks of a kind
    image             [rows, N, 128] -> [rows, N, 6144], N = h * w, plus the tokens of reference images
    text              Mistral's states [rows, L, 15360] -> [rows, L, 6144]
    8 double blocks   two streams with weights of their own (MM-DiT, https://arxiv.org/abs/2403.03206): joint attention
                      with 48 heads of 128, then a SwiGLU feed-forward of 18432 per stream
    48 single blocks  text, then image, in one sequence: attention and feed-forward of the same norm, in parallel
                      (https://arxiv.org/abs/2302.05442)
    output            norm, scale and shift, then a projection [rows, N, 128] -> flow [rows, 128, h, w]

Of a head's 128 channels, 32 each are rotated by image number, row, column and text position, with a base of 2000.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...messages import compose
from ...model_spec import Component, ConfigRequirement, RowSlice, split_rows, swap_halves
from ...model_spec.upstream import Net
from ..common import layers
from ..common.layers import Modulation, OverlappedHalves

if TYPE_CHECKING:
    import torch

    from ....attention.api import Placement
    from ...programs.sharded_ops import ShardedOps
    from ..common.layers import Pair, ResidualNorm

# --- the denoiser -----------------------------------------------------------------------------------------------------


def forward(
    dit: Net, run: "ShardedOps", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """Return the flow (velocity) of `sample` `[rows, 128, height, width]` at one `timestep` `[1]`.

    dit: diffusers' `Flux2Transformer2DModel`. run: operations on the mesh.
    inputs: `text` `[rows, tokens, joint_attention_dim]`, all of it valid, and optionally `guidance` `[1]` and reference
        latents `reference_0`, `reference_1`, ... `[rows, 128, height, width]`, which are more tokens.

    The image tokens are in two halves (`layers.OverlappedHalves`): sums of one half are exchanged between chips while
    products of the other are computed.
    """
    import torch

    rows, _, height, width = sample.shape
    num_references = sum(name.startswith("reference_") for name in inputs)
    all_latents = [sample, *(inputs[f"reference_{index}"] for index in range(num_references))]
    norm = partial(run.residual_norm, eps=dit.config.eps, spread=True)

    # Upstream's pipeline divides by 1000 and its transformer multiplies by 1000, both in the network's dtype.
    time = timestep.to(sample.dtype).expand(rows) / 1000 * 1000
    guidance = inputs["guidance"].to(sample.dtype).expand(rows) * 1000 if "guidance" in inputs else None
    temb = dit.time_guidance_embed(time, guidance)  # [rows, dim]
    image_modulations = modulate(run, dit.double_stream_modulation_img, temb)
    text_modulations = modulate(run, dit.double_stream_modulation_txt, temb)
    (modulation,) = modulate(run, dit.single_stream_modulation, temb)

    image = dit.x_embedder(torch.cat([latents.flatten(2).transpose(1, 2) for latents in all_latents], dim=1))
    text = dit.context_embedder(inputs["text"])  # [rows, tokens, dim], as the image
    image_size, text_size = image.shape[1], text.shape[1]
    text = run.spread(run.replicate(text), placement="replicated")
    image_rotary = rotary_tables(dit.pos_embed, [(latents.shape[2], latents.shape[3], 1) for latents in all_latents])
    text_rotary = rotary_tables(dit.pos_embed, [(1, 1, text.shape[1])])

    # Double blocks.
    run = run.with_length(image_size)
    stream = layers.start_overlap(run, norm, image, image_modulations[0])
    rotary = (*layers.halve_tables(run, image_rotary), text_rotary)

    def double_body(
        block: Net, carry: "tuple[torch.Tensor, OverlappedHalves]"
    ) -> "tuple[torch.Tensor, OverlappedHalves]":
        return run_double_block(block, run, norm, *carry, text_size, image_modulations, text_modulations, rotary)

    text, stream = run.scan(dit.transformer_blocks, (text, stream), double_body)
    image = run.remove_padding(layers.join_halves(run, stream, image_modulations[-1]))

    # Single blocks.
    joint_run = run.with_length(text_size + image_size)
    stream = layers.start_overlap(joint_run, norm, torch.cat([text[:, :text_size], image], dim=1), modulation)
    pairs = zip(text_rotary, image_rotary, strict=True)
    tables = [torch.cat([text_table[:, :text_size], image_table], dim=1) for text_table, image_table in pairs]
    joint_rotary = layers.halve_tables(joint_run, tables)

    def single_body(block: Net, stream: OverlappedHalves) -> OverlappedHalves:
        return run_single_block(block, joint_run, norm, stream, modulation, joint_rotary)

    merged = ("attn.in_gate", "attn.in_fed", "attn.out")
    stream = joint_run.scan(dit.single_transformer_blocks, stream, single_body, merged=merged)
    image = layers.join_halves(joint_run, stream, modulation)[:, text_size : text_size + height * width]

    flow = dit.proj_out(dit.norm_out(image, temb))
    return flow.transpose(1, 2).unflatten(2, (height, width))


def modulate(run: "ShardedOps", module: Net, temb: "torch.Tensor") -> list[Modulation]:
    """Return `Flux2Modulation`'s output, one per update of a block and the same for all blocks, `[rows, dim]` each.

    run: operations on the mesh. module: diffusers'. temb: time embedding `[rows, dim]`.
    """
    chunks = run.replicate(module(temb)).chunk(3 * module.mod_param_sets, dim=-1)
    return [layers.make_modulation(*triple) for triple in zip(chunks[::3], chunks[1::3], chunks[2::3], strict=True)]


def rotary_tables(pos_embed: Net, sizes: "Sequence[tuple[int, int, int]]") -> "Pair":
    """Return `Flux2PosEmbed`'s cosines and sines `[1, tokens, head_dim]`.

    pos_embed: diffusers' module. sizes: a grid (height, width, text tokens) per image or text. The axes are image
    number, row, column and text position. Image numbers are 10 apart (`Flux2Pipeline._prepare_image_ids`).
    """
    import numpy as np

    grids = [np.indices((1, *size)).reshape(4, -1) for size in sizes]
    positions = np.concatenate([grid + [[10 * index], [0], [0], [0]] for index, grid in enumerate(grids)], axis=1)
    return layers.rotary_tables(pos_embed.theta, pos_embed.axes_dim, positions)


def run_double_block(
    block: Net,
    run: "ShardedOps",
    norm: "ResidualNorm",
    text: "torch.Tensor",
    image: "OverlappedHalves",
    text_size: int,
    image_modulations: "list[Modulation]",
    text_modulations: "list[Modulation]",
    rotary: "Sequence[Pair]",
) -> "tuple[torch.Tensor, OverlappedHalves]":
    """Run one `Flux2TransformerBlock`: joint attention, then a feed-forward per stream. Returns text and image.

    block: diffusers' module. run: operations on the mesh. norm: the residual norm. text: `[rows, tokens, dim]`.
    image: the image tokens in two halves `[rows, tokens / 2, dim]`. text_size: valid text tokens.
    image_modulations, text_modulations: of attention and feed-forward.
    rotary: cosines and sines `[1, tokens, head_dim]` of both halves and of the text.
    """
    attn, (msa, mlp), (text_msa, text_mlp) = block.attn, image_modulations, text_modulations
    text_norm, text_product = partial(norm, placement="replicated"), partial(run.sum_products, placement="replicated")
    norms = (attn.norm_q, attn.norm_k), (attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)

    _, y = text_norm(text, None, None, text_msa.scale, text_msa.shift)
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    text_heads = project_heads(run, attn, y, *added, placement="replicated")
    halves, normed = layers.apply_pending_update(run, norm, image, mlp, msa)
    heads = [project_heads(run, attn, y, attn.to_q, attn.to_k, attn.to_v) for y in normed]
    *attended, text_attended = joint_attention(run, [*heads, text_heads], norms, rotary, text_size)
    text_update = text_product(attn.to_add_out, text_attended)
    sums = [run.partial_sums(attn.to_out[0], half) for half in attended]
    image = layers.add_update(run, norm, halves, sums, msa, mlp)

    text, y = text_norm(text, text_update, text_msa.gate, text_mlp.scale, text_mlp.shift)
    text = run.add_gated(text, feed_forward(run, block.ff_context, y, text_product, "replicated"), text_mlp.gate)
    halves, normed = layers.apply_pending_update(run, norm, image, msa, mlp)
    sums = [feed_forward(run, block.ff, y, run.partial_sums) for y in normed]
    return text, layers.add_update(run, norm, halves, sums, mlp, msa)


def run_single_block(
    block: Net,
    run: "ShardedOps",
    norm: "ResidualNorm",
    x: "OverlappedHalves",
    modulation: "Modulation",
    rotary: "Sequence[Pair]",
) -> "OverlappedHalves":
    """Run one `Flux2SingleTransformerBlock`: attention and feed-forward of one norm, with one output projection.

    block: diffusers' module. run: operations on the mesh. norm: the residual norm. x: text and image tokens, in two
        halves.
    modulation: of the block's only update. rotary: cosines and sines `[1, tokens, head_dim]` of both halves.
    """
    attn = block.attn
    halves, normed = layers.apply_pending_update(run, norm, x, modulation, modulation)
    qkv = (attn, "in_query"), (attn, "in_key"), (attn, "in_value")
    heads = [project_heads(run, attn, y, *qkv) for y in normed]
    attended = joint_attention(run, heads, [(attn.norm_q, attn.norm_k)] * 2, rotary)
    fed = [swiglu(run, y, (attn, "in_gate"), (attn, "in_fed")) for y in normed]
    sums = [run.partial_sums((attn, "out"), *pair) for pair in zip(attended, fed, strict=True)]
    return layers.add_update(run, norm, halves, sums, modulation, modulation)


def project_heads(
    run: "ShardedOps", attn: Net, x: "torch.Tensor", *factors: Any, **how: Any
) -> "tuple[torch.Tensor, ...]":
    """Return query, key and value `[rows, tokens, heads, head_dim]` of `x` `[rows, tokens, dim]`.

    run: operations on the mesh. attn: diffusers' module. factors, how: as in `ShardedOps.products`.
    """
    products = run.products(x, *factors, split="outs", **how)
    return tuple(product.unflatten(2, (-1, attn.head_dim)) for product in products)


def joint_attention(
    run: "ShardedOps", heads: "Sequence[Any]", norms: "Sequence[Any]", rotary: "Sequence[Pair]", text_size: int = 0
) -> "list[torch.Tensor]":
    """Return joint attention over both halves and the text, if any: `[rows, tokens, heads * head_dim]` of each.

    run: operations on the mesh. heads: (query, key, value) of each sequence. norms: (query norm, key norm) of each.
    rotary: cosines and sines `[1, tokens, head_dim]` of each. text_size: valid text tokens.
    """
    prologues = [layers.make_prologue(query, key, tables) for (query, key), tables in zip(norms, rotary, strict=True)]
    lengths = [*run.half_lengths(heads[0][0].shape[1]), text_size][: len(heads)]
    attended = run.streams_attention(*heads, lengths=lengths, prologues=prologues)
    return [sequence.flatten(2) for sequence in attended]


def feed_forward(
    run: "ShardedOps",
    ff: Net,
    x: "torch.Tensor",
    product: "Callable[..., torch.Tensor]",
    placement: "Placement" = "sharded",
) -> "torch.Tensor":
    """Run `Flux2FeedForward` `ff` on `x` `[rows, tokens, dim]`.

    run: operations on the mesh. product: `product(factor, hidden)` applies the output projection and decides how its
    partial sums are combined over chips. placement: of `x`.
    """
    return product(ff.linear_out, swiglu(run, x, (ff, "gate"), (ff, "value"), placement))


def swiglu(
    run: "ShardedOps", x: "torch.Tensor", gate: Any, value: Any, placement: "Placement" = "sharded"
) -> "torch.Tensor":
    """Return `silu(gate(x)) * value(x)`, `[rows, tokens, hidden]`, of `x` `[rows, tokens, dim]`.

    run: operations on the mesh. gate, value: weights as in `ShardedOps.products`. placement: of `x`.
    """
    (hidden,) = run.products(x, gate, value, activation="silu", placement=placement, split="outs")
    return hidden


# --- the component ----------------------------------------------------------------------------------------------------


def split_fused_projections(module: Net) -> None:
    """Split the fused projections into one weight per product, so that each is sharded over chips by heads.

    `linear_in` `[2 * mlp, dim]` has gate and value. `to_qkv_mlp_proj` `[3 * dim + 2 * mlp, dim]` has query, key, value,
    gate and value of the feed-forward; `to_out` `[dim, dim + mlp]` has the output projections of both.

    The feed-forward of single blocks is in groups as wide as all heads, and its output projection is stored as `[in,
    out]`. So a chip's rows of it are contiguous: those of its heads, then its share of each group.
    """
    from ...programs.upstream_network import slice_weight

    for block in module.transformer_blocks:
        for ff in (block.ff, block.ff_context):
            for group, name in enumerate(("gate", "value")):
                setattr(ff, name, slice_weight(ff.linear_in.weight, "linear_in.weight", 0, 2, group))
            del ff.linear_in
    for block in module.single_transformer_blocks:
        attn = block.attn
        wide = attn.mlp_hidden_dim // attn.inner_dim
        taken = {"query": 0, "key": 1, "value": 2, "gate": slice(3, 3 + wide), "fed": slice(3 + wide, None)}
        for name, groups in taken.items():
            projection = slice_weight(attn.to_qkv_mlp_proj.weight, "to_qkv_mlp_proj.weight", 0, 3 + 2 * wide, groups)
            setattr(attn, f"in_{name}", projection)
        attn.out = slice_weight(attn.to_out.weight, "to_out.weight", 1, 1 + wide, slice(None), order=(1, 2, 0))
        del attn.to_qkv_mlp_proj, attn.to_out


def is_integral(ratio: object) -> bool:
    """Return whether `ratio` is a whole number of at least 1."""
    return isinstance(ratio, int | float) and ratio >= 1 and float(ratio).is_integer()


TRANSFORMER_RULES = (
    Rule("transformer_blocks.*.attn.to_out.0.weight", (None, "fsdp_beside_tp", "heads"), over=(2,)),
    Rule("transformer_blocks.*.attn.to_add_out.weight", (None, "fsdp_beside_tp", "heads"), over=(2,)),
    Rule("transformer_blocks.*.attn.*_proj.weight", (None, "heads", "fsdp_beside_tp"), over=(2,)),
    Rule("transformer_blocks.*.attn.to_*.weight", (None, "heads", "fsdp_beside_tp"), over=(2,)),
    Rule("transformer_blocks.*.*.gate", (None, "mlp", "fsdp_beside_tp"), over=(2,)),
    Rule("transformer_blocks.*.*.value", (None, "mlp", "fsdp_beside_tp"), over=(2,)),
    Rule("transformer_blocks.*.*.linear_out.weight", (None, "fsdp_beside_tp", "mlp"), over=(2,)),
    Rule("single_transformer_blocks.*.attn.in_gate", (None, None, "heads", "fsdp_beside_tp"), over=(3,)),
    Rule("single_transformer_blocks.*.attn.in_fed", (None, None, "heads", "fsdp_beside_tp"), over=(3,)),
    Rule("single_transformer_blocks.*.attn.in_*", (None, "heads", "fsdp_beside_tp"), over=(2,)),
    Rule("single_transformer_blocks.*.attn.out", (None, None, "heads", "fsdp_beside_tp"), over=(1, 2)),
    # Used once per step, on one vector or on the text: outputs are gathered instead of weights.
    Rule("*_modulation_*.linear.weight", ("all_mlp", None)),
    Rule("single_stream_modulation.linear.weight", ("all_mlp", None)),
    Rule("time_guidance_embed.*.linear_1.weight", REPLICATED),
    Rule("time_guidance_embed.*.linear_2.weight", ("all_mlp", None)),
    Rule("context_embedder.weight", ("all_mlp", None)),
    Rule("norm_out.linear.weight", ("all_mlp", None)),
    Rule("x_embedder.weight", REPLICATED),
    Rule("proj_out.weight", REPLICATED),
)

_QKV = split_rows("transformer_blocks.*.attn.to_q", "transformer_blocks.*.attn.to_k", "transformer_blocks.*.attn.to_v")
_ADDED_QKV = split_rows(*(f"transformer_blocks.*.attn.add_{name}_proj" for name in "qkv"))
# Black Forest Labs' keys; see `diffusers.loaders.single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers`.
# They call the norms' weights `scale`; ComfyUI calls them `weight`.
_NORMS = {
    "double_blocks.*.img_attn.norm.query_norm": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn.norm.key_norm": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.txt_attn.norm.query_norm": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn.norm.key_norm": "transformer_blocks.*.attn.norm_added_k",
    "single_blocks.*.norm.query_norm": "single_transformer_blocks.*.attn.norm_q",
    "single_blocks.*.norm.key_norm": "single_transformer_blocks.*.attn.norm_k",
}
ORIGINAL_KEYS = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    # Diffusers' fused projections, as LyCORIS trains them.
    "transformer_blocks.*.attn.to_qkv": _QKV,
    "transformer_blocks.*.attn.to_added_qkv": _ADDED_QKV,
    "double_blocks.*.img_attn.qkv": _QKV,
    "double_blocks.*.txt_attn.qkv": _ADDED_QKV,
    "double_blocks.*.img_attn.proj": "transformer_blocks.*.attn.to_out.0",
    "double_blocks.*.txt_attn.proj": "transformer_blocks.*.attn.to_add_out",
    "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.linear_in",
    "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.linear_out",
    "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.linear_in",
    "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.linear_out",
    # x-flux' and ComfyUI's name for the rows of `linear1` that make query, key and value.
    "single_blocks.*.linear1_qkv": (RowSlice("single_transformer_blocks.*.attn.to_qkv_mlp_proj", squares=3),),
    "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
    "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
    **{f"{theirs}{ending}": key for theirs, key in _NORMS.items() for ending in (".scale", ".weight", "")},
    "final_layer.adaLN_modulation.1": swap_halves("norm_out.linear"),
    "final_layer.linear": "proj_out",
}

# Of models with a guidance input.
GUIDANCE_KEYS = {
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="Flux2Transformer2DModel",
    config={
        "attention_head_dim": 128,
        "axes_dims_rope": (32, 32, 32, 32),
        "eps": 1e-6,
        "in_channels": 128,
        "mlp_ratio": 3.0,
        "patch_size": 1,
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
    },
    tiny={
        "attention_head_dim": 24,
        "axes_dims_rope": (4, 8, 6, 6),
        "joint_attention_dim": 120,
        "num_layers": 2,
        "num_single_layers": 3,
        "timestep_guidance_channels": 32,
    },
    needs={
        "in_channels": ConfigRequirement((128,)),
        # The single blocks' fused projections are cut into groups as wide as the heads together.
        "mlp_ratio": ConfigRequirement(fits=is_integral, wording=compose("settings.a_whole_number")),
        "out_channels": ConfigRequirement((None, 128)),
        "patch_size": ConfigRequirement((1,)),
    },
    blocks=("transformer_blocks", "single_transformer_blocks"),
    trim=split_fused_projections,
    rules=TRANSFORMER_RULES,
    original_keys=ORIGINAL_KEYS,
    lora_prefixes=("transformer.", "lycoris_", "lora_transformer_", ""),
)
