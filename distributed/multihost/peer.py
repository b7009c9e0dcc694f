"""The leader's view of a follower, and the progress of a stage that several hosts run."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...tpu_runtime.progress import Preview, Progress
from ..rpc.connection import Connection
from ..rpc.messages import AttemptEnded, BarrierReached, ChipStats, LogLine, StatusText
from .coordinator import ChipRow, RemoteAttemptFailed

FOLLOWER_MESSAGES, _LOG_LINES = (BarrierReached, AttemptEnded, LogLine, ChipStats, StatusText), 5


class Peer:
    """A follower, as the leader sees it. The connections' loop calls `handle`; another thread reads the rest."""

    def __init__(self, process: int, address: str, link: Connection) -> None:
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

    def handle(self, message: Any) -> None:
        """Store or queue a message of the follower."""
        if isinstance(message, StatusText):
            self.text = message.text
        elif isinstance(message, LogLine):
            self.log.append(message.text)
        elif isinstance(message, ChipStats):
            self.rows = message.rows
        elif isinstance(message, AttemptEnded):
            self.ended = message
            self._messages.put(None)
        else:
            self._messages.put(message)

    def next(self, timeout_s: float) -> BarrierReached | None:
        """Return the follower's next message of this attempt; None after `timeout_s`, or once its attempt has ended."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(timeout=timeout_s)

    def failure(self) -> RemoteAttemptFailed | None:
        """Return the error of the follower's attempt, or None."""
        outcome = self.ended
        return (
            RemoteAttemptFailed(outcome.ending, f"{self.title}: {outcome.error}")
            if outcome and outcome.ending
            else None
        )

    def forget_attempt(self) -> None:
        """Reset the state of the attempt."""
        self.ended: AttemptEnded | None = None
        self._messages: queue.SimpleQueue[BarrierReached | None] = queue.SimpleQueue()


@dataclass(frozen=True, kw_only=True)
class GuardedProgress:
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
