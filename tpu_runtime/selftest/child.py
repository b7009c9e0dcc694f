"""The process of one group of checks: it says each check before it starts, and what came of it, in lines of JSON.

A check that loses the chips is the process's last: `first_run` starts another for the rest.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from ..progress import Silent
from . import checks, report, run


class Told(Silent):
    """A check's progress, which the other process shows."""

    def __init__(self, say: Any) -> None:
        self._say = say

    def text(self, message: str) -> None:
        self._say(text=message)


def main(say: Callable[..., None], job: dict[str, Any]) -> None:
    devices = jax.local_devices()
    say(platform=devices[0].platform, chips=[asdict(report.chip_record(device)) for device in devices])
    for check in run.of_group(job["group"], run.CheckPlace(devices=devices, folder=Path(job["folder"]))):
        if check.title in job["done"]:
            continue
        say(begins=[check.family, check.stage, check.precision], if_lost=check.if_lost.to_json())
        row = checks.perform(check, Told(say))
        say(row=row.to_json())
        if row.is_lost:
            break
    # XLA may still compile what nobody waits for, and chips that were lost may never answer.
    os._exit(0)
