"""A worker on this machine: a child process, which has the chips, and is started again whenever it ends.

Not this process: what kills a worker must not kill the driver, and JAX and PyTorch do not grow the driver.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .messages import Done, Event, Lost, Ready, Request, Status

# A worker that ends at once is started again after longer and longer.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
# So many in a row that were not even ready: it is not the machine that goes away.
_VAIN_STARTS = 4
_LOG_LINES = 6
_RUN, _CANCEL = "run", "cancel"


@dataclass(kw_only=True)
class _Child:
    """One worker's process and our end of its pipe; none between its end and its next start."""

    name: str
    log: Path
    process: BaseProcess | None = None
    connection: Any = None
    status: Status = field(default_factory=Status)
    wait_s: float = _FIRST_WAIT_S
    vain_starts: int = 0
    start_at: float = 0.0


class LocalWorkers:
    """Workers as child processes: one, as one process has the chips. What they print goes to `<logs>/<name>.log`.

    `body` is what a child runs, for tests: it gets its name and its end of the pipe.
    """

    def __init__(self, logs: Path, body: "Callable[[str, Connection], None] | None" = None, count: int = 1) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._body = body or serve
        host = socket.gethostname()
        names = [host if count == 1 else f"{host}-{index}" for index in range(count)]
        self._children = {name: _Child(name=name, log=logs / f"{name}.log") for name in names}

    def events(self, timeout_s: float) -> list[Event]:
        now = time.monotonic()
        for child in self._children.values():
            if child.process is None and now >= child.start_at:
                self._start(child)
        connections = {child.connection: child for child in self._children.values() if child.connection is not None}
        if not connections:
            time.sleep(timeout_s)
            return []
        found: list[Event] = []
        for ready in wait(list(connections), timeout_s):
            found += self._read(connections[ready])
        return found

    def _start(self, child: _Child) -> None:
        context = multiprocessing.get_context("spawn")
        child.connection, theirs = context.Pipe()
        child.process = context.Process(
            target=_begin, args=(self._body, child.name, theirs, str(child.log)), daemon=True
        )
        child.process.start()
        theirs.close()

    def _read(self, child: _Child) -> list[Event]:
        """All that a child has said, up to its end."""
        assert child.connection is not None
        found: list[Event] = []
        try:
            while child.connection.poll():
                said = child.connection.recv()
                if isinstance(said, Status):
                    child.status = said
                else:
                    if isinstance(said, Done):
                        child.wait_s = _FIRST_WAIT_S
                    child.vain_starts = 0
                    child.status = Status()
                    found.append(said)
        except (EOFError, OSError):
            found.append(self._ended(child))
        return found

    def _ended(self, child: _Child) -> Lost:
        assert child.process is not None and child.connection is not None
        child.connection.close()
        child.process.join(timeout=5)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        code = child.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        child.process = child.connection = None
        child.status = Status()
        reason = f"its process ended ({how}). {_tail(child.log)}"
        child.vain_starts += 1
        if child.vain_starts == _VAIN_STARTS:
            raise RuntimeError(f"the worker on this machine does not start: {reason}")
        child.start_at = time.monotonic() + child.wait_s
        child.wait_s = min(2 * child.wait_s, _LONGEST_WAIT_S)
        return Lost(worker=child.name, reason=reason)

    def submit(self, worker: str, request: Request) -> None:
        self._send(self._children[worker], (_RUN, request))

    def _send(self, child: _Child, message: tuple[Any, ...]) -> None:
        if child.connection is not None:
            with contextlib.suppress(OSError):  # it has ended: the next look says so
                child.connection.send(message)

    def statuses(self) -> Mapping[str, Status]:
        return {child.name: child.status for child in self._children.values()}

    def restart(self, worker: str) -> None:
        if (process := self._children[worker].process) is not None:
            process.kill()

    def cancel(self) -> None:
        for child in self._children.values():
            self._send(child, (_CANCEL,))

    def close(self) -> None:
        for child in self._children.values():
            if child.process is not None:
                child.process.kill()
                child.process.join()
            if child.connection is not None:
                child.connection.close()


def _tail(path: Path) -> str:
    """The last lines of a log, in one."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"Its log ends: {' | '.join(lines[-_LOG_LINES:])}" if lines else f"Its log, {path}, is empty."


# --- in the child -----------------------------------------------------------------------------------------------------


def _begin(body: "Callable[[str, Connection], None]", name: str, connection: Connection, log: str) -> None:
    # Ctrl-C reaches every process of the terminal; the driver says what is to be done then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    body(name, connection)


class Inbox:
    """What the driver sends, read in a thread of its own: so a job can be cancelled, and ends with the driver."""

    def __init__(self, connection: Connection) -> None:
        self.requests: queue.Queue[Request] = queue.Queue()
        self.is_cancelled = threading.Event()
        self._connection = connection
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                kind, *rest = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the driver is gone, and with it whoever wants the job
            if kind == _RUN:
                self.requests.put(rest[0])
            else:
                self.is_cancelled.set()


def serve(name: str, connection: Connection) -> None:
    """A child's work: job after job, until the driver is gone."""
    import logging

    from tqdm import tqdm

    from .worker import Worker

    # Its own lock is one between processes: Python would complain, in the driver's terminal, that nobody frees it.
    tqdm.set_lock(threading.RLock())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    inbox, worker, sending = Inbox(connection), Worker(name), threading.Lock()

    def send(message: Event | Status) -> None:
        with sending:
            connection.send(message)

    send(Ready(worker=name))
    while True:
        send(worker.run(inbox.requests.get(), send, inbox.is_cancelled.is_set))
