"""Ctrl-C of a batch on this machine, in the middle of a step: a pretended one, and by hand (`-m recorded`) that of a
real worker.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from comfyui_tpu.tests.support.fleet import SMALLEST, WORKFLOW
from comfyui_tpu.tests.support.patience import PATIENCE_S

# The command, that also says what its worker does.
COMMAND = """
import signal
import sys
from comfyui_tpu.cli import batch, main
from comfyui_tpu.distributed.fleet.local import LocalWorker
from comfyui_tpu.tests.support.fleet import Stepping
def show(view, progress):
    for doing in progress.workers.values():
        if doing.job is not None:
            print("line", doing.job.line, doing.status, flush=True)
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
    batch.TerminalView.show = show
    if sys.argv.pop(1) == "pretends":
        batch._workers = lambda options, store: LocalWorker(store.root / "logs", Stepping)
    sys.exit(main.main(sys.argv[1:]))
"""
STEPS = 20


class Batch:
    """The command as a process in a group of its own, which Ctrl-C reaches, and what it prints, as it comes."""

    def __init__(self, folder: Path, worker: str) -> None:
        program = folder / "command.py"
        program.write_text(COMMAND)
        arguments = ["batch", str(WORKFLOW), "--tiny", "--set-from", str(folder / "prompts.jsonl")]
        self.process = subprocess.Popen(
            [sys.executable, str(program), worker, *arguments, "--out", str(folder / "out")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0,
        )  # fmt: skip
        self.said: list[str] = []
        self._guard = threading.Timer(PATIENCE_S, self.process.kill)
        self._guard.start()

    def lines(self) -> Iterator[str]:
        for line in self.process.stdout or ():
            self.said.append(line)
            yield line

    def end(self) -> int:
        """Its exit code, once it has said all."""
        for _ in self.lines():
            pass
        self._guard.cancel()
        return self.process.wait()


@pytest.mark.parametrize("worker", ["pretends", pytest.param("is real", marks=pytest.mark.recorded)])
def test_batch_ctrl_c_leaves_no_process_and_next_call_resumes(tmp_path: Path, worker: str):
    jobs = [{**SMALLEST, "2.seed": 1}, {**SMALLEST, "2.seed": 2, "2.num_inference_steps": STEPS}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    first = Batch(tmp_path, worker)
    steps = (re.match(r"line 2 .*step (\d+)", line) for line in first.lines())
    done = next(int(found[1]) for found in steps if found)
    children = psutil.Process(first.process.pid).children(recursive=True)
    began = time.monotonic()
    os.killpg(first.process.pid, signal.SIGINT)
    assert first.end() == 130
    print(f"stopped after {time.monotonic() - began:.1f} s, in step {done} of {STEPS}: {first.said[-3:]}")
    assert worker == "pretends" or done < STEPS  # whose job would go on for a day
    assert any("stopping: running jobs end within a step" in said for said in first.said)
    assert any("stopped: 1 jobs are done" in said for said in first.said)
    assert children and psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
    (kept,) = results(tmp_path)
    # It was cancelled, not lost with a worker that did not stop.
    assert not list((tmp_path / "out" / "tries").glob("*"))

    second = Batch(tmp_path, worker)
    assert second.end() == 0
    print(second.said[-3:])
    assert not any("leaked" in said for said in [*first.said, *second.said])
    assert any("2 of 2 jobs are done, 1 of them decided by earlier calls" in said for said in second.said), second.said
    assert len(found := results(tmp_path)) == 2 and kept in found


def results(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in (folder / "out" / "results").rglob("*") if path.is_file()]
