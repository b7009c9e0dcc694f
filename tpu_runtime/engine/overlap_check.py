"""Comparison of each new program's first real step with and without overlapped transfers, bit by bit.

A faulty overlapped transfer can give wrong but finite numbers that no other check detects. The step's arguments and
results are kept on the host, the program without overlap is compiled in the background, and the chips run it between
two stages. The machine's record stores the verdict, so each program is compared once per machine.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from ..machine.fallbacks import WITHOUT_OVERLAP
from ..machine.record import MachineRecord
from ..programs.executables import Executable
from ..programs.weights import Weights
from ..progress import run_in_daemon_thread
from .program_cache import PendingCompilation, ProgramRequest

log = logging.getLogger(__name__)

THREAD = "comfyui-tpu-compare"
# Longer than any compilation; a request that is dropped from the queue never ends.
MAX_WAIT_S = 2 * 3600.0


class Programs(Protocol):
    """Program cache of a process."""

    def note(self, wanted: ProgramRequest) -> PendingCompilation | Executable: ...


class HeldPrograms(Protocol):
    """Device cache of a process."""

    def has_room(self, program: Executable, *, runs: bool = False) -> bool: ...
    def drop_program(self, digest: str) -> None: ...


class Verdicts(Protocol):
    """Fallback policy, which stores verdicts in the machine's record."""

    @property
    def record(self) -> MachineRecord: ...
    def record_comparison(self, digest: str, title: str, *, is_same: bool) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """A step that the chips are about to run."""

    wanted: ProgramRequest  # its program
    without: ProgramRequest  # the same without overlapped transfers
    args: tuple[Any, ...]  # copies on the host: a program or a sampler may overwrite the originals


@dataclass(kw_only=True)
class OverlapChecks:
    """The comparisons of an engine, whose `lock` is held while the chips compute one."""

    programs: Programs
    chips: HeldPrograms
    verdicts: Verdicts
    lock: threading.RLock  # pyright: ignore[reportGeneralTypeIssues]
    _begun: set[str] = field(default_factory=set)

    def first_step(
        self, program: object, args: tuple[Any, ...], make_request: Callable[[bool], ProgramRequest]
    ) -> FirstStep | None:
        """Return the step that `program` is about to run with `args`, if it is to be compared; else None.

        It is compared if the program is new to this machine and overlaps transfers.
        make_request: returns the program with overlap (True) or without.
        """
        if not isinstance(program, Executable):
            return None
        options = program.program.compiler_options
        if WITHOUT_OVERLAP.left(options) == dict(options):
            return None
        wanted = make_request(True)
        if wanted.digest in self._begun or wanted.digest in self.verdicts.record.overlap:
            return None
        self._begun.add(wanted.digest)
        copies = jax.tree.map(np.array, jax.device_get(tuple(args)))
        return FirstStep(wanted=wanted, without=make_request(False), args=copies)

    def compare(self, step: FirstStep, weights: Weights, results: Any) -> None:
        """Compare a step's `results` in a thread, as soon as the other form is compiled and no stage runs.

        results: the last one tells whether they are finite; a step that is not is retried without overlap anyway.
        """
        kept, held = jax.device_get(results), dict(weights)
        if not np.all(kept[-1]):
            return
        run_in_daemon_thread(lambda: self._quietly(step, held, kept), THREAD)

    def _quietly(self, step: FirstStep, weights: Mapping[str, jax.Array], results: Any) -> None:
        try:
            self._compare(step, weights, results)
        except Exception as error:  # of any kind: the step itself succeeded
            log.warning("%s was not compared with its version without overlap: %s", step.wanted.title, error)

    def _compare(self, step: FirstStep, weights: Mapping[str, jax.Array], results: Any) -> None:
        coming = self.programs.note(step.without)
        if isinstance(coming, PendingCompilation):
            coming.done.wait(MAX_WAIT_S)
        other = coming.found if isinstance(coming, PendingCompilation) else coming
        if other is None:
            return
        with self.lock:
            is_gone = any(weight.is_deleted() for weight in weights.values())
            if is_gone or not self.chips.has_room(other, runs=True):
                return  # another process compares it
            again = jax.device_get(other(dict(weights), *step.args))
            self.chips.drop_program(step.without.digest)
            sentence = self.verdicts.record_comparison(
                step.wanted.digest, step.wanted.title, is_same=have_same_bits(results, again)
            )
        if sentence:
            log.warning("%s", sentence)


def have_same_bits(one: Any, other: Any) -> bool:
    """Return whether two results have arrays of the same shapes and types with the same bits."""
    left, right = ([np.asarray(leaf) for leaf in jax.tree.leaves(results)] for results in (one, other))
    return len(left) == len(right) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for a, b in zip(left, right, strict=True)
    )
