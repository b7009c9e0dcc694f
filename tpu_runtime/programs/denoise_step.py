"""The denoiser's step as one program: guidance, the network, the solver."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from ...attention import local
from ...attention.policy import AttentionPolicy, are_many
from ...attention.tiles import MOST, Tiling
from ...kernels import choice
from ...sharding.mesh import Mesh
from ...sharding.shape import MeshShape
from ..model_spec import QUALITIES, SPARSE, ModelSpec, StepReuse
from . import finite, modules, solver_table, step_reuse, torch_bridge, weights
from .denoiser_run import DenoiserRun
from .program import DENOISE_STEP, Config, Program, Target, shaped, step_options
from .token_layout import TokenLayout
from .weights import Weights

log = logging.getLogger(__name__)


class StepArgs(NamedTuple):
    """What a step's program takes beside the weights."""

    state: tuple[Any, ...]  # the sample and the solver's memory, float32 and donated
    row: Any  # the solver's row of numbers, `[rows, columns]` float32 (see `solver_table`)
    timestep: Any  # a scalar, as in the scheduler
    next_timestep: Any  # that of the step after it, 0 behind the last
    inputs: dict[str, Any]  # texts and condition by name (see `model_spec.Forward`)
    guidance: Any  # a float32 scalar
    features: Any = ()  # of an earlier step, where the program starts from them


# The call of the network alone, and the shape and format of its inputs by name.
PREDICT = "predict"
InputShapes = Mapping[str, tuple[tuple[int, ...], Any]]
# Inputs that are one number for all branches.
OF_STEP = frozenset({"guidance", "next_timestep"})

# With tiles a step attends to the nearest alone between these shares of noise: before, a video's layout is decided, and
# behind, its details. Of flow steps with shift 5 these are the ones from 0.4 to 0.9 of all, as of ComfyUI's node for
# sparse blocks.
SPARSE_NOISE = (0.36, 0.88)
TIMESTEPS = 1000  # of noise alone

