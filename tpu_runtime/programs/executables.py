"""Compiled programs, as they are called and accounted for."""

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import jax

from ...sharding import placement
from .. import refusal
from ..cache.xla_cache import cached_by_thread, compilations
from ..machine import fallbacks
from ..refusal import DoesNotFit
from .program import Program


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
        placed = placement.put_all(args, self._shardings)
        global _last
        self.runs += 1
        _last = weakref.ref(self)  # what is unloaded must not stay for this
        return self.compiled(weights, *placed)

    @functools.cached_property
    def _shardings(self) -> Any:
        return jax.tree.map(lambda want: want.sharding, tuple(self.program.args))

    @functools.cached_property
    def kernels(self) -> tuple[str, ...]:
        """The Pallas kernels that it consists of, by the names in `names.KERNELS`."""
        return fallbacks.named(self.compiled.as_text() or "")

    @property
    def parts(self) -> tuple["Executable", ...]:
        """The loaded programs that it consists of."""
        return (self,)

    @property
    def workspace_bytes(self) -> int:
        """Bytes on one chip while it runs, without its weights and its code: other arguments, results, temporaries."""
        return self._bytes[0]

    @property
    def code_bytes(self) -> int:
        """What its code takes of one chip for as long as it is loaded."""
        return self._bytes[1]

    @functools.cached_property
    def _bytes(self) -> tuple[int, int]:
        """Those of `workspace_bytes` and `code_bytes`. XLA counts anew each time that it is asked."""
        if (stats := self.compiled.memory_analysis()) is None:
            return 0, 0
        weights = self.program.weight_bytes_in(self.compiled)
        held = stats.argument_size_in_bytes - weights + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return max(0, held) + stats.temp_size_in_bytes, stats.generated_code_size_in_bytes


_last: weakref.ref[Executable] | None = None


def last_started() -> Executable | None:
    """The program that this process started last, on whatever devices."""
    return _last() if _last is not None else None


def obtain(program: Program) -> tuple[Executable, bool]:
    """The program, compiled, and whether XLA had to: its persistent cache may hold what it would make.

    Raises `DoesNotFit` where the compiler refuses it for lack of the chip's memory, and `Unsupported` where it refuses
    a kernel or an option.
    """
    compilations()  # counts from now on
    before = cached_by_thread()
    try:
        compiled = program.compile()
    except Exception as error:
        if unsupported := fallbacks.explained(error, program.name, program.compiler_options):
            raise unsupported from error
        refused = refusal.parse(str(error)) if isinstance(error, jax.errors.JaxRuntimeError) else None
        if refused is None:
            raise  # another complaint, or memory that is full only now
        raise DoesNotFit(refused) from None
    return Executable(program=program, compiled=compiled), cached_by_thread() == before
