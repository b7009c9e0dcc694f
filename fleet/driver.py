"""Drives a batch: a thread for each worker gives it the job that suits it, and keeps account of what comes back.

Each worker has one job. Nothing here grows with the jobs but what is known of each: its line, and its name.
"""

import contextlib
import json
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .jobs import JobTemplate, with_tries
from .ledger import FAILED, Ledger
from .messages import JOBS_FAULT, PLACES_FAULT, JobDone, JobFailed, Lost, Status, Worker, Workers
from .queue import Job, Queue

log = logging.getLogger(__name__)

# How often is looked what changed, and what runs is given to stop.
_TICK_S, _STOP_S = 0.25, 20.0
# A worker that fails or goes away rests, each time for twice as long, and is started again every third time.
FIRST_REST_S, LONGEST_REST_S, _RESTART_AFTER = 1.0, 60.0, 3
# Once all workers have failed so often in a row, nothing good comes of going on.
MOST_IN_A_ROW = 8
# So many starts in a row in vain: it is not the machine that goes away.
_VAIN_STARTS = 4
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
    lost_in_a_row: int = 0
    vain_starts: int = 0
    failed: dict[str, Job] = field(default_factory=dict)  # in a row, by neither job's own fault


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
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

    def show(self, progress: BatchNumbers) -> None:
        """Shows where the batch is; called several times a second."""


class BatchStopped(RuntimeError):
    """The batch cannot go on, in a sentence; what is done stays, and another call goes on."""


