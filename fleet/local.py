"""A worker on this machine: a child process, which has the chips, and is started again whenever it ends.

Not this process: what kills a worker must not kill the driver, and JAX and PyTorch do not grow the driver.
"""

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .messages import JobDone, JobFailed, Lost, Request, Status

# A worker that ends at once is started again after longer and longer.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _LOOK_S = 1.0, 60.0, 0.1
# So many in a row that were not even ready: it is not the machine that goes away.
_VAIN_STARTS = 4
_LOG_LINES = 6
READY, _CANCEL = "ready", "cancel"


class LocalWorker:
    """One child process at a time, whose output goes to `<logs>/<name>.log`. `body` is what it runs, for tests: it gets
    its end of the pipe.
    """

    def __init__(self, logs: Path, body: Callable[[Connection], None] | None = None) -> None:
        self.name = socket.gethostname()
        self._log, self._body = logs / f"{self.name}.log", body or serve
        self._process: Any = None
        self._connection: Any = None
        self._vain_starts, self._wait_s = 0, _FIRST_WAIT_S
        logs.mkdir(parents=True, exist_ok=True)

    # As `Workers`: the only one, as one process has the chips.
    def found(self) -> Sequence["LocalWorker"]:
        is_new, self._is_new = self._is_new, False
        return [self] if is_new else []

    _is_new = True

    def wait(self, is_over: Callable[[], bool]) -> None:
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_begin, args=(self._body, theirs, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()
        self._next(lambda status: None, is_over, lambda: None)

    def run(
        self, request: Request, report: Callable[[Status], None], is_cancelled: Callable[[], bool]
    ) -> JobDone | JobFailed:
        def cancel() -> None:
            self._connection.send(_CANCEL)

        try:
            self._connection.send(request)
        except OSError:
            raise self._ended(is_cancelled) from None
        found = self._next(report, is_cancelled, cancel)
        if isinstance(found, JobDone):
            self._wait_s = _FIRST_WAIT_S
        return found

    def _next(self, report: Callable[[Status], None], is_over: Callable[[], bool], end: Callable[[], None]) -> Any:
        """What it says next; `end` is called once where that `is_over`."""
        said_so = False
        try:
            while True:
                if self._connection.poll(_LOOK_S):
                    said = self._connection.recv()
                    if not isinstance(said, Status):
                        self._vain_starts = 0
                        return said
                    report(said)
                if is_over() and not said_so:
                    end()
                    said_so = True
        except (EOFError, OSError):
            raise self._ended(is_over) from None

    def _ended(self, is_over: Callable[[], bool]) -> Exception:
        """Why; after a pause, if it ends again and again."""
        self._connection.close()
        self._process.join(timeout=5)
        self._process.kill()
        self._process.join()
        code = self._process.exitcode or 0
        self._process = None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"its process ended ({how}). {_tail(self._log)}"
        self._vain_starts += 1
        if self._vain_starts == _VAIN_STARTS:
            return RuntimeError(f"the worker on this machine does not start: {reason}")
        until = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        while time.monotonic() < until and not is_over():
            time.sleep(_LOOK_S)
        return Lost(reason)

    def restart(self) -> None:
        self.close()
        self._process = None

    def close(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            process.join()


def _tail(path: Path) -> str:
    """The last lines of a log, in one."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"Its log ends: {' | '.join(lines[-_LOG_LINES:])}" if lines else f"Its log, {path}, is empty."


# --- in the child -----------------------------------------------------------------------------------------------------


def _begin(body: Callable[[Connection], None], connection: Connection, log: str) -> None:
    # Ctrl-C reaches every process of the terminal; the driver says what is to be done then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    body(connection)


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
                said = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)  # the driver is gone, and with it whoever wants the job
            if said == _CANCEL:
                self.is_cancelled.set()
            else:
                self.requests.put(said)


def serve(connection: Connection) -> None:
    """A child's work: job after job, until the driver is gone."""
    import logging

    from tqdm import tqdm

    from .worker import JobRunner

    # Its own lock is one between processes: Python would complain, in the driver's terminal, that nobody frees it.
    tqdm.set_lock(threading.RLock())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    inbox, runner = Inbox(connection), JobRunner(socket.gethostname())
    connection.send(READY)
    while True:
        connection.send(runner.run(inbox.requests.get(), connection.send, inbox.is_cancelled.is_set))
