"""The programs of a model, built from its spec and a checkpoint's configs. Shapes only: no weights here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from ...attention.policy import AttentionPolicy
from ...sharding.mesh import Mesh, make_mesh
from ...sharding.rules import Layout
from ...sharding.shape import MeshShape
from ..checkpoints import load
from ..plan.options import STAGES
from ..precision import Precision
from ..spec import Call, ModelSpec, Settings
from . import finite, modules, solver_table, step_reuse, torch_bridge
from . import token_layout as sequences
from .program import Program

Config = Mapping[str, Any]
Place = Literal["whole", "image"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What programs are compiled for: these devices, in this precision."""

    devices: tuple[jax.Device, ...]
    precision: Precision

    def mesh(self, shape: MeshShape) -> Mesh:
        return make_mesh(self.devices, shape)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.precision)


def image_mesh(num_devices: int, height: int, width: int) -> MeshShape:
    """Image width on `sp`, height on `dp`: as many chips as divide both; the rest repeat the work."""

    def used(shape: MeshShape) -> tuple[int, int]:
        return shape.dp * shape.sp, shape.sp

    shapes = (
        MeshShape(dp=dp, sp=sp, tp=num_devices // (dp * sp))
        for dp in range(1, num_devices + 1)
        for sp in range(1, num_devices // dp + 1)
        if num_devices % (dp * sp) == 0 and height % dp == 0 and width % sp == 0
    )
    return max(shapes, key=used)


def shaped(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def solver(spec: ModelSpec, config: Config, settings: Settings) -> solver_table.Schedule:
    """The steps of a generation with the scheduler that `config`, a checkpoint's `scheduler_config.json`, describes, or
    with the one that was chosen in its place.
    """
    config = {**config, **spec.schedulers.get(settings.scheduler, {})}
    if settings.shift and spec.shift_key:  # 0 is the checkpoint's own
        config[spec.shift_key] = settings.shift
    arguments = spec.solver_arguments(config, spec.geometry.latent_shape(settings), settings)
    return solver_table.probe(solver_table.scheduler_from(config), settings.num_inference_steps, **arguments)


def call_program(
    spec: ModelSpec,
    component: str,
    config: Config,
    target: Target,
    function: Callable[..., tuple[Any, Any]],
    args: tuple[Any, ...],
    *,
    place: Place,
    carries: bool,
) -> Program:
    """`(weights, *args) -> (result, carried, is_finite)` for one call of a stage (see `spec.Call`), with shapes `args`.

    Floating arguments reach the network in the target's format; the result leaves as float32. `is_finite` is the
    result's (see `finite`).
    """
    network = modules.build(spec.component(component), config)
    mesh, sharding = _placed(target, args, place)
    whole = NamedSharding(mesh, P())
    layouts = load.layouts(network, mesh, target.precision)

    def run(weights: load.Weights, *args: Any) -> tuple[Any, Any, Bool[Array, ""]]:
        weights = {name: _in_use(mesh, name, x, layouts[name]) for name, x in weights.items()}
        args = jax.tree.map(lambda x: x.astype(target.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        if place == "image":
            args = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), args)
        result, carried = torch_bridge.functional(network.module, weights, function, *args)
        result = jax.tree.map(lambda x: x.astype(jnp.float32), result)
        return result, carried, finite.flag(result)

    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return Program(
        name=f"{component}.{function.__name__}",
        fn=run,
        args=(load.abstract(network, mesh, target.precision), *wanted),
        mesh=mesh,
        precision=target.precision,
        donate=(len(args),) if carries else (),
        out_shardings=(whole, sharding, whole),
        weights=(component,),
    )


def _in_use(mesh: Mesh, name: str, weight: Array, layout: Layout) -> Array:
    """A weight outside scanned blocks, gathered where it is only split at rest."""
    if f".{modules.LAYER}." in name or layout.in_use == layout.at_rest:
        return weight
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, P(*layout.in_use)))


def _placed(target: Target, args: tuple[Any, ...], place: Place) -> tuple[Mesh, NamedSharding]:
    if place == "whole":
        mesh = target.mesh(MeshShape(sp=len(target.devices)))
        return mesh, NamedSharding(mesh, P())
    height, width = min(x.shape[-2:] for x in jax.tree.leaves(args))
    mesh = target.mesh(image_mesh(len(target.devices), height, width))
    rank = len(jax.tree.leaves(args)[0].shape)
    return mesh, NamedSharding(mesh, P(*[None] * (rank - 2), "dp", "sp"))


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
    tokens = sequences.Sequence(
        mesh=mesh,
        num_tokens=spec.geometry.num_tokens(latent_shape),
        policy=AttentionPolicy(bounded=bool(spec.head_norms) if bounded is None else bounded),
        layouts=load.layouts(network, mesh, target.precision),
    )
    spec.prepare_denoiser(network, tokens)

    def step(
        weights: load.Weights,
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
            load.abstract(network, mesh, target.precision),
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
    for text in spec.texts_encoded:
        width = int(config[text.width_key])
        inputs[text.name] = shaped(mesh, (branches, text.max_length, width), jnp.float32, "dp")
        inputs[f"{text.name}_length"] = shaped(mesh, (branches,), jnp.int32, "dp")
    for name, shape in {**spec.conditions(config, latent_shape), **references}.items():
        inputs[name] = shaped(mesh, shape, jnp.float32)
    return inputs


@dataclass
class Recorder:
    """A `spec.Call` that runs nothing: it notes the programs that a stage would run, and how often."""

    spec: ModelSpec
    target: Target
    programs: dict[tuple, Program] = field(default_factory=dict)
    runs: dict[tuple, int] = field(default_factory=dict)

    def __call__(
        self,
        component: str,
        function: Callable[..., tuple[Any, Any]],
        *args: Any,
        place: Place = "whole",
        carries: bool = False,
    ) -> tuple[Any, Any]:
        key = call_key(component, function, args, place)
        if key not in self.programs:
            config = self.spec.component(component).config
            self.programs[key] = call_program(
                self.spec, component, config, self.target, function, abstract_args(args), place=place, carries=carries
            )
        self.runs[key] = self.runs.get(key, 0) + 1
        return self.programs[key].zeros


def call_key(component: str, function: Callable, args: tuple[Any, ...], place: Place) -> tuple:
    """What two calls share when one program serves both."""
    leaves, tree = jax.tree.flatten(abstract_args(args))
    return (component, function.__qualname__, place, str(tree), tuple((x.shape, str(x.dtype)) for x in leaves))


def abstract_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and dtypes of host arrays, torch tensors, device arrays or shapes."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        dtype = np.dtype(str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x.dtype
        return jax.ShapeDtypeStruct(tuple(x.shape), dtype)

    return jax.tree.map(shape_of, args)


def rehearse(
    spec: ModelSpec, settings: Settings, vae_config: Config, call: Call, stages: Sequence[str] = STAGES
) -> None:
    """Runs the host code of the stages around the denoiser on zeros: `call` gets every program they would run."""
    if "encode" in stages:
        for text in spec.texts_encoded:
            rows = 2 if spec.guidance == "cfg" else 1
            ids, mask = (np.zeros((rows, n), np.int32) for n in (text.prefix + text.max_length, text.max_length))
            call(text.component, text.encode, ids, mask)
    if "image" in stages and spec.encode_image is not None:
        image = torch.zeros(()).expand(1, settings.height, settings.width, 3)
        spec.encode_image(call, image, settings, vae_config)
    if "decode" in stages:
        latent_shape = spec.geometry.latent_shape(settings)
        samples = spec.finish(torch.zeros(()).expand(latent_shape), settings, vae_config)
        for _ in spec.decode(call, samples, lambda done, total: None):
            pass


def for_spec(
    spec: ModelSpec,
    settings: Settings,
    devices: Sequence[jax.Device],
    *,
    precision: Precision = "bfloat16",
    mesh_shape: MeshShape | None = None,
    stages: Sequence[str] = STAGES,
) -> tuple[Program, ...]:
    """Every program of one generation with the real architecture: what `plan` compiles, without a checkpoint."""
    target = Target(devices=tuple(devices), precision=precision)
    recorder = Recorder(spec, target)
    configs = {component.name: component.config for component in spec.components}
    found: list[Program] = []
    rehearse(spec, settings, configs[spec.vae], recorder, stages)
    if "denoise" in stages:
        steps = solver(spec, spec.scheduler, settings)
        found.append(
            denoise_program(
                spec,
                configs[spec.experts[0]],
                target,
                settings,
                num_memory=steps.num_memory,
                timestep_dtype=steps.timesteps.dtype,
                mesh_shape=mesh_shape,
            )
        )
    recorded = [_with_runs(program, recorder.runs[key]) for key, program in recorder.programs.items()]
    return (
        *(p for p in recorded if p.weights != (spec.vae,)),
        *found,
        *(p for p in recorded if p.weights == (spec.vae,)),
    )


def _with_runs(program: Program, runs: int) -> Program:
    from dataclasses import replace

    return replace(program, runs=runs)
