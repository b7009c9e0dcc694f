"""Keeps a process of several running: all end when one is gone, and each has somebody who starts it again."""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .distributed import SUPERVISED
from .together import RESTART

log = logging.getLogger(__name__)

# Between two starts, doubled while they end early.
PAUSE_S, LONGEST_PAUSE_S, EARLY_S = 1.0, 15.0, 30.0
_PR_SET_PDEATHSIG = 1


def ending_with_us() -> Callable[[], None] | None:
    """What `subprocess` is to run in a child (`preexec_fn`) so that it gets SIGTERM when this process is gone, even by
    kill -9. Nobody would be left to end it, and it would keep the chips and the port that the next start wants. Only
    Linux can; the thread that starts the child must stay as long as the process.
    """
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def begin() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before that
            os._exit(128 + signal.SIGTERM)

    return begin


def keep(command: Sequence[str], environment: Mapping[str, str], *, always: bool = False) -> int:
    """Runs a command, again whenever it asks for that or a signal ends it, or `always`; its exit code otherwise.

    SIGTERM and SIGINT are for both: the command ends, and is not started again.
    """
    asked: list[int] = []
    process: subprocess.Popen | None = None

    def end(number: int, _: Any) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    pause_s, given = PAUSE_S, {**os.environ, **environment, SUPERVISED: "1"}
    with signals(end):
        while True:
            began = time.monotonic()
            # A group of its own: Ctrl-C would reach it twice.
            process = subprocess.Popen(command, env=given, process_group=0, preexec_fn=ending_with_us())
            if asked:  # while it was being started, when there was nothing to tell
                process.send_signal(asked[0])
            status = process.wait()
            process = None
            if asked or not (always or status == RESTART or status < 0):
                return status if status >= 0 else 128 - status
            pause_s = PAUSE_S if time.monotonic() - began > EARLY_S else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("Starting again in %.0f s: the process ended with %d", pause_s, status)
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                if asked:
                    return 128 + asked[0]
                time.sleep(0.1)


@contextlib.contextmanager
def signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `handler`. For the main thread."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
