"""A plan in a process of its own: libtpu, its environment and its memory stay out of this one, and a cancel ends it.

The file is the program of that process too. It gets the options of `comfyui-tpu plan`, and answers in lines of JSON.
"""

import argparse
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..progress import Progress

# How soon a cancel is noticed.
LOOK_S = 0.2
PACKAGE = "comfyui_tpu"


def make_text(options: Sequence[str], progress: "Progress") -> str:
    """The report of `comfyui-tpu plan` with these options; `progress` gets a line as each program is compiled.

    Raises `ValueError` for wrong options, `RuntimeError` where the compiler fails or its process ends early.
    """
    with tempfile.TemporaryFile("w+") as complaints, _started(options, complaints) as process:
        for answer in _answers(process, progress):
            if "report" in answer:
                return answer["report"]
            if "error" in answer:
                raise (ValueError if answer["is_users"] else RuntimeError)(answer["error"])
            progress.text(answer["line"])
        code = process.wait()
        complaints.seek(0)
        said = complaints.read().strip().splitlines()[-1:]
    raise RuntimeError(
        f"the plan's process ended with exit code {code}{f' ({said[0]})' if said else ''}. Plans take up to 12 GiB of "
        "host memory: end other programs, or plan a smaller size."
    )


@contextlib.contextmanager
def _started(options: Sequence[str], complaints: IO[str]) -> Iterator[subprocess.Popen]:
    """The process, which ends with the block, and its own children with it."""
    # -P: this file's folder holds modules of the package, which must not hide others.
    command = [sys.executable, "-P", __file__, *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a TPU of this machine is not its business
    process = subprocess.Popen(
        command, env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints,
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _answers(process: subprocess.Popen, progress: "Progress") -> Iterator[dict[str, Any]]:
    """What the process says until it ends; between two lines, cancels are looked for."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout
        with contextlib.suppress(ValueError):  # closed meanwhile
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        progress.check_cancelled()
        try:
            line = lines.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        if line is None:
            return
        yield json.loads(line)


# --- the other process ------------------------------------------------------------------------------------------------


def _main(arguments: Sequence[str]) -> None:
    # Only answers go where the other process reads them, whatever libraries print.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_other, daemon=True).start()

    def say(**answer: Any) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    plan = _package_module("tpu_runtime.plan.plan")
    report = _package_module("tpu_runtime.plan.report")
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    try:
        found = plan.make_plan(plan.request_of(parser.parse_args(arguments)), lambda line: say(line=line))
        say(report=report.text(found))
    except (ValueError, RuntimeError) as error:
        say(error=str(error), is_users=isinstance(error, ValueError))


def _end_with_the_other() -> None:
    """A server that is killed leaves no compiler behind."""
    os.read(0, 1)  # nothing is ever written: it returns when the pipe closes
    os.killpg(0, signal.SIGKILL)


def _package_module(name: str) -> Any:
    """A module of the pack, which need not be installed and whose folder may have any name."""
    root = Path(__file__).parents[2]
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec and spec.loader
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE])
    return importlib.import_module(f"{PACKAGE}.{name}")


if __name__ == "__main__":
    _main(sys.argv[1:])
