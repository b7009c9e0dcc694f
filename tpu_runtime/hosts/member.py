"""A follower as its leader knows it, and the progress of a stage that is run with others."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..line.link import MachineLink
from ..line.records import At, ChipRows, Ended, Log, Text
from ..progress import Preview, Progress
from .together import Elsewhere

HEARD, _LOG_LINES = (At, Ended, Log, ChipRows, Text), 5


class Member:
    """A follower, as the leader knows it. The loop of the line hears it, another thread asks what it said."""

    def __init__(self, process: int, address: str, link: MachineLink) -> None:
        self.process, self.link = process, link
        self.text = ""
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.rows: list[dict[str, Any]] = []
        self._name = f"{process} ({address})"
        self.forget_attempt()

    def __str__(self) -> str:
        return f"host {self._name}"

    @property
    def title(self) -> str:
        """At the start of a sentence."""
        return f"Host {self._name}"

    def hear(self, message: Any) -> None:
        if isinstance(message, Text):
            self.text = message.text
        elif isinstance(message, Log):
            self.log.append(message.text)
        elif isinstance(message, ChipRows):
            self.rows = message.rows
        elif isinstance(message, Ended):
            self.ended = message
            self._said.put(None)
        else:
            self._said.put(message)

    def next(self, timeout_s: float) -> At | None:
        """What it said next within this attempt; None after a while, or once the attempt ended there."""
        with contextlib.suppress(queue.Empty):
            return self._said.get(timeout=timeout_s)

    def failure(self) -> Elsewhere | None:
        """Of an attempt that failed there."""
        ended = self.ended
        return Elsewhere(ended.ending, f"{self.title}: {ended.error}") if ended and ended.ending else None

    def forget_attempt(self) -> None:
        self.ended: Ended | None = None
        self._said: queue.SimpleQueue[At | None] = queue.SimpleQueue()


@dataclass(frozen=True, kw_only=True)
class Guarded:
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
