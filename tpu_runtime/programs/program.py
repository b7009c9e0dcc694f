"""A compiled unit of work: a pure function, the shapes and shardings it is compiled for, and nothing else.

The very same programs run on the devices and are compiled for described ones by `plan`.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...sharding.mesh import Device, Mesh, make_mesh
from ...sharding.shape import MeshShape
from ..precision import Precision

log = logging.getLogger(__name__)

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What programs are compiled for: these devices, in this precision."""

    devices: tuple[Device, ...]
    precision: Precision

    def mesh(self, shape: MeshShape) -> Mesh:
        return make_mesh(self.devices, shape)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.precision)


def shaped(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


@dataclass(frozen=True, kw_only=True)
class Program:
    """`fn(weights, *args)`, or `fn(*args)` where there are no weights. All are `ShapeDtypeStruct`s with shardings.

    `weights`, by parameter name, are those of any one of `components`. `args` is a tuple, named where a caller asks
    for single ones. `donate` are the indices in `args` of what the program may overwrite. `runs` is how often one
    generation executes it.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    weights: Mapping[str, jax.ShapeDtypeStruct] | None = None
    components: tuple[str, ...] = ()
    mesh: Mesh
    precision: Precision
    donate: tuple[int, ...] = ()
    out_shardings: Any = None
    runs: int = 1

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Everything that `fn` takes, in order."""
        return tuple(self.args) if self.weights is None else (self.weights, *self.args)

    def lower(self) -> jax.stages.Lowered:
        before = len(self.arguments) - len(self.args)
        donated = tuple(before + index for index in self.donate)
        jitted = jax.jit(self.fn, donate_argnums=donated, out_shardings=self.out_shardings)
        # float32 means float32: by default a TPU multiplies float32 matrices in bfloat16.
        highest = jax.default_matmul_precision("highest") if self.precision == "float32" else contextlib.nullcontext()
        with highest, _target(self.mesh):
            return jitted.lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        return self.lower().compile()

    @functools.cached_property
    def zeros(self) -> tuple[Any, Any]:
        """What a call's program gives (see `spec.Call`), without running it: zeros without memory behind them, so that
        host code may slice and join them, and the shapes of what it carries.
        """
        result, carried, _ = jax.eval_shape(self.fn, *self.arguments)
        return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), result), carried


@contextlib.contextmanager
def _target(mesh: Mesh) -> Iterator[None]:
    """Kernels are lowered for the mesh's devices, not for those of this process (see `plan`)."""
    if mesh.devices.flat[0].platform == "tpu":
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    else:
        yield


def shard_bytes(leaf: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes of an array on one of its devices."""
    size = leaf.dtype.itemsize
    for dim in leaf.sharding.shard_shape(leaf.shape):
        size *= dim
    return size
