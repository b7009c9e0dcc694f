"""The process's one engine: made by the first stage, only looked at by everything else; and how the process ends while
XLA compiles, or when another host of the engine is gone. Imports no JAX by itself.

XLA cannot be stopped, and looks for signals several times a second: a thread that it does so in after Python has begun
to end is killed within C++, which aborts the process (up to Python 3.13).
"""

import atexit
import contextlib
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..hosts import place
from ..hosts.distributed import SUPERVISED
from ..hosts.together import RESTART
from ..machine.device_access import open_devices
from ..progress import Progress, in_daemon

if TYPE_CHECKING:
    from ..hosts.leader import Leader
    from .engine import Engine

log = logging.getLogger(__name__)

# Set where a process may start itself again, as `setup.py start` does.
RESTARTS = "COMFYUI_TPU_RESTARTS"
# How long what was said last has until it is read, before the process ends.
LAST_WORDS_S = 2.0

_engine: "Engine | None" = None
_leader: "Leader | None" = None
_lock = threading.Lock()
_leaves = False
_when_stuck: list[Callable[[str], None]] = []


def engine(progress: Progress) -> "Engine":
    """The engine, made on first use: only then a device is touched. With several hosts it waits for these, and raises
    `HostsError` where they do not come.
    """
    global _engine
    with _lock:
        if _engine is None:
            leader = listen()
            with leader.joining(progress) if leader else contextlib.nullcontext():
                from .engine import Engine

                chips = open_devices(progress.text, progress.check_cancelled)
                _engine = Engine(chips, hosts=leader, when_halted=_halted)
            if leader is not None and _leaves:
                atexit.register(leave)  # again: before what JAX registered meanwhile, which waits for the other hosts
        return _engine


def listen() -> "Leader | None":
    """Takes the engine's other hosts in from now on, where this process was started as the first of several."""
    global _leader
    found = place.from_environment()
    if _leader is None and found is not None:
        from ..hosts.leader import Leader

        if not found.is_leader:
            raise ValueError(f"{place.VARIABLE} is {found}: only process 0 runs workflows. Start `comfyui-tpu follow`.")
        _leader = Leader(found, _start_again)
        _leader.listen()
    return _leader


def when_stuck(say: Callable[[str], None]) -> None:
    """`say` gets the sentence if a stage is stuck on the chips and the process ends: there it can raise no error."""
    _when_stuck.append(say)


def _start_again(sentence: str, stuck: Progress | None) -> None:
    """Another host is gone, and with it the use of these chips: the process ends, to be started again."""
    try:
        for say in [stuck.text, *_when_stuck] if stuck else ():
            say(sentence)
        time.sleep(LAST_WORDS_S)
    finally:
        _end(RESTART)


def _halted() -> None:
    """The chips are lost to this process. Where it may, it starts again once the stage has said so."""
    if os.environ.get(SUPERVISED):
        in_daemon(lambda: (time.sleep(LAST_WORDS_S), _end(RESTART)), "comfyui-tpu-halted")
    elif os.environ.get(RESTARTS):
        in_daemon(lambda: (time.sleep(LAST_WORDS_S), restart()), "comfyui-tpu-halted")


def restart() -> None:
    """Becomes the program that this process was started as, with its arguments and environment. Threads end, however
    stuck; what libtpu holds of the chips is closed. Folders stay open: `setup.py start` has locked ComfyUI's.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists them is closed
            os.set_inheritable(number, number <= 2 or stat.S_ISDIR(os.fstat(number).st_mode))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def compilers() -> list[threading.Thread]:
    """The threads in which XLA may be at work, or tracing is."""
    programs = sys.modules.get(f"{__package__}.program_cache")
    return [thread for thread in threading.enumerate() if programs and thread.name == programs.COMPILER]


def leave(status: int = 0) -> None:
    """Ends the process at once if XLA compiles, or other hosts have joined it, for which JAX would wait.

    For a host that knows its exit code, as its last act.
    """
    if _leader is not None:
        _leader.close()
    if (_leader is not None and _engine is not None) or compilers():
        _end(status)


def leave_at_exit() -> None:
    """`leave`, for a host whose exit code is 0 when it ends in order."""
    global _leaves
    _leaves = True
    atexit.register(leave)


def _end(status: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@atexit.register
def _wait() -> None:
    """Where no host has left: only Python knows the exit code, so it is let end in order, once XLA is done."""
    if _engine is not None:
        _engine.expect(())
    for thread in compilers():
        thread.join()


def current() -> "Engine | None":
    """The engine, if a stage has made it."""
    return _engine
