"""What an engine asks of its hosts: to announce a stage, and to take the same turn at the same place.

What runs on all chips may not run on some hosts only: these would wait for the others for ever. So hosts agree before
each program, and about how each attempt at a stage ended. A process alone agrees with itself.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from ..progress import Progress

Result = TypeVar("Result")
# How an attempt ended that did not succeed, the gravest first: for good; out of memory, so that it is worth a second
# one with nothing else loaded; it can not fit.
Ending = Literal["failed", "again", "no room"]
ENDINGS: tuple[Ending, ...] = ("failed", "again", "no room")
# Exit code of a process that wants to be started again (EX_TEMPFAIL).
RESTART = 75


class HostsError(RuntimeError):
    """Hosts that are missing, gone, or in disagreement; a sentence for the user."""


class Elsewhere(HostsError):
    """Another host's attempt did not succeed."""

    def __init__(self, ending: Ending, sentence: str) -> None:
        super().__init__(sentence)
        self.ending: Ending = ending


class Stopped(Exception):
    """In a follower: the leader ends this attempt."""


class Together:
    """The hosts of an engine, as its one thread that runs stages sees them; this one is a process with all chips."""

    is_leader = True

    def stage(
        self, name: str, arguments: Mapping[str, Any], progress: Progress
    ) -> contextlib.AbstractContextManager[Progress]:
        """Lets all hosts run a stage; gives the progress to run it with."""
        return contextlib.nullcontext(progress)

    def tell(self, request: str, arguments: Mapping[str, Any]) -> None:
        """Lets the followers call a method of the engine between stages."""

    def attempt(self, work: Callable[[], Result], ending: Callable[[BaseException], Ending]) -> Result:
        """`work` of all hosts: succeeds where it does everywhere. Else raises its own error if that is the gravest, or
        `Elsewhere`; `ending` classifies errors.
        """
        error: BaseException | None = None
        result, own = None, None
        try:
            try:
                result = work()
                self._wait_for_ends()
            except BaseException as raised:
                error, own = raised, None if isinstance(raised, Elsewhere | Stopped) else ending(raised)
            verdict, sentence = self._verdict(own, error)
            if error is not None and own is not None and own == verdict:
                raise error
            if verdict is not None:
                raise Elsewhere(verdict, sentence)
            return result  # pyright: ignore[reportReturnType] - `work` gave it, or nobody needs it
        finally:
            error = None  # its traceback holds this frame, and arrays: the circle would keep these on the chips

    def _wait_for_ends(self) -> None:
        """Until the attempt has ended on the others, where this one waits for them."""

    def _verdict(self, own: Ending | None, error: BaseException | None) -> tuple[Ending | None, str]:
        """The gravest ending of all, and the sentence of a host that has it; this one's is `own`, of `error`."""
        return own, ""

    def agree(self, what: str, state: Any = None) -> bool:
        """Waits until all hosts are about to do `what`, and gives whether all said the same `state`. Raises if one is
        about to do something else.
        """
        return True

    def decide(self, value: Result) -> Result:
        """The leader's value, on all hosts."""
        return value

    def rows(self) -> list[dict[str, Any]]:
        """The chips of the other hosts, as they were lately (see `monitor.snapshot`)."""
        return []
