"""The driver of a batch: it assigns a suitable job to each worker, and records the results.

It never waits for one worker alone, so one thread drives all of them. Each worker has one job. Per job only its line,
its id and its line of the journal are kept.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from ..multihost import supervisor
from .jobs import JobTemplate
from .messages import JOB_FAULT, MACHINE_FAULT, JobFailed, Worker, WorkerLost, Workers, WorkerStatus
from .queue import Job, Queue
from .store import DONE, FAILED, TRIES, BatchStore, Document, make_record

# Seconds between polls, and seconds that running jobs get to stop.
_TICK_S, _STOP_S = 0.25, 20.0
# Backoff of a worker that fails or is lost, in seconds, doubled each time; every third failure restarts it.
FIRST_BACKOFF_S, MAX_BACKOFF_S, _RESTART_AFTER = 1.0, 60.0, 3
# The batch ends once every worker has had this many failures in a row.
MAX_CONSECUTIVE_FAILURES = 8
# The batch ends after this many starts in a row that failed: the machine is not the cause.
_VAIN_STARTS = 4
# How many workers a job may lose before it is set aside.
MAX_LOSSES = 12
_RECENT = 50


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """The state of a worker, as a view shows it."""

    worker: Worker = field(default_factory=Worker)
    job: Job | None = None  # that it runs; None while it waits or is lost
    since: float = 0.0  # when the job started, `time.monotonic()`
    is_here: bool = True
    status: WorkerStatus = field(default_factory=WorkerStatus)
    asked: Future | None = None  # the call of `run`, or of `status` while it has no job
    looked: Future | None = None  # the call of `status` while it runs a job
    next_poll: float = 0.0  # time of the next such call
    backoff_until: float = 0.0  # end of its backoff
    consecutive_failures: int = 0  # consecutive failures
    consecutive_losses: int = 0  # consecutive losses
    failed_starts: int = 0  # consecutive starts that failed
    failed: dict[str, Job] = field(default_factory=dict)  # consecutive jobs that failed, each perhaps by its own fault


@dataclass(kw_only=True)
class BatchNumbers:
    """The counts of a batch."""

    total: int
    done: int
    failed: int  # set aside
    before: int  # done or set aside by earlier calls
    waiting: int = 0
    per_hour: float | None = None
    workers: dict[str, WorkerState] = field(default_factory=dict)


class View:
    """The display of a batch; this one displays nothing."""

    def line(self, text: str) -> None:
        """Report an event."""

    def show(self, numbers: BatchNumbers) -> None:
        """Show the batch's state; called several times a second."""


