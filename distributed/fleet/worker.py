"""The process that runs jobs, a child of the driver or an actor of a cluster: models and programs stay loaded."""

import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ...nodes.declare import Folders
from ...nodes.headless.runner import TerminalContext, run_workflow
from ...tpu_runtime.memory_errors import HostMemoryError
from ...tpu_runtime.progress import Progress, SilentProgress
from ...tpu_runtime.redact import redact
from .jobs import hash_content
from .messages import JOB_FAULT, MACHINE_FAULT, ContentHash, JobFailed, JobRequest, WorkerStatus
from .store import DONE, RESULTS, BatchStore, Document, StoreError, lock_path, make_record

log = logging.getLogger(__name__)

_PREFIX = "comfyui-tpu-job-"


class JobCancelled(Exception):
    """The driver has cancelled the job."""


class FileMismatch(RuntimeError):
    """This machine's files differ from those of the batch."""


class JobContext(TerminalContext):
    """The host of a job's workflow: its progress is the actor's status."""

    def __init__(self, folders: Folders, actor: "WorkerActor") -> None:
        super().__init__(folders)
        self._actor = actor

    def text(self, message: str) -> None:
        self._actor.now = replace(self._actor.now, text=message, done=0, total=0)

    def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
        self._actor.now = replace(self._actor.now, done=done, total=total, unit=unit)

    def check_cancelled(self) -> None:
        if self._actor.is_cancelled.is_set():
            raise JobCancelled

    @contextmanager
    def time_node(self, title: str) -> Iterator[None]:
        self.check_cancelled()
        self._actor.now = WorkerStatus(node=title)
        with super().time_node(title):
            yield


class WorkerActor:
    """The object that the driver calls, with the worker's `name`.

    It runs one job at a time; other methods answer meanwhile.
    """

    CONCURRENCY = 4

    def __init__(self, name: str) -> None:
        self.name = name
        self._compared: set[ContentHash] = set()
        self.now, self.is_cancelled, self._lock = WorkerStatus(), threading.Event(), threading.Lock()

    def status(self) -> WorkerStatus:
        return self.now

    def cancel(self) -> None:
        self.is_cancelled.set()

    def run(self, request: JobRequest) -> Document | JobFailed:
        """Run a job, and store its results and record. Errors are returned, not raised."""
        try:
            with self._lock:
                return self._run(request)
        except JobCancelled:
            return JobFailed(error="cancelled", cancelled=True)
        except Exception as error:  # of any kind: the driver decides whether to try again
            is_known = isinstance(error, OSError | RuntimeError | ValueError)
            log.error("job %s failed", request.job, exc_info=error)
            text = redact(str(error) if is_known else f"{type(error).__name__}: {error}")
            return JobFailed(error=text, fault=self._fault(request, error))

    def _fault(self, request: JobRequest, error: Exception) -> str:
        """Return the cause of an error: the machine if its files cannot be used or differ from those of the batch."""
        if isinstance(error, OSError | StoreError | FileMismatch | MemoryError | HostMemoryError):
            return MACHINE_FAULT
        try:
            self._compared.clear()
            self._compare(request, SilentProgress())
        except Exception:  # of any kind: the files are not unchanged
            return MACHINE_FAULT
        return JOB_FAULT if isinstance(error, ValueError) else ""

    def _run(self, request: JobRequest) -> Document:
        store = BatchStore(request.out)
        if store.token() != request.token:
            raise StoreError(
                f"{self.name} does not see the batch's folder at {store.location}. With several machines --out must be "
                "a folder that all of them share, or an address such as gs://bucket/folder."
            )
        with scratch_folder() as folder:
            inputs, outputs = folder / "input", folder / "output"
            inputs.mkdir()
            outputs.mkdir()
            for name, content in request.files.items():
                (inputs / Path(name).name).write_bytes(content)
            host = JobContext(replace(request.folders, input=inputs, output=outputs), self)
            self._compare(request, host)
            start = time.perf_counter()
            run_workflow(request.workflow, host)
            elapsed_s = time.perf_counter() - start
            host.check_cancelled()
            paths = sorted(path for path in outputs.rglob("*") if path.is_file())
            files = {f"{RESULTS}/{request.job}/{path.relative_to(outputs).as_posix()}": path for path in paths}
            for name, path in files.items():
                store.write(name, path)
        stages = {timing.title: round(timing.elapsed_s, 3) for timing in host.timings}
        record = make_record(
            DONE, request.job, request.line, files=list(files), seconds=round(elapsed_s, 3), stages=stages,
            worker=self.name, machine=socket.gethostname(),
        )  # fmt: skip
        # Last: a job is done once this is there.
        store.write(f"{DONE}/{request.job}.json", record)
        return record

    def _compare(self, request: JobRequest, host: Progress) -> None:
        """Raise WrongFiles if a model or LoRA of this machine differs from that of the batch."""
        for expected in request.marks:
            if expected in self._compared or expected.kind not in ("model", "LoRA"):
                continue
            local = hash_content(expected.kind, expected.name, request.folders, host)
            if local != expected:
                raise FileMismatch(
                    f"the {expected.kind} {expected.name} of {socket.gethostname()} is {local.content}, and the "
                    f"batch's is {expected.content}. Give both machines the same files."
                )
            self._compared.add(expected)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a temporary folder that is locked while this process lives.

    Folders of killed processes are removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), lock_path(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    with lock_path(made):  # before it has the name by which others find it
        folder = made.rename(made.with_name(made.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