class Driver:
    """One call's work on a batch of `jobs`."""

    def __init__(
        self, recipe: JobTemplate, jobs: Sequence[Job], ledger: Ledger, workers: Workers, *, limits: Limits, view: View
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
        self._is_stopping, self._is_cancelled = False, False
        self._problem: Exception | None = None
        # Of all above: a thread for each worker, and the one that shows.
        self._changed = threading.Condition()

    def run(self) -> BatchNumbers:
        """Runs until every job is decided, or Ctrl-C; KeyboardInterrupt then, once all workers have stopped. Raises
        `BatchStopped` where all workers only fail.
        """
        self._ends.append(time.monotonic())
        deadline = float("inf")
        with _interruptible(self._stop):
            try:
                while time.monotonic() < deadline and not self._is_over():
                    if self._is_stopping and deadline == float("inf"):
                        self._view.line("stopping: what runs ends within a step; Ctrl-C once more ends it at once")
                        deadline = time.monotonic() + _STOP_S
                        self._is_cancelled = True
                    for worker in self._workers.found():
                        threading.Thread(target=self._work, args=(worker,), daemon=True).start()
                    with self._changed:
                        self._changed.wait(_TICK_S)
                        self._view.show(self.progress())
            finally:
                with self._changed:
                    self._ledger.close()
        if self._problem is not None:
            raise self._problem
        if self._is_stopping:
            raise KeyboardInterrupt
        return self.progress()

    def _stop(self) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt  # twice: at once
        self._is_stopping = True

    def _is_ending(self) -> bool:
        return self._is_stopping or self._problem is not None

    def _is_over(self) -> bool:
        with self._changed:
            is_running = any(doing.job is not None for doing in self._doing.values())
            return not is_running and (self._is_cancelled or self._problem is not None or not len(self._queue))

    # -- the thread of a worker ----------------------------------------------------------------------------------------

    def _work(self, worker: Worker) -> None:
        with self._changed:
            doing = self._doing[worker.name] = Doing(is_here=False)
        try:
            while not self._is_over():
                try:
                    worker.wait(self._is_over)
                    doing.is_here, doing.vain_starts = True, 0
                    self._do_next(worker, doing)
                except Lost as lost:
                    with self._changed:
                        self._lost(worker, doing, lost)
                        if lost.for_good:
                            del self._doing[worker.name]
                            return
                    doing.vain_starts += not lost.started
                    if doing.vain_starts == _VAIN_STARTS:
                        raise RuntimeError(str(lost)) from None
                    doing.lost_in_a_row += 1
                    self._rest(_rest_s(doing.lost_in_a_row))
        except Exception as error:  # whatever it is, the batch ends with it
            self._problem = error
        finally:
            doing.job = None

    def _do_next(self, worker: Worker, doing: Doing) -> None:
        """Runs the job that suits a worker, and rests after a failure that may be the machine's."""
        with self._changed:
            job = None if self._is_ending() else self._queue.take(worker.name)
            if job is None:
                self._changed.wait(_TICK_S)
                return
            doing.job, doing.since, doing.status = job, time.monotonic(), Status()
        try:
            request = self._recipe.request(job, self._ledger.store.location, self._ledger.token)
            outcome = worker.run(request, lambda status: setattr(doing, "status", status), lambda: self._is_cancelled)
        except (ValueError, OSError) as error:  # its pictures, here
            fault = JOBS_FAULT if isinstance(error, ValueError) else PLACES_FAULT
            outcome = JobFailed(job=job.id, error=str(error), fault=fault)
        with self._changed:
            rest_s = self._handle(worker.name, doing, job, outcome)
            doing.job = None
            self._changed.notify_all()
        if rest_s and doing.in_a_row % _RESTART_AFTER == 0:
            doing.is_here = False
            self._queue.forget(worker.name)
            worker.restart()
        self._rest(rest_s)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_over():
            time.sleep(min(_TICK_S, seconds))

    def _handle(self, worker: str, doing: Doing, job: Job, outcome: JobDone | JobFailed) -> float:
        """Keeps account of a job's end; how long the worker is to rest."""
        if isinstance(outcome, JobDone):
            doing.in_a_row = doing.lost_in_a_row = 0
            doing.failed.clear()
            self._finished(job, outcome.record)
        elif outcome.cancelled:
            self._queue.add(job)
        else:
            job.avoid = worker if len(self._doing) > 1 else ""
            if outcome.fault == JOBS_FAULT:
                self._failed_once(job, outcome.error)
                return 0.0
            return self._failed_on(worker, doing, job, outcome)
        return 0.0

    def _failed_on(self, worker: str, doing: Doing, job: Job, outcome: JobFailed) -> float:
        """A machine's fault is not the job's; nor is one that other jobs meet there too."""
        doing.in_a_row += 1
        rest_s = _rest_s(doing.in_a_row)
        if outcome.fault != PLACES_FAULT:
            doing.failed[job.id] = job
        if outcome.fault == PLACES_FAULT or len(doing.failed) > 1:
            for one in doing.failed.values():
                if one.tries.failures and one.id not in self._ledger.failed:
                    one.tries.failures.clear()
                    self._ledger.note_tries(one.id, one.tries)
            self._view.line(f"{worker} rests {rest_s:.0f} s, line {job.line} waits again: {outcome.error}")
            self._queue.add(job)
        else:
            self._failed_once(job, outcome.error)
        if all(one.in_a_row >= MOST_IN_A_ROW for one in self._doing.values()):
            self._problem = BatchStopped(
                f"{MOST_IN_A_ROW} jobs in a row ended with an error of the machine, on every one, the last with: "
                f"{outcome.error} Fix that, and run the same command again: no job has lost an attempt by it."
            )
        return rest_s

    def _finished(self, job: Job, record: Mapping[str, Any]) -> None:
        self._done += 1
        self._ends.append(time.monotonic())
        self._ledger.note_done(job.id, record, had_tries=bool(job.tries.failures or job.tries.losses))
        files = ", ".join(record.get("files", ())) or "no file"
        self._view.line(f"{self._count()} line {job.line}: {record.get('seconds', 0):.1f} s, {files}")

    def _lost(self, worker: Worker, doing: Doing, lost: Lost) -> None:
        self._queue.forget(worker.name)
        job, doing.job, doing.is_here, doing.in_a_row = doing.job, None, False, 0
        if self._is_ending():
            return
        if job is None:
            self._view.line(f"{worker.name} is gone: {lost}")
        elif (record := self._ledger.is_done(job.id)) is not None:
            self._finished(job, record)  # it kept its results before it went
        else:
            job.tries.losses += 1
            if job.tries.losses >= self._limits.losses:
                why = f"its worker went away {job.tries.losses} times while it ran; last: {lost}"
                return self._set_aside(job, why)
            self._view.line(f"{worker.name} is gone, line {job.line} waits again: {lost}")
            self._ledger.note_tries(job.id, job.tries)
            self._queue.add(job)

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

    def progress(self) -> BatchNumbers:
        taken = self._ends[-1] - self._ends[0] if self._ends else 0.0
        return BatchNumbers(
            total=self._total,
            done=self._done,
            failed=self._failed,
            before=self._before,
            waiting=len(self._queue),
            per_hour=(len(self._ends) - 1) * 3600 / taken if taken else None,
            workers=dict(self._doing),
        )


def _rest_s(in_a_row: int) -> float:
    return min(FIRST_REST_S * 2 ** (in_a_row - 1), LONGEST_REST_S)


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
