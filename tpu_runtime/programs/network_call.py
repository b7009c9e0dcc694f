"""One call of a network as a program, and the `model_spec.Call` that a stage's host code gets. Shapes only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from ...sharding import rules
from ...sharding.mesh import Mesh
from ...sharding.shape import MeshShape
from ..model_spec import Call, ModelSpec
from . import finite, modules, torch_bridge, weights
from .program import Config, Program, Target
from .weights import Weights

Partition = Literal["replicated", "spatial"]
Prepared = TypeVar("Prepared")


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """What a stage's host code asks a network for: `function(module, *args)` (see `model_spec.Call`)."""

    component: str
    function: Callable[..., tuple[Any, Any]]
    args: tuple[Any, ...]  # host arrays, torch tensors, or what an earlier call carried
    partition: Partition
    carries: bool
    defers: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """What two requests share when one program serves both."""
        leaves, tree = jax.tree.flatten(abstract_args(self.args))
        shapes = tuple((x.shape, str(x.dtype)) for x in leaves)
        return (
            self.component,
            self.function.__qualname__,
            self.partition,
            self.carries,
            self.defers,
            str(tree),
            shapes,
        )

    def program(self, spec: ModelSpec, config: Config, target: Target) -> Program:
        if target.pictures is not None and self.component in spec.picture_encoders:
            target = replace(target, precision=target.pictures)
        return call_program(
            spec, self.component, config, target, self.function, abstract_args(self.args),
            partition=self.partition, carries=self.carries, defers=self.defers,
        )  # fmt: skip


def caller(
    prepare: Callable[[CallRequest], Prepared], execute: Callable[[Prepared, CallRequest], tuple[Any, Any]]
) -> Call:
    """A `model_spec.Call` that gets each request's program by `prepare` and its result by `execute`."""

    def call(
        component: str,
        function: Callable[..., tuple[Any, Any]],
        *args: Any,
        partition: Partition = "replicated",
        carries: bool = False,
        defers: bool = False,
    ) -> tuple[Any, Any]:
        request = CallRequest(
            component=component, function=function, args=args, partition=partition, carries=carries, defers=defers
        )
        return execute(prepare(request), request)

    return call


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


def call_program(
    spec: ModelSpec,
    component: str,
    config: Config,
    target: Target,
    function: Callable[..., tuple[Any, Any]],
    args: tuple[Any, ...],
    *,
    partition: Partition,
    carries: bool,
    defers: bool = False,
) -> Program:
    """`(weights, *args) -> (result, carried, is_finite)` for one call of a stage, with shapes `args`.

    Floating arguments reach the network in the target's format; the result leaves as float32. `is_finite` is the
    result's (see `finite`). What is carried lies as kernels have it, its channels together: any other layout is a copy
    before and one behind each of them.
    """
    network = weights.traceable(spec.component(component), config)
    mesh, sharding = _placed(target, args, partition)
    replicated = NamedSharding(mesh, P())
    rank = len(jax.tree.leaves(args)[0].shape)
    channels_last = Format(Layout((0, *range(2, rank), 1)), sharding)
    layouts = weights.layouts(network, mesh, target.precision)
    # Frames leave each chip over its own link to the host. Those of several hosts go to the first one.
    is_one_host = len({device.process_index for device in target.devices}) == 1
    frames = NamedSharding(mesh, P(None, "dp", "sp")) if defers and is_one_host else replicated

    def run(weights: Weights, *args: Any) -> tuple[Any, Any, Bool[Array, ""]]:
        weights = {name: _in_use(mesh, name, x, layouts[name]) for name, x in weights.items()}
        args = jax.tree.map(lambda x: x.astype(target.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        if partition == "spatial":
            args = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), args)
        result, carried = torch_bridge.functional(network.module, weights, function, *args)
        result = jax.tree.map(lambda x: x.astype(jnp.float32), result)
        return result, carried, finite.flag(result)

    def wanted(args: Any, sharding: NamedSharding | Format) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)

    given = args[:-1] if carries else args
    return Program(
        name=f"{component}.{function.__name__}",
        fn=run,
        weights=weights.abstract(network, mesh, target.precision),
        components=(component,),
        args=(*wanted(given, sharding), *wanted(args[len(given) :], channels_last)),
        mesh=mesh,
        precision=target.precision,
        donate=(len(given),) if carries else (),
        out_shardings=(frames, channels_last, replicated),
        rungs=target.fallbacks.kernels,
    )


def _in_use(mesh: Mesh, name: str, weight: Array, layout: rules.Layout) -> Array:
    """A weight outside scanned blocks, gathered where it is only split at rest."""
    if f".{modules.LAYER}." in name or layout.in_use == layout.at_rest:
        return weight
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, P(*layout.in_use)))


def _placed(target: Target, args: tuple[Any, ...], partition: Partition) -> tuple[Mesh, NamedSharding]:
    if partition == "replicated":
        mesh = target.mesh(MeshShape(sp=len(target.devices)))
        return mesh, NamedSharding(mesh, P())
    height, width = min(x.shape[-2:] for x in jax.tree.leaves(args))
    mesh = target.mesh(image_mesh(len(target.devices), height, width))
    rank = len(jax.tree.leaves(args)[0].shape)
    return mesh, NamedSharding(mesh, P(*[None] * (rank - 2), "dp", "sp"))


def abstract_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and dtypes of host arrays, torch tensors, device arrays or shapes."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        dtype = np.dtype(str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x.dtype
        return jax.ShapeDtypeStruct(tuple(x.shape), dtype)

    return jax.tree.map(shape_of, args)
