"""Runs one job after the other in this process, whose models and compiled programs stay for the next.

The same in a child process of this machine and in an actor of a cluster.
"""

import json
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..nodes.declare import Folders
from ..nodes.headless.runner import NodeTime, run_workflow
from ..tpu_runtime.pipeline import Preview, redact
from .jobs import mark
from .ledger import DONE, RESULTS, check_same_place
from .messages import Done, Failed, Mark, Request, Status
from .store import Store, open_store

log = logging.getLogger(__name__)

# How often a step is reported at most.
_REPORT_S = 0.2


class Cancelled(Exception):
    """The driver wants the job no more."""


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


class Worker:
    """One process's worker. `name` is what the driver calls it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._compared: set[Mark] = set()

    def run(
        self, request: Request, report: Callable[[Status], None], is_cancelled: Callable[[], bool] = lambda: False
    ) -> Done | Failed:
        """Runs a job and keeps its results; whatever goes wrong is said, not raised."""
        try:
            return Done(worker=self.name, job=request.job, record=self._run(request, report, is_cancelled))
        except Cancelled:
            return Failed(worker=self.name, job=request.job, error="cancelled", cancelled=True)
        except ValueError as error:
            log.info("job %s: %s", request.job, error)
            return Failed(worker=self.name, job=request.job, error=redact(str(error)), of_job=True)
        except Exception as error:  # whatever it is, the driver decides whether it is tried again
            log.exception("job %s failed", request.job)
            text = str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {error}"
            return Failed(worker=self.name, job=request.job, error=redact(text))

    def _run(
        self, request: Request, report: Callable[[Status], None], is_cancelled: Callable[[], bool]
    ) -> dict[str, Any]:
        store = open_store(request.out)
        check_same_place(store, request.token, self.name)
        with tempfile.TemporaryDirectory(prefix="comfyui-tpu-job-") as scratch:
            given, made = Path(scratch) / "input", Path(scratch) / "output"
            for folder in (given, made):
                folder.mkdir()
            for name, content in request.files.items():
                (given / Path(name).name).write_bytes(content)
            host = JobHost(replace(request.folders, input=given, output=made), report, is_cancelled)
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

    def _compare(self, request: Request, host: JobHost) -> None:
        """Raises RuntimeError where this machine's model or LoRA is not the one that the batch is about."""
        for wanted in request.marks:
            if wanted in self._compared or wanted.kind not in ("model", "LoRA"):
                continue
            found = mark(wanted.kind, wanted.name, request.folders, host)
            if found != wanted:
                raise RuntimeError(
                    f"the {wanted.kind} {wanted.name} of {socket.gethostname()} is {found.content}, and the batch's is "
                    f"{wanted.content}. Give both machines the same files."
                )
            self._compared.add(wanted)


def _keep(store: Store, job: str, made: Path) -> list[str]:
    """Puts what a job wrote into the store; the names, in order."""
    paths = sorted(path for path in made.rglob("*") if path.is_file())
    names = [f"{RESULTS}/{job}/{path.relative_to(made).as_posix()}" for path in paths]
    for name, path in zip(names, paths, strict=True):
        store.add(name, path)
    return names
