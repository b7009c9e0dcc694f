"""Recovery of a stage: the failures after which it is tried again, and the change that comes before each retry.

| failure | before the retry | without a further change |
|---|---|---|
| unsupported kernel or compiler option | the next fallback; the stage is opened anew | raised |
| values that are not finite | overlapped transfers are off; the stage is opened anew | raised |
| out of memory, on the chips or the host, here or on another host | one group is unloaded | `OutOfMemory` |
| a program that the compiler refuses for lack of memory | | `OutOfMemory`: unloading does not help |
| a chip that halted | | `ChipHalted`: this process cannot go on |
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax

from ...distributed.multihost.coordinator import AttemptOutcome, RemoteAttemptFailed
from .. import memory_errors
from ..machine.fallbacks import ChipHalted, Unsupported, classify_halt
from ..machine.policy import FallbackPolicy
from ..messages import compose
from ..model_spec import Settings
from ..programs import executables
from ..programs.finite_check import NotFinite
from . import memory_advice
from .memory_advice import OutOfMemory
from .stage_context import StageContext

log = logging.getLogger(__name__)

FAILURES = (
    Unsupported, NotFinite, OutOfMemory, RemoteAttemptFailed, memory_errors.CompileOutOfMemory,
    memory_errors.HostMemoryError, jax.errors.JaxRuntimeError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The policy for one opened stage. A stage that is opened anew gets another."""

    stage: StageContext
    settings: Settings | None  # of the generation, None if unknown
    policy: FallbackPolicy
    options: Callable[[], Mapping[str, str]]  # compiler options of the stage's steps, before any is left out
    unloads: Iterator[str]  # unloads one group after the other, and yields its title
    clear: Callable[[], None]  # unloads everything
    mark_lost: Callable[[ChipHalted], None]  # called before the error of a halted chip is raised

    def choose(self, failure: Exception) -> Callable[[], bool]:
        """Return the action after a failure. The action returns whether the stage has to be opened anew, or raises.

        failure: one of `FAILURES`. The caller runs the action outside of its `except` block, because the traceback of
          `failure` holds arrays. If no action can help, `failure` or a better error is raised at once.
        """
        if isinstance(failure, Unsupported | NotFinite):
            sentence = (
                self.policy.down(failure)
                if isinstance(failure, Unsupported)
                else self.policy.try_without_overlap(self.options())
            )
            if sentence is None:
                raise failure
            return functools.partial(self._open_anew, sentence)
        if isinstance(failure, memory_errors.CompileOutOfMemory):
            raise OutOfMemory(
                memory_advice.compile_refusal_message(
                    self.stage.spec, self.stage.name, self.settings, failure.refused, len(self.stage.target.devices)
                )
            ) from None
        outcome = failure.ending if isinstance(failure, RemoteAttemptFailed) else classify_failure(failure)
        if outcome == "failed":
            raise self._explain(failure) from None
        if isinstance(failure, memory_errors.HostMemoryError):
            # Arrays on the chips need no host memory, unless the host is the device.
            may_help = self.stage.target.devices[0].platform == "cpu"
            return functools.partial(self._unload, str(failure), may_help, is_host=True)
        return functools.partial(self._unload, str(failure).partition("\n")[0], outcome == "again")

    def _open_anew(self, sentence: str) -> bool:
        log.warning("%s", sentence)
        self.stage.progress.text(sentence)
        return True

    def _unload(self, reason: str, may_help: bool, *, is_host: bool = False) -> bool:
        """Unload the next group. Raises the error for the user if nothing is left to unload, or if it cannot help.

        reason: of the failure. is_host: whether the host's memory ran out.
        """
        unloaded = next(self.unloads, "") if may_help else ""
        if unloaded:
            log.warning("%s: out of memory (%s); unloaded %s, trying once more.", self.stage.name, reason, unloaded)
            self.stage.progress.text(compose("stage.retrying_after_unload", unloaded=unloaded))
            return False
        self.clear()
        if is_host:
            raise memory_errors.HostMemoryError(reason)
        raise OutOfMemory(
            memory_advice.out_of_memory_message(
                self.stage.spec, self.stage.name, self.settings, reason, len(self.stage.target.devices)
            )
        )

    def _explain(self, failure: Exception) -> Exception:
        """Return the error to raise for a failure without recovery: ChipHalted, a clearer error, or `failure`."""
        if not isinstance(failure, jax.errors.JaxRuntimeError):
            return failure
        last = executables.last_executed()
        program, kernels = (last.program.name, last.kernels) if last else (self.stage.name, ())
        halt = classify_halt(failure, program, kernels)
        if halt is None:
            return memory_errors.parse_host_error(str(failure)) or failure
        lost = self.policy.record_halt(halt)
        self.mark_lost(lost)
        return lost


def classify_failure(error: BaseException) -> AttemptOutcome:
    """Return `"no room"` if memory cannot suffice, "again" if unloading may help, "failed" for other errors."""
    if isinstance(error, OutOfMemory | memory_errors.HostMemoryError):
        return "no room"
    if not isinstance(error, jax.errors.JaxRuntimeError) or memory_errors.parse_host_error(str(error)):
        return "failed"
    return "again" if "RESOURCE_EXHAUSTED" in str(error) else "failed"
