"""Workers of a batch without chips: in this process, or as child processes that a test may kill."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import av

from ...distributed.fleet.messages import JobFailed, JobRequest, Worker, WorkerLost, Workers, WorkerStatus
from ...distributed.fleet.store import DONE, RESULTS, BatchStore, make_record
from ...distributed.fleet.worker import WorkerActor

PACK = Path(__file__).parents[2]
WORKFLOW = PACK / "examples" / "api" / "wan21_t2v_720p.json"
# The smallest that the model allows.
SMALLEST = {"2.num_frames": 5, "2.num_inference_steps": 1}


def prompts(path: Path, count: int, **more: Any) -> Path:
    """A file of jobs that differ in prompt and seed."""
    lines = [{"1.prompt": f"number {index}", "2.seed": index, **SMALLEST, **more} for index in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def keep(worker: str, request: JobRequest) -> dict[str, Any]:
    """What a worker does when a job is done, with the prompt as its result."""
    store = BatchStore(request.out)
    name = f"{RESULTS}/{request.job}/prompt.txt"
    store.write(name, request.workflow["1"]["inputs"]["prompt"].encode())
    record = make_record(DONE, request.job, request.line, files=[name], worker=worker)
    store.write(f"{DONE}/{request.job}.json", record)
    return record


class InlineWorker(Worker):
    """A worker in the driver's thread: `Inline.body` says how a job ends."""

    def __init__(self, name: str, workers: "Inline") -> None:
        self.name, self._workers = name, workers

    def call(self, method: str, *arguments: Any) -> Future:
        return came(lambda: self._run(*arguments) if method == "run" else WorkerStatus())

    def _run(self, request: JobRequest) -> dict[str, Any] | JobFailed:
        self._workers.runs[request.line] += 1
        self._workers.ran[self.name].append(request)
        return self._workers.body(self.name, request)

    def lost(self, error: Exception, is_running: bool) -> WorkerLost:
        assert isinstance(error, WorkerLost), error
        return error

    def restart(self) -> None:
        self._workers.restarted.append(self.name)


class Inline(Workers):
    """Workers in this process, which do one job after the other."""

    def __init__(self, names: list[str], body: Callable[[str, JobRequest], dict[str, Any] | JobFailed] = keep) -> None:
        self.body = body
        self.runs: Counter[int] = Counter()  # by line
        self.ran: dict[str, list[JobRequest]] = {name: [] for name in names}
        self.restarted: list[str] = []
        self.all = [InlineWorker(name, self) for name in names]

    def found(self) -> Sequence[InlineWorker]:
        return self.all

    def close(self) -> None: ...

    def ctrl_c(self) -> None:
        """As if the user pressed it."""
        signal.raise_signal(signal.SIGINT)


def came(work: Callable[[], Any]) -> Future:
    """What has come of some work."""
    future: Future = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


class Stub(WorkerActor):
    """Needs a moment for each job; it notes each as it begins."""

    def run(self, request: JobRequest) -> dict[str, Any] | JobFailed:
        with (Path(request.out) / "begun.txt").open("a") as file:
            file.write(f"{request.job} {os.getpid()}\n")
        time.sleep(0.05)
        return keep("stub", request)


class Stepping(WorkerActor):
    """Its second job has steps without end, until it is cancelled; begun again it has none."""

    def run(self, request: JobRequest) -> dict[str, Any] | JobFailed:
        begun = Path(request.out) / "begun.txt"
        if request.line != 2 or begun.exists():
            return keep("stepping", request)
        begun.touch()
        step = 0
        while not self.is_cancelled.wait(0.05):
            step += 1
            self.now = WorkerStatus(node="Sampler", done=step, total=10**6, unit="step")
        return JobFailed(error="cancelled", cancelled=True)


def packets(video: Path) -> list[bytes]:
    """A video as it is compressed, without what its file says beside: `comfyui-tpu run` notes its seconds there."""
    with av.open(str(video)) as opened:
        return [bytes(packet) for packet in opened.demux(video=0)]
