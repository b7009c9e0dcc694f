"""Supervision of a process of several: it ends when another one is lost, and is started again."""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from .coordinator import RESTART_EXIT_CODE
from .distributed import SUPERVISED

log = logging.getLogger(__name__)

# Seconds between two starts: the first pause, doubled up to the second while processes end within the third.
PAUSE_S, MAX_PAUSE_S, EARLY_S = 1.0, 15.0, 30.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` for `subprocess` that sends the child SIGTERM when this process ends, even by kill -9.

    Otherwise the child would go on, and keep the chips and the port that the next start needs. Returns None except on
    Linux. The thread that starts the child must live as long as the process.
    """
    if sys.platform != "linux":
        return None
    parent, libc = os.getpid(), ctypes.CDLL(None)

    def begin() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has already ended
            os._exit(128 + signal.SIGTERM)

    return begin


def supervise(command: Sequence[str], environment: Mapping[str, str], *, always: bool = False) -> int:
    """Run a command, again if it exits with `RESTART_EXIT_CODE` or by a signal, or `always`. Returns its exit code.

    environment: further variables. SIGTERM and SIGINT are forwarded: the command ends, and is not started again.
    """
    received: list[int] = []
    process: subprocess.Popen | None = None

    def end(number: int, _: object) -> None:
        received.append(number)
        if process is not None:
            process.send_signal(number)

    pause_s, variables = PAUSE_S, {**os.environ, **environment, SUPERVISED: "1"}
    with handle_signals(end):
        while True:
            began = time.monotonic()
            # A group of its own: Ctrl-C would reach it twice.
            process = subprocess.Popen(command, env=variables, process_group=0, preexec_fn=die_with_parent())
            if received:  # while it was being started
                process.send_signal(received[0])
            status = process.wait()
            process = None
            if received or not (always or status == RESTART_EXIT_CODE or status < 0):
                return status if status >= 0 else 128 - status
            pause_s = PAUSE_S if time.monotonic() - began > EARLY_S else min(2 * pause_s, MAX_PAUSE_S)
            log.warning("Restarting in %.0f s: the process ended with exit code %d", pause_s, status)
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                if received:
                    return 128 + received[0]
                time.sleep(0.1)


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler` on SIGTERM and SIGINT within this context. For the main thread."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
