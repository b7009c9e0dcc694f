"""The denoiser's step as one program: guidance, the network, the solver."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ...attention import local
from ...attention.policy import AttentionPolicy, is_long_sequence
from ...attention.tiles import MAX_TILES, Tiling
from ...kernels import dispatch
from ...kernels.number_formats import EXACT, FORMATS, SCORES
from ...sharding.mesh import Mesh
from ...sharding.shape import MeshShape
from ..model_spec import FeatureReuse, ModelSpec, Quality
from . import finite_check, solver_table, step_cache, torch_bridge, upstream_network, weights
from .controls import BuiltControl, Control, ControlShape, JoinedNetworks, join_weights, name_in_module, split_weights
from .program import DENOISE_STEP, CompileTarget, Config, Program, shape_struct, step_compiler_options
from .sharded_ops import ShardedOps
from .weights import Weights

log = logging.getLogger(__name__)


class StepArgs(NamedTuple):
    """Arguments of a step's program after the weights: arrays, or their shapes."""

    state: tuple[Any, ...]  # the sample and the solver's memory, float32 and donated
    row: Any  # the solver's coefficients of this step, `[rows, columns]` float32 (see `solver_table`)
    timestep: Any  # scalar, as in the scheduler
    next_timestep: Any  # scalar, of the following step; 0 after the last
    inputs: dict[str, Any]  # texts and condition by name (see `model_spec.Forward`)
    guidance: Any  # float32 scalar
    features: Any = ()  # of an earlier step, if the program starts from them


PREDICT = "predict"  # name of the network's program without a step
InputShapes = Mapping[str, tuple[tuple[int, ...], DTypeLike]]  # shape and dtype of inputs by name
# Inputs that are one number for all branches.
STEP_SCALARS = frozenset({"guidance", "next_timestep"})

# Share of noise, lowest and highest, at which a step with tiles is sparse. Earlier steps decide a video's layout, later
# ones its details. With shift 5 this is 0.4 to 0.9 of the flow steps, as in ComfyUI's node for sparse blocks.
SPARSE_NOISE_RANGE = (0.36, 0.88)
MAX_TIMESTEP = 1000  # timestep of pure noise

