"""Runs one job after the other in this process, whose models and compiled programs stay for the next.

The same in a child process of this machine and in an actor of a cluster.
"""

import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..nodes.declare import Folders
from ..nodes.headless.runner import NodeTime, run_workflow
from ..tpu_runtime.pipeline import Preview, Progress, Silent, redact
from .jobs import mark
from .ledger import DONE, RESULTS, check_same_place
from .messages import JOBS_FAULT, PLACES_FAULT, JobDone, JobFailed, Mark, Request, Status
from .store import BatchStore, StoreError, open_store

log = logging.getLogger(__name__)

# How often a step is reported at most.
_REPORT_S = 0.2
_PREFIX = "comfyui-tpu-job-"


class Cancelled(Exception):
    """The driver wants the job no more."""


class WrongFiles(RuntimeError):
    """This machine's files are not those that the batch is about."""


class JobHost:
    """The host of a job: says what runs, and looks whether it is still wanted."""

    def __init__(self, folders: Folders, report: Callable[[Status], None], is_cancelled: Callable[[], bool]) -> None:
        self.folders = folders
        self.timings: list[NodeTime] = []
        self._report = report
        self._is_cancelled = is_cancelled
        self._status = Status()
        self._reported = 0.0

    def text(self, message: str) -> None:
        self._say(replace(self._status, text=message, done=0, total=0), always=True)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self._say(replace(self._status, done=done, total=total, unit=unit), always=done == total)

    def check_cancelled(self) -> None:
        if self._is_cancelled():
            raise Cancelled

    @contextmanager
    def timed(self, title: str) -> Iterator[None]:
        self.check_cancelled()
        self._say(Status(node=title), always=True)
        start = time.perf_counter()
        yield
        self.timings.append(NodeTime(title=title, elapsed_s=time.perf_counter() - start))

    def _say(self, status: Status, *, always: bool) -> None:
        self._status = status
        if always or time.monotonic() > self._reported + _REPORT_S:
            self._reported = time.monotonic()
            self._report(status)


class Actor:
    """Runs jobs in this process, a Ray actor or a child of the driver, which calls it `name`. One job at a time, and it
    answers meanwhile: all methods may be called at once.
    """

    CONCURRENCY = 4

    def __init__(self, name: str) -> None:
        self.name = name
        self._compared: set[Mark] = set()
        self._status, self._is_cancelled, self._lock = Status(), threading.Event(), threading.Lock()

    def ready(self) -> None:
        """Answers once it is there."""

    def status(self) -> Status:
        return self._status

    def _report(self, status: Status) -> None:
        self._status = status

    def cancel(self) -> None:
        self._is_cancelled.set()

    def run(self, request: Request) -> JobDone | JobFailed:
        """Runs a job and keeps its results; whatever goes wrong is said, not raised."""
        try:
            with self._lock:
                return JobDone(job=request.job, record=self._run(request))
        except Cancelled:
            return JobFailed(job=request.job, error="cancelled", cancelled=True)
        except Exception as error:  # whatever it is, the driver decides whether it is tried again
            is_known = isinstance(error, OSError | RuntimeError | ValueError)
            log.error("job %s failed", request.job, exc_info=error)
            text = redact(str(error) if is_known else f"{type(error).__name__}: {error}")
            return JobFailed(job=request.job, error=text, fault=self._fault(request, error))

    def _fault(self, request: Request, error: Exception) -> str:
        """Whose fault an error is: the place's where its files cannot be used, or are no longer those of the batch."""
        if isinstance(error, OSError | StoreError | WrongFiles | MemoryError):
            return PLACES_FAULT
        try:
            self._compared.clear()
            self._compare(request, Silent())
        except Exception:  # whatever it is, they are not there as they were
            return PLACES_FAULT
        return JOBS_FAULT if isinstance(error, ValueError) else ""

    def _run(self, request: Request) -> dict[str, Any]:
        store = open_store(request.out)
        check_same_place(store, request.token, self.name)
        with scratch() as folder:
            given, made = folder / "input", folder / "output"
            given.mkdir()
            made.mkdir()
            for name, content in request.files.items():
                (given / Path(name).name).write_bytes(content)
            host = JobHost(replace(request.folders, input=given, output=made), self._report, self._is_cancelled.is_set)
            self._compare(request, host)
            start = time.perf_counter()
            run_workflow(request.workflow, host)
            elapsed_s = time.perf_counter() - start
            host.check_cancelled()
            files = _keep(store, request.job, made)
        record = {
            "job": request.job,
            "state": DONE,
            "line": request.line,
            "files": files,
            "seconds": round(elapsed_s, 3),
            "stages": {timing.title: round(timing.elapsed_s, 3) for timing in host.timings},
            "worker": self.name,
            "machine": socket.gethostname(),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        # Last: a job is done once this is there.
        store.write(f"{DONE}/{request.job}.json", json.dumps(record, ensure_ascii=False).encode())
        return record

    def _compare(self, request: Request, host: Progress) -> None:
        """Raises `WrongFiles` where this machine's model or LoRA is not the one that the batch is about."""
        for wanted in request.marks:
            if wanted in self._compared or wanted.kind not in ("model", "LoRA"):
                continue
            found = mark(wanted.kind, wanted.name, request.folders, host)
            if found != wanted:
                raise WrongFiles(
                    f"the {wanted.kind} {wanted.name} of {socket.gethostname()} is {found.content}, and the batch's is "
                    f"{wanted.content}. Give both machines the same files."
                )
            self._compared.add(wanted)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, locked while this process is there; those of killed ones leave first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    with _locked(made):  # before it has the name by which others find it
        folder = made.rename(made.with_name(made.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """OSError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _keep(store: BatchStore, job: str, made: Path) -> list[str]:
    """Puts what a job wrote into the store; the names, in order."""
    paths = sorted(path for path in made.rglob("*") if path.is_file())
    names = [f"{RESULTS}/{job}/{path.relative_to(made).as_posix()}" for path in paths]
    for name, path in zip(names, paths, strict=True):
        store.add(name, path)
    return names
