"""A worker on this machine: an actor in a child process that holds the chips, and is started again when it ends.

It is a separate process so that a failure of the worker does not end the driver, and JAX and PyTorch do not use its
memory. Both communicate by `multiprocessing.managers`, over a socket in a folder that only this user can read.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait as wait_for
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from .messages import Worker, WorkerLost, Workers
from .worker import WorkerActor, scratch_folder

_POLL_S, _LOG_LINES = 0.1, 6


class _Manager(BaseManager):
    """The manager of one actor class."""


class LocalWorker(Worker, Workers):
    """One child process at a time, which runs `actor` and writes its output to `<logs>/<name>.log`."""

    def __init__(self, logs: Path, actor: type[WorkerActor] = WorkerActor) -> None:
        self.name = socket.gethostname()
        self._log, self._actor = logs / f"{self.name}.log", actor
        self._process: Any = None
        self._calls = ThreadPoolExecutor(actor.CONCURRENCY)
        self._folders = contextlib.ExitStack()
        logs.mkdir(parents=True, exist_ok=True)

    def found(self) -> Sequence[Worker]:
        """Return the only worker, because one process holds the chips."""
        return [self]

    def call(self, method: str, *arguments: object) -> Future:
        if self._process is None:
            where = str(self._folders.enter_context(scratch_folder()) / "actor")
            begun = (self._actor, where, str(self._log))
            self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=begun, daemon=True)
            self._process.start()
            self._handle = self._calls.submit(_connect, self._process, where, self._actor, self.name)
        handle = self._handle
        return self._calls.submit(lambda: getattr(handle.result(), method)(*arguments))

    def lost(self, error: Exception, is_running: bool) -> WorkerLost:
        if not isinstance(error, EOFError | OSError):
            raise error
        process = self._process
        process.join(timeout=5)
        self.close()
        code = process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        ended = f"its process ended ({how}). {_tail(self._log)}"
        return WorkerLost(ended if is_running else f"the worker on this machine does not start: {ended}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        self._folders.close()

    restart = close


def _connect(process: Any, where: str, actor: type[WorkerActor], name: str) -> Any:
    """Return the actor of a process once it answers. Raises EOFError if the process ends before."""
    manager = _Manager(where)
    manager.register("actor", actor)
    while process.is_alive():
        with contextlib.suppress(OSError):
            manager.connect()
            return manager.actor(name)  # pyright: ignore[reportAttributeAccessIssue] - registered
        time.sleep(_POLL_S)
    raise EOFError


def _tail(path: Path) -> str:
    """Return the last lines of a log, joined."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"Its log ends: {' | '.join(lines[-_LOG_LINES:])}" if lines else f"Its log, {path}, is empty."


# --- in the child -----------------------------------------------------------------------------------------------------


def _serve(actor: type[WorkerActor], where: str, log: str) -> None:
    """Answer calls until the driver ends."""
    from tqdm import tqdm

    # Ctrl-C reaches every process of the terminal; the driver decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    driver = multiprocessing.parent_process()
    assert driver is not None
    threading.Thread(target=lambda: wait_for([driver.sentinel]) and os._exit(0), daemon=True).start()
    # tqdm's own lock is a multiprocessing lock, about which Python would warn in the driver's terminal.
    tqdm.set_lock(threading.RLock())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    manager = _Manager(where)
    manager.register("actor", actor)
    manager.get_server().serve_forever()
