"""The statistics as JSON for all clients, sampled at most twice a second and never on the caller's event loop."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..messages import find_messages
from ..progress import run_in_daemon_thread
from . import snapshot
from .host_stats import READER, Sampler, Stats

log = logging.getLogger(__name__)

# Maximum age of a sample, in seconds.
MAX_AGE_S = 0.5
# How long a client waits for a new sample if there is an earlier one: a page that waits seems to hang.
PROMPT_S = 0.1
# A device call in the runtime may hang; after this many seconds clients get the last sample and a note.
TIMEOUT_S = 2.0
# The statistics without any sample, with every key that the page and the terminal read.
EMPTY_STATS: Stats = {
    **snapshot.empty_stats("The runtime does not answer."),
    "host": dict.fromkeys(("cpu_percent", "ram_used", "ram_total", "process_ram")),
    "notes": [],
}


class StatsFeed:
    """One sample for all clients. `answer` belongs to one event loop; creating a Feed starts nothing."""

    def __init__(
        self,
        stats: Callable[[], Stats] = snapshot.take_snapshot,
        sampler: Sampler | None = None,
        *,
        patience_s: float = TIMEOUT_S,
    ) -> None:
        self._stats = stats
        self._sampler = sampler or Sampler()
        self._patience_s = patience_s
        self._pending: Future | None = None
        self._asked_s = -MAX_AGE_S
        self._last: Stats = EMPTY_STATS
        self._body = b""
        self._body_s = -MAX_AGE_S

    async def answer(self) -> bytes:
        """Return the newest statistics as a JSON object.

        They are at most `MAX_AGE_S` old if a sample takes no longer than `PROMPT_S`. Otherwise the previous sample is
        returned while a new one is taken, after `PATIENCE_S` with a note of its age.
        """
        if self._body and time.monotonic() - self._body_s < MAX_AGE_S:
            return self._body
        if self._pending is None:
            self._asked_s = time.monotonic()
            self._pending = run_in_daemon_thread(self._sample, READER)
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
            return stats, _encode(stats)
        except Exception as error:  # of any kind: the monitor goes on with the last sample and the error
            log.warning("The monitor has no statistics", exc_info=True)
            return self._last, self._stale(f"The runtime has no statistics: {type(error).__name__}: {error}")

    def _stale(self, note: str) -> bytes:
        return _encode({**self._last, "notes": [*self._last["notes"], note]})


def _encode(stats: Stats) -> bytes:
    """Encode statistics with their messages as JSON without NaN, so that a browser can parse it."""
    described = {**stats, "messages": find_messages(stats)}
    return json.dumps(_finite(described), allow_nan=False, default=str).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not (float("-inf") < value < float("inf")):
        return None
    return value
