"""The statistics as JSON for whoever asks, sampled at most twice a second and never on the caller's event loop."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..progress import in_daemon
from . import snapshot
from .readings import READER, Sampler, Stats

log = logging.getLogger(__name__)

# How long a sample is good for.
FRESH_S = 0.5
# Whoever asks waits so long for a new sample where there is an earlier one: a page that waits looks dead.
PROMPT_S = 0.1
# A device call in the runtime may hang; whoever asks then still gets the last sample, and a note.
PATIENCE_S = 2.0
# What the page and the terminal need to stay useful when there is no sample at all.
NOTHING: Stats = {
    **snapshot.nothing("The runtime does not answer."),
    "host": dict.fromkeys(("cpu_percent", "ram_used", "ram_total", "process_ram")),
    "notes": [],
}


class Feed:
    """One sample for all clients. `answer` belongs to one event loop; making a Feed starts nothing."""

    def __init__(
        self,
        stats: Callable[[], Stats] = snapshot.stats,
        sampler: Sampler | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._stats = stats
        self._sampler = sampler or Sampler()
        self._patience_s = patience_s
        self._pending: Future | None = None
        self._asked_s = -FRESH_S
        self._last: Stats = NOTHING
        self._body = b""
        self._body_s = -FRESH_S

    async def answer(self) -> bytes:
        """The newest statistics as a JSON object: at most `FRESH_S` old where a sample takes no longer than `PROMPT_S`,
        else those before while this one is taken, and after `PATIENCE_S` with a note that says how old.
        """
        if self._body and time.monotonic() - self._body_s < FRESH_S:
            return self._body
        if self._pending is None:
            self._asked_s = time.monotonic()
            self._pending = in_daemon(self._sample, READER)
        pending = self._pending
        if not pending.done():
            patience_s = max(0.001, self._asked_s + self._patience_s - time.monotonic())
            # Unlike wait_for, wait cancels nothing when one client leaves: the sample belongs to the others as well.
            await asyncio.wait(
                [asyncio.wrap_future(pending)], timeout=min(patience_s, PROMPT_S) if self._body else patience_s
            )
        if not pending.done():
            if self._body and time.monotonic() - self._asked_s < self._patience_s:
                return self._body
            age_s = time.monotonic() - self._asked_s
            return self._stale(f"The runtime has not answered for {age_s:.0f} s; these numbers are old.")
        if self._pending is pending:
            self._pending = None
            self._last, self._body = pending.result()
            self._body_s = time.monotonic()
        return self._body

    def _sample(self) -> tuple[Stats, bytes]:
        try:
            stats = self._sampler.complete(self._stats())
            return stats, _encoded(stats)
        except Exception as error:  # a monitor that fails helps nobody: it shows what it has and says what is wrong
            log.warning("The monitor has no statistics", exc_info=True)
            return self._last, self._stale(f"The runtime cannot say: {type(error).__name__}: {error}")

    def _stale(self, note: str) -> bytes:
        return _encoded({**self._last, "notes": [*self._last["notes"], note]})


def _encoded(stats: Stats) -> bytes:
    """JSON that a browser can parse: it has no NaN."""
    return json.dumps(_finite(stats), allow_nan=False, default=str).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None
    return value
