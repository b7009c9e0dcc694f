"""Output for the user, and commands whose output goes to a file."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class SetupError(Exception):
    """An error that ends the run with its message, a sentence for the user."""


def say(message: str) -> None:
    """Print a message."""
    print(f"[setup] {message}", flush=True)


def confirm(question: str) -> None:
    """Raise SetupError unless the user answers yes."""
    if not sys.stdin.isatty():
        raise SetupError(f"{question} No terminal to ask at: add --yes to continue without a question.")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise SetupError("Nothing was changed.")


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path) -> int:
    """Run `command` in `folder` with its output appended to `log`; return its exit code.

    environment: its variables. In a terminal its last line of output is shown while it runs.
    """
    with log.open("ab") as output:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            _watch(process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode


def _watch(process: subprocess.Popen[bytes], log: Path) -> None:
    if not sys.stdout.isatty():
        process.wait()
        return
    started = time.monotonic()
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        line = f"  {time.monotonic() - started:4.0f} s  {tail(log)}" if process.poll() is None else ""
        print(f"\r\033[K{line[: os.get_terminal_size().columns - 1]}", end="", flush=True)


def tail(log: Path, num_lines: int = 1) -> str:
    """Return the last `num_lines` non-empty lines of a log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])
