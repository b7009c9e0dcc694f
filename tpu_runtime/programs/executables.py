"""Compiled programs: calls, and accounting of their memory."""

import functools
import weakref
from dataclasses import dataclass

import jax
from jaxtyping import PyTree

from ...sharding import placement
from .. import memory_errors
from ..cache.xla_cache import count_compilations, count_thread_hits
from ..machine import fallbacks
from ..memory_errors import CompileOutOfMemory
from .program import Program


@dataclass(eq=False, kw_only=True)
class Executable:
    """Compiled program, with its arguments' shapes and shardings."""

    program: Program
    compiled: jax.stages.Compiled
    # Launches since it was loaded. Must be equal on all hosts: a TPU identifies launches by counting them from loading.
    runs: int = 0

    def __call__(self, weights: dict[str, jax.Array], *args: PyTree) -> PyTree:
        """Run the program and return its results. Host arrays among `args` are placed by the program's shardings."""
        placed = placement.put_all(args, self._shardings)
        global _last
        self.runs += 1
        _last = weakref.ref(self)  # weak, so that an unloaded program is freed
        return self.compiled(weights, *placed)

    @functools.cached_property
    def _shardings(self) -> PyTree:
        return jax.tree.map(lambda arg: arg.sharding, tuple(self.program.args))

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """Return the program's Pallas kernels, by the names in `names.KERNELS`."""
        return fallbacks.find_kernels(self.compiled.as_text() or "")

    @property
    def parts(self) -> tuple["Executable", ...]:
        """Return the loaded programs that it consists of."""
        return (self,)

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes on one chip while it runs, besides weights and code."""
        return self._bytes[0]

    @property
    def code_bytes(self) -> int:
        """Return the bytes of its code on one chip while it is loaded."""
        return self._bytes[1]

    @functools.cached_property
    def _bytes(self) -> tuple[int, int]:
        """Return `workspace_bytes` and `code_bytes`. Cached, because XLA counts anew at each call."""
        if (stats := self.compiled.memory_analysis()) is None:
            return 0, 0
        weights = self.program.used_weight_bytes(self.compiled)
        used = stats.argument_size_in_bytes - weights + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return max(0, used) + stats.temp_size_in_bytes, stats.generated_code_size_in_bytes


_last: weakref.ref[Executable] | None = None


def last_executed() -> Executable | None:
    """Return the program that this process started last, on any devices; None before the first."""
    return _last() if _last is not None else None


def compile_or_load(program: Program) -> tuple[Executable, bool]:
    """Return the compiled program, and whether XLA compiled it: its persistent cache may have it already.

    Raises `CompileOutOfMemory` if the compiler rejects it for lack of the chip's memory, and `Unsupported` if it
    rejects a kernel or an option.
    """
    count_compilations()  # counts from now on
    before = count_thread_hits()
    try:
        compiled = program.compile()
    except Exception as error:
        if unsupported := fallbacks.classify_compile_error(error, program.name, program.compiler_options):
            raise unsupported from error
        refused = (
            memory_errors.parse_compile_error(str(error)) if isinstance(error, jax.errors.JaxRuntimeError) else None
        )
        if refused is None:
            raise  # another error, or memory that is only full now
        raise CompileOutOfMemory(refused) from None
    return Executable(program=program, compiled=compiled), count_thread_hits() == before
