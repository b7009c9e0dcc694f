"""The denoiser's step as one program: guidance, the network, the solver."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ...attention.policy import AttentionPolicy
from ...sharding.mesh import Mesh
from ...sharding.shape import MeshShape
from ..spec import ModelSpec, Settings
from . import finite, modules, solver_table, step_reuse, torch_bridge, weights
from . import token_layout as sequences
from .program import Config, Program, Target, shaped
from .weights import Weights


def denoise_program(
    spec: ModelSpec,
    config: Config,
    target: Target,
    settings: Settings,
    *,
    num_memory: int,
    timestep_dtype: Any,
    mesh_shape: MeshShape | None = None,
    references: Mapping[str, tuple[int, ...]] | None = None,
    features: Literal["keep"] | step_reuse.Shapes | None = None,
    bounded: bool | None = None,
) -> Program:
    """One step: `(weights, state, row, timestep, inputs, guidance) -> (*state, denoised, is_finite)`.

    `state` is the sample and the solver's memory, float32 and donated; `row` is the solver's (see `schedule`); `inputs`
    are the text and the condition by name (see `spec.ModelSpec`); `denoised` is what a preview shows; `is_finite` says
    whether the sample is. With `features` "keep" it gives `((*state, denoised, is_finite), features)`; with the shapes
    of such features it takes them as its last argument and runs what is left of the denoiser. `bounded`: the weights
    bound attention's scores (see `score_bound`); None, without a checkpoint: those of a model with `head_norms` are
    taken to.
    """
    component = spec.component(spec.experts[0])
    branches = spec.branches(settings)
    default = spec.mesh(len(target.devices), branches)
    mesh = target.mesh(mesh_shape or default.for_heads(int(config.get(spec.heads_key, default.tp))))
    latent_shape = spec.geometry.latent_shape(settings)
    network = modules.build(component, config)
    tokens = sequences.TokenLayout(
        mesh=mesh,
        num_tokens=spec.geometry.num_tokens(latent_shape),
        policy=AttentionPolicy(bounded=bool(spec.head_norms) if bounded is None else bounded),
        layouts=weights.layouts(network, mesh, target.precision),
    )
    spec.prepare_denoiser(network, tokens)

    def step(
        weights: Weights,
        state: solver_table.State,
        row: Float[Array, "rows columns"],
        timestep: Array,
        inputs: dict[str, Array],
        guidance: Float[Array, ""],
        *kept: step_reuse.Features,
    ) -> Any:
        sample = jnp.broadcast_to(state[0].astype(target.dtype), (branches, *latent_shape[1:]))
        sample = tokens.constrain(sample, "dp")
        inputs = {name: _branched(x, branches, target.dtype) for name, x in inputs.items()}
        weights = tokens.use_outside_blocks(weights)
        asked = (sample, timestep[None], {**inputs, "guidance": guidance[None]})
        predict = step_reuse.predictor(spec, tokens, *kept, keeps=features == "keep")
        output, keeping = torch_bridge.functional(network.module, weights, predict, *asked)
        output = output.astype(jnp.float32)
        if branches == 2:
            output = output[1:] + guidance * (output[:1] - output[1:])
        state = solver_table.advance(state, output, row)
        state = (*state, finite.flag(state[0]))
        return (state, keeping) if features == "keep" else state

    latents = shaped(mesh, latent_shape, jnp.float32)
    rows = 1 + num_memory
    placed = (NamedSharding(mesh, P()),) * (rows + 2)
    return Program(
        name="denoise_step",
        fn=step,
        args=(
            weights.abstract(network, mesh, target.precision),
            (latents,) * rows,
            shaped(mesh, (rows + 1, rows + 1), jnp.float32),
            shaped(mesh, (), timestep_dtype),
            denoiser_inputs(spec, config, mesh, branches, latent_shape, references or {}),
            shaped(mesh, (), jnp.float32),
            *([features] if isinstance(features, Mapping) else []),
        ),
        mesh=mesh,
        precision=target.precision,
        donate=(1,),
        out_shardings=(placed, step_reuse.shardings(spec.step_reuse, mesh)) if features == "keep" else placed,
        runs=settings.num_inference_steps,
        weights=spec.experts,
    )


def _branched(x: Array, branches: int, dtype: jnp.dtype) -> Array:
    """An input for every branch, floating ones in the network's format."""
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jnp.broadcast_to(x, (branches, *x.shape[1:]))


def denoiser_inputs(
    spec: ModelSpec,
    config: Config,
    mesh: Mesh,
    branches: int,
    latent_shape: tuple[int, ...],
    references: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a denoiser's inputs: every text encoding with its lengths, the condition and the references."""
    inputs = {}
    for text in spec.text_encoders:
        width = int(config[text.width_key])
        inputs[text.name] = shaped(mesh, (branches, text.max_length, width), jnp.float32, "dp")
        inputs[f"{text.name}_length"] = shaped(mesh, (branches,), jnp.int32, "dp")
    for name, shape in {**spec.conditions(config, latent_shape), **references}.items():
        inputs[name] = shaped(mesh, shape, jnp.float32)
    return inputs
