"""Drives a batch: gives every worker that is free the job that suits it, and keeps account of what comes back.

Each worker has one job. Nothing here grows with the jobs but what is known of each: its line, and its name.
"""

import contextlib
import json
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .jobs import Recipe, with_tries
from .ledger import FAILED, Ledger
from .messages import Done, Event, Failed, Lost, Ready, Status, Workers
from .queue import Job, Queue

log = logging.getLogger(__name__)

# How long events are waited for, and what runs is given to stop.
_TICK_S, _STOP_S = 0.25, 20.0
# Errors of the machine, in a row and of different jobs: nothing good comes of going on.
MOST_IN_A_ROW = 10
# A worker that fails so often in a row is started again.
_WORKER_IN_A_ROW = 3
_RECENT = 50


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How often a job may fail, and how often it may lose its worker, before it is set aside."""

    failures: int = 3
    losses: int = 12


@dataclass(slots=True, kw_only=True)
class Doing:
    """A worker as a view shows it. `job` is what it runs, None while it waits or is gone."""

    job: Job | None = None
    since: float = 0.0
    is_here: bool = True
    status: Status = field(default_factory=Status)
    in_a_row: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The numbers of a batch. `before` counts what earlier calls had done or set aside."""

    total: int
    done: int
    failed: int
    before: int
    waiting: int
    per_hour: float | None
    workers: Mapping[str, Doing]


class View:
    """Shows a batch; this one shows nothing."""

    def line(self, text: str) -> None:
        """Says what happened, once."""

    def show(self, progress: Progress) -> None:
        """Shows where the batch is; called several times a second."""


class Stopped(RuntimeError):
    """The batch cannot go on, in a sentence; what is done stays, and another call goes on."""


