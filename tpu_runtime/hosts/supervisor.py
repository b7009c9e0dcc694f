"""Keeps a process of several running: all end when one is gone, and each has somebody who starts it again."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from .distributed import SUPERVISED
from .together import RESTART

log = logging.getLogger(__name__)

# Between two starts, doubled while they end early.
PAUSE_S, LONGEST_PAUSE_S, EARLY_S = 1.0, 15.0, 30.0


def keep(command: Sequence[str], environment: Mapping[str, str], *, always: bool = False) -> int:
    """Runs a command, again whenever it asks for that or a signal ends it, or `always`; its exit code otherwise.

    SIGTERM and SIGINT are for both: the command ends, and is not started again.
    """
    asked: list[int] = []
    process: subprocess.Popen | None = None

    def end(number: int, _: object) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    pause_s = PAUSE_S
    try:
        while True:
            began = time.monotonic()
            # A group of its own: Ctrl-C would reach it twice.
            process = subprocess.Popen(command, env={**os.environ, **environment, SUPERVISED: "1"}, process_group=0)
            status = process.wait()
            if asked or not (always or status == RESTART or status < 0):
                return status if status >= 0 else 128 - status
            pause_s = PAUSE_S if time.monotonic() - began > EARLY_S else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("Starting again in %.0f s: the process ended with %d", pause_s, status)
            _sleep(pause_s, asked)
            if asked:
                return 128 + asked[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sleep(seconds: float, asked: Sequence[int]) -> None:
    """Less if somebody asked to end."""
    until = time.monotonic() + seconds
    while not asked and time.monotonic() < until:
        time.sleep(0.1)