# (denoiser, run, features, *rest of `model_spec.Forward`) -> (prediction of one step, features to keep)
Predict = Callable[..., tuple[PyTree, PyTree]]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Shapes and options that a step's program is compiled for, besides the checkpoint's config and the target."""

    latent_shape: tuple[int, ...]
    branches: int  # of guidance
    num_memory: int  # tensors that the solver remembers
    timestep_dtype: DTypeLike
    quality: str = Quality.EXACT
    reuse: FeatureReuse | None = None  # with a step cache: how features are kept and reused
    mesh_shape: MeshShape | None = None  # None: the spec's choice
    references: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of reference inputs by name
    # Whether the weights bound attention's scores (see `compute_score_bound`). None, without a checkpoint: a model with
    # `head_norms` is assumed to.
    bounded: bool | None = None
    controls: tuple[ControlShape, ...] = ()  # control networks


def build_denoise_program(spec: ModelSpec, config: Config, target: CompileTarget, shape: StepShape) -> Program:
    """Return the program of one step: `(weights, *StepArgs) -> (*state, denoised, is_finite)`.

    `denoised` is for a preview; `is_finite` is whether the sample is finite.
    spec, config: of the model and its denoiser. target: devices and precision. shape: shapes and options of the step.
    """
    build = _StepBuild.create(spec, config, target, shape)

    def step(weights: Weights, *args: PyTree) -> PyTree:
        return build.run(weights, StepArgs(*args), build.forward)[0]

    return build.program(step, build.state_shardings)


def build_saving_program(spec: ModelSpec, config: Config, target: CompileTarget, shape: StepShape) -> Program:
    """Return the program of a full step that also returns features: `((*state, denoised, is_finite), features)`.

    Later steps may start from these. spec, config, target, shape: as for `build_denoise_program`.
    """
    build, reuse = _StepBuild.create(spec, config, target, shape), shape.reuse
    assert reuse is not None, spec.name

    def predict(denoiser: torch.nn.Module, run: ShardedOps, features: PyTree, *asked: PyTree) -> tuple[PyTree, PyTree]:
        return reuse.keep(denoiser, run, *asked)

    def step(weights: Weights, *args: PyTree) -> PyTree:
        return build.run(weights, StepArgs(*args), predict)

    kept = step_cache.feature_shardings(reuse, build.mesh)
    return build.program(step, (build.state_shardings, kept))


def build_reusing_program(spec: ModelSpec, config: Config, target: CompileTarget, shape: StepShape) -> Program:
    """Return the program of the rest of a step, starting from the features of `build_saving_program`.

    It returns `(*state, denoised, is_finite)`. spec, config, target, shape: as for `build_denoise_program`.
    """
    build, reuse = _StepBuild.create(spec, config, target, shape), shape.reuse
    assert reuse is not None, spec.name
    features = step_cache.feature_shapes(reuse, build_saving_program(spec, config, target, shape))

    def predict(denoiser: torch.nn.Module, run: ShardedOps, features: PyTree, *asked: PyTree) -> tuple[PyTree, PyTree]:
        return reuse.reuse(denoiser, run, features, *asked), ()

    def step(weights: Weights, *args: PyTree) -> PyTree:
        return build.run(weights, StepArgs(*args), predict)[0]

    return build.program(step, build.state_shardings, features, name=f"{DENOISE_STEP}.from_features")


def build_prediction_program(
    spec: ModelSpec,
    config: Config,
    target: CompileTarget,
    shape: StepShape,
    sample_shape: tuple[int, ...],
    inputs: InputShapes,
) -> Program:
    """Return the program of the network alone, for external samplers.

    It is `(weights, sample, timestep, inputs) -> (prediction, is_finite)`. The host sends the sample and the inputs
    once per step: each chip gets a part, and the chips exchange these faster than the host could send copies. With
    control networks, hints and strengths follow, as a tuple each.

    spec, config, target, shape: as for `build_denoise_program`. sample_shape, inputs: shapes of the sample and of the
    inputs
      of `model_spec.Forward`, with one row for all branches or one for each.
    """
    build = _StepBuild.create(spec, config, target, shape)
    mesh = build.mesh

    def predict(
        weights: Weights,
        sample: Array,
        timestep: Array,
        inputs: dict[str, Array],
        hints: tuple[Array, ...] = (),
        strengths: tuple[Array, ...] = (),
    ) -> tuple[Array, Array]:
        sample, inputs, hints = jax.lax.with_sharding_constraint((sample, inputs, hints), NamedSharding(mesh, P()))
        asked = (sample.astype(target.dtype), timestep[None], inputs)
        output, _ = build.predicted(weights, build.forward, (), asked, hints, strengths)
        return output, finite_check.all_finite(output)

    given = (
        tuple(_spread(mesh, control.hint_shape, jnp.float32) for control in shape.controls),
        (shape_struct(mesh, (), jnp.float32),) * len(shape.controls),
    )
    return build.make_program(
        predict,
        (
            _spread(mesh, sample_shape, jnp.float32),
            shape_struct(mesh, (), shape.timestep_dtype),
            {name: _spread(mesh, size, dtype) for name, (size, dtype) in inputs.items()},
            *(given if shape.controls else ()),
        ),
        out_shardings=(NamedSharding(mesh, P()),) * 2,
        name=PREDICT,
    )


def _spread(mesh: Mesh, size: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Return the shape of an argument that is split over all chips, along the first axis that they divide evenly."""
    split = next((axis for axis, length in enumerate(size) if axis and length % mesh.size == 0), 0)
    return shape_struct(mesh, size, dtype, *((None,) * split + (mesh.axis_names,) if split else ()))


