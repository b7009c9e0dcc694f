"""`comfyui-tpu selftest`: checks the results of this machine. One line per check, a verdict, a report.

With --first-run it also tests the machine's limits, in child processes: see `diagnostics/selftest/first_run.py`.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from ..diagnostics.selftest import groups
from ..tpu_runtime import files
from ..tpu_runtime.machine import device_access, fallbacks
from ..tpu_runtime.models import FLAGSHIPS, NAME_HELP, lookup_spec

if TYPE_CHECKING:
    from ..diagnostics.selftest.checks import CheckResult
    from ..diagnostics.selftest.report import ChipRecord, SelftestReport
    from ..tpu_runtime.progress import Preview


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"only this model's tiny model: {NAME_HELP}; repeatable; default: {len(FLAGSHIPS)}, one of each kind",
    )
    parser.add_argument(
        "--first-run",
        action="store_true",
        help="also test options, kernels, memory and rates, each part in its own process. Results are saved, and "
        "later programs are compiled accordingly. Estimated at 20 to 40 minutes on a TPU; it has not run on one yet",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="like --first-run, but only the parts that a first image needs. Takes an estimated 5 minutes on a TPU",
    )
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="with --first-run: run all checks in one process, for sandboxes where a second one cannot open the chips; "
        "gVisor is detected automatically",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the report as JSON, to attach to a bug report"
    )


def run(options: argparse.Namespace, console: Console | None = None) -> int:
    """Run the command; return 0 if all checks passed, else 1. Raises ValueError for errors of the user."""
    console = console or Console(highlight=False, soft_wrap=True)
    specs = [lookup_spec(name) for name in dict.fromkeys(options.model or ())]
    specs = specs or ([lookup_spec(name) for name in groups.QUICK_MODELS] if options.quick else FLAGSHIPS)
    if options.report and not (options.report.parent.is_dir() and not options.report.is_dir()):
        raise ValueError(f"--report {options.report}: it must be a file in a folder that exists.")
    # Hides XLA's many warnings about sharding arrays as small as the tiny models', in child processes too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    fallbacks.fallbacks_from_environment()  # raises for an invalid switch now, not in the middle
    models = [spec.name for spec in specs]
    in_processes = options.first_run or options.quick
    if options.one_process and not in_processes:
        raise ValueError(
            "--one-process is for --first-run and --quick; a plain self-test always uses one process. Leave it out."
        )
    result = _first_run(models, options, console) if in_processes else _plain(models, console)
    problem = ""
    if options.report:
        problem = _write(options.report, result)
        console.print(Text(problem or f"written: {options.report}"))
    elif not result.is_good:
        first = " --first-run" * options.first_run or " --quick" * options.quick
        console.print(f"To report it: comfyui-tpu selftest{first} --report selftest.json, and attach the file.")
    for sentence in result.machine.sentences if result.machine else ():
        console.print(Text(sentence))
    console.print(Text(result.verdict, style="green" if result.is_good else "red"))
    return 0 if result.is_good and not problem else 1


def _plain(models: Sequence[str], console: Console) -> "SelftestReport":
    import jax

    from ..diagnostics.selftest import checks, report
    from ..diagnostics.selftest import run as running

    started, rows = time.monotonic(), []
    device_access.open_devices(console.print)
    devices = jax.local_devices()
    chips = [report.chip_record(device) for device in devices]
    console.print(_head(chips, devices[0].platform))
    with console.status("") as status:
        for check in running.checks(devices, models):
            rows.append(
                checks.run_check(check, ProgressLine(status, f"{check.family}: {check.stage} {check.precision}"))
            )
            console.print(_line(rows[-1]))
    return report.make_report(devices[0].platform, chips, models, rows, time.monotonic() - started)


def _first_run(models: Sequence[str], options: argparse.Namespace, console: Console) -> "SelftestReport":
    """Run all parts. Each change is written to the report at once, so that a machine failure keeps earlier results."""
    from ..diagnostics.selftest import first_run

    file: Path | None = options.report
    in_one_process = options.one_process or device_access.allows_one_process()
    if in_one_process:
        console.print("All checks share one process: in this sandbox no second one can open the chips.")
    with console.status("") as status:
        printed = 0

        def print_rows() -> None:
            nonlocal printed
            if file is not None:
                _write(file, run.report())
            *ended, last = run.rows
            if last.problem != first_run.UNFINISHED:
                ended.append(last)
            for row in ended[printed:]:
                console.print(_line(row))
            printed = len(ended)
            status.update(Text(last.title))

        def show_status(text: str) -> None:
            status.update(Text(f"{run.rows[-1].title}  {text}"))

        run = first_run.FirstRun(models, print_rows, show_status, in_one_process=in_one_process)
        run.run(groups.quick_groups(models) if options.quick and not options.first_run else groups.all_groups(models))
    return run.report()


def _write(file: Path, found: "SelftestReport") -> str:
    """Write the report; return a sentence if that fails, because a full disk does not end the checks."""
    try:
        files.write_file(file, (json.dumps(found.to_json(), indent=1) + "\n").encode())
    except OSError as error:
        return f"--report {file} was not written: {error.strerror or error}."
    return ""


class ProgressLine:
    """Progress of a check in a terminal's last line, which is overwritten; silent elsewhere."""

    def __init__(self, status: Status, title: str) -> None:
        self._status, self._title = status, title
        self.text("")

    def text(self, message: str) -> None:
        """Show a line of status."""
        self._status.update(Text(f"{self._title}  {message}".rstrip()))

    def step(self, done: int, total: int, unit: str, preview: "Preview | None" = None) -> None:
        """Show the progress."""
        self.text(f"{unit} {done} of {total}")

    def check_cancelled(self) -> None:
        """Do nothing: Ctrl-C arrives as KeyboardInterrupt."""


def _head(chips: "Sequence[ChipRecord]", platform: str) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(chip.kind for chip in chips).items())
    if platform == "tpu":
        return f"On {kinds}, against float32 on the host's CPU."
    return f"On {kinds}, which is no TPU: kernels run in interpret mode."


def _line(row: "CheckResult") -> Text:
    numbers = "" if row.error is None or row.bound is None else f"  {row.error:.1e} of {row.bound.error:.0e}"
    details = ", ".join(
        [*(f"{name} {value:g}" for name, value in row.values.items()), *([row.note] if row.note else [])]
    )
    word, style = ("ok", "green") if row.is_good else ("skipped", "yellow") if row.is_skipped else ("WRONG", "red")
    line = Text(f"{word:<7}", style=style)
    line.append(f"{row.title}{numbers}  {row.seconds:.1f} s{f'  {details}' if details else ''}", style="default")
    return line if not row.problem else line.append(f"\n       {row.problem}", style="default")
