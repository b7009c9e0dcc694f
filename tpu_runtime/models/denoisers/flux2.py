"""The denoiser of FLUX.2 as data: sizes, sharding rules, splits of fused weights, key names of other formats."""

from ....sharding.rules import REPLICATED, Rule
from ...messages import compose
from ...model_spec import Component, ConfigRequirement, RowSlice, split_rows, swap_halves
from ...model_spec.upstream import Net


def split_fused_projections(module: Net) -> None:
    """Split the fused projections into one weight per product, so that each is sharded over chips by heads.

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
