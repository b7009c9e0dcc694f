"""Process 0: says what all hosts run, waits for them where they must agree, and knows when one is gone."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..line.records import Answer, Ask, AskRows, At, Bye, Ended, Stop
from ..progress import Preview, Progress
from .members import Member, Members
from .place import Place
from .together import Elsewhere, Ending, HostsError, Result, Together, gravest

log = logging.getLogger(__name__)

# How often who waits for a host looks whether the user cancelled, and after how long it says for whom.
LOOK_S, SAY_S = 0.2, 2.0
# How long a host may take to end an attempt that is over: then it is stuck in a program that others have left.
STUCK_S = 30.0
# How long a stage may take to end by itself once a host is gone, and to be told so.
GRACE_S, TELL_S = 5.0, 1.0


@dataclass(frozen=True, kw_only=True)
class _Guarded:
    """A host's progress that also ends when another host fails or is gone."""

    inner: Progress
    check: Callable[[], None]

    def text(self, message: str) -> None:
        self.inner.text(message)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self.inner.step(done, total, unit, preview)

    def check_cancelled(self) -> None:
        self.check()
        self.inner.check_cancelled()


class Leader(Together):
    """`end` is called with a sentence, in a thread of its own, when the process must be started again;
    with the progress of the stage if that is stuck on the chips, which nothing can interrupt.
    """

    def __init__(self, place: Place, end: Callable[[str, Progress | None], None]) -> None:
        self._end = end
        self._members = Members(place, self._lost, self._failed)
        self._running: _Guarded | None = None
        self._idle = threading.Event()
        self._idle.set()

    def listen(self) -> None:
        """Takes followers in from now on."""
        self._members.listen()

    @contextlib.contextmanager
    def joining(self, progress: Progress) -> Iterator[None]:
        """Waits for all followers, then joins their chips to this process's; raises `HostsError` for those missing. The
        chips are started within.
        """
        with self._at_work(progress) as guarded:
            self._members.gather(guarded)
            yield

    def close(self) -> None:
        """Lets the followers go; the process ends."""
        self._members.tell(Bye("the leader ended"))

    # -- see `Together` ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, name: str, arguments: Mapping[str, Any], progress: Progress) -> Iterator[Progress]:
        with self._at_work(progress) as guarded:
            self._members.tell(Ask(name, dict(arguments)))
            yield guarded

    def tell(self, request: str, arguments: Mapping[str, Any]) -> None:
        self._members.tell(Ask(request, dict(arguments)))

    def attempt(self, work: Callable[[], Result], ending: Callable[[BaseException], Ending]) -> Result:
        error: BaseException | None = None
        failures: list[Elsewhere] = []
        result: Any = None
        try:
            try:
                result = work()
                self._wait_for_ends()
            except BaseException as raised:
                error = raised
                self._end_attempt(error)
            own = None if error is None or isinstance(error, Elsewhere) else ending(error)
            failures = [_failure(member, message) for member in self._members.all() if (message := member.failure())]
            verdict = gravest([own, *(failure.ending for failure in failures)])
            for member in self._members.all():
                member.forget_attempt()
            self._members.tell(Answer("verdict", verdict))
            if error is not None and verdict == own:
                raise error
            if verdict is not None:
                raise next(failure for failure in failures if failure.ending == verdict)
            return result
        finally:
            # Their tracebacks hold this frame, and arrays: the circle would keep these on the chips.
            error, failures = None, []

    def _end_attempt(self, error: BaseException) -> None:
        """After an error here, or elsewhere, or a cancel: until the others have ended too."""
        if isinstance(error, RuntimeError) and not isinstance(error, HostsError):
            self._members.wait_lost(TELL_S)  # the chips may notice first that a host is gone, in words of their own
        self._raise_if_lost(error)
        self._members.tell(Stop())
        self._wait_for_ends(time.monotonic() + STUCK_S)

    def agree(self, what: str, state: Any = None) -> bool:
        self._check_progress()
        states = [state]
        for member in self._members.all():
            message = self._next(member)
            if message.what != what:
                raise HostsError(
                    f"Hosts would do different things: {member} {message.what}, the leader {what}. Their checkpoints, "
                    "LoRAs or memory differ; make them the same."
                )
            states.append(message.state)
        is_same = all(other == states[0] for other in states)
        self._members.tell(Answer("go", is_same))
        return is_same

    def decide(self, value: Result) -> Result:
        self._members.tell(Answer("decided", value))
        return value

    def rows(self) -> list[dict[str, Any]]:
        self._members.tell(AskRows())
        return [row for member in self._members.all() for row in member.rows]

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _next(self, member: Member) -> At:
        """A follower's next word; meanwhile the user sees for whom all wait, and may cancel."""
        waiting = self._waiting(member)
        while (message := member.next(LOOK_S)) is None:
            self._check_progress()
            if member.ended:
                raise HostsError(f"{member.title} ended the stage early; its checkpoint differs.")
            waiting()
        return message

    def _wait_for_ends(self, deadline: float | None = None) -> None:
        """Until all followers have ended the attempt. A `deadline` is for those that were told to stop."""
        for member in self._members.all():
            waiting = self._waiting(member)
            while member.ended is None:
                message = member.next(LOOK_S)
                if message is not None:
                    member.tell(Stop())  # it waits to agree, and there is nothing more to do
                elif deadline is None:
                    self._check_progress()
                    waiting()
                elif time.monotonic() > deadline:
                    self._lost(f"{member.title} does not stop.")
                self._raise_if_lost()

    def _waiting(self, member: Member) -> Callable[[], None]:
        """Says after a while for whom all wait, and what that does."""
        began, said = time.monotonic(), ""

        def say() -> None:
            nonlocal said
            text = f"Waiting for {member}{': ' if member.text else ''}{member.text}"
            if time.monotonic() - began > SAY_S and text != said and self._running:
                said = text
                self._running.text(text)

        return say

    def _check_progress(self) -> None:
        if self._running is not None:
            self._running.check_cancelled()

    def _check(self) -> None:
        """For the stage's thread: raises where it need not go on."""
        self._raise_if_lost()
        for member in self._members.all():
            if (message := member.failure()) is not None:
                raise _failure(member, message)

    @contextlib.contextmanager
    def _at_work(self, progress: Progress) -> Iterator[_Guarded]:
        """While the stage's thread is told of hosts that are gone; if it is stuck, its progress is."""
        self._raise_if_lost()
        self._running = _Guarded(inner=progress, check=self._check)
        self._idle.clear()
        try:
            yield self._running
        finally:
            self._running = None
            self._idle.set()

    # -- hosts that are gone -------------------------------------------------------------------------------------------

    def _raise_if_lost(self, cause: BaseException | None = None) -> None:
        if self._members.lost is not None:
            raise HostsError(self._members.lost) from cause

    def _failed(self, member: Member, message: Ended) -> None:
        """A follower's attempt failed. If this process waits for it on the chips, nothing else ends that."""

        def look() -> None:
            if member.failure() is message:
                self._lost(f"{member.title} failed: {message.error}")

        timer = threading.Timer(STUCK_S, look)
        timer.daemon = True
        timer.start()

    def _lost(self, why: str) -> None:
        if self._members.lose(why):
            threading.Thread(target=self._end_all, name="comfyui-tpu-hosts-end", daemon=True).start()

    def _end_all(self) -> None:
        sentence = self._members.lost
        assert sentence is not None
        log.error("%s", sentence)
        self._idle.wait(GRACE_S)
        running = self._running
        self._end(sentence, running.inner if running else None)


def _failure(member: Member, message: Ended) -> Elsewhere:
    return Elsewhere(message.ending, f"{member.title}: {message.error}")
