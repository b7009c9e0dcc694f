"""Processes of our own that say lines of JSON, and what such a process does to say them.

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

# How long a process has to end in order before it is killed, and a killed one until it has ended, in seconds.
TERMINATE_S, KILLED_S = 10.0, 30.0
PACKAGE = "comfyui_tpu"


class Child:
    """A running child; `running` makes one."""

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
        """What it says next, None once it has ended. Raises `TimeoutError` where it says nothing for so long."""
        until = time.monotonic() + within_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            with contextlib.suppress(ValueError):  # cut off, where the process was killed within it
                if isinstance(said := json.loads(line), dict):
                    return said

    def ending(self, within_s: float) -> int:
        """Its exit code. Raises `TimeoutError` where it has not ended by then, as within a driver that hangs."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def last_words(self) -> str:
        """The last line of its complaints, " (in parentheses)"; empty where it had none."""
        self._complaints.seek(0)
        said = [line.strip() for line in self._complaints.read()[-4000:].splitlines() if line.strip()]
        return f" ({said[-1][:200]})" if said else ""


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Child]:
    """The process of `command`, in this process's environment unless another is given."""
    # A process that crashes may say anything.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command, env=environment, encoding="utf-8", errors="replace", start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
        )  # fmt: skip
        assert process.stdin and process.stdout
        try:
            yield Child(process, complaints)
        finally:
            # A killed process leaves libtpu without its shutdown, and the chips busy for the next one.
            for signal_number, limit_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILLED_S)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal_number)
                # A process that not even SIGKILL ends, within its driver, is left behind.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(limit_s)
            process.stdin.close()
            process.stdout.close()


def answering(
    module: str, job: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[Child]:
    """A process that calls `main(say, job)` of a module of the runtime. It is started by this file's path: ComfyUI's
    folder of the pack need not be installed, and may have any name.
    """
    # -P: folders hold modules, which must not hide others.
    return running([sys.executable, "-P", __file__, module, json.dumps(job)], environment)


# --- in the child -----------------------------------------------------------------------------------------------------


def speaker() -> Callable[..., None]:
    """Called first thing in a child: what says a line, made of its keyword arguments. Whatever libraries print is a
    complaint. When the other process ends, so does this one, with its own children.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_other, daemon=True).start()
    lock = threading.Lock()

    def say(**line: Any) -> None:
        with lock:
            out.write(json.dumps(line) + "\n")
            out.flush()

    return say


def _end_with_the_other() -> None:
    os.read(0, 1)  # nothing is ever written: it returns when the pipe closes
    os.killpg(0, signal.SIGTERM)
    time.sleep(TERMINATE_S)
    os.killpg(0, signal.SIGKILL)


def _main(module: str, job: str) -> None:
    say = speaker()
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec and spec.loader
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])
    importlib.import_module(f"{PACKAGE}.tpu_runtime.{module}").main(say, json.loads(job))


if __name__ == "__main__":
    _main(*sys.argv[1:])
