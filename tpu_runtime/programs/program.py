"""A compiled unit of work: a pure function, and the shapes and shardings that it is compiled for.

The same programs run on the devices, and are compiled for described devices by `plan`.
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
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ...attention.policy import Kernel
from ...kernels import dispatch
from ...sharding.chips import find_chip
from ...sharding.mesh import Device, Mesh, make_mesh
from ...sharding.shape import MeshShape
from ..cache.store import signature
from ..machine import fallbacks
from ..machine.fallbacks import Fallbacks
from ..precision import Precision

log = logging.getLogger(__name__)

DENOISE_STEP = "denoise_step"  # prefix of the denoiser's program names, by which plan and benchmarks find them

Config = Mapping[str, Any]

# Mark in the names of weights of control networks of a program (see `controls.join_weights`).
CONTROL_MARK = "/"

# Held to build modules and to trace them: torchax's enabled state is shared by all threads. XLA's compilation, the long
# part, does not need it, and releases Python's lock.
TRACE_LOCK = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """Target of compilation."""

    devices: tuple[Device, ...]
    precision: Precision
    pictures: Precision | None = None  # of image encoders; None: `precision`
    kernel: Kernel = "auto"  # whether Pallas kernels are used, see `AttentionPolicy`
    # Kernels and options that are not used; by default those that the environment switches off.
    fallbacks: Fallbacks = field(default_factory=fallbacks.fallbacks_from_environment)

    def mesh(self, shape: MeshShape) -> Mesh:
        return make_mesh(self.devices, shape)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.precision)


def step_compiler_options(mesh: Mesh) -> Mapping[str, str]:
    """Return libtpu's options for a denoising step: faster products, overlapped transfers. Empty for other devices.

    Tried options and their figures are in docs/LOG.md.
    """
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return {}
    options = {"xla_tpu_enable_async_all_to_all": "true"}
    chip = find_chip(device.device_kind)
    if chip and chip.scoped_vmem_mib:
        options["xla_tpu_scoped_vmem_limit_kib"] = str(chip.scoped_vmem_mib * 1024)
    if chip and chip.gathers_on_sparse_core:
        for kind in ("all_gather", "reduce_scatter"):
            options[f"xla_tpu_enable_sparse_core_collective_offload_{kind}"] = "true"
        # The scheduler underestimates gathers, and starts some of the weights' too late to be hidden. With `tp`, tokens
        # are gathered: started sooner, they would delay the reduce-scatters that alternate with them.
        if mesh.shape["tp"] == 1:
            options["xla_tpu_sparse_core_all_gather_latency_multiplier"] = "4"
    return options


def shape_struct(
    mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, *axes: str | tuple[str, ...] | None
) -> jax.ShapeDtypeStruct:
    """Return a shape on `mesh`, with mesh axes `axes` of its leading dimensions.

    shape, dtype: of the array.
    """
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


@dataclass(frozen=True, kw_only=True)
class Program:
    """Function to compile, `fn(weights, *args)` or `fn(*args)`; arguments are `ShapeDtypeStruct`s with shardings."""

    name: str
    fn: Callable[..., PyTree]
    args: tuple[PyTree, ...]  # a named tuple if callers access single ones
    # by parameter name, of control networks too (see `controls.join_weights`); None: `fn` has no weights
    weights: Mapping[str, jax.ShapeDtypeStruct] | None = None
    components: tuple[str, ...] = ()  # the weights are those of any one of these
    mesh: Mesh
    precision: Precision
    donate: tuple[int, ...] = ()  # indices in `args` of arrays that the program may overwrite
    out_shardings: PyTree = None
    runs: int = 1  # executions in one generation
    compiler_options: Mapping[str, str] = field(default_factory=dict)  # of libtpu, by name
    rungs: dispatch.KernelFallbacks = field(default_factory=dispatch.KernelFallbacks)  # fallbacks of kernels

    @functools.cached_property
    def own_weights(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the weights without those of control networks."""
        return {name: want for name, want in (self.weights or {}).items() if CONTROL_MARK not in name}

    @functools.cached_property
    def weights_digest(self) -> str:
        """Return a hash that is equal for programs whose own weights have equal names, shapes and formats."""
        return digest_weights(self.own_weights)

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """Return all arguments of `fn`, in order."""
        return tuple(self.args) if self.weights is None else (self.weights, *self.args)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Hold the tracing lock and set everything that the program's code looks up while it is traced and lowered."""
        # float32 means float32: by default a TPU multiplies float32 matrices in bfloat16.
        highest = jax.default_matmul_precision("highest") if self.precision == "float32" else contextlib.nullcontext()
        with TRACE_LOCK, highest, _target(self.mesh), dispatch.use_fallbacks(self.rungs):
            yield

    @functools.cached_property
    def _traced(self) -> jax.stages.Traced:
        before = len(self.arguments) - len(self.args)
        donated = tuple(before + index for index in self.donate)
        return jax.jit(self.fn, donate_argnums=donated, out_shardings=self.out_shardings).trace(*self.arguments)

    @functools.cached_property
    def _results(self) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._traced.out_info)

    def lower(self) -> jax.stages.Lowered:
        """Return the lowered program."""
        with self._tracing():
            lowered, _ = self._traced.lower(), self._results
            del vars(self)["_traced"]  # megabytes, for as long as the program is loaded
            return lowered

    def results(self) -> PyTree:
        """Return the shapes of the results of `fn`.

        Tracing for them takes seconds; `lower` then does not trace again.
        """
        if "_results" in vars(self):  # known: do not wait for another thread's tracing
            return self._results
        with self._tracing():
            return self._results

    def compile(self, lowered: jax.stages.Lowered | None = None) -> jax.stages.Compiled:
        """Return the compiled program with its `compiler_options`.

        lowered: the lowered program, if it exists already.
        """
        return (lowered or self.lower()).compile(compiler_options=dict(self.compiler_options))

    def used_weight_bytes(self, compiled: jax.stages.Compiled) -> int:
        """Return the bytes on one chip of the weights that the `compiled` program uses: JAX drops unused ones."""
        if self.weights is None:
            return 0
        used, _ = compiled.input_shardings
        return sum(shard_bytes(self.weights[name]) for name, sharding in used[0].items() if sharding is not None)

    def zeros(self) -> tuple[PyTree, PyTree]:
        """Return zeros instead of the results of a `model_spec.Call`, without running the program.

        They use no memory, but host code may slice and join them. The second value has the shapes of
        carried arrays.
        """
        result, carried, _ = self.results()
        return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), result), carried


def digest_weights(weights: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    """Return a hash that is equal for weights of equal names, shapes and formats."""
    return signature(sorted((name, want.shape, str(want.dtype)) for name, want in weights.items()))


@contextlib.contextmanager
def _target(mesh: Mesh) -> Iterator[None]:
    """Lower kernels for the mesh's devices inside the context, not for those of this process (see `plan`)."""
    if mesh.devices.flat[0].platform == "tpu":
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    else:
        yield


def shard_bytes(leaf: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Return the bytes of an array `[...]`, or of its shape, on one of its devices."""
    size = leaf.dtype.itemsize
    for dim in leaf.sharding.shard_shape(leaf.shape):
        size *= dim
    return size
