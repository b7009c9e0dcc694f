"""Workers of a batch without chips: in this process, or as child processes that a test may kill."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...fleet.ledger import DONE, RESULTS
from ...fleet.local import Inbox
from ...fleet.messages import Done, Event, Failed, Lost, Ready, Request, Status
from ...fleet.store import open_store

PACK = Path(__file__).parents[2]
WORKFLOW = PACK / "examples" / "api" / "wan21_t2v_720p.json"
# The smallest that the model allows.
SMALLEST = {"2.num_frames": 5, "2.num_inference_steps": 1}


def prompts(path: Path, count: int, **more: Any) -> Path:
    """A file of jobs that differ in prompt and seed."""
    lines = [{"1.prompt": f"number {index}", "2.seed": index, **SMALLEST, **more} for index in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def keep(worker: str, request: Request) -> Done:
    """What a worker does when a job is done, with the prompt as its result."""
    store = open_store(request.out)
    name = f"{RESULTS}/{request.job}/prompt.txt"
    store.write(name, request.workflow["1"]["inputs"]["prompt"].encode())
    record = {"job": request.job, "state": DONE, "line": request.line, "files": [name], "worker": worker}
    store.write(f"{DONE}/{request.job}.json", json.dumps(record).encode())
    return Done(worker=worker, job=request.job, record=record)


class Inline:
    """Workers in this process, which do a job when events are asked for: `body` says how it ends."""

    def __init__(self, names: list[str], body: Callable[[str, Request], Event] = keep) -> None:
        self._body = body
        self._events: list[Event] = [Ready(worker=name) for name in names]
        self._given: list[tuple[str, Request]] = []
        self.runs: Counter[int] = Counter()  # by line
        self.ran: dict[str, list[Request]] = {name: [] for name in names}
        self.restarted: list[str] = []

    def events(self, timeout_s: float) -> list[Event]:
        found, self._events = self._events, []
        given, self._given = self._given, []
        for worker, request in given:
            self.runs[request.line] += 1
            self.ran[worker].append(request)
            event = self._body(worker, request)
            found.append(event)
            if isinstance(event, Lost):
                found.append(Ready(worker=worker))
        return found

    def submit(self, worker: str, request: Request) -> None:
        self._given.append((worker, request))

    def statuses(self) -> Mapping[str, Status]:
        return {name: Status() for name in self.ran}

    def restart(self, worker: str) -> None:
        self.restarted.append(worker)
        self._events += [Lost(worker=worker, reason="restarted"), Ready(worker=worker)]

    def cancel(self) -> None:
        self._events += [
            Failed(worker=worker, job=request.job, error="cancelled", cancelled=True) for worker, request in self._given
        ]
        self._given = []

    def close(self) -> None: ...


def stub(name: str, connection: Connection) -> None:
    """The body of a child process that needs a moment for each job; it notes each as it begins."""
    inbox = Inbox(connection)
    connection.send(Ready(worker=name))
    while True:
        request = inbox.requests.get()
        with (Path(request.out) / "begun.txt").open("a") as file:
            file.write(f"{request.job} {os.getpid()}\n")
        time.sleep(0.05)
        connection.send(keep(name, request))


def stepping(name: str, connection: Connection) -> None:
    """The body of a child process whose second job has steps without end, until it is cancelled; begun again it has
    none.
    """
    inbox = Inbox(connection)
    connection.send(Ready(worker=name))
    while True:
        request = inbox.requests.get()
        begun = Path(request.out) / "begun.txt"
        if request.line == 2 and not begun.exists():
            begun.touch()
            step = 0
            while not inbox.is_cancelled.wait(0.05):
                step += 1
                connection.send(Status(node="Sampler", done=step, total=10**6, unit="step"))
            connection.send(Failed(worker=name, job=request.job, error="cancelled", cancelled=True))
        else:
            connection.send(keep(name, request))
