"""Flux.2 text to image: black-forest-labs/FLUX.2-dev. The oracle is `diffusers.Flux2Pipeline`."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule
from ...sharding.shape import MeshShape
from ..limits import FloatLimit, IntLimit
from ..spec import Component, HeadNorms, LatentGeometry, ModelSpec, Need, Rows, Same, Settings, split, swapped
from . import layers
from .autoencoders.flux2 import VAE_DECODER, VAE_ENCODER, decode, denormalize_latents, encode_image
from .text_encoders import mistral3

PROMPT = "A beautiful sunset over the ocean"
# What of the double blocks' arguments every chip needs whole; it comes split from the projections that make it.
WHOLE = ("encoder_hidden_states", "temb_mod_img", "temb_mod_txt")

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch


def forward(
    transformer: "torch.nn.Module", sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The flow (velocity) of `[1, 128, latent_height, latent_width]` at one timestep; all 512 tokens of text count."""
    import numpy as np
    import torch

    rows, _, height, width = sample.shape
    text = inputs["text"]
    # References follow the latents as frames of their own, ten apart.
    pictures = [sample, *(inputs[name] for name in sorted(inputs, key=_reference_number) if _reference_number(name))]
    places = [np.indices((1, *picture.shape[2:], 1)).reshape(4, -1).T for picture in pictures]
    places = [place + [10 * index, 0, 0, 0] for index, place in enumerate(places)]
    flow = transformer(
        hidden_states=torch.cat([picture.flatten(2).transpose(1, 2) for picture in pictures], dim=1),
        encoder_hidden_states=text,
        timestep=timestep.to(sample.dtype).expand(rows) / 1000,
        guidance=inputs["guidance"].expand(rows),
        # Frame, row, column and place in the text of every token, known while tracing: see `rotary_tables`.
        img_ids=np.concatenate(places),
        txt_ids=np.indices((1, 1, 1, text.shape[1])).reshape(4, -1).T,
        return_dict=False,
    )[0]
    return flow[:, : height * width].transpose(1, 2).unflatten(2, (height, width))


def _reference_number(name: str) -> int:
    """1 for the first reference, 0 for an input that is none."""
    return int(name.removeprefix("reference_")) + 1 if name.startswith("reference_") else 0


def rotary_tables(pos_embed: Any, ids: "np.ndarray") -> "tuple[torch.Tensor, torch.Tensor]":
    """`Flux2PosEmbed.forward` for positions known while tracing: angles in float64, a row for each number there is."""
    import jax.numpy as jnp
    import numpy as np

    from ..programs import torch_bridge

    tables: list[list[jax.Array]] = [[], []]
    for dim, positions in zip(pos_embed.axes_dim, ids.T, strict=True):
        numbers, places = np.unique(positions, return_inverse=True)
        frequencies = 1.0 / pos_embed.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        angles = np.repeat(np.outer(numbers, frequencies), 2, axis=1)
        for table, function in zip(tables, (np.cos, np.sin), strict=True):
            table.append(jnp.asarray(function(angles), jnp.float32)[jnp.asarray(places, jnp.int32)])
    return torch_bridge.to_torch(tuple(jnp.concatenate(table, axis=1) for table in tables))


def cut_transformer(module: Any) -> None:
    """Cuts the fused projections into one for each product, so that each is split over chips as heads are.

    The single blocks' feed-forward lies in groups as wide as the heads, and their output projection as `[in, out]`: so
    a chip's rows of it are one piece, those of its heads and then of its part of each group.
    """
    from ..programs.modules import cut

    for block in module.transformer_blocks:
        for part in (block.ff, block.ff_context):
            for group, name in enumerate(("gate", "value")):
                setattr(part, name, cut(part.linear_in.weight, "linear_in.weight", 0, 2, group))
            del part.linear_in
    for block in module.single_transformer_blocks:
        attn = block.attn
        wide = attn.mlp_hidden_dim // attn.inner_dim
        taken = {"query": 0, "key": 1, "value": 2, "gate": slice(3, 3 + wide), "fed": slice(3 + wide, None)}
        for name, groups in taken.items():
            projection = cut(attn.to_qkv_mlp_proj.weight, "to_qkv_mlp_proj.weight", 0, 3 + 2 * wide, groups)
            setattr(attn, f"in_{name}", projection)
        attn.out = cut(attn.to_out.weight, "to_out.weight", 1, 1 + wide, slice(None), order=(1, 2, 0))
        del attn.to_qkv_mlp_proj, attn.to_out


def is_whole(ratio: Any) -> bool:
    return isinstance(ratio, int | float) and ratio >= 1 and float(ratio).is_integer()


