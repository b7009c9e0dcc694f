"""A worker on this machine: an actor in a child process, which has the chips, and is started again whenever it ends.

Not this process: what kills a worker must not kill the driver, and JAX and PyTorch do not grow that. The two speak
as `multiprocessing.managers` does, over a socket in a folder that only this user reads.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import wait as wait_for
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from .messages import Lost, Worker, Workers
from .worker import Actor, scratch

_LOOK_S, _LOG_LINES = 0.1, 6


class _Manager(BaseManager):
    """Has one kind of actor."""


class LocalWorker(Worker, Workers):
    """One child process at a time, whose output goes to `<logs>/<name>.log`; `actor` is what it runs."""

    gone = (EOFError, OSError)

    def __init__(self, logs: Path, actor: type[Actor] = Actor) -> None:
        self.name = socket.gethostname()
        self._log, self._actor = logs / f"{self.name}.log", actor
        self._process: Any = None
        self._calls = ThreadPoolExecutor(actor.CONCURRENCY)
        self._held, self._is_new = contextlib.ExitStack(), True
        logs.mkdir(parents=True, exist_ok=True)

    def found(self) -> Sequence[Worker]:
        """The only one, as one process has the chips."""
        is_new, self._is_new = self._is_new, False
        return [self] if is_new else []

    def wait(self, is_over: Callable[[], bool]) -> None:
        if self._process is not None:
            return
        self._held.close()
        where = str(self._held.enter_context(scratch()) / "actor")
        begun = (self._actor, where, str(self._log))
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=begun, daemon=True)
        self._process.start()
        manager = _Manager(where)
        manager.register("actor", self._actor)
        while not is_over():
            if not self._process.is_alive():
                reason = f"the worker on this machine does not start: {self._ended()}"
                raise Lost(reason, started=False)
            try:
                manager.connect()
                self._handle = manager.actor(self.name)  # pyright: ignore[reportAttributeAccessIssue] - registered
                return
            except self.gone:
                time.sleep(_LOOK_S)

    def _call(self, method: str, *arguments: Any) -> Future:
        return self._calls.submit(getattr(self._handle, method), *arguments)

    def _why(self, error: Exception) -> Exception:
        return Lost(self._ended())

    def _ended(self) -> str:
        """How."""
        self._process.join(timeout=5)
        self.close()
        code, self._process = self._process.exitcode or 0, None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process ended ({how}). {_tail(self._log)}"

    def restart(self) -> None:
        self.close()
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._held.close()


def _tail(path: Path) -> str:
    """The last lines of a log, in one."""
    try:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"Its log ends: {' | '.join(lines[-_LOG_LINES:])}" if lines else f"Its log, {path}, is empty."


# --- in the child -----------------------------------------------------------------------------------------------------


def _serve(actor: type[Actor], where: str, log: str) -> None:
    """Answers calls until the driver is gone, and with it whoever wants the job."""
    from tqdm import tqdm

    # Ctrl-C reaches every process of the terminal; the driver says what is to be done then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    driver = multiprocessing.parent_process()
    assert driver is not None
    threading.Thread(target=lambda: wait_for([driver.sentinel]) and os._exit(0), daemon=True).start()
    # Its own lock is one between processes: Python would complain, in the driver's terminal, that nobody frees it.
    tqdm.set_lock(threading.RLock())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    manager = _Manager(where)
    manager.register("actor", actor)
    manager.get_server().serve_forever()
