"""`selftest --first-run`: each group of checks in a process of its own, and what the machine does without afterwards.

This process imports no JAX: it holds no chips, and whatever ends a child leaves it alive. A check's row is there before
the check starts. What a row teaches goes into `machine.json` at once, so that later groups run as prompts will.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

from ..machine import record
from ..machine.record import MachineRecord
from . import report
from .checks import CheckResult, result
from .groups import CheckGroup
from .report import UNFINISHED, ChipRecord, SelftestReport

# From the start of a process to its first check: JAX waits for all hosts of a slice.
START_S = 300.0
# What the chips get to recover after a process that lost them.
RECOVERY_S = 5.0
BEGIN = "start of the process"


class FirstRun:
    """The checks so far. `changed` is called before each check and after it, `shown` with its progress."""

    def __init__(
        self,
        models: Sequence[str],
        changed: Callable[[], None] = lambda: None,
        shown: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.models, self._changed, self._shown = models, changed, shown
        self.rows: list[CheckResult] = []
        self.chips: list[ChipRecord] = []
        self._platform, self._key = "", ""
        self._started = time.monotonic()

    def report(self) -> SelftestReport:
        found = record.read(self._key) if self._key else MachineRecord()
        elapsed_s = time.monotonic() - self._started
        return report.make(self._platform, self.chips, self.models, self.rows, elapsed_s, found)

    def run(self, groups: Iterable[CheckGroup]) -> None:
        """Runs every group. Without chips there is nothing to be checked: then the first is the last."""
        with tempfile.TemporaryDirectory(prefix="comfyui-tpu-") as folder:
            for group in groups:
                self._group(group, folder)
                if not self.chips:
                    return

    def _group(self, group: CheckGroup, folder: str) -> None:
        done: list[str] = []
        while True:
            before = len(self.rows)
            is_over = self._process(group, {"group": group.name, "folder": folder, "done": done})
            made = self.rows[before:]
            done += [row.title for row in made]
            if is_over or not group.goes_on or not made or made[-1].stage == BEGIN:
                return
            if self._platform == "tpu":
                time.sleep(RECOVERY_S)

    def _process(self, group: CheckGroup, job: dict[str, Any]) -> bool:
        """One process of a group, with a row for each check; whether it came to its end."""
        self._begin(group.name, BEGIN, "", MachineRecord())
        with tempfile.TemporaryFile("w+") as complaints, _started(job, complaints) as process:
            lines, is_begun = _Lines(process), False
            while True:
                limit_s = group.deadline_s if is_begun else START_S
                try:
                    line = lines.next(limit_s)
                except TimeoutError:
                    self._end_lost(f"It did not end within {limit_s:.0f} s, and was killed.")
                    return False
                if line is None:
                    break
                if "begins" in line:
                    if not is_begun:
                        self.rows.pop()  # the process has started
                    is_begun = True
                    family, stage, precision = line["begins"]
                    self._begin(family, stage, precision, record.parsed(line["if_lost"]))
                    lines.restart()
                elif "row" in line:
                    row = result(line["row"])
                    self._end(row)
                    if row.is_lost:
                        return False
                elif "chips" in line:
                    self._arrived(line)
                else:
                    self._shown(line["text"])
            code = process.wait()
            if code == 0:
                if not is_begun:
                    self.rows.pop()
                return True
            self._end_lost(f"Its process ended {_ending(code)}{_last_words(complaints)}.")
            return False

    def _begin(self, family: str, stage: str, precision: str, if_lost: MachineRecord) -> None:
        self.rows.append(
            CheckResult(
                family=family, stage=stage, precision=precision, error=None, slope=None, bound=None, seconds=0.0,
                problem=UNFINISHED, learnt=if_lost,
            )
        )  # fmt: skip
        self._begun = time.monotonic()
        self._changed()

    def _end(self, row: CheckResult) -> None:
        self.rows[-1] = row
        self._learn(row)
        self._changed()

    def _end_lost(self, problem: str) -> None:
        """The running check took its process with it."""
        seconds = time.monotonic() - self._begun
        if self.rows[-1].problem != UNFINISHED:  # between two checks
            self._begin(self.rows[-1].family, "end of the process", "", MachineRecord())
        self._end(replace(self.rows[-1], problem=problem, seconds=seconds, is_lost=True))

    def _arrived(self, line: dict[str, Any]) -> None:
        """A process has the chips. The first finds out everything again, so what was known of them is forgotten."""
        if self.chips:
            return
        self.chips = [ChipRecord(**chip) for chip in line["chips"]]
        self._platform = line["platform"]
        self._key = record.key_of(self.chips[0].kind, len(self.chips))
        record.write(self._key, MachineRecord())

    def _learn(self, row: CheckResult) -> None:
        if row.learnt == MachineRecord() or not self._key:
            return
        sentences = (f"Self-test, {row.title}: {row.problem}",) if row.problem else ()
        learnt = replace(row.learnt, sentences=sentences)
        record.write(self._key, record.read(self._key) | learnt)


class _Lines:
    """What a process says until it ends, None then; `TimeoutError` where the running check takes too long."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.restart()

        def read() -> None:
            assert process.stdout
            with contextlib.suppress(ValueError):  # closed meanwhile
                for line in process.stdout:
                    self._lines.put(line)
            self._lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def restart(self) -> None:
        """The time of a check begins."""
        self._since = time.monotonic()

    def next(self, limit_s: float) -> dict[str, Any] | None:
        left_s = self._since + limit_s - time.monotonic()
        try:
            line = self._lines.get(timeout=max(0.0, left_s))
        except queue.Empty:
            raise TimeoutError from None
        try:
            return None if line is None else json.loads(line)
        except ValueError:  # cut off, where the process was killed within it
            return {"text": ""}


@contextlib.contextmanager
def _started(job: dict[str, Any], complaints: IO[str]) -> Iterator[subprocess.Popen]:
    """The process, which ends with the block, and its own children with it."""
    # -P: the working folder may hold modules that hide others.
    command = [sys.executable, "-P", "-m", f"{__package__}.child", json.dumps(job)]
    process = subprocess.Popen(
        command, text=True, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
    )
    assert process.stdin and process.stdout
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _ending(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    except ValueError:
        return f"by signal {-code}"


def _last_words(complaints: IO[str]) -> str:
    """What it said last, as a part of the sentence."""
    complaints.seek(0)
    said = [line.strip() for line in complaints.read()[-4000:].splitlines() if line.strip()]
    return f" ({said[-1][:200]})" if said else ""
