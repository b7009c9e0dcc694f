"""The programs of a model, built from its spec and a checkpoint's configs. Shapes only: no weights here."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from ...sharding.mesh import Mesh
from ...sharding.rules import Layout
from ...sharding.shape import MeshShape
from ..spec import ModelSpec, Settings
from . import finite, modules, solver_table, torch_bridge, weights
from .program import Config, Program, Target
from .weights import Weights

Partition = Literal["replicated", "spatial"]


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


def solver(spec: ModelSpec, config: Config, settings: Settings) -> solver_table.SolverTable:
    """The steps of a generation with the scheduler that `config`, a checkpoint's `scheduler_config.json`, describes, or
    with the one that was chosen in its place.
    """
    config = {**config, **spec.schedulers.get(settings.scheduler, {})}
    if settings.shift and spec.shift_key:  # 0 is the checkpoint's own
        config[spec.shift_key] = settings.shift
    arguments = spec.solver_arguments(config, spec.geometry.latent_shape(settings), settings)
    return solver_table.tabulate(solver_table.scheduler_from(config), settings.num_inference_steps, **arguments)


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
) -> Program:
    """`(weights, *args) -> (result, carried, is_finite)` for one call of a stage (see `spec.Call`), with shapes `args`.

    Floating arguments reach the network in the target's format; the result leaves as float32. `is_finite` is the
    result's (see `finite`).
    """
    network = modules.build(spec.component(component), config)
    mesh, sharding = _placed(target, args, partition)
    whole = NamedSharding(mesh, P())
    layouts = weights.layouts(network, mesh, target.precision)

    def run(weights: Weights, *args: Any) -> tuple[Any, Any, Bool[Array, ""]]:
        weights = {name: _in_use(mesh, name, x, layouts[name]) for name, x in weights.items()}
        args = jax.tree.map(lambda x: x.astype(target.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)
        if partition == "spatial":
            args = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), args)
        result, carried = torch_bridge.functional(network.module, weights, function, *args)
        result = jax.tree.map(lambda x: x.astype(jnp.float32), result)
        return result, carried, finite.flag(result)

    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return Program(
        name=f"{component}.{function.__name__}",
        fn=run,
        args=(weights.abstract(network, mesh, target.precision), *wanted),
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


def _placed(target: Target, args: tuple[Any, ...], partition: Partition) -> tuple[Mesh, NamedSharding]:
    if partition == "replicated":
        mesh = target.mesh(MeshShape(sp=len(target.devices)))
        return mesh, NamedSharding(mesh, P())
    height, width = min(x.shape[-2:] for x in jax.tree.leaves(args))
    mesh = target.mesh(image_mesh(len(target.devices), height, width))
    rank = len(jax.tree.leaves(args)[0].shape)
    return mesh, NamedSharding(mesh, P(*[None] * (rank - 2), "dp", "sp"))


def call_key(component: str, function: Callable, args: tuple[Any, ...], partition: Partition) -> tuple:
    """What two calls share when one program serves both."""
    leaves, tree = jax.tree.flatten(abstract_args(args))
    return (component, function.__qualname__, partition, str(tree), tuple((x.shape, str(x.dtype)) for x in leaves))


def abstract_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and dtypes of host arrays, torch tensors, device arrays or shapes."""

    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        dtype = np.dtype(str(x.dtype).removeprefix("torch.")) if isinstance(x, torch.Tensor) else x.dtype
        return jax.ShapeDtypeStruct(tuple(x.shape), dtype)

    return jax.tree.map(shape_of, args)