def feed_forward(module: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """`Flux2FeedForward.forward` with gate and value apart."""
    from torch.nn.functional import linear

    return module.linear_out(module.act_fn.gate_fn(linear(hidden, module.gate)) * linear(hidden, module.value))


def run_double_block(
    attend: Callable[..., Any],
    staggered: "layers.Staggered",
    block: Any,
    hidden_states: "dict[str, torch.Tensor]",
    encoder_hidden_states: "torch.Tensor",
    temb_mod_img: "torch.Tensor",
    temb_mod_txt: "torch.Tensor",
    image_rotary_emb: tuple,
    joint_attention_kwargs: None = None,
) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """`Flux2TransformerBlock`: the text, and both halves of the latents."""
    attn, fuse = block.attn, staggered.fuse_text
    before, within = _modulations(temb_mod_img, 2)
    text_before, text_within = _modulations(temb_mod_txt, 2)
    own, of_text = (attn.norm_q, attn.norm_k), (attn.norm_added_q, attn.norm_added_k)
    _, normed = fuse(encoder_hidden_states, None, None, *text_before[:2])
    text_heads = layers.heads(attn, normed, (attn.add_q_proj.weight, attn.add_k_proj.weight, attn.add_v_proj.weight))
    text_update = None

    def attention(*halves: "torch.Tensor") -> "list[torch.Tensor]":
        nonlocal text_update
        own_weights = attn.to_q.weight, attn.to_k.weight, attn.to_v.weight
        streams = *(layers.heads(attn, half, own_weights) for half in halves), text_heads
        *outs, text_out = layers.attended(attend, streams, (own, own, of_text), image_rotary_emb)
        text_update = attn.to_add_out(text_out)
        return [attn.to_out[0](out) for out in outs]

    state = staggered.run(hidden_states, (within, before, within), attention)
    text, normed = fuse(encoder_hidden_states, text_update, text_before[2], *text_within[:2])
    text = layers.add_gated(text, block.ff_context(normed), text_within[2])
    return text, staggered.run(state, (before, within, before), lambda *halves: [*map(block.ff, halves)])


def run_single_block(
    attend: Callable[..., Any],
    staggered: "layers.Staggered",
    block: Any,
    hidden_states: "dict[str, torch.Tensor]",
    encoder_hidden_states: None,
    temb_mod: "torch.Tensor",
    image_rotary_emb: tuple,
    joint_attention_kwargs: None = None,
) -> "dict[str, torch.Tensor]":
    """`Flux2SingleTransformerBlock` over both halves of a sequence. Both results are projected at once."""
    from torch.nn.functional import linear

    attn, (modulation,) = block.attn, _modulations(temb_mod, 1)
    norms = ((attn.norm_q, attn.norm_k),) * 2

    def update(*halves: "torch.Tensor") -> "list[torch.Tensor]":
        streams = [layers.heads(attn, half, (attn.in_query, attn.in_key, attn.in_value)) for half in halves]
        attended = layers.attended(attend, streams, norms, image_rotary_emb)
        fed = (attn.mlp_act_fn.gate_fn(linear(half, attn.in_gate)) * linear(half, attn.in_fed) for half in halves)
        return [staggered.partial_sums(attn.out, *pair) for pair in zip(attended, fed, strict=True)]

    return staggered.run(hidden_states, (modulation, modulation, modulation), update)


def _modulations(vector: "torch.Tensor", count: int) -> "list[layers.Modulation]":
    found = (part.chunk(3, dim=-1) for part in vector.chunk(count, dim=-1))
    return [layers.modulated(shift, scale, gate) for shift, scale, gate in found]


def prepare_denoiser(network: Any, sequence: Any) -> None:
    """Puts our attention, token placement, tables and cut projections where upstream lets us.

    The double blocks keep text and latents apart, the text whole on every chip of `sp`; the single blocks see one
    sequence, split as a whole. Between products tokens are spread over `tp`, and a sequence is in halves.
    """
    import types

    double, single = network.blocks("transformer_blocks"), network.blocks("single_transformer_blocks")
    block = double.block
    for module in (block.ff, block.ff_context):
        module.forward = types.MethodType(feed_forward, module)
    layers.project_by(sequence.partial_sums, block.attn.to_out[0], block.ff.linear_out)
    summed = functools.partial(sequence.summed, placement="replicated")
    layers.project_by(summed, block.attn.to_add_out, block.ff_context.linear_out)
    network.module.pos_embed.forward = types.MethodType(rotary_tables, network.module.pos_embed)
    staggered = layers.Staggered(sequence, block.norm1.eps)

    def halves(tables: Any) -> tuple:
        return tuple(zip(*map(sequence.halves, tables), strict=True))

    def enter_double(values: dict[str, Any]) -> dict[str, Any]:
        whole = {name: sequence.constrain(values[name], "dp") for name in WHOLE}
        text = whole["encoder_hidden_states"]
        size = text.shape[1]
        # With the references' tokens, which the latents' number does not count.
        tokens = replace(sequence, num_tokens=values["hidden_states"].shape[1])
        attend = functools.partial(tokens.halves_attention, text_length=size)
        block.forward = functools.partial(run_double_block, attend, staggered, block)
        tables = [table[None, :, None] for table in values["image_rotary_emb"]]
        text_tables = tuple(sequence.pad_tokens(table[:, :size]) for table in tables)
        rotary = (*halves(table[:, size:] for table in tables), text_tables)
        spread = sequence.spread_tokens(text, "replicated")
        return {**values, **whole, "encoder_hidden_states": spread, "image_rotary_emb": rotary}

    def enter_single(values: dict[str, Any]) -> dict[str, Any]:
        attend = replace(sequence, num_tokens=values["hidden_states"].shape[1]).halves_attention
        single.block.forward = functools.partial(run_single_block, attend, staggered, single.block)
        tables = halves(table[None, :, None] for table in values["image_rotary_emb"])
        return {**values, "temb_mod": sequence.constrain(values["temb_mod"], "dp"), "image_rotary_emb": tables}

    carried, merged = ("encoder_hidden_states", "hidden_states"), ("attn.in_gate", "attn.in_fed", "attn.out")
    scan = sequence.scan("transformer_blocks", enter_double, carried)
    double.scan = staggered.surround(scan, "temb_mod_img", functools.partial(_modulations, count=2))
    scan = sequence.scan("single_transformer_blocks", enter_single, merged=merged)
    single.scan = staggered.surround(scan, "temb_mod", functools.partial(_modulations, count=1))


def heads_first(num_devices: int, branches: int) -> MeshShape:
    """A short sequence and 60 GiB of weights: these stay split over all chips, and activations are summed instead."""
    return MeshShape(tp=num_devices)


def solver_arguments(
    scheduler_config: Mapping[str, Any], latent_shape: tuple[int, ...], settings: Settings
) -> dict[str, Any]:
    import numpy as np
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    steps = settings.num_inference_steps
    sigmas = None if scheduler_config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
    return {"sigmas": sigmas, "mu": compute_empirical_mu(latent_shape[-2] * latent_shape[-1], steps)}


TRANSFORMER_RULES = (
    Rule("transformer_blocks.*.attn.to_out.0.weight", (None, "fsdp_beside_tp", "heads")),
    Rule("transformer_blocks.*.attn.to_add_out.weight", (None, "fsdp_beside_tp", "heads")),
    Rule("transformer_blocks.*.attn.*_proj.weight", (None, "heads", "fsdp_beside_tp")),
    Rule("transformer_blocks.*.attn.to_*.weight", (None, "heads", "fsdp_beside_tp")),
    Rule("transformer_blocks.*.*.gate", (None, "mlp", "fsdp_beside_tp")),
    Rule("transformer_blocks.*.*.value", (None, "mlp", "fsdp_beside_tp")),
    Rule("transformer_blocks.*.*.linear_out.weight", (None, "fsdp_beside_tp", "mlp")),
    Rule("single_transformer_blocks.*.attn.in_gate", (None, None, "heads", "fsdp_beside_tp")),
    Rule("single_transformer_blocks.*.attn.in_fed", (None, None, "heads", "fsdp_beside_tp")),
    Rule("single_transformer_blocks.*.attn.in_*", (None, "heads", "fsdp_beside_tp")),
    Rule("single_transformer_blocks.*.attn.out", (None, None, "heads", "fsdp_beside_tp")),
    # Used once a step, on a row or on the text: their outputs are gathered, not they.
    Rule("*_modulation_*.linear.weight", ("all_mlp", None)),
    Rule("single_stream_modulation.linear.weight", ("all_mlp", None)),
    Rule("time_guidance_embed.*.linear_1.weight", REPLICATED),
    Rule("time_guidance_embed.*.linear_2.weight", ("all_mlp", None)),
    Rule("context_embedder.weight", ("all_mlp", None)),
    Rule("norm_out.linear.weight", ("all_mlp", None)),
    Rule("x_embedder.weight", REPLICATED),
    Rule("proj_out.weight", REPLICATED),
)

_QKV = split("transformer_blocks.*.attn.to_q", "transformer_blocks.*.attn.to_k", "transformer_blocks.*.attn.to_v")
_ADDED_QKV = split(*(f"transformer_blocks.*.attn.add_{name}_proj" for name in "qkv"))
# Black Forest Labs'; as in `diffusers.loaders.single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers`.
# The makers have the norms' weights as `scale`; ComfyUI calls them `weight`, as any module's.
_NORMS = {
    "double_blocks.*.img_attn.norm.query_norm": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn.norm.key_norm": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.txt_attn.norm.query_norm": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn.norm.key_norm": "transformer_blocks.*.attn.norm_added_k",
    "single_blocks.*.norm.query_norm": "single_transformer_blocks.*.attn.norm_q",
    "single_blocks.*.norm.key_norm": "single_transformer_blocks.*.attn.norm_k",
}
MAKERS_NAMES = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "double_blocks.*.img_attn.qkv": _QKV,
    "double_blocks.*.txt_attn.qkv": _ADDED_QKV,
    # Diffusers' own, fused, as LyCORIS trains them.
    "transformer_blocks.*.attn.to_qkv": _QKV,
    "transformer_blocks.*.attn.to_added_qkv": _ADDED_QKV,
    "double_blocks.*.img_attn.proj": "transformer_blocks.*.attn.to_out.0",
    "double_blocks.*.txt_attn.proj": "transformer_blocks.*.attn.to_add_out",
    "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.linear_in",
    "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.linear_out",
    "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.linear_in",
    "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.linear_out",
    "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
    "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
    # x-flux' and ComfyUI's name for the rows of `linear1` that make query, key and value.
    "single_blocks.*.linear1_qkv": (Rows("single_transformer_blocks.*.attn.to_qkv_mlp_proj", squares=3),),
    **{f"{theirs}{ending}": own for theirs, own in _NORMS.items() for ending in (".scale", "", ".weight")},
    "final_layer.adaLN_modulation.1": swapped("norm_out.linear"),
    "final_layer.linear": "proj_out",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="Flux2Transformer2DModel",
    config={
        "attention_head_dim": 128,
        "axes_dims_rope": (32, 32, 32, 32),
        "eps": 1e-6,
        "guidance_embeds": True,
        "in_channels": 128,
        "joint_attention_dim": 15360,
        "mlp_ratio": 3.0,
        "num_attention_heads": 48,
        "num_layers": 8,
        "num_single_layers": 48,
        "patch_size": 1,
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
    },
    tiny={
        "attention_head_dim": 24,
        "axes_dims_rope": (4, 8, 6, 6),
        "joint_attention_dim": 120,
        "num_attention_heads": 6,
        "num_layers": 2,
        "num_single_layers": 3,
        "timestep_guidance_channels": 32,
    },
    needs={
        "in_channels": Need((128,)),
        "joint_attention_dim": Same("text_encoder", "text_config.hidden_size", times=len(mistral3.STATES)),
        # The single blocks' fused projections are cut into groups as wide as the heads together.
        "mlp_ratio": Need(fits=is_whole, wording="a whole number"),
        "out_channels": Need((None, 128)),
        "patch_size": Need((1,)),
    },
    blocks=("transformer_blocks", "single_transformer_blocks"),
    trim=cut_transformer,
    rules=TRANSFORMER_RULES,
    makers_names=MAKERS_NAMES,
)

SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

SPEC = ModelSpec(
    name="flux2-dev",
    family="Flux2",
    title="Flux.2 dev",
    category="Flux.2",
    hub_id="black-forest-labs/FLUX.2-dev",
    tiny_id="tiny/flux2",
    latent_format="Flux2",
    pipeline_classes=("Flux2Pipeline",),
    components=(mistral3.TEXT_ENCODER, TRANSFORMER, VAE_DECODER, VAE_ENCODER),
    geometry=LatentGeometry(channels=128, stride_t=0, stride_hw=16, patch_thw=(1, 1, 1)),
    text_encoders=(mistral3.TEXT,),
    inputs={
        "height": IntLimit(default=1024, low=64, high=2048, multiple_of=16),
        "width": IntLimit(default=1024, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntLimit(default=50, low=1, high=100),
        "guidance_scale": FloatLimit(default=4.0, low=0.0, high=20.0),
        "seed": IntLimit(default=42, low=0, high=2**64 - 1),
    },
    texts={"prompt": PROMPT},
    tiny_inputs={"height": 80, "width": 112},
    scheduler=SCHEDULER,
    guidance="embedded",
    head_norms=(
        HeadNorms(
            queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
            keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
        ),
        HeadNorms(
            queries=("single_transformer_blocks.*.attn.norm_q",), keys=("single_transformer_blocks.*.attn.norm_k",)
        ),
    ),
    prepare_denoiser=prepare_denoiser,
    forward=forward,
    decode=decode,
    denormalize_latents=denormalize_latents,
    solver_arguments=solver_arguments,
    encode_image=encode_image,
    references=True,
    mesh=heads_first,
)
