"""A call of a network as a program, and the `model_spec.Call` for a stage's host code. It works on shapes only."""

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
from jaxtyping import Array, Bool, PyTree

from ...sharding import rules
from ...sharding.mesh import Mesh
from ...sharding.shape import MeshShape
from ..model_spec import Call, ModelSpec
from . import finite_check, torch_bridge, upstream_network, weights
from .program import CompileTarget, Config, Program
from .weights import Weights

Partition = Literal["replicated", "spatial"]
Prepared = TypeVar("Prepared")


@dataclass(frozen=True, kw_only=True)
class CallRequest:
    """Request of a stage's host code for `function(module, *args)` of a network (see `model_spec.Call`)."""

    component: str
    function: Callable[..., tuple[PyTree, PyTree]]
    args: tuple[PyTree, ...]  # host arrays, torch tensors, or values that an earlier call carried
    partition: Partition
    carries: bool  # whether the last argument is carried
    defers: bool  # whether the result is returned before it is computed

    @property
    def key(self) -> tuple[PyTree, ...]:
        """Return a key that is equal for requests that one program can serve."""
        leaves, tree = jax.tree.flatten(to_shapes(self.args))
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

    def program(self, spec: ModelSpec, config: Config, target: CompileTarget) -> Program:
        """Return the request's program for `target`. spec, config: of the model and the component."""
        if target.pictures is not None and self.component in spec.image_encoders:
            target = replace(target, precision=target.pictures)
        return build_call_program(
            spec, self.component, config, target, self.function, to_shapes(self.args),
            partition=self.partition, carries=self.carries, defers=self.defers,
        )  # fmt: skip


def make_call(
    prepare: Callable[[CallRequest], Prepared], execute: Callable[[Prepared, CallRequest], tuple[PyTree, PyTree]]
) -> Call:
    """Return a `model_spec.Call` that gets each request's program by `prepare` and its result by `execute`."""

    def call(
        component: str,
        function: Callable[..., tuple[PyTree, PyTree]],
        *args: PyTree,
        partition: Partition = "replicated",
        carries: bool = False,
        defers: bool = False,
    ) -> tuple[PyTree, PyTree]:
        request = CallRequest(
            component=component, function=function, args=args, partition=partition, carries=carries, defers=defers
        )
        return execute(prepare(request), request)

    return call


def choose_image_mesh(num_devices: int, height: int, width: int) -> MeshShape:
    """Return the mesh for an image: width on `sp`, height on `dp`, with as many chips as divide both.

    Other chips repeat work.

    num_devices: of the mesh. height, width: of the image, in pixels or latents.
    """

    def count_chips(shape: MeshShape) -> tuple[int, int]:
        return shape.dp * shape.sp, shape.sp

    shapes = (
        MeshShape(dp=dp, sp=sp, tp=num_devices // (dp * sp))
        for dp in range(1, num_devices + 1)
        for sp in range(1, num_devices // dp + 1)
        if num_devices % (dp * sp) == 0 and height % dp == 0 and width % sp == 0
    )
    return max(shapes, key=count_chips)


def build_call_program(
    spec: ModelSpec,
    component: str,
    config: Config,
    target: CompileTarget,
    function: Callable[..., tuple[PyTree, PyTree]],
    args: tuple[PyTree, ...],
    *,
    partition: Partition,
    carries: bool,
    defers: bool = False,
) -> Program:
    """Return the program of one call of a stage: `(weights, *args) -> (result, carried, is_finite)`.

    Floating arguments reach the network in the target's format; the result is float32. `is_finite` is the result's (see
    `finite`). Carried arrays have the layout of kernels, channels last: another layout would cost a copy before and
    after each kernel.

    spec, component, config: the network. target: devices and precision. function: `function(module, *args)`; its name
      is part of the program's. args: shapes. partition, carries, defers: see `CallRequest`.
    """
    network = weights.private_network(spec.component(component), config)
    mesh, sharding = _choose_placement(target, args, partition)
    replicated = NamedSharding(mesh, P())
    rank = len(jax.tree.leaves(args)[0].shape)
    channels_last = Format(Layout((0, *range(2, rank), 1)), sharding)
    layouts = weights.layouts(network, mesh, target.precision)
    # Each chip sends frames over its own link to the host. With several hosts, all frames go to the first one.
    is_one_host = len({device.process_index for device in target.devices}) == 1
    frames = NamedSharding(mesh, P(None, "dp", "sp")) if defers and is_one_host else replicated

    def run(weights: Weights, *args: PyTree) -> tuple[PyTree, PyTree, Bool[Array, ""]]:
        weights = {name: _in_use(mesh, name, x, layouts[name]) for name, x in weights.items()}
        args = jax.tree.map(lambda x: x.astype(target.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        if partition == "spatial":
            args = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), args)
        result, carried = torch_bridge.call_functional(network.module, weights, function, *args)
        result = jax.tree.map(lambda x: x.astype(jnp.float32), result)
        return result, carried, finite_check.all_finite(result)

    def place(args: PyTree, sharding: NamedSharding | Format) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)

    host_args = args[:-1] if carries else args
    return Program(
        name=f"{component}.{function.__name__}",
        fn=run,
        weights=weights.abstract_weights(network, mesh, target.precision),
        components=(component,),
        args=(*place(host_args, sharding), *place(args[len(host_args) :], channels_last)),
        mesh=mesh,
        precision=target.precision,
        donate=(len(host_args),) if carries else (),
        out_shardings=(frames, channels_last, replicated),
        rungs=target.fallbacks.kernels,
    )


def _in_use(mesh: Mesh, name: str, weight: Array, layout: rules.Layout) -> Array:
    """Return a weight outside scanned blocks, gathered if it is only split at rest."""
    if f".{upstream_network.LAYER}." in name or layout.in_use == layout.at_rest:
        return weight
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, P(*layout.in_use)))


def _choose_placement(
    target: CompileTarget, args: tuple[PyTree, ...], partition: Partition
) -> tuple[Mesh, NamedSharding]:
    """Return the mesh of a call and the sharding of its arguments."""
    if partition == "replicated":
        mesh = target.mesh(MeshShape(sp=len(target.devices)))
        return mesh, NamedSharding(mesh, P())
    height, width = min(x.shape[-2:] for x in jax.tree.leaves(args))
    mesh = target.mesh(choose_image_mesh(len(target.devices), height, width))
    rank = len(jax.tree.leaves(args)[0].shape)
    return mesh, NamedSharding(mesh, P(*[None] * (rank - 2), "dp", "sp"))


def to_shapes(args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Return the shapes and dtypes of a pytree of host arrays, torch tensors, device arrays or shapes."""

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        dtype = np.dtype(str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x.dtype
        return jax.ShapeDtypeStruct(tuple(x.shape), dtype)

    return jax.tree.map(describe, args)
