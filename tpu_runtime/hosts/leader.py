"""Process 0: says what all hosts run, waits for them where they must agree, and knows when one is gone."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..line.records import Answer, Ask, AskRows, At, Bye, Stop
from ..progress import Progress
from .members import STUCK_S, Member, Members
from .together import Ending, HostsError, Result, gravest

# How often who waits for a host looks whether the user cancelled, and after how long it says for whom.
LOOK_S, SAY_S = 0.2, 2.0
# How long it may take until it is known that a host is gone, which the chips may notice first.
TELL_S = 1.0


class Leader(Members):
    @contextlib.contextmanager
    def joining(self, progress: Progress) -> Iterator[None]:
        """Waits for all followers, then joins their chips to this process's; raises `HostsError` for those missing. The
        chips are started within.
        """
        with self._at_work(progress) as guarded:
            self._gather(guarded)
            yield

    def close(self) -> None:
        """Lets the followers go; the process ends."""
        self._tell(Bye("the leader ended"))

    # -- see `Together` ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, name: str, arguments: Mapping[str, Any], progress: Progress) -> Iterator[Progress]:
        with self._at_work(progress) as guarded:
            self.tell(name, arguments)
            yield guarded

    def tell(self, request: str, arguments: Mapping[str, Any]) -> None:
        self._tell(Ask(request, dict(arguments)))

    def agree(self, what: str, state: Any = None) -> bool:
        self._check_progress()
        states = [state]
        for member in self.members():
            if (message := self._next(member)) is None:
                raise HostsError(f"{member.title} ended the stage early; its checkpoint differs.")
            if message.what != what:
                raise HostsError(
                    f"Hosts would do different things: {member} {message.what}, the leader {what}. Their checkpoints, "
                    "LoRAs or memory differ; make them the same."
                )
            states.append(message.state)
        is_same = all(other == states[0] for other in states)
        self._tell(Answer("go", is_same))
        return is_same

    def decide(self, value: Result) -> Result:
        self._tell(Answer("decided", value))
        return value

    def rows(self) -> list[dict[str, Any]]:
        self._tell(AskRows())
        return [row for member in self.members() for row in member.rows]

    # -- how an attempt ends -------------------------------------------------------------------------------------------

    def _wait_for_ends(self, deadline: float | None = None) -> None:
        """Until all followers have ended the attempt. A `deadline` is for those that were told to stop."""
        for member in self.members():
            while self._next(member, deadline) is not None:
                member.link.tell(Stop())  # it waits to agree, and there is nothing more to do

    def _verdict(self, own: Ending | None, error: BaseException | None) -> tuple[Ending | None, str]:
        """After an error here, or elsewhere, or a cancel, once the others have ended too."""
        if error is not None:
            is_of_chips = isinstance(error, RuntimeError) and not isinstance(error, HostsError)
            # They may notice first that a host is gone, in words of their own.
            self._raise_if_lost(error, TELL_S if is_of_chips else 0.0)
            self._tell(Stop())
            self._wait_for_ends(time.monotonic() + STUCK_S)
        failures = [failure for member in self.members() if (failure := member.failure())]
        verdict = gravest([own, *(failure.ending for failure in failures)])
        for member in self.members():
            member.forget_attempt()
        self._tell(Answer("verdict", verdict))
        return verdict, next((str(failure) for failure in failures if failure.ending == verdict), "")

    def _next(self, member: Member, deadline: float | None = None) -> At | None:
        """A follower's next word in an attempt; None once it has ended that. Meanwhile the user sees for whom all wait,
        and may cancel; or it has until a `deadline`.
        """
        began, said = time.monotonic(), ""
        while member.ended is None:
            if (message := member.next(LOOK_S)) is not None:
                return message
            self._raise_if_lost()
            if deadline is None:
                self._check_progress()
                text = f"Waiting for {member}{': ' if member.text else ''}{member.text}"
                if time.monotonic() - began > SAY_S and text != said and self._running:
                    said = text
                    self._running.text(text)
            elif time.monotonic() > deadline:
                self._lost(f"{member.title} does not stop.")
        return None

    def _check_progress(self) -> None:
        if self._running is not None:
            self._running.check_cancelled()