# The prediction of one step, and the features to keep: (denoiser, run, features, *the rest of `model_spec.Forward`).
Predict = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step's program is compiled for, beside the checkpoint's config and the target."""

    latent_shape: tuple[int, ...]
    branches: int  # of guidance
    num_memory: int
    timestep_dtype: Any
    quality: str = QUALITIES[0]
    reuse: StepReuse | None = None  # what other steps start from, with a step cache
    mesh_shape: MeshShape | None = None  # None: what the spec chooses
    references: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Whether the weights bound attention's scores (see `score_bound`); None, without a checkpoint: those of a model
    # with `head_norms` are taken to.
    bounded: bool | None = None


def denoise_program(spec: ModelSpec, config: Config, target: Target, shape: StepShape) -> Program:
    """One step: `(weights, *StepArgs) -> (*state, denoised, is_finite)`.

    `denoised` is what a preview shows; `is_finite` says whether the sample is.
    """
    build = _StepBuild.of(spec, config, target, shape)

    def step(weights: Weights, *args: Any) -> Any:
        return build.run(weights, StepArgs(*args), build.forward)[0]

    return build.program(step, build.state_shardings)


def keeping_program(spec: ModelSpec, config: Config, target: Target, shape: StepShape) -> Program:
    """A full step that also returns what later steps may start from: `((*state, denoised, is_finite), features)`."""
    build, reuse = _StepBuild.of(spec, config, target, shape), shape.reuse
    assert reuse is not None, spec.name

    def predict(denoiser: Any, run: DenoiserRun, features: Any, *asked: Any) -> tuple[Any, Any]:
        return reuse.keep(denoiser, run, *asked)

    def step(weights: Weights, *args: Any) -> Any:
        return build.run(weights, StepArgs(*args), predict)

    kept = step_reuse.shardings(reuse, build.mesh)
    return build.program(step, (build.state_shardings, kept))


def reusing_program(spec: ModelSpec, config: Config, target: Target, shape: StepShape) -> Program:
    """What is left of a step that starts from what `keeping_program` kept: `(*state, denoised, is_finite)`."""
    build, reuse = _StepBuild.of(spec, config, target, shape), shape.reuse
    assert reuse is not None, spec.name
    features = step_reuse.kept_shapes(reuse, keeping_program(spec, config, target, shape))

    def predict(denoiser: Any, run: DenoiserRun, features: Any, *asked: Any) -> tuple[Any, Any]:
        return reuse.reuse(denoiser, run, features, *asked), ()

    def step(weights: Weights, *args: Any) -> Any:
        return build.run(weights, StepArgs(*args), predict)[0]

    return build.program(step, build.state_shardings, features, name=f"{DENOISE_STEP}.from_features")


def prediction_program(
    spec: ModelSpec,
    config: Config,
    target: Target,
    shape: StepShape,
    sample_shape: tuple[int, ...],
    inputs: InputShapes,
) -> Program:
    """The network alone, for a sampler of others: `(weights, sample, timestep, inputs) -> (prediction, is_finite)`.

    The sample, and `inputs`, those of `model_spec.Forward`, have one row for all branches or one for each. What the
    host sends at each step it sends once: each chip gets a part, and they exchange these faster than the host could
    send copies.
    """
    build = _StepBuild.of(spec, config, target, shape)
    mesh = build.mesh

    def predict(weights: Weights, sample: Any, timestep: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        sample, inputs = jax.lax.with_sharding_constraint((sample, inputs), NamedSharding(mesh, P()))
        asked = (sample.astype(target.dtype), timestep[None], inputs)
        found, _ = build.predicted(weights, build.forward, (), asked)
        return found, finite.flag(found)

    return build.program_of(
        predict,
        (
            _spread(mesh, sample_shape, jnp.float32),
            shaped(mesh, (), shape.timestep_dtype),
            {name: _spread(mesh, size, dtype) for name, (size, dtype) in inputs.items()},
        ),
        out_shardings=(NamedSharding(mesh, P()),) * 2,
        name=PREDICT,
    )


def _spread(mesh: Mesh, size: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument in parts over all chips, along the first axis that they share evenly."""
    split = next((axis for axis, length in enumerate(size) if axis and length % mesh.size == 0), 0)
    return shaped(mesh, size, dtype, *((None,) * split + (mesh.axis_names,) if split else ()))


