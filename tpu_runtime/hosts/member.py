"""The leader's view of a follower, and the progress of a stage that several hosts run."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..line.link import MachineLink
from ..line.records import At, ChipRows, Ended, Log, Text
from ..progress import Preview, Progress
from .together import ChipRow, Elsewhere

HEARD, _LOG_LINES = (At, Ended, Log, ChipRows, Text), 5


class Member:
    """A follower, as the leader sees it. The connections' loop calls `hear`; another thread reads the rest."""

    def __init__(self, process: int, address: str, link: MachineLink) -> None:
        self.process, self.link = process, link
        self.text = ""
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.rows: list[ChipRow] = []
        self._name = f"{process} ({address})"
        self.forget_attempt()

    def __str__(self) -> str:
        return f"host {self._name}"

    @property
    def title(self) -> str:
        """Return the name for the start of a sentence."""
        return f"Host {self._name}"

    def hear(self, message: Any) -> None:
        """Store or queue a message of the follower."""
        if isinstance(message, Text):
            self.text = message.text
        elif isinstance(message, Log):
            self.log.append(message.text)
        elif isinstance(message, ChipRows):
            self.rows = message.rows
        elif isinstance(message, Ended):
            self.ended = message
            self._messages.put(None)
        else:
            self._messages.put(message)

    def next(self, timeout_s: float) -> At | None:
        """Return the follower's next message of this attempt; None after `timeout_s`, or once its attempt has ended."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(timeout=timeout_s)

    def failure(self) -> Elsewhere | None:
        """Return the error of the follower's attempt, or None."""
        outcome = self.ended
        return Elsewhere(outcome.ending, f"{self.title}: {outcome.error}") if outcome and outcome.ending else None

    def forget_attempt(self) -> None:
        """Reset the state of the attempt."""
        self.ended: Ended | None = None
        self._messages: queue.SimpleQueue[At | None] = queue.SimpleQueue()


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A host's progress that also raises if another host fails or disconnects."""

    inner: Progress
    check: Callable[[], None]  # raises if another host failed

    def text(self, message: str) -> None:
        self.inner.text(message)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self.inner.step(done, total, unit, preview)

    def check_cancelled(self) -> None:
        self.check()
        self.inner.check_cancelled()
