"""The process that runs groups of checks. It announces each check and its result in lines of JSON.

A check that loses the chips is the process's last: `first_run` starts another process for the rest.
"""

import gc
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.extend.backend import clear_backends

from ...sharding.mesh import Device
from ...tpu_runtime.engine import lifecycle
from ...tpu_runtime.machine.device_access import DevicesBusy, open_devices
from ...tpu_runtime.progress import SilentProgress
from . import checks, report, run

# How long the process has to end in order, in seconds.
WATCHDOG_S = 20


class ChildProgress(SilentProgress):
    """A check's progress, which the parent process displays."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say

    def text(self, message: str) -> None:
        self._say(text=message)


def main(say: Callable[..., None], job: dict[str, Any]) -> None:
    """Run the groups of `job` and report to the other process through `say`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the other process ends this one: in order, if it can
    started = time.monotonic()
    try:
        open_devices(lambda message: say(text=message))
    except DevicesBusy as error:
        say(busy=str(error))
        return
    devices = jax.local_devices()
    say(
        platform=devices[0].platform, chips=[asdict(report.chip_record(device)) for device in devices],
        open_s=time.monotonic() - started,
    )  # fmt: skip
    _run_groups(say, job, devices)
    del devices
    _end_in_order()


def _run_groups(say: Callable[..., None], job: dict[str, Any], devices: "Sequence[Device]") -> None:
    place = run.CheckPlace(devices=devices, folder=Path(job["folder"]))
    for group in job["groups"]:
        for check in run.checks_of_group(group, place):
            if check.title in job["done"]:
                continue
            say(begins=[check.family, check.stage, check.precision], group=group, if_lost=check.if_lost.to_json())
            row = checks.run_check(check, ChildProgress(say))
            say(row=row.to_json())
            if row.is_lost:
                return


def _end_in_order() -> None:
    """Shut the back end down, so that the next process finds the chips free.

    The kernel ends the process after `WATCHDOG_S`: XLA may compile for longer, and lost chips may never answer.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(WATCHDOG_S)
    for thread in lifecycle.compile_threads():
        thread.join()
    clear_backends()
    gc.collect()
