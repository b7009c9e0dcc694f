"""`selftest --first-run`: each group of checks in a process of its own. The machine's record is the result.

This process imports no JAX: it holds no chips, and survives any failure of a child. A check's row exists before the
check starts. New fallbacks are written to `machine.json` at once, so that later groups run as prompts will.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...tpu_runtime import children
from ...tpu_runtime.machine import device_access, pci, record
from ...tpu_runtime.machine.record import MachineRecord
from . import report
from .checks import CheckResult, parse_result
from .groups import REOPEN, CheckGroup
from .report import UNFINISHED, ChipRecord, SelftestReport

# Seconds from the start of a process to its first check: JAX waits for all hosts of a slice.
START_S = 300.0
# Seconds from its last line to its end.
END_S = 60.0
START_TITLE, REOPEN_TITLE = "start of the process", "open and exit in a row"
NUM_REOPENINGS = 5
# Groups in a row whose process did not reach a check, after which the rest is skipped: because it failed, or because
# another process held the chips.
MAX_FAILED_STARTS, MAX_BUSY_GROUPS = 2, 2


class FirstRun:
    """A first run with its rows so far.

    models: whose tiny models run. changed: called before and after each check. shown: receives its progress.
    in_one_process: run all groups in the first process, because no other one can open the chips after it.
    """

    def __init__(
        self,
        models: Sequence[str],
        changed: Callable[[], None] = lambda: None,
        shown: Callable[[str], None] = lambda text: None,
        *,
        in_one_process: bool = False,
    ) -> None:
        self.models, self._changed, self._shown = models, changed, shown
        self.rows: list[CheckResult] = []
        self.chips: list[ChipRecord] = []
        self._platform, self._key = "", ""
        self._open_s = 0.0  # of the last process that opened the chips
        self._started = time.monotonic()
        self._in_one_process = in_one_process
        self._begun_groups: set[str] = set()

    def report(self) -> SelftestReport:
        """Return the report of the checks so far."""
        known = record.read_record(self._key) if self._key else MachineRecord()
        elapsed_s = time.monotonic() - self._started
        return report.make_report(self._platform, self.chips, self.models, self.rows, elapsed_s, known)

    def run(self, groups: Iterable[CheckGroup]) -> None:
        """Run every group, as long as processes reach a check: otherwise each would wait in vain."""
        chosen = list(groups)
        with tempfile.TemporaryDirectory(prefix="comfyui-tpu-") as folder:
            if self._in_one_process:
                self._run_together(chosen, folder)
                return
            in_vain = busy = 0
            for position, group in enumerate(chosen):
                before = len(self.rows)
                if group.name == REOPEN:
                    self._reopen(group, folder)
                else:
                    self._group(group, folder)
                made = self.rows[before:]
                in_vain = in_vain + 1 if [row for row in made if row.stage == START_TITLE and row.problem] else 0
                busy = busy + 1 if [row for row in made if row.is_skipped] else 0
                if busy == MAX_BUSY_GROUPS:
                    self._skip(chosen[position + 1 :], made[-1].note)
                    return
                if (not self.chips and not busy) or in_vain == MAX_FAILED_STARTS:
                    return

    def _run_together(self, chosen: Sequence[CheckGroup], folder: str) -> None:
        """Run all groups in one process, which ends if a chip is lost."""
        # A process gets its environment once.
        together = [group for group in chosen if group.name != REOPEN and not group.environment]
        if self._process(together, {"folder": folder, "done": []}):
            return
        note = "All checks share one process here, and an earlier check ended it. Restart the sandbox to continue."
        last = self.rows[-1]
        self._skip([group for group in together if group.name not in self._begun_groups], last.note or note)

    def _group(self, group: CheckGroup, folder: str) -> None:
        done: list[str] = []
        while True:
            before = len(self.rows)
            if self._process([group], {"folder": folder, "done": done}):
                return
            made = self.rows[before:]
            done += [row.title for row in made]
            if not group.continue_on_failure or made[-1].stage == START_TITLE:
                return

    def _reopen(self, group: CheckGroup, folder: str) -> None:
        """Open the chips by several processes in a row, and record how long each waited for them in seconds."""
        self._begin(group.name, REOPEN_TITLE, "", MachineRecord())
        started, values = self._begun, dict[str, float]()
        row = self.rows[-1]
        for number in range(1, NUM_REOPENINGS + 1):
            before = len(self.rows)
            is_over = self._process([group], {"folder": folder, "done": []})
            trouble = self.rows[before:]
            del self.rows[before:]
            self._begun = started
            if not is_over:
                last = trouble[-1]
                self._end(replace(row, problem=last.problem, note=last.note, values=values, is_skipped=last.is_skipped))
                return
            values[f"open_{number}_s"] = round(self._open_s, 2)
        self._end(replace(row, problem="", values=values, seconds=time.monotonic() - started))

    def _explain(self, busy: str) -> str:
        """Add to DevicesBusy's sentence the other possible cause, where an earlier process had the chips."""
        if not self.chips or pci.find_holders():
            return busy
        return f"{busy} If this sandbox lets only one process open the chips, restart it and add --one-process."

    def _skip(self, left_out: Sequence[CheckGroup], note: str) -> None:
        """Add a row for each group that does not run, with the reason."""
        for group in left_out:
            self._begin(group.name, START_TITLE, "", MachineRecord())
            self._end(replace(self.rows[-1], problem="", note=note, is_skipped=True))

    def _process(self, chosen: Sequence[CheckGroup], job: dict[str, Any]) -> bool:
        """Run groups in one process, with a row per check. Return whether the process ended regularly."""
        self._begin(chosen[0].name, START_TITLE, "", MachineRecord())
        device_access.wait_for_release(self._shown)
        self._begun = time.monotonic()
        deadlines = {group.name: group.deadline_s for group in chosen}
        limit_s, is_begun = START_S, False
        environment = {**os.environ, **dict(chosen[0].environment)}
        asked = {**job, "groups": list(deadlines)}
        with children.run_module_child("diagnostics.selftest.worker", asked, environment) as child:
            while True:
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
                    is_begun, limit_s = True, deadlines[line["group"]]
                    self._begun_groups.add(line["group"])
                    family, stage, precision = line["begins"]
                    self._begin(family, stage, precision, record.parse_record(line["if_lost"]))
                elif "row" in line:
                    row = parse_result(line["row"])
                    self._end(row)
                    if row.is_lost:
                        return False
                elif "chips" in line:
                    self._record_chips(line)
                elif "busy" in line:
                    self._end(replace(self.rows[-1], problem="", note=self._explain(line["busy"]), is_skipped=True))
                    return False
                else:
                    self._shown(line["text"])
            try:
                code = child.ending(END_S)
            except TimeoutError:
                self._end_lost(f"Its process did not end within {END_S:.0f} s, and was killed.")
                return False
            is_over = code in (0, -signal.SIGALRM)  # its own watchdog ends a process that is done
            if is_over and not is_begun:
                self.rows.pop()
                return True
            if is_over and self.rows[-1].problem != UNFINISHED:
                return True
            self._end_lost(f"Its process ended {_ending(code)}{child.last_error_line()}.")
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
        """Record that the running check ended its process."""
        seconds = time.monotonic() - self._begun
        if self.rows[-1].problem != UNFINISHED:  # between two checks
            self._begin(self.rows[-1].family, "end of the process", "", MachineRecord())
        self._end(replace(self.rows[-1], problem=problem, seconds=seconds, is_lost=True))

    def _record_chips(self, line: dict[str, Any]) -> None:
        """Record that a process has opened the chips.

        The first one clears the machine's record, so that everything is detected again.
        """
        self._open_s = line["open_s"]
        if self.chips:
            return
        self.chips = [ChipRecord(**chip) for chip in line["chips"]]
        self._platform = line["platform"]
        self._key = record.machine_key(self.chips[0].kind, len(self.chips))
        record.write_record(self._key, MachineRecord())

    def _learn(self, row: CheckResult) -> None:
        if row.learnt == MachineRecord() or not self._key:
            return
        sentences = (f"Self-test, {row.title}: {row.problem}",) if row.problem else ()
        record.update_record(self._key, replace(row.learnt, sentences=sentences))


def _ending(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    except ValueError:
        return f"by signal {-code}"
