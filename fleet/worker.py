"""Runs one job after the other in this process, a child of the driver or an actor of a cluster: models and compiled
programs stay for the next.
"""

import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..nodes.declare import Folders
from ..nodes.headless.runner import TerminalHost, run_workflow
from ..tpu_runtime.pipeline import Progress, Silent, redact
from .jobs import mark
from .messages import JOBS_FAULT, PLACES_FAULT, JobFailed, Mark, Request, Status
from .store import DONE, RESULTS, BatchStore, StoreError, decided, locked

log = logging.getLogger(__name__)

_PREFIX = "comfyui-tpu-job-"


class Cancelled(Exception):
    """The driver no longer wants the job."""


class WrongFiles(RuntimeError):
    """This machine's files are not those that the batch is about."""


class JobHost(TerminalHost):
    """The host of a job: its actor says what runs, and knows whether that is still wanted."""

    def __init__(self, folders: Folders, actor: "Actor") -> None:
        super().__init__(folders)
        self._actor = actor

    def text(self, message: str) -> None:
        self._actor.now = replace(self._actor.now, text=message, done=0, total=0)

    def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
        self._actor.now = replace(self._actor.now, done=done, total=total, unit=unit)

    def check_cancelled(self) -> None:
        if self._actor.is_cancelled.is_set():
            raise Cancelled

    def timed(self, title: str) -> AbstractContextManager[None]:
        self.check_cancelled()
        self._actor.now = Status(node=title)
        return super().timed(title)


class Actor:
    """What the driver calls `name`. It runs one job at a time, and answers meanwhile: methods may be called at once."""

    CONCURRENCY = 4

    def __init__(self, name: str) -> None:
        self.name = name
        self._compared: set[Mark] = set()
        self.now, self.is_cancelled, self._lock = Status(), threading.Event(), threading.Lock()

    def status(self) -> Status:
        return self.now

    def cancel(self) -> None:
        self.is_cancelled.set()

    def run(self, request: Request) -> dict[str, Any] | JobFailed:
        """Runs a job and keeps its results, and its record; whatever goes wrong is said, not raised."""
        try:
            with self._lock:
                return self._run(request)
        except Cancelled:
            return JobFailed(error="cancelled", cancelled=True)
        except Exception as error:  # whatever it is, the driver decides whether it is tried again
            is_known = isinstance(error, OSError | RuntimeError | ValueError)
            log.error("job %s failed", request.job, exc_info=error)
            text = redact(str(error) if is_known else f"{type(error).__name__}: {error}")
            return JobFailed(error=text, fault=self._fault(request, error))

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
        store = BatchStore(request.out)
        if store.token() != request.token:
            raise StoreError(
                f"{self.name} does not see the batch's folder at {store.location}. With several machines --out must be "
                "a folder that all of them share, or an address such as gs://bucket/folder."
            )
        with scratch() as folder:
            given, made = folder / "input", folder / "output"
            given.mkdir()
            made.mkdir()
            for name, content in request.files.items():
                (given / Path(name).name).write_bytes(content)
            host = JobHost(replace(request.folders, input=given, output=made), self)
            self._compare(request, host)
            start = time.perf_counter()
            run_workflow(request.workflow, host)
            elapsed_s = time.perf_counter() - start
            host.check_cancelled()
            paths = sorted(path for path in made.rglob("*") if path.is_file())
            files = {f"{RESULTS}/{request.job}/{path.relative_to(made).as_posix()}": path for path in paths}
            for name, path in files.items():
                store.write(name, path)
        stages = {timing.title: round(timing.elapsed_s, 3) for timing in host.timings}
        record = decided(
            DONE, request.job, request.line, files=list(files), seconds=round(elapsed_s, 3), stages=stages,
            worker=self.name, machine=socket.gethostname(),
        )  # fmt: skip
        # Last: a job is done once this is there.
        store.write(f"{DONE}/{request.job}.json", record)
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
        with suppress(OSError), locked(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    with locked(made):  # before it has the name by which others find it
        folder = made.rename(made.with_name(made.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