@dataclass(frozen=True, kw_only=True)
class _StepBuild:
    """What the three programs of a step share."""

    spec: ModelSpec
    config: Config
    target: Target
    shape: StepShape
    mesh: Mesh
    network: modules.Network
    on_mesh: DenoiserRun
    axes: weights.Axes  # of weights in int8

    @classmethod
    def of(cls, spec: ModelSpec, config: Config, target: Target, shape: StepShape) -> "_StepBuild":
        default = spec.parallelism.arranged(len(target.devices), shape.branches, config)
        mesh = target.mesh(shape.mesh_shape or default)
        network = weights.traceable(spec.component(spec.denoiser.experts[0]), config)
        is_int8 = shape.quality != QUALITIES[0]
        axes = weights.prepared(network, target.devices[0], target.fallbacks.kernels) if is_int8 else {}
        num_tokens = spec.geometry.num_tokens(shape.latent_shape)
        policy = AttentionPolicy(
            kernel=target.kernel,
            bounded=bool(spec.denoiser.head_norms) if shape.bounded is None else shape.bounded,
            scores="int8" if is_int8 else "exact",
        )
        on_tpu = target.devices[0].platform == "tpu"
        scores = policy.scores_of(num_tokens, target.devices[0].device_kind if on_tpu else None)
        if is_int8 and not axes and scores == "exact":
            what = f"with {num_tokens} tokens, these layers and these chips it would be no faster"
            log.warning("%s: quality int8 is exact here: %s.", spec.title, what)
        layout = TokenLayout(
            mesh=mesh,
            num_tokens=num_tokens,
            frame_tokens=spec.geometry.frame_tokens(shape.latent_shape),
            policy=policy,
            layouts=weights.layouts(network, mesh, target.precision, axes),
            rounds=weights.are_all_rounded(network, axes),
            tiles=tiles_of(spec, config, shape.latent_shape, mesh, policy, target) if shape.quality == SPARSE else None,
        )
        return cls(
            spec=spec, config=config, target=target, shape=shape,
            mesh=mesh, network=network, on_mesh=DenoiserRun(layout=layout), axes=axes,
        )  # fmt: skip

    def run(self, weights: Weights, args: StepArgs, predict: Predict) -> tuple[Any, Any]:
        """The traced step: new state, denoised estimate, whether the sample is finite; and the features to keep."""
        sample = self._put_given(args.state[0], args.inputs).astype(self.target.dtype)
        inputs = {**args.inputs, "guidance": args.guidance[None], "next_timestep": args.next_timestep[None]}
        asked = (sample, args.timestep[None], inputs)
        output, kept = self.predicted(weights, predict, args.features, asked)
        if len(output) == 2:
            output = torch_bridge.call(self.spec.recipe.guide, output[:1], output[1:], args.guidance)
        sample, *memory, denoised = solver_table.advance(args.state, output, args.row)
        state = (self._put_given(sample, args.inputs), *memory, self._put_given(denoised, args.inputs))
        return (*state, finite.flag(state[0])), kept

    def forward(self, denoiser: Any, run: DenoiserRun, features: Any, *asked: Any) -> tuple[Any, Any]:
        """The `Predict` of a step that stands alone."""
        return self.spec.denoiser.forward(denoiser, run, *asked), ()

    def predicted(self, weights: Weights, predict: Predict, features: Any, asked: tuple[Any, ...]) -> tuple[Any, Any]:
        """What `predict` makes of a sample, a timestep and inputs, in float32, and the features to keep. What has one
        row stands for every branch.
        """
        branches, dtype = self.shape.branches, self.target.dtype
        sample, timestep, inputs = asked
        sample = jnp.broadcast_to(sample, (branches, *sample.shape[1:]))
        sample = self.on_mesh.layout.constrain(sample, "dp")
        inputs = {name: x if name in OF_STEP else _branched(x, branches, dtype) for name, x in inputs.items()}
        weights = self.on_mesh.layout.use_outside_blocks(weights)
        asked = (sample, timestep, inputs)
        run = self.on_mesh.where(is_sparse(timestep, inputs))
        output, kept = torch_bridge.functional(
            self.network.module, weights, lambda denoiser, *given: predict(denoiser, run, *given), features, *asked
        )
        return output.astype(jnp.float32), kept

    def _put_given(self, sample: Any, inputs: dict[str, Any]) -> Any:
        put_given = self.spec.pictures.put_given
        return sample if put_given is None else torch_bridge.call(put_given, sample, inputs)

    @property
    def state_shardings(self) -> tuple[NamedSharding, ...]:
        return (NamedSharding(self.mesh, P()),) * (3 + self.shape.num_memory)

    def program(
        self, step: Callable[..., Any], out_shardings: Any, features: Any = (), name: str = DENOISE_STEP
    ) -> Program:
        mesh, shape, rows = self.mesh, self.shape, 1 + self.shape.num_memory
        return self.program_of(
            step,
            StepArgs(
                state=(shaped(mesh, shape.latent_shape, jnp.float32),) * rows,
                row=shaped(mesh, (rows + 1, rows + 1), jnp.float32),
                timestep=shaped(mesh, (), shape.timestep_dtype),
                next_timestep=shaped(mesh, (), shape.timestep_dtype),
                inputs=denoiser_inputs(self.spec, self.config, mesh, shape),
                guidance=shaped(mesh, (), jnp.float32),
                features=features,
            ),
            out_shardings,
            name,
            donate=(StepArgs._fields.index("state"),),
        )

    def program_of(
        self, fn: Callable[..., Any], args: tuple[Any, ...], out_shardings: Any, name: str, donate: tuple[int, ...] = ()
    ) -> Program:
        mesh = self.mesh
        return Program(
            name=name,
            fn=fn,
            weights=weights.abstract(self.network, mesh, self.target.precision, self.axes),
            components=self.spec.denoiser.experts,
            args=args,
            mesh=mesh,
            precision=self.target.precision,
            donate=donate,
            out_shardings=out_shardings,
            compiler_options=self.target.fallbacks.left(step_options(mesh)),
            rungs=self.target.fallbacks.kernels,
        )


