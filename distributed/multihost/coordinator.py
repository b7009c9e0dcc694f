"""The hosts of an engine: announcing stages, barriers before each program, and the common outcome of an attempt.

A program that runs on all chips would deadlock if only some hosts launched it. So hosts synchronize before each
program, and agree how each attempt at a stage ended. A single process needs no synchronization.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from ...tpu_runtime.progress import Progress

Result = TypeVar("Result")
Arguments = Mapping[str, Any]  # of a stage, or of a method of the engine
ChipRow = dict[str, Any]  # statistics of a chip (see `monitor.snapshot`)
# Outcomes of an attempt that did not succeed, the gravest first: a final error; out of memory, so that a second attempt
# with nothing else loaded may succeed; too large for the memory.
AttemptOutcome = Literal["failed", "again", "no room"]
OUTCOMES: tuple[AttemptOutcome, ...] = ("failed", "again", "no room")
# Exit code of a process that is to be started again (EX_TEMPFAIL).
RESTART_EXIT_CODE = 75


class HostsError(RuntimeError):
    """Hosts are missing, lost or in disagreement; the message is a sentence for the user."""


class RemoteAttemptFailed(HostsError):
    """The attempt of another host did not succeed."""

    def __init__(self, ending: AttemptOutcome, sentence: str) -> None:
        super().__init__(sentence)
        self.ending: AttemptOutcome = ending


class AttemptAborted(Exception):
    """Raised in a follower when the leader aborts the attempt."""


class HostGroup:
    """The hosts of an engine, seen by its thread that runs stages. This class is a single process with all chips."""

    is_leader = True

    def stage(self, name: str, arguments: Arguments, progress: Progress) -> contextlib.AbstractContextManager[Progress]:
        """Announce a stage to all hosts. Enters the progress to run it with.

        name, arguments: of the stage. progress: of this host.
        """
        return contextlib.nullcontext(progress)

    def tell(self, request: str, arguments: Arguments) -> None:
        """Announce a call of an engine's method to the followers, between stages."""

    @contextlib.contextmanager
    def attempt(self, ending: Callable[[BaseException], AttemptOutcome]) -> Iterator[None]:
        """Run the block on all hosts; it succeeds if it does on all of them.

        ending: classifies an error. Otherwise raises this host's own error if it is the gravest, or else
          `RemoteAttemptFailed`.
        """
        error: BaseException | None = None
        outcome = None
        try:
            try:
                yield
                self._wait_for_outcomes()
            except BaseException as raised:
                error, outcome = (
                    raised,
                    None if isinstance(raised, RemoteAttemptFailed | AttemptAborted) else ending(raised),
                )
            verdict, sentence = self._verdict(outcome, error)
            if error is not None and outcome is not None and outcome == verdict:
                raise error
            if verdict is not None:
                raise RemoteAttemptFailed(verdict, sentence)
        finally:
            error = None  # its traceback refers to this frame and to arrays: the cycle would keep these on the chips

    def _wait_for_outcomes(self) -> None:
        """Wait until the attempt has ended on the other hosts, if this one waits for them."""

    def _verdict(self, own: AttemptOutcome | None, error: BaseException | None) -> tuple[AttemptOutcome | None, str]:
        """Return the gravest outcome of all hosts, and the sentence of a host with it.

        own: the outcome of this host. error: its exception. None for both: success.
        """
        return own, ""

    def barrier(self, what: str, state: object = None) -> bool:
        """Wait until all hosts are about to do `what`, and return whether all passed an equal `state`.

        Raises HostsError if a host is about to do something else.
        """
        return True

    def broadcast(self, value: Result) -> Result:
        """Return the leader's value on all hosts."""
        return value

    def rows(self) -> list[ChipRow]:
        """Return the most recent statistics of the other hosts' chips (see `monitor.snapshot`)."""
        return []
