"""Compiled programs that outlive the process: serialized to the cache, loaded without tracing or compiling.

An entry is keyed by the program's own key and by everything else that a compiled program depends on: the devices, the
versions, the compiler's flags and this package's source.
"""

import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from ...sharding import placement
from ...sharding.mesh import Device
from .. import refusal
from ..cache.store import Store, signature, trim_xla
from ..refusal import DoesNotFit
from .program import Program
from .xla_cache import cached_by_thread, compilations

log = logging.getLogger(__name__)

STORE = Store("programs", code=True)
PACKAGES = ("jax", "jaxlib", "libtpu", "torch", "torchax", "diffusers", "transformers")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")
# `tpu_runtime` by itself stands for its leaves: what plans, monitors or keeps weights may change without a compile.
SOURCES = ("attention/**", "sharding/**", "tpu_runtime", "tpu_runtime/models/**", "tpu_runtime/programs/**")


@dataclass(eq=False, kw_only=True)
class Executable:
    """A compiled program, with its arguments' shapes and shardings.

    `runs` is how often it ran since it was loaded. With several hosts it must be the same on all of them: a TPU tells
    one launch from the next by counting, from the moment that a program was loaded.
    """

    program: Program
    compiled: jax.stages.Compiled
    runs: int = 0

    def __call__(self, weights: dict[str, jax.Array], *args: Any) -> Any:
        """Runs it; host arrays among `args` are placed as the program wants them."""
        placed = jax.tree.map(lambda value, want: placement.put(value, want.sharding), args, tuple(self.program.args))
        self.runs += 1
        return self.compiled(weights, *placed)

    @property
    def parts(self) -> tuple["Executable", ...]:
        """The loaded programs that it is made of."""
        return (self,)

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """What one chip holds while it runs, beside its weights and its code: other arguments, results, temporaries."""
        stats = self.compiled.memory_analysis()
        if stats is None:
            return 0
        weights = self.program.weight_bytes_in(self.compiled)
        held = stats.argument_size_in_bytes - weights + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return max(0, held) + stats.temp_size_in_bytes

    @functools.cached_property
    def code_bytes(self) -> int:
        """What its code takes of one chip for as long as it is loaded."""
        stats = self.compiled.memory_analysis()
        return stats.generated_code_size_in_bytes if stats else 0


def is_stored(digest: str, devices: tuple[Device, ...]) -> bool:
    """Whether `obtain` need not compile."""
    return STORE.has(_key(digest, devices))


def obtain(digest: str, build: Callable[[], Program], devices: tuple[Device, ...]) -> tuple[Executable, bool]:
    """The program for `digest`, from the cache or compiled, and whether it was compiled.

    Raises `DoesNotFit` where the compiler refuses it for lack of memory.
    """
    key, program = _key(digest, devices), build()
    if payload := STORE.get(key):
        try:
            return Executable(program=program, compiled=_load(payload, program)), False
        except (ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError, jax.errors.JaxRuntimeError) as error:
            STORE.discard(key, f"it cannot be loaded ({_first_line(error)})")
    compilations()  # counts from now on
    from_xla_cache = cached_by_thread()
    compiled = _compile(program)
    if cached_by_thread() == from_xla_cache:
        # What XLA itself has loaded does not serialize again: the CPU's code then lacks functions.
        _keep(key, program, compiled)
        trim_xla()
    return Executable(program=program, compiled=compiled), True


def _compile(program: Program) -> jax.stages.Compiled:
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = refusal.parse(str(error))
        if refused is None:
            raise  # another complaint, or memory that is full only now
        raise DoesNotFit(refused) from None


def _load(payload: bytes, program: Program) -> jax.stages.Compiled:
    # A pickle can do anything: the store gives only what bears this cache's own seal.
    devices = list(program.mesh.devices.flat)
    return serialize_executable.deserialize_and_load(
        *pickle.loads(payload), backend=devices[0].client, execution_devices=devices
    )


def _keep(key: str, program: Program, compiled: jax.stages.Compiled) -> None:
    try:
        STORE.put(key, pickle.dumps(serialize_executable.serialize(compiled)))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        log.warning("%s cannot be kept for the next process: %s", program.name, _first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _key(digest: str, devices: tuple[Device, ...]) -> str:
    where = [(device.id, device.device_kind, getattr(device, "coords", None)) for device in devices]
    client = devices[0].client
    # What is compiled in one process of several is for the devices of that process.
    process = (client.process_index(), client.local_device_count())
    return signature(digest, where, process, client.platform_version, environment())


def environment() -> tuple[Any, ...]:
    """What compiled programs depend on beside their own description."""
    return (_versions(), tuple(os.environ.get(name, "") for name in FLAGS), source_digest())


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {_version(name)}" for name in PACKAGES)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"  # libtpu where there is no TPU


@functools.cache
def source_digest(root: Path = Path(__file__).parents[2]) -> str:
    """Of the source that programs are traced from, in the pack's folder `root`."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(root.glob(f"{folder}/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
