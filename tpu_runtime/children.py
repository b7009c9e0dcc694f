"""Child processes that send lines of JSON, and the child's side of it.

A child ends with the block that it runs in, with this process, and with a deadline; so do the processes it has started.
"""

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Seconds that a process has to end after SIGTERM, and after SIGKILL.
TERMINATE_TIMEOUT_S, KILL_TIMEOUT_S = 10.0, 30.0
PACKAGE = "comfyui_tpu"


class Child:
    """A running child, made by `running`."""

    def __init__(self, process: subprocess.Popen, complaints: IO[str]) -> None:
        self.process, self._complaints = process, complaints
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def line(self, within_s: float) -> dict[str, Any] | None:
        """Return the next message, None once the child has ended.

        Raises `TimeoutError` without a message in time.
        """
        until = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            with contextlib.suppress(ValueError):  # cut off, where the process was killed within it
                if isinstance(message := json.loads(line), dict):
                    return message

    def ending(self, within_s: float) -> int:
        """Return the exit code.

        Raises `TimeoutError` if the child has not ended in time, for example hanging in a driver.
        """
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def last_error_line(self) -> str:
        """Return the last line of the child's stderr in parentheses, after a space; "" without one."""
        self._complaints.seek(0)
        lines = [line.strip() for line in self._complaints.read()[-4000:].splitlines() if line.strip()]
        return f" ({lines[-1][:200]})" if lines else ""


@contextlib.contextmanager
def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Yield the process of `command`, with this process's environment unless another is given."""
    # A crashing process may print any bytes.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command, env=environment, encoding="utf-8", errors="replace", start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
        )  # fmt: skip
        assert process.stdin and process.stdout
        try:
            yield Child(process, complaints)
        finally:
            # SIGKILL skips libtpu's shutdown, after which the chips stay busy.
            for signal_number, limit_s in ((signal.SIGTERM, TERMINATE_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_number)
                # A process hanging in its driver survives SIGKILL and is abandoned.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(limit_s)
            process.stdin.close()
            process.stdout.close()


def run_module_child(
    module: str, job: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Child]:
    """Return the context of a process that calls `main(say, job)` of a module of the pack.

    environment: of the process; None for that of this one.
    It is started by this file's path: ComfyUI's folder of the pack need not be installed and may have any name.
    """
    # -P: modules in the working folder must not hide others.
    return run_child([sys.executable, "-P", __file__, module, json.dumps(job)], environment)


# --- in the child -----------------------------------------------------------------------------------------------------


def open_child_channel() -> Callable[..., None]:
    """Return a function that sends its keyword arguments as a line. Called first in a child.

    Output of libraries goes to stderr. When the parent ends, so do this process and its own children.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    lock = threading.Lock()

    def say(**line: object) -> None:
        with lock:
            out.write(json.dumps(line) + "\n")
            out.flush()

    return say


def _end_with_the_other() -> None:
    os.read(0, 1)  # nothing is ever written: returns when the pipe closes
    os.killpg(0, signal.SIGTERM)
    time.sleep(TERMINATE_TIMEOUT_S)
    os.killpg(0, signal.SIGKILL)


def _main(module: str, job: str) -> None:
    say = open_child_channel()
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec and spec.loader
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])
    importlib.import_module(f"{PACKAGE}.{module}").main(say, json.loads(job))


if __name__ == "__main__":
    _main(*sys.argv[1:])