def is_sparse(timestep: Any, inputs: Mapping[str, Any]) -> Any:
    """Whether a step with tiles, at `timestep` `[1]`, attends to the nearest alone: one that lies within
    `SPARSE_NOISE`. Of a sampler that does not tell where a step ends its beginning decides.
    """
    low, high = (TIMESTEPS * share for share in SPARSE_NOISE)
    return (timestep[0] <= high) & (inputs.get("next_timestep", timestep)[0] >= low)


def tiles_of(
    spec: ModelSpec, config: Config, latent_shape: tuple[int, ...], mesh: Mesh, policy: AttentionPolicy, target: Target
) -> Tiling | None:
    """The tiles in which the denoiser's tokens lie, of which some may be left out; where they cannot, or it would save
    nothing, None, and why in the log.
    """
    geometry, wanted = spec.geometry, spec.denoiser.tile
    tokens, sp = geometry.num_tokens(latent_shape), mesh.shape["sp"]
    heads = int(config.get(spec.parallelism.heads_key, 1)) // mesh.shape["tp"]
    assert wanted is not None, spec.name
    if not are_many(tokens):
        why = f"a video of {tokens} tokens would be no faster"
    elif heads % sp:
        why = f"{heads} heads do not divide over {sp} chips"
    else:
        frames, rows, columns = (size // part for size, part in zip(latent_shape[2:], geometry.patch_thw, strict=True))
        tiles = Tiling(sizes=(frames, rows, columns), tile=wanted)
        if tiles.count > MOST:
            why = f"{tiles.count} tiles are more than the {MOST} whose lists a chip holds"
        elif _keys_fit(tiles, heads // sp, int(config["attention_head_dim"]), policy, target):
            return tiles
        else:
            why = f"the keys of {tokens} tokens do not fit the chip's VMEM at once"
    log.warning("%s: quality %s is %s here: %s.", spec.title, SPARSE, QUALITIES[1], why)
    return None


def _keys_fit(tiles: Tiling, heads: int, head_dim: int, policy: AttentionPolicy, target: Target) -> bool:
    """Of a chip's `heads`; anything that is no TPU takes the reference, which takes all."""
    device = target.devices[0]
    if device.platform != "tpu":
        return True
    rows, size = tiles.rows * tiles.count, {"heads": heads, "head_dim": head_dim, "itemsize": target.dtype.itemsize}
    with choice.on(target.fallbacks.kernels):
        return local.keys_fit(policy, device.device_kind, rows, **size)


def _branched(x: Array, branches: int, dtype: jnp.dtype) -> Array:
    """An input for every branch, floating ones in the network's format."""
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jnp.broadcast_to(x, (branches, *x.shape[1:]))


def denoiser_inputs(spec: ModelSpec, config: Config, mesh: Mesh, shape: StepShape) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a denoiser's inputs: every text encoding with its lengths, the condition and the references."""
    inputs = {}
    for text in spec.text_encoders:
        width = int(config[text.width_key])
        inputs[text.name] = shaped(mesh, (shape.branches, text.max_length, width), jnp.float32, "dp")
        inputs[f"{text.name}_length"] = shaped(mesh, (shape.branches,), jnp.int32, "dp")
    for name, size in {**spec.conditions(config, shape.latent_shape), **shape.references}.items():
        inputs[name] = shaped(mesh, size, jnp.float32)
    return inputs
