"""`comfyui-tpu selftest`: does this machine compute what it should? A line a check, a verdict, a record."""

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

from ..tpu_runtime.pipeline import FLAGSHIPS, SPECS, spec_by_name

if TYPE_CHECKING:
    from ..sharding.mesh import Device
    from ..tpu_runtime.pipeline import Preview
    from ..tpu_runtime.selftest.checks import CheckResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default, others = (
        ", ".join(spec.name for spec in SPECS if (spec in FLAGSHIPS) == is_in) for is_in in (True, False)
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"only this model's miniature; repeatable; default: {default}; there are also {others}",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all of it as JSON, for a bug report")


def run(options: argparse.Namespace, console: Console | None = None) -> int:
    """Runs the command; 0 where all is well, 1 where a check failed. Errors of the user are `ValueError`."""
    console = console or Console(highlight=False, soft_wrap=True)
    specs = [spec_by_name(name) for name in dict.fromkeys(options.model or ())] or FLAGSHIPS
    if options.report and not (options.report.parent.is_dir() and not options.report.is_dir()):
        raise ValueError(f"--report {options.report}: it must be a file in a folder that exists.")
    # XLA warns of how arrays as small as the miniatures' are split, by the dozen.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    from ..tpu_runtime.selftest import checks, report
    from ..tpu_runtime.selftest import run as running

    started, rows = time.monotonic(), []
    devices = jax.local_devices()
    console.print(_head(devices))
    with console.status("") as status:
        for check in running.checks(devices, specs):
            rows.append(checks.perform(check, Shown(status, f"{check.family}: {check.stage} {check.precision}")))
            console.print(_line(rows[-1]))
    found = report.make(devices, [spec.name for spec in specs], rows, time.monotonic() - started)
    if options.report:
        options.report.write_text(json.dumps(found.to_json(), indent=1) + "\n", "utf-8")
        console.print(Text(f"written: {options.report}"))
    elif not found.is_good:
        console.print("To report it: comfyui-tpu selftest --report selftest.json, and attach the file.")
    console.print(Text(found.verdict, style="green" if found.is_good else "red"))
    return 0 if found.is_good else 1


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


def _head(devices: "Sequence[Device]") -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(one.device_kind for one in devices).items())
    if devices[0].platform == "tpu":
        return f"On {kinds}, against float32 on the host's CPU."
    return f"On {kinds}, which is no TPU: kernels run in interpret mode."


def _line(row: "CheckResult") -> Text:
    numbers = "" if row.error is None or row.bound is None else f"  {row.error:.1e} of {row.bound.error:.0e}"
    line = Text("ok     " if row.is_good else "WRONG  ", style="green" if row.is_good else "red")
    line.append(f"{row.title}{numbers}  {row.seconds:.1f} s", style="default")
    return line if row.is_good else line.append(f"\n       {row.problem}", style="default")