class Driver:
    """One run of a batch of `jobs`, whose store is open for driving. A job may fail `attempts` times."""

    def __init__(
        self, recipe: JobTemplate, jobs: Sequence[Job], store: BatchStore, workers: Workers, attempts: int, view: View
    ) -> None:
        self._recipe, self._store, self._workers = recipe, store, workers
        self._attempts, self._view, self._token = attempts, view, store.token()
        done, failed = (sum(job.id in store.jobs[state] for job in jobs) for state in (DONE, FAILED))
        self._numbers = BatchNumbers(total=len(jobs), done=done, failed=failed, before=done + failed)
        self._doing = self._numbers.workers
        self._queue = Queue(job for job in jobs if job.id not in store.jobs[DONE] and job.id not in store.jobs[FAILED])
        for job in (job for job in jobs if job.id in store.jobs[TRIES]):
            tries = store.document(f"{TRIES}/{job.id}.json")
            job.failures, job.losses = list(tries.get("failures", ())), int(tries.get("losses", 0))
        self._ends: deque[float] = deque(maxlen=_RECENT)
        self._end: BaseException | None = None  # raised by `run` if it ends before all jobs are decided

    def run(self) -> BatchNumbers:
        """Run until every job is done or set aside.

        Raises KeyboardInterrupt after Ctrl-C, once all workers have stopped, and RuntimeError if all workers only fail.
        Finished jobs stay, and another call continues.
        """
        self._ends.append(time.monotonic())
        deadline = float("inf")
        with supervisor.handle_signals(self._stop):
            while time.monotonic() < deadline and not self._is_over():
                if isinstance(self._end, KeyboardInterrupt) and deadline == float("inf"):
                    self._view.line("stopping: running jobs end within a step; press Ctrl-C again to end them at once")
                    deadline = time.monotonic() + _STOP_S
                    for doing in self._running():
                        doing.worker.call("cancel")
                there = {worker.name: worker for worker in self._workers.found()}
                for name in [name for name in there if name not in self._doing]:
                    self._doing[name] = WorkerState(worker=there[name], is_here=False)
                for name, doing in list(self._doing.items()):
                    if doing.job is not None or name in there:
                        self._turn(doing)
                    else:
                        self._view.line(f"{name} was removed: its slice is not complete any more")
                        self._queue.forget(name)
                        del self._doing[name]
                self._numbers.waiting = len(self._queue)
                self._view.show(self._numbers)
                self._wait()
        if self._end is not None:
            raise self._end
        return self._numbers

    def _stop(self, *_: object) -> None:
        """Handle Ctrl-C, or SIGTERM before the machine is preempted. The second signal raises at once."""
        if isinstance(self._end, KeyboardInterrupt):
            raise self._end
        self._end = KeyboardInterrupt()

    def _is_over(self) -> bool:
        return not self._running() and (self._end is not None or not len(self._queue))

    def _running(self) -> list[WorkerState]:
        return [doing for doing in self._doing.values() if doing.job is not None]

    def _wait(self) -> None:
        """Wait until a worker answers, or its backoff ends."""
        now = time.monotonic()
        pending = [doing.asked for doing in self._doing.values() if doing.asked is not None]
        rests = [doing.backoff_until - now for doing in self._doing.values() if doing.asked is None]
        pause_s = max(0.0, min([_TICK_S, *rests])) if self._end is None else _TICK_S
        if pending:
            wait(pending, pause_s, FIRST_COMPLETED)
        else:
            time.sleep(pause_s)

    # -- calls of a worker ---------------------------------------------------------------------------------------------

    def _turn(self, doing: WorkerState) -> None:
        """Advance a worker: check that it answers, then let it run a job, and so on.

        An idle worker is checked first, because a lost one would keep its job until the loss is noticed.
        """
        if doing.asked is None:
            if time.monotonic() >= doing.backoff_until and self._end is None:
                doing.asked = doing.worker.call("status")
        elif doing.asked.done():
            call, doing.asked = doing.asked, None
            try:
                outcome = call.result()
            except Exception as error:  # `lost` handles those of its kind of worker, and raises others again
                self._lost(doing, doing.worker.lost(error, doing.job is not None))
            else:
                if doing.job is None:
                    self._give_job(doing)
                else:
                    self._handle_outcome(doing, doing.job, outcome)
        elif doing.job is not None and time.monotonic() > doing.next_poll and (not doing.looked or doing.looked.done()):
            if doing.looked and doing.looked.exception() is None:
                doing.status = doing.looked.result()
            doing.looked, doing.next_poll = doing.worker.call("status"), time.monotonic() + _TICK_S

    def _give_job(self, doing: WorkerState) -> None:
        """Assign the most suitable job to a worker that answers."""
        doing.is_here, doing.failed_starts = True, 0
        job = self._queue.take(doing.worker.name) if self._end is None else None
        if job is None:
            doing.backoff_until = time.monotonic() + _TICK_S
            return
        doing.job, doing.since, doing.status, doing.looked = job, time.monotonic(), WorkerStatus(), None
        try:
            doing.asked = doing.worker.call("run", self._recipe.request(job, self._store.location, self._token))
        except (ValueError, OSError) as error:  # from reading its images on this machine
            fault = JOB_FAULT if isinstance(error, ValueError) else MACHINE_FAULT
            self._handle_outcome(doing, job, JobFailed(error=str(error), fault=fault))

    def _handle_outcome(self, doing: WorkerState, job: Job, outcome: Document | JobFailed) -> None:
        """Record the outcome of a job. After a failure that the machine may have caused, the worker backs off."""
        doing.job = None
        if not isinstance(outcome, JobFailed):
            doing.consecutive_failures = doing.consecutive_losses = 0
            doing.failed.clear()
            self._record_done(job, outcome)
        elif outcome.cancelled:
            self._queue.add(job)
        else:
            job.avoid = doing.worker.name if len(self._doing) > 1 else ""
            if outcome.fault == JOB_FAULT:
                return self._count_failure(job, outcome.error)
            doing.backoff_until = time.monotonic() + self._blame_worker(doing, job, outcome)
            if doing.consecutive_failures % _RESTART_AFTER == 0:
                doing.is_here = False
                self._queue.forget(doing.worker.name)
                doing.worker.restart()

    def _blame_worker(self, doing: WorkerState, job: Job, outcome: JobFailed) -> float:
        """Count a failure for the worker, and for the job unless the machine caused it.

        The machine is the cause if other jobs failed on it too. Returns the worker's backoff in seconds.
        """
        doing.consecutive_failures += 1
        rest_s = _rest_s(doing.consecutive_failures)
        if outcome.fault != MACHINE_FAULT:
            doing.failed[job.id] = job
        if outcome.fault == MACHINE_FAULT or len(doing.failed) > 1:
            for earlier in doing.failed.values():
                if earlier.failures and earlier.id not in self._store.jobs[FAILED]:
                    earlier.failures.clear()
                    self._note_tries(earlier)
            self._view.line(
                f"{doing.worker.name} pauses for {rest_s:.0f} s, line {job.line} waits again: {outcome.error}"
            )
            self._queue.add(job)
        else:
            self._count_failure(job, outcome.error)
        if all(state.consecutive_failures >= MAX_CONSECUTIVE_FAILURES for state in self._doing.values()):
            self._end = RuntimeError(
                f"{MAX_CONSECUTIVE_FAILURES} jobs in a row failed with an error of the machine, on every machine, the "
                "last with: "
                f"{outcome.error} Fix that, and run the same command again: no job has lost an attempt by it."
            )
        return rest_s

    def _lost(self, doing: WorkerState, lost: WorkerLost | None) -> None:
        doing.is_here = False
        if lost is None:
            doing.backoff_until = time.monotonic() + _TICK_S
            return
        job, doing.job, doing.asked, doing.consecutive_failures = doing.job, None, None, 0
        doing.consecutive_losses += 1
        doing.failed_starts += job is None
        doing.backoff_until = time.monotonic() + _rest_s(doing.consecutive_losses)
        name = doing.worker.name
        self._queue.forget(name)
        if self._end is not None:
            return
        if job is None:
            self._view.line(f"{name} was lost: {lost}")
            if doing.failed_starts == _VAIN_STARTS:
                self._end = RuntimeError(str(lost))
        elif record := self._store.document(f"{DONE}/{job.id}.json"):
            self._record_done(job, record)  # it stored its results before it was lost
        else:
            job.losses += 1
            if job.losses >= MAX_LOSSES:
                return self._set_aside(job, f"its worker was lost {job.losses} times while it ran; last: {lost}")
            self._view.line(f"{name} was lost, line {job.line} waits again: {lost}")
            self._note_tries(job)
            self._queue.add(job)

    # -- outcomes of a job ---------------------------------------------------------------------------------------------

    def _record_done(self, job: Job, record: Document) -> None:
        self._numbers.done += 1
        self._ends.append(time.monotonic())
        self._numbers.per_hour = (len(self._ends) - 1) * 3600 / max(1e-3, self._ends[-1] - self._ends[0])
        self._store.note(DONE, job.id, record)
        self._store.link(job.line, job.text, record.get("files", ()))
        files = ", ".join(record.get("files", ())) or "no file"
        self._view.line(f"{self._count()} line {job.line}: {record.get('seconds', 0):.1f} s, {files}")

    def _count_failure(self, job: Job, error: str) -> None:
        job.failures.append(error)
        count = len(job.failures)
        if count >= self._attempts:
            return self._set_aside(job, error)
        self._view.line(f"line {job.line} failed ({count} of {self._attempts}), and waits again: {error}")
        self._note_tries(job)
        self._queue.add(job)

    def _note_tries(self, job: Job) -> None:
        self._store.note(TRIES, job.id, {"failures": job.failures, "losses": job.losses})

    def _set_aside(self, job: Job, error: str) -> None:
        self._numbers.failed += 1
        tries = {"failures": job.failures, "losses": job.losses}
        record = make_record(FAILED, job.id, job.line, error=error, **tries, set=json.loads(job.text))
        self._store.note(FAILED, job.id, record)
        self._view.line(f"{self._count()} line {job.line} is set aside: {error}")

    def _count(self) -> str:
        return f"[{self._numbers.done + self._numbers.failed}/{self._numbers.total}]"


def _rest_s(in_a_row: int) -> float:
    return min(FIRST_BACKOFF_S * 2 ** min(in_a_row - 1, 30), MAX_BACKOFF_S)  # a larger power overflows a float