class Driver:
    """One call's work on a batch of `jobs`."""

    def __init__(
        self, recipe: Recipe, jobs: Sequence[Job], ledger: Ledger, workers: Workers, *, limits: Limits, view: View
    ) -> None:
        self._recipe, self._ledger, self._workers = recipe, ledger, workers
        self._limits, self._view = limits, view
        self._total = len(jobs)
        own = {job.id for job in jobs}
        self._done, self._failed = len(own & ledger.done), len(own & ledger.failed)
        self._before = self._done + self._failed
        waiting = [job for job in jobs if job.id not in ledger.done and job.id not in ledger.failed]
        self._queue = Queue(with_tries(waiting, ledger.tries(job.id for job in waiting)))
        self._doing: dict[str, Doing] = {}
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self._in_a_row: dict[str, Job] = {}
        self._is_stopping = False

    def run(self) -> Progress:
        """Runs until every job is decided, or Ctrl-C; KeyboardInterrupt then, once all workers have stopped."""
        self._ends.append(time.monotonic())
        with _interruptible(self._stop):
            try:
                deadline = float("inf")
                while (len(self._queue) and not self._is_stopping) or self._is_running():
                    if self._is_stopping and deadline == float("inf"):
                        self._view.line("stopping: what runs ends within a step; Ctrl-C once more ends it at once")
                        deadline = time.monotonic() + _STOP_S
                        self._workers.cancel()
                    if time.monotonic() > deadline:
                        break
                    self._dispatch()
                    for event in self._workers.events(_TICK_S):
                        self._handle(event)
                    self._show()
            finally:
                self._ledger.close()
        if self._is_stopping:
            raise KeyboardInterrupt
        return self.progress()

    def _stop(self) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt  # twice: at once
        self._is_stopping = True

    def _is_running(self) -> bool:
        return any(doing.job is not None for doing in self._doing.values())

    # -- jobs to workers -----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        for worker, doing in self._doing.items():
            while doing.is_here and doing.job is None and not self._is_stopping:
                job = self._queue.take(worker)
                if job is None:
                    return
                try:
                    request = self._recipe.request(job, self._ledger.store.location, self._ledger.token)
                except (ValueError, OSError) as error:
                    self._failed_once(job, f"{error}")
                    continue
                doing.job, doing.since = job, time.monotonic()
                self._workers.submit(worker, request)

    # -- what comes back -----------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        doing = self._doing.setdefault(event.worker, Doing())
        if isinstance(event, Ready):
            self._queue.forget(event.worker)
            doing.is_here, doing.in_a_row = True, 0
            return
        job, doing.job = doing.job, None
        if isinstance(event, Lost):
            doing.is_here = False
            self._queue.forget(event.worker)
            if event.for_good:
                del self._doing[event.worker]
            self._lost(event, job)
        elif job is None or job.id != event.job:
            log.warning("%s speaks of job %s, which it does not have.", event.worker, event.job)
            doing.job = job
        elif isinstance(event, Done):
            doing.in_a_row = 0
            self._finished(job, event.record)
        elif event.cancelled:
            self._queue.add(job)
        else:
            self._failed_on(event, job, doing)

    def _finished(self, job: Job, record: Mapping[str, Any]) -> None:
        self._in_a_row.clear()
        self._done += 1
        self._ends.append(time.monotonic())
        self._ledger.note_done(job.id, record, had_tries=bool(job.tries.failures or job.tries.losses))
        files = ", ".join(record.get("files", ())) or "no file"
        self._view.line(f"{self._count()} line {job.line}: {record.get('seconds', 0):.1f} s, {files}")

    def _lost(self, event: Lost, job: Job | None) -> None:
        if job is None:
            self._view.line(f"{event.worker} is gone: {event.reason}")
            return
        # It may have kept its results before it went.
        if (record := self._ledger.is_done(job.id)) is not None:
            self._finished(job, record)
            return
        job.tries.losses += 1
        if job.tries.losses >= self._limits.losses:
            self._set_aside(job, f"its worker went away {job.tries.losses} times while it ran; last: {event.reason}")
            return
        self._view.line(f"{event.worker} is gone, line {job.line} waits again: {event.reason}")
        self._ledger.note_tries(job.id, job.tries)
        self._queue.add(job)

    def _failed_on(self, event: Failed, job: Job, doing: Doing) -> None:
        if len(self._doing) > 1:
            job.avoid = event.worker
        self._failed_once(job, event.error)
        if event.of_job:
            return
        doing.in_a_row += 1
        self._in_a_row[job.id] = job
        if len(self._in_a_row) >= MOST_IN_A_ROW:
            self._forgive()
            raise Stopped(
                f"{len(self._in_a_row)} jobs in a row ended with an error of the machine, the last with: {event.error} "
                "Mend it, and run the same command again: with --retry-failed also for what was set aside."
            )
        if doing.in_a_row >= _WORKER_IN_A_ROW:
            doing.in_a_row, doing.is_here = 0, False
            self._workers.restart(event.worker)

    def _forgive(self) -> None:
        """Jobs that failed in a row, by the machine's fault, have lost none of their attempts."""
        for job in self._in_a_row.values():
            if job.id not in self._ledger.failed:
                job.tries.failures.clear()
                self._ledger.note_tries(job.id, job.tries)

    def _failed_once(self, job: Job, error: str) -> None:
        job.tries.failures.append(error)
        count = len(job.tries.failures)
        if count >= self._limits.failures:
            self._set_aside(job, error)
            return
        self._view.line(f"line {job.line} failed ({count} of {self._limits.failures}), and waits again: {error}")
        self._ledger.note_tries(job.id, job.tries)
        self._queue.add(job)

    def _set_aside(self, job: Job, error: str) -> None:
        self._failed += 1
        record = {
            "job": job.id,
            "state": FAILED,
            "line": job.line,
            "error": error,
            "failures": job.tries.failures,
            "losses": job.tries.losses,
            "set": json.loads(job.text),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._ledger.set_aside(job.id, record)
        self._view.line(f"{self._count()} line {job.line} is set aside: {error}")

    # -- for the view --------------------------------------------------------------------------------------------------

    def _count(self) -> str:
        return f"[{self._done + self._failed}/{self._total}]"

    def _show(self) -> None:
        for worker, status in self._workers.statuses().items():
            if worker in self._doing:
                self._doing[worker].status = status
        self._view.show(self.progress())

    def progress(self) -> Progress:
        taken = self._ends[-1] - self._ends[0] if self._ends else 0.0
        return Progress(
            total=self._total,
            done=self._done,
            failed=self._failed,
            before=self._before,
            waiting=len(self._queue),
            per_hour=(len(self._ends) - 1) * 3600 / taken if taken else None,
            workers=self._doing,
        )


@contextlib.contextmanager
def _interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, and the signal that a machine sends before it goes away, call `stop`, here or in a test's thread."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    except ValueError:  # not the main thread: whoever started it decides
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
