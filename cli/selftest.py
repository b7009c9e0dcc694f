"""`comfyui-tpu selftest`: does this machine compute what it should? A line a check, a verdict, a record.

With --first-run, in processes of their own, also what this machine takes: see `tpu_runtime/selftest/first_run.py`.
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

from ..tpu_runtime.pipeline import FLAGSHIPS, NAME_HELP, device_access, fallbacks, files, spec_by_name
from ..tpu_runtime.selftest import groups

if TYPE_CHECKING:
    from ..tpu_runtime.pipeline import Preview
    from ..tpu_runtime.selftest.checks import CheckResult
    from ..tpu_runtime.selftest.report import ChipRecord, SelftestReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"only this model's miniature: {NAME_HELP}; repeatable; default: {len(FLAGSHIPS)}, one of each kind",
    )
    parser.add_argument(
        "--first-run",
        action="store_true",
        help="what this machine takes, too: options, kernels, memory, rates; each part in a process of its own. It is "
        "kept, and programs are compiled by it. Estimated at 20 to 40 minutes on a TPU; none has run it yet",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="as --first-run, but only the parts that a first image needs. Estimated at 5 minutes on a TPU",
    )
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="with --first-run: all checks in one process, for a sandbox in which no second one can open the chips; "
        "gVisor is recognized by itself",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all of it as JSON, for a bug report")


def run(options: argparse.Namespace, console: Console | None = None) -> int:
    """Runs the command; 0 where all is well, 1 where a check failed. Errors of the user are `ValueError`."""
    console = console or Console(highlight=False, soft_wrap=True)
    specs = [spec_by_name(name) for name in dict.fromkeys(options.model or ())]
    specs = specs or ([spec_by_name(name) for name in groups.QUICK_MODELS] if options.quick else FLAGSHIPS)
    if options.report and not (options.report.parent.is_dir() and not options.report.is_dir()):
        raise ValueError(f"--report {options.report}: it must be a file in a folder that exists.")
    # XLA warns of how arrays as small as the miniatures' are split, by the dozen; for the processes of a first run too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    fallbacks.from_environment()  # a switch that is none is said now, not in the middle
    models = [spec.name for spec in specs]
    in_processes = options.first_run or options.quick
    if options.one_process and not in_processes:
        raise ValueError(
            "--one-process is for --first-run and --quick; a plain self-test has one process anyway. Leave it out."
        )
    found = _first_run(models, options, console) if in_processes else _plain(models, console)
    problem = ""
    if options.report:
        problem = _write(options.report, found)
        console.print(Text(problem or f"written: {options.report}"))
    elif not found.is_good:
        first = " --first-run" * options.first_run or " --quick" * options.quick
        console.print(f"To report it: comfyui-tpu selftest{first} --report selftest.json, and attach the file.")
    for sentence in found.machine.sentences if found.machine else ():
        console.print(Text(sentence))
    console.print(Text(found.verdict, style="green" if found.is_good else "red"))
    return 0 if found.is_good and not problem else 1


def _plain(models: Sequence[str], console: Console) -> "SelftestReport":
    import jax

    from ..tpu_runtime.selftest import checks, report
    from ..tpu_runtime.selftest import run as running

    started, rows = time.monotonic(), []
    device_access.open_devices(console.print)
    devices = jax.local_devices()
    chips = [report.chip_record(device) for device in devices]
    console.print(_head(chips, devices[0].platform))
    with console.status("") as status:
        for check in running.checks(devices, models):
            rows.append(checks.perform(check, Shown(status, f"{check.family}: {check.stage} {check.precision}")))
            console.print(_line(rows[-1]))
    return report.make(devices[0].platform, chips, models, rows, time.monotonic() - started)


def _first_run(models: Sequence[str], options: argparse.Namespace, console: Console) -> "SelftestReport":
    """Write each change to the file at once, so that a lost machine leaves all earlier results."""
    from ..tpu_runtime.selftest import first_run

    file: Path | None = options.report
    in_one_process = options.one_process or device_access.allows_one_process()
    if in_one_process:
        console.print("All checks share one process: in this sandbox no second one can open the chips.")
    with console.status("") as status:
        printed = 0

        def changed() -> None:
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

        def shown(text: str) -> None:
            status.update(Text(f"{run.rows[-1].title}  {text}"))

        run = first_run.FirstRun(models, changed, shown, in_one_process=in_one_process)
        run.run(groups.quick(models) if options.quick and not options.first_run else groups.all_of(models))
    return run.report()


def _write(file: Path, found: "SelftestReport") -> str:
    """Writes the report; what went wrong as a sentence, for a full disk does not end the checks."""
    try:
        files.write_file(file, (json.dumps(found.to_json(), indent=1) + "\n").encode())
    except OSError as error:
        return f"--report {file} was not written: {error.strerror or error}."
    return ""


class Shown:
    """Progress of a check in a terminal's last line, which is overwritten; elsewhere it is silent."""

    def __init__(self, status: Status, title: str) -> None:
        self._status, self._title = status, title
        self.text("")

    def text(self, message: str) -> None:
        self._status.update(Text(f"{self._title}  {message}".rstrip()))

    def step(self, done: int, total: int, unit: str, preview: "Preview | None" = None) -> None:
        self.text(f"{unit} {done} of {total}")

    def check_cancelled(self) -> None:
        """Ctrl-C arrives as KeyboardInterrupt; nothing to ask."""


def _head(chips: "Sequence[ChipRecord]", platform: str) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(one.kind for one in chips).items())
    if platform == "tpu":
        return f"On {kinds}, against float32 on the host's CPU."
    return f"On {kinds}, which is no TPU: kernels run in interpret mode."


def _line(row: "CheckResult") -> Text:
    numbers = "" if row.error is None or row.bound is None else f"  {row.error:.1e} of {row.bound.error:.0e}"
    said = ", ".join([*(f"{name} {value:g}" for name, value in row.values.items()), *([row.note] if row.note else [])])
    word, style = ("ok", "green") if row.is_good else ("skipped", "yellow") if row.is_skipped else ("WRONG", "red")
    line = Text(f"{word:<7}", style=style)
    line.append(f"{row.title}{numbers}  {row.seconds:.1f} s{f'  {said}' if said else ''}", style="default")
    return line if not row.problem else line.append(f"\n       {row.problem}", style="default")
