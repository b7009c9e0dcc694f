"""Flux.2 text to image: black-forest-labs/FLUX.2-dev. The oracle is `diffusers.Flux2Pipeline`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule
from ...sharding.shape import MeshShape
from ..limits import FloatLimit, IntLimit
from ..spec import Component, HeadNorms, LatentGeometry, ModelSpec, Need, Same, Settings, split, swapped
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


def fold_transformer(module: Any) -> None:
    """Folds the fused projections into groups of equal width, so that each group is split over chips as heads are."""
    for block in module.transformer_blocks:
        for feed_forward in (block.ff, block.ff_context):
            _fold(feed_forward.linear_in, 0, 2)
    for block in module.single_transformer_blocks:
        groups = block.attn.mlp_hidden_dim // block.attn.inner_dim
        _fold(block.attn.to_qkv_mlp_proj, 0, 3 + 2 * groups)
        _fold(block.attn.to_out, 1, 1 + groups)


def is_whole(ratio: Any) -> bool:
    return isinstance(ratio, int | float) and ratio >= 1 and float(ratio).is_integer()


def _fold(linear: Any, dim: int, groups: int) -> None:
    import torch

    linear.weight = torch.nn.Parameter(linear.weight.unflatten(dim, (groups, -1)), requires_grad=False)


def feed_forward(module: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """`Flux2FeedForward.forward` with gate and value folded apart."""
    gate, value = _project(hidden, module.linear_in.weight).unbind(-2)
    return module.linear_out(module.act_fn.gate_fn(gate) * value)


def _project(hidden: "torch.Tensor", weight: "torch.Tensor") -> "torch.Tensor":
    """`[batch, seq, dim]` and a folded weight `[groups, size, dim]` to `[batch, seq, groups, size]`."""
    import functools

    import jax.numpy as jnp

    from ..programs import torch_bridge

    return torch_bridge.call_jax(functools.partial(jnp.einsum, "bsd,god->bsgo"), hidden, weight)


class SingleProcessor:
    """`Flux2ParallelSelfAttnProcessor` on folded weights: query, key, value, then the feed-forward's gate and value."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: "torch.Tensor",
        attention_mask: None,
        image_rotary_emb: "tuple[torch.Tensor, torch.Tensor]",
    ) -> "torch.Tensor":
        import functools

        import jax.numpy as jnp
        import torch

        from ..programs import torch_bridge

        # A product each: cut out of one, they would be copied.
        weights = attn.to_qkv_mlp_proj.weight.unbind(0)
        query, key, value, *wide = (torch.nn.functional.linear(hidden_states, weight) for weight in weights)
        heads = [x.unflatten(-1, (-1, attn.head_dim)) for x in (query, key, value)]
        attend = functools.partial(self.attend, prologue=layers.prologue(attn.norm_q, attn.norm_k, image_rotary_emb))
        attended = torch_bridge.call_jax(attend, *heads).flatten(2)
        gates, values = wide[: len(wide) // 2], wide[len(wide) // 2 :]
        fed = [attn.mlp_act_fn.gate_fn(gate) * value for gate, value in zip(gates, values, strict=True)]
        joined = torch.stack([attended, *fed], dim=-2)
        return torch_bridge.call_jax(lambda x, w: jnp.einsum("bsgi,ogi->bso", x, w), joined, attn.to_out.weight)


def run_double_block(
    fuses: Any,
    block: Any,
    hidden_states: "torch.Tensor",
    encoder_hidden_states: "torch.Tensor",
    temb_mod_img: "torch.Tensor",
    temb_mod_txt: "torch.Tensor",
    image_rotary_emb: tuple,
    joint_attention_kwargs: None = None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """`Flux2TransformerBlock` (see `layers.run_joint_block`): text and latents."""

    def attend(latent: "torch.Tensor", text: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        return block.attn(latent, text, image_rotary_emb=image_rotary_emb)

    halves = (vector.chunk(2, dim=-1) for vector in (temb_mod_img, temb_mod_txt))
    modulations = [(_modulation(first), _modulation(second)) for first, second in halves]
    hidden = hidden_states, encoder_hidden_states
    latent, text = layers.run_joint_block(fuses, attend, hidden, modulations, (block.ff, block.ff_context))
    return text, latent


def run_single_block(
    fuse: Any,
    block: Any,
    hidden_states: "torch.Tensor",
    encoder_hidden_states: None,
    temb_mod: "torch.Tensor",
    image_rotary_emb: "tuple[torch.Tensor, torch.Tensor]",
    joint_attention_kwargs: None = None,
) -> "torch.Tensor":
    """`Flux2SingleTransformerBlock` with its norm fused."""
    scale, shift, gate = _modulation(temb_mod)
    _, normed = fuse(hidden_states, None, None, scale, shift)
    return layers.add_gated(hidden_states, block.attn(normed, image_rotary_emb=image_rotary_emb), gate)


def _modulation(vector: "torch.Tensor") -> "layers.Modulation":
    shift, scale, gate = vector.chunk(3, dim=-1)
    return layers.modulated(shift, scale, gate)


def prepare_denoiser(network: Any, sequence: Any) -> None:
    """Puts our attention, token placement, tables and folded projections where upstream lets us.

    The double blocks keep text and latents apart, the text whole on every chip of `sp`; the single blocks see one
    sequence, split as a whole.
    """
    import functools
    import types

    double, single = network.blocks("transformer_blocks"), network.blocks("single_transformer_blocks")
    for module in (double.block.ff, double.block.ff_context):
        module.forward = types.MethodType(feed_forward, module)
    network.module.pos_embed.forward = types.MethodType(rotary_tables, network.module.pos_embed)

    fuses = layers.fused_norms(sequence, double.block.norm1.eps)
    double.block.forward = functools.partial(run_double_block, fuses, double.block)
    single.block.forward = functools.partial(run_single_block, fuses[0], single.block)

    def enter_double(values: dict[str, Any]) -> dict[str, Any]:
        size = values["encoder_hidden_states"].shape[1]
        # With the references' tokens, which the latents' number does not count.
        tokens = replace(sequence, num_tokens=values["hidden_states"].shape[1])
        double.block.attn.set_processor(layers.JointProcessor(tokens.joint_attention))
        text = tuple(table[None, :size, None] for table in values["image_rotary_emb"])
        latent = tuple(sequence.pad_tokens(table[None, size:, None]) for table in values["image_rotary_emb"])
        whole = {name: sequence.constrain(values[name], "dp") for name in WHOLE}
        hidden = sequence.shard_tokens(values["hidden_states"])
        return {**values, **whole, "hidden_states": hidden, "image_rotary_emb": (text, latent)}

    def enter_single(values: dict[str, Any]) -> dict[str, Any]:
        hidden = values["hidden_states"]
        attend = functools.partial(sequence.self_attention, num_tokens=hidden.shape[1])
        single.block.attn.set_processor(SingleProcessor(attend))
        tables = tuple(sequence.pad_tokens(table[None, :, None]) for table in values["image_rotary_emb"])
        whole = {"temb_mod": sequence.constrain(values["temb_mod"], "dp")}
        return {**values, **whole, "hidden_states": sequence.shard_tokens(hidden), "image_rotary_emb": tables}

    double.scan = sequence.scan("transformer_blocks", enter_double, ("encoder_hidden_states", "hidden_states"))
    single.scan = sequence.scan("single_transformer_blocks", enter_single)


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
    Rule("transformer_blocks.*.*.linear_in.weight", (None, None, "mlp", "fsdp_beside_tp")),
    Rule("transformer_blocks.*.*.linear_out.weight", (None, "fsdp_beside_tp", "mlp")),
    Rule("single_transformer_blocks.*.attn.to_qkv_mlp_proj.weight", (None, None, "heads", "fsdp_beside_tp")),
    Rule("single_transformer_blocks.*.attn.to_out.weight", (None, "fsdp_beside_tp", None, "heads")),
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
    "double_blocks.*.img_attn.norm.query_norm.scale": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn.norm.key_norm.scale": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.txt_attn.norm.query_norm.scale": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn.norm.key_norm.scale": "transformer_blocks.*.attn.norm_added_k",
    "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.linear_in",
    "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.linear_out",
    "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.linear_in",
    "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.linear_out",
    "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
    "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
    "single_blocks.*.norm.query_norm.scale": "single_transformer_blocks.*.attn.norm_q",
    "single_blocks.*.norm.key_norm.scale": "single_transformer_blocks.*.attn.norm_k",
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
        # The single blocks' fused projections are split over chips in groups as wide as the heads together.
        "mlp_ratio": Need(fits=is_whole, wording="a whole number"),
        "out_channels": Need((None, 128)),
        "patch_size": Need((1,)),
    },
    blocks=("transformer_blocks", "single_transformer_blocks"),
    trim=fold_transformer,
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
