"""Open the chips, and wait while another process holds them.

One process at a time can open a TPU. A process that has just ended may hold the chips for some more seconds, and libtpu
then reports them as busy. libtpu's texts were collected from public reports of vLLM, PyTorch/XLA and libtpu itself.
"""

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..messages import compose
from . import pci

if TYPE_CHECKING:
    from ...sharding.mesh import Device

Result = TypeVar("Result")

# How long a process waits for chips that another one holds, in seconds.
WAIT_S = 60.0
# Pauses between two attempts double from the first to the last, in seconds.
FIRST_PAUSE_S, LAST_PAUSE_S = 2.0, 16.0
# How often a wait asks whether it was cancelled, in seconds.
POLL_S = 0.2

_BUSY = re.compile(
    r"device or resource busy|(?<!address )already in use|in use by (another )?process|iommu group|"
    r"multi-process lockfile",
    re.IGNORECASE,
)
# gVisor lets one process open the chips for as long as the sandbox lives, and reports this kernel.
_GVISOR = re.compile(r"^Linux version 4\.4\.0 #1 SMP Sun Jan 10 15:06:54 PST 2016|gvisor", re.IGNORECASE)


class DevicesBusy(RuntimeError):
    """Another process holds the chips. The message is a sentence for the user."""


def is_busy(error_text: str) -> bool:
    """Return whether an error of libtpu or JAX means that another process holds the chips."""
    return bool(_BUSY.search(error_text))


def describe_holders(root: Path = pci.ROOT) -> str:
    """Name the processes that hold the chips, such as "python3 main.py (process 123)"."""
    holders = [f"{holder.program} (process {holder.pid})" for holder in pci.find_holders(root)]
    return ", ".join(holders) or "a process of another user or container"


def allows_one_process(root: Path = pci.ROOT) -> bool:
    """Return whether only the first process of this sandbox can ever open the chips."""
    try:
        return bool(_GVISOR.search((root / "proc/version").read_text("utf-8", "replace")))
    except OSError:
        return False


def wait_while_busy(
    attempt: Callable[[], Result],
    report: Callable[[str], None] = lambda message: None,
    check_cancelled: Callable[[], None] = lambda: None,
    *,
    timeout_s: float | None = None,
) -> Result:
    """Call `attempt` until it no longer raises a RuntimeError that `is_busy` recognizes, and return its result.

    report: receives a line with the holders of the chips before each pause.
    check_cancelled: called several times a second during a pause; its exception ends the wait.
    timeout_s: time from the first attempt to the last one; None: WAIT_S.
    Raises DevicesBusy at the timeout. Any other exception of `attempt` passes.
    """
    limit_s = WAIT_S if timeout_s is None else timeout_s
    started, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except RuntimeError as error:
            if not is_busy(str(error)):
                raise
            waited_s = time.monotonic() - started
            if waited_s >= limit_s:
                raise DevicesBusy(
                    compose("machine.chips_held", holders=describe_holders(), waited_s=f"{waited_s:.0f}")
                ) from error
        report(compose("machine.chips_held_waiting", holders=describe_holders(), waited_s=f"{waited_s:.0f}"))
        _pause(min(pause_s, limit_s - waited_s), check_cancelled)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def wait_for_release(
    report: Callable[[str], None] = lambda message: None, *, timeout_s: float = WAIT_S, root: Path = pci.ROOT
) -> bool:
    """Wait until no process holds the chips. Return whether that happened within `timeout_s` seconds.

    report: called with the reason for waiting.
    root: of the kernel's PCI devices.
    """
    until = time.monotonic() + timeout_s
    while holders := pci.find_holders(root):
        if time.monotonic() >= until:
            return False
        report(f"The TPU chips are still held by {holders[0].program} (process {holders[0].pid})")
        time.sleep(POLL_S)
    return True


def open_devices(
    report: Callable[[str], None] = lambda message: None,
    check_cancelled: Callable[[], None] = lambda: None,
    *,
    timeout_s: float | None = None,
) -> "tuple[Device, ...]":
    """Start JAX's back end and return its devices, in JAX's order. Parameters and errors as in `wait_while_busy`.

    report: called with the reason for waiting.
    check_cancelled: raises to stop waiting.
    timeout_s: longest time to wait; None for the default.
    """
    import jax
    from jax.extend.backend import clear_backends

    def start() -> "tuple[Device, ...]":
        try:
            return tuple(jax.devices())
        except RuntimeError:
            # A back end that JAX started before the failing one would be all that the next attempt finds.
            clear_backends()
            raise

    return wait_while_busy(start, report, check_cancelled, timeout_s=timeout_s)


def try_to_start(command: list[str], environment: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command that opens the chips and exits, again while they are busy. Return its last run.

    environment: variables of the command.
    Raises DevicesBusy as `wait_while_busy`, and subprocess.TimeoutExpired if one run takes longer than `timeout_s`.
    """

    def attempt() -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
        if done.returncode and is_busy(done.stderr):
            raise RuntimeError(done.stderr)
        return done

    return wait_while_busy(attempt)


def _pause(seconds: float, check_cancelled: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        check_cancelled()
        time.sleep(min(POLL_S, left))
    check_cancelled()