@dataclass(frozen=True, kw_only=True)
class _StepBuild:
    """Parts that the programs of a step share."""

    spec: ModelSpec
    config: Config
    target: CompileTarget
    shape: StepShape
    mesh: Mesh
    network: upstream_network.Network
    on_mesh: ShardedOps
    axes: weights.Axes  # contracting dimensions of quantized weights
    number_format: str  # of quantized weights
    controls: tuple[BuiltControl, ...]  # control networks

    @classmethod
    def create(cls, spec: ModelSpec, config: Config, target: CompileTarget, shape: StepShape) -> "_StepBuild":
        default = spec.parallelism.mesh_shape(len(target.devices), shape.branches, config)
        mesh = target.mesh(shape.mesh_shape or default)
        network = weights.private_network(spec.component(spec.denoiser.experts[0]), config)
        quality = Quality(shape.quality)
        number_format = quality.traits.number_format
        axes = weights.add_scale_parameters(network, target.devices[0], target.fallbacks.kernels, number_format)
        num_tokens = spec.geometry.num_tokens(shape.latent_shape)
        policy = AttentionPolicy(
            kernel=target.kernel,
            bounded=bool(spec.denoiser.head_norms) if shape.bounded is None else shape.bounded,
            scores=number_format if number_format in SCORES else EXACT,
        )
        on_tpu = target.devices[0].platform == "tpu"
        scores = policy.choose_scores(num_tokens, target.devices[0].device_kind if on_tpu else None)
        if number_format != EXACT and not axes and scores == EXACT:
            reason = f"with {num_tokens} tokens, these layers and these chips it would be no faster"
            log.warning("%s: quality %s is exact here: %s.", spec.title, number_format, reason)
        on_mesh = ShardedOps(
            mesh=mesh,
            num_tokens=num_tokens,
            frame_tokens=spec.geometry.frame_tokens(shape.latent_shape),
            policy=policy,
            layouts=weights.layouts(network, mesh, target.precision, axes),
            quantize_tokens=(
                FORMATS[number_format].quantize_tokens if weights.are_all_quantized(network, axes) else None
            ),
            tiles=choose_tiling(spec, config, shape.latent_shape, mesh, policy, target, quality),
        )
        return cls(
            spec=spec, config=config, target=target, shape=shape,
            mesh=mesh, network=network, on_mesh=on_mesh, axes=axes, number_format=number_format,
            controls=tuple(BuiltControl.create(control, mesh, target.precision) for control in shape.controls),
        )  # fmt: skip

    def run(self, weights: Weights, args: StepArgs, predict: Predict) -> tuple[PyTree, PyTree]:
        """Return the traced step's new state, denoised estimate and finiteness, and the features to keep.

        weights, args: of the program. predict: predicts with or without features.
        """
        sample = self._put_given(args.state[0], args.inputs).astype(self.target.dtype)
        inputs = {**args.inputs, "guidance": args.guidance[None], "next_timestep": args.next_timestep[None]}
        asked = (sample, args.timestep[None], inputs)
        output, kept = self.predicted(weights, predict, args.features, asked)
        if len(output) == 2:
            output = torch_bridge.call(self.spec.recipe.guide, output[:1], output[1:], args.guidance)
        sample, *memory, denoised = solver_table.advance(args.state, output, args.row)
        state = (self._put_given(sample, args.inputs), *memory, self._put_given(denoised, args.inputs))
        return (*state, finite_check.all_finite(state[0])), kept

    def forward(
        self, denoiser: torch.nn.Module, run: ShardedOps, features: PyTree, *asked: PyTree, **controls: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Return the `Predict` result without a step cache: the forward of `denoiser` with `run`; no `features`.

        controls: the control networks under this name, if there are any.
        """
        if controls:
            assert self.spec.denoiser.controlled is not None, self.spec.name
            return self.spec.denoiser.controlled(denoiser, run, *asked, **controls), ()
        return self.spec.denoiser.forward(denoiser, run, *asked), ()

    def predicted(
        self,
        weights: Weights,
        predict: Predict,
        features: PyTree,
        asked: tuple[PyTree, ...],
        hints: tuple[Array, ...] = (),
        strengths: tuple[Array, ...] = (),
    ) -> tuple[Array, PyTree]:
        """Return the result of `predict` in float32, `[branches, ...]`, and the features to keep.

        weights, features: of the program. asked: sample, timestep and inputs; arrays with one row apply to every
          branch. hints, strengths: of the control networks.
        """
        branches, dtype = self.shape.branches, self.target.dtype
        sample, timestep, inputs = asked
        sample = jnp.broadcast_to(sample, (branches, *sample.shape[1:]))
        sample = self.on_mesh.constrain(sample, "dp")
        inputs = {
            name: x if name in STEP_SCALARS else _expand_branches(x, branches, dtype) for name, x in inputs.items()
        }
        asked = (sample, timestep, inputs)
        run = self.on_mesh.where(is_sparse_step(timestep, inputs))
        if self.controls:
            hints = tuple(_expand_branches(hint, branches, dtype) for hint in hints)
            output, kept = self._predict_with_controls(weights, run, predict, features, asked, (hints, strengths))
            return output.astype(jnp.float32), kept
        output, kept = torch_bridge.call_functional(
            self.network.module,
            self.on_mesh.gather_weights(weights),
            lambda denoiser, *args: predict(denoiser, run, *args),
            features,
            *asked,
        )
        return output.astype(jnp.float32), kept

    def _predict_with_controls(
        self,
        weights: Weights,
        run: ShardedOps,
        predict: Predict,
        features: PyTree,
        asked: tuple[PyTree, ...],
        given: tuple[tuple[Array, ...], ...],
    ) -> tuple[PyTree, PyTree]:
        """Return the result of `predict` with the control networks.

        weights, features: of the program. run: operations on the mesh. asked, given: arrays with a row per branch;
          `given` has hints and strengths.
        """
        operations = [control.operations(run) for control in self.controls]
        own, parts = split_weights(weights, len(self.controls))
        gathered = [on_mesh.gather_weights(part) for on_mesh, part in zip(operations, parts, strict=True)]

        def forward(joined: Any, hints: PyTree, strengths: PyTree, *args: PyTree) -> PyTree:
            controls = [
                Control(module=module, config=built.shape.config, run=on_mesh, hint=hint, strength=strength)
                for module, built, on_mesh, hint, strength in zip(
                    joined.controls, self.controls, operations, hints, strengths, strict=True
                )
            ]
            return predict(joined.denoiser, run, *args, controls=controls)

        module = JoinedNetworks(self.network.module, self.controls)
        parameters = name_in_module(self.on_mesh.gather_weights(own), gathered)
        return torch_bridge.call_functional(module, parameters, forward, *given, features, *asked)

    def _put_given(self, sample: Array | np.ndarray, inputs: dict[str, Array]) -> Any:
        put_given = self.spec.pictures.put_given
        return sample if put_given is None else torch_bridge.call(put_given, sample, inputs)

    @property
    def state_shardings(self) -> tuple[NamedSharding, ...]:
        return (NamedSharding(self.mesh, P()),) * (3 + self.shape.num_memory)

    def program(
        self, step: Callable[..., PyTree], out_shardings: PyTree, features: PyTree = (), name: str = DENOISE_STEP
    ) -> Program:
        mesh, shape, rows = self.mesh, self.shape, 1 + self.shape.num_memory
        return self.make_program(
            step,
            StepArgs(
                state=(shape_struct(mesh, shape.latent_shape, jnp.float32),) * rows,
                row=shape_struct(mesh, (rows + 1, rows + 1), jnp.float32),
                timestep=shape_struct(mesh, (), shape.timestep_dtype),
                next_timestep=shape_struct(mesh, (), shape.timestep_dtype),
                inputs=denoiser_input_shapes(self.spec, self.config, mesh, shape),
                guidance=shape_struct(mesh, (), jnp.float32),
                features=features,
            ),
            out_shardings,
            name,
            donate=(StepArgs._fields.index("state"),),
        )

    def make_program(
        self,
        fn: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        out_shardings: PyTree,
        name: str,
        donate: tuple[int, ...] = (),
    ) -> Program:
        mesh, precision = self.mesh, self.target.precision
        own = weights.abstract_weights(self.network, mesh, precision, self.axes, self.number_format)
        parts = [weights.abstract_weights(control.network, mesh, precision) for control in self.controls]
        return Program(
            name=name,
            fn=fn,
            weights=join_weights(own, parts),
            components=self.spec.denoiser.experts,
            args=args,
            mesh=mesh,
            precision=precision,
            donate=donate,
            out_shardings=out_shardings,
            compiler_options=self.target.fallbacks.left(step_compiler_options(mesh)),
            rungs=self.target.fallbacks.kernels,
        )


def is_sparse_step(timestep: Any, inputs: Mapping[str, Any]) -> Any:
    """Return whether a step with tiles is sparse: within `SPARSE_NOISE_RANGE`.

    timestep: `[1]`. inputs: those of the step; without `next_timestep`, of an external sampler, the step's beginning
      decides.
    """
    low, high = (MAX_TIMESTEP * share for share in SPARSE_NOISE_RANGE)
    return (timestep[0] <= high) & (inputs.get("next_timestep", timestep)[0] >= low)


def choose_tiling(
    spec: ModelSpec,
    config: Config,
    latent_shape: tuple[int, ...],
    mesh: Mesh,
    policy: AttentionPolicy,
    target: CompileTarget,
    quality: Quality,
) -> Tiling | None:
    """Return the tiling of the tokens for a sparse quality; None, and log why, if it is impossible or useless.

    spec, config: of the model and its denoiser. latent_shape: `[batch, channels, frames, height, width]`. mesh, policy,
      target, quality: of the step.
    """
    if not quality.is_sparse:
        return None
    geometry, tile = spec.geometry, spec.denoiser.tile
    tokens, sp = geometry.num_tokens(latent_shape), mesh.shape["sp"]
    heads = int(config.get(spec.parallelism.heads_key, 1)) // mesh.shape["tp"]
    assert tile is not None, spec.name
    if not is_long_sequence(tokens):
        why = f"a video of {tokens} tokens would be no faster"
    elif heads % sp:
        why = f"{heads} heads do not divide over {sp} chips"
    else:
        frames, rows, columns = (size // part for size, part in zip(latent_shape[2:], geometry.patch_thw, strict=True))
        tiles = Tiling(sizes=(frames, rows, columns), tile=tile)
        if tiles.count > MAX_TILES:
            why = f"{tiles.count} tiles are more than the {MAX_TILES} whose lists fit on a chip"
        elif _keys_fit(tiles, heads // sp, int(config["attention_head_dim"]), policy, target):
            return tiles
        else:
            why = f"the keys of {tokens} tokens do not fit the chip's VMEM at once"
    log.warning("%s: quality %s is %s here: %s.", spec.title, quality, quality.dense, why)
    return None


def _keys_fit(tiles: Tiling, heads: int, head_dim: int, policy: AttentionPolicy, target: CompileTarget) -> bool:
    """Return whether a chip's keys of `heads` fit in VMEM; other devices than TPUs have no such limit."""
    device = target.devices[0]
    if device.platform != "tpu":
        return True
    rows, size = tiles.rows * tiles.count, {"heads": heads, "head_dim": head_dim, "itemsize": target.dtype.itemsize}
    with dispatch.use_fallbacks(target.fallbacks.kernels):
        return local.all_keys_fit_vmem(policy, device.device_kind, rows, **size)


def _expand_branches(x: Array, branches: int, dtype: jnp.dtype) -> Array:
    """Return an input for every branch, `[branches, ...]`, with floating values in the network's `dtype`."""
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return jnp.broadcast_to(x, (branches, *x.shape[1:]))


def denoiser_input_shapes(
    spec: ModelSpec, config: Config, mesh: Mesh, shape: StepShape
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a denoiser's inputs by name: text encodings, their lengths, own inputs, images.

    spec, config: of the model and its denoiser. mesh, shape: of the step.
    """
    inputs = {}
    for text in spec.text_encoders:
        width = int(config[text.width_key])
        inputs[text.name] = shape_struct(mesh, (shape.branches, text.max_length, width), jnp.float32, "dp")
        inputs[f"{text.name}_length"] = shape_struct(mesh, (shape.branches,), jnp.int32, "dp")
    for name, size in {**spec.condition_shapes(config, shape.latent_shape), **shape.references}.items():
        inputs[name] = shape_struct(mesh, size, jnp.float32)
    inputs |= {name: shape_struct(mesh, (1,), jnp.float32) for name in spec.own_inputs}
    return inputs
