"""A compiled unit of work: a pure function, the shapes and shardings it is compiled for, and nothing else.

The very same programs run on the devices and are compiled for described ones by `plan`.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...attention.policy import Kernel
from ...kernels import choice
from ...sharding.chips import chip_of
from ...sharding.mesh import Device, Mesh, make_mesh
from ...sharding.shape import MeshShape
from ..cache.store import signature
from ..machine import fallbacks
from ..machine.fallbacks import Fallbacks
from ..precision import Precision

log = logging.getLogger(__name__)

DENOISE_STEP = "denoise_step"  # begins the names of the denoiser's programs, by which plan and benchmarks find them

Config = Mapping[str, Any]

# One thread at a time builds modules and traces them: torchax keeps what is enabled in one place for all threads. What
# XLA does afterwards, the long part, needs no lock and does not hold Python's.
TRACING = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Target:
    """What programs are compiled for: these devices, in this precision, with Pallas kernels as `kernel` says (see
    `AttentionPolicy`), and without what is in `fallbacks`: by default what the environment switches off. Encoders of
    pictures are in the precision `pictures`, None for that of the others.
    """

    devices: tuple[Device, ...]
    precision: Precision
    pictures: Precision | None = None
    kernel: Kernel = "auto"
    fallbacks: Fallbacks = field(default_factory=fallbacks.from_environment)

    def mesh(self, shape: MeshShape) -> Mesh:
        return make_mesh(self.devices, shape)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.precision)


def step_options(mesh: Mesh) -> Mapping[str, str]:
    """What libtpu is told of a denoising step: faster products, transfers beside computation. Empty for other devices.

    Tried options and their figures are in docs/LOG.md.
    """
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return {}
    options = {"xla_tpu_enable_async_all_to_all": "true"}
    chip = chip_of(device.device_kind)
    if chip and chip.scoped_vmem_mib:
        options["xla_tpu_scoped_vmem_limit_kib"] = str(chip.scoped_vmem_mib * 1024)
    if chip and chip.gathers_on_sparse_core:
        for kind in ("all_gather", "reduce_scatter"):
            options[f"xla_tpu_enable_sparse_core_collective_offload_{kind}"] = "true"
        # The scheduler thinks gathers shorter than they are, and begins some of weights too late to be hidden. With
        # `tp` they are of tokens, and begun sooner they hold up the reduce-scatters that take turns with them.
        if mesh.shape["tp"] == 1:
            options["xla_tpu_sparse_core_all_gather_latency_multiplier"] = "4"
    return options


def shaped(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


@dataclass(frozen=True, kw_only=True)
class Program:
    """`fn(weights, *args)`, or `fn(*args)` where there are no weights. All are `ShapeDtypeStruct`s with shardings.

    `weights`, by parameter name, are those of any one of `components`. `args` is a tuple, named where a caller asks
    for single ones. `donate` are the indices in `args` of what the program may overwrite. `runs` is how often one
    generation executes it. `compiler_options` are libtpu's, by name; `rungs` how far kernels are followed.
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
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    rungs: choice.Rungs = field(default_factory=choice.Rungs)

    @functools.cached_property
    def weights_digest(self) -> str:
        """Equal for programs that take weights of the same names and shapes."""
        return signature(sorted((name, want.shape) for name, want in (self.weights or {}).items()))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Everything that `fn` takes, in order."""
        return tuple(self.args) if self.weights is None else (self.weights, *self.args)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """One thread at a time, with all that the program's code looks up while it is traced and lowered."""
        # float32 means float32: by default a TPU multiplies float32 matrices in bfloat16.
        highest = jax.default_matmul_precision("highest") if self.precision == "float32" else contextlib.nullcontext()
        with TRACING, highest, _target(self.mesh), choice.on(self.rungs):
            yield

    @functools.cached_property
    def _traced(self) -> jax.stages.Traced:
        before = len(self.arguments) - len(self.args)
        donated = tuple(before + index for index in self.donate)
        return jax.jit(self.fn, donate_argnums=donated, out_shardings=self.out_shardings).trace(*self.arguments)

    @functools.cached_property
    def _results(self) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._traced.out_info)

    def lower(self) -> jax.stages.Lowered:
        with self._tracing():
            lowered, _ = self._traced.lower(), self._results
            del vars(self)["_traced"]  # megabytes, for as long as the program is loaded
            return lowered

    def results(self) -> Any:
        """The shapes of what `fn` returns. To trace it for them takes seconds, and `lower` then need not again."""
        if "_results" in vars(self):  # else nobody need wait for what another thread traces
            return self._results
        with self._tracing():
            return self._results

    def compile(self, lowered: jax.stages.Lowered | None = None) -> jax.stages.Compiled:
        """The program, which may have been `lowered` already, with its `compiler_options`."""
        return (lowered or self.lower()).compile(compiler_options=dict(self.compiler_options))

    def weight_bytes_in(self, compiled: jax.stages.Compiled) -> int:
        """Bytes on one chip of the weights that the `compiled` program takes: JAX drops those that it does not use."""
        if self.weights is None:
            return 0
        taken, _ = compiled.input_shardings
        return sum(shard_bytes(self.weights[name]) for name, sharding in taken[0].items() if sharding is not None)

    def zeros(self) -> tuple[Any, Any]:
        """What a `model_spec.Call` returns, without running it: zeros without memory behind them, which host code may
        slice and join, and the shapes of what it carries.
        """
        result, carried, _ = self.results()
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
