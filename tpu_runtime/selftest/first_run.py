"""`selftest --first-run`: each group of checks in a process of its own, and what the machine does without afterwards.

This process imports no JAX: it holds no chips, and whatever ends a child leaves it alive. A check's row is there before
the check starts. What a row teaches goes into `machine.json` at once, so that later groups run as prompts will.
"""

import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .. import children
from ..machine import record
from ..machine.record import MachineRecord
from . import report
from .checks import CheckResult, result
from .groups import CheckGroup
from .report import UNFINISHED, ChipRecord, SelftestReport

# From the start of a process to its first check: JAX waits for all hosts of a slice.
START_S = 300.0
# From its last word to its end.
END_S = 60.0
# What the chips get to recover after a process that lost them.
RECOVERY_S = 5.0
BEGIN = "start of the process"
# Groups in a row whose process did not get as far as a check, after which the rest is left out.
MOST_IN_VAIN = 2


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
        """Runs every group, as long as processes get the chips: else each would wait for them in vain."""
        in_vain = 0
        with tempfile.TemporaryDirectory(prefix="comfyui-tpu-") as folder:
            for group in groups:
                before = len(self.rows)
                self._group(group, folder)
                in_vain = in_vain + 1 if BEGIN in [row.stage for row in self.rows[before:]] else 0
                if not self.chips or in_vain == MOST_IN_VAIN:
                    return

    def _group(self, group: CheckGroup, folder: str) -> None:
        done: list[str] = []
        while True:
            before = len(self.rows)
            if self._process(group, {"group": group.name, "folder": folder, "done": done}):
                return
            if self._platform == "tpu":
                time.sleep(RECOVERY_S)
            made = self.rows[before:]
            done += [row.title for row in made]
            if not group.goes_on or made[-1].stage == BEGIN:
                return

    def _process(self, group: CheckGroup, job: dict[str, Any]) -> bool:
        """One process of a group, with a row for each check; whether it came to its end."""
        self._begin(group.name, BEGIN, "", MachineRecord())
        is_begun = False
        with children.answering("selftest.child", job) as child:
            while True:
                limit_s = group.deadline_s if is_begun else START_S
                try:
                    line = child.line(self._begun + limit_s - time.monotonic())
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
                elif "row" in line:
                    row = result(line["row"])
                    self._end(row)
                    if row.is_lost:
                        return False
                elif "chips" in line:
                    self._arrived(line)
                else:
                    self._shown(line["text"])
            try:
                code = child.ending(END_S)
            except TimeoutError:
                self._end_lost(f"Its process did not end within {END_S:.0f} s, and was killed.")
                return False
            if code == 0 and not is_begun:
                self.rows.pop()
                return True
            if code == 0 and self.rows[-1].problem != UNFINISHED:
                return True
            self._end_lost(f"Its process ended {_ending(code)}{child.last_words()}.")
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
        record.add(self._key, replace(row.learnt, sentences=sentences))


def _ending(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    except ValueError:
        return f"by signal {-code}"
