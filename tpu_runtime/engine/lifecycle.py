"""The process's one engine, made by the first stage, and how the process ends. Imports no JAX by itself.

XLA compilations cannot be interrupted, and XLA checks for signals several times a second. Once Python has begun to
exit, such a check kills its thread within C++ and so aborts the process (up to Python 3.13).
"""

import atexit
import contextlib
import functools
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ...distributed.multihost import rank
from ...distributed.multihost.coordinator import RESTART_EXIT_CODE
from ...distributed.multihost.distributed import SUPERVISED
from .. import garbage
from ..checkpoints import prefetch
from ..checkpoints.model_ref import PlannedGeneration
from ..checkpoints.prefetch import FilePrefetch
from ..machine.device_access import open_devices
from ..messages import compose
from ..progress import Progress, run_in_daemon_thread

if TYPE_CHECKING:
    from ...distributed.multihost.leader import Leader
    from .engine import Engine

log = logging.getLogger(__name__)

# Environment variable: set if the process may restart itself, as under `setup.py start`.
RESTART_VARIABLE = "COMFYUI_TPU_RESTARTS"
# Delay before the process ends, so that the last messages reach the user.
FLUSH_DELAY_S = 2.0

_engine: "Engine | None" = None
_leader: "Leader | None" = None
_lock = threading.Lock()
_ends_at_exit = False
_when_stuck: list[Callable[[str], None]] = []


def get_engine(progress: Progress, expected: Collection[PlannedGeneration] = ()) -> "Engine":
    """Return the engine; made on first use, which opens the devices.

    expected: generations whose weights are read from the disk while the devices open.
    With several hosts, wait until all have joined. Raises `HostsError` if one does not come.
    """
    global _engine
    with _lock:
        if _engine is None:
            leader = listen_for_hosts()
            with leader.join(progress) if leader else contextlib.nullcontext(), garbage.pause_while_importing():
                import jax  # noqa: F401 - before two threads need it

                files = _read_in_background(() if leader else expected)
                try:
                    importing = _import_in_background()
                    chips = open_devices(progress.text, progress.check_cancelled)
                    importing.result()  # libraries import lazily, and threads may get half-imported modules

                    from .engine import Engine

                    _engine = Engine(chips, hosts=leader, when_halted=_schedule_restart, files=files)
                except BaseException:
                    files.cancel()
                    raise
            if leader is not None and _ends_at_exit:
                atexit.register(exit_process)  # again: runs before JAX's own handlers, which wait for the other hosts
        return _engine


def _read_in_background(expected: Iterable[PlannedGeneration]) -> FilePrefetch:
    """Start to read the weights of `expected` generations, as far as they are on this machine.

    A model with problems is left out, because its stage reports them. A built-in one may not be written yet.
    """
    files = FilePrefetch()
    for model, stages in ((each.model, each.stages) for each in expected):
        if model.model_id not in model.spec.miniature.ids:
            with contextlib.suppress(Exception):
                files.request(model.without_choices(), prefetch.list_files(model.locate(), stages))
    return files


@functools.cache
def _import_in_background() -> Future:
    """Start to import what stages need, which takes seconds, while the chips are opened, which takes more.

    The first error is kept for every later attempt: PyTorch refuses a second import without the cause.
    """
    return run_in_daemon_thread(_import_libraries, "comfyui-tpu-import")


def _import_libraries() -> None:
    from ..programs import upstream_network
    from . import engine  # noqa: F401 - torch, torchax

    upstream_network.import_libraries()


def listen_for_hosts() -> "Leader | None":
    """Start to accept the engine's other hosts if this process is the first of several.

    Returns None otherwise.
    """
    global _leader
    own_place = rank.rank_from_environment()
    if _leader is None and own_place is not None:
        from ...distributed.multihost.leader import Leader

        if not own_place.is_leader:
            raise ValueError(compose("stage.not_process_0", variable=rank.VARIABLE, own_place=own_place))
        _leader = Leader(own_place, _start_again)
        _leader.listen()
    return _leader


def on_fatal(say: Callable[[str], None]) -> None:
    """Register a callback for a stage that is stuck on the chips while the process ends: no error can be raised there.

    say: gets the sentence for the user.
    """
    _when_stuck.append(say)


def _start_again(sentence: str, stuck: Progress | None) -> None:
    """End the process so that it is restarted, because another host was lost and the chips cannot be used any more.

    stuck: progress of the running stage, None if no stage runs.
    """
    try:
        for say in [stuck.text, *_when_stuck] if stuck else ():
            say(sentence)
        time.sleep(FLUSH_DELAY_S)
    finally:
        _end(RESTART_EXIT_CODE)


def _schedule_restart() -> None:
    """Schedule a restart, if allowed, after the stage has reported that the chips were lost to this process."""
    if os.environ.get(SUPERVISED):
        run_in_daemon_thread(lambda: (time.sleep(FLUSH_DELAY_S), _end(RESTART_EXIT_CODE)), "comfyui-tpu-halted")
    elif os.environ.get(RESTART_VARIABLE):
        run_in_daemon_thread(lambda: (time.sleep(FLUSH_DELAY_S), restart()), "comfyui-tpu-halted")


def restart() -> None:
    """Replace this process by the program it was started as, with the same arguments and environment.

    All threads end, and libtpu's handles of the chips are closed. Folders stay open: `setup.py start` locks ComfyUI's.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that lists them is closed
            os.set_inheritable(number, number <= 2 or stat.S_ISDIR(os.fstat(number).st_mode))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def compile_threads() -> list[threading.Thread]:
    """Return the threads that may be tracing or in an XLA compilation."""
    programs = sys.modules.get(f"{__package__}.program_cache")
    return [thread for thread in threading.enumerate() if programs and thread.name == programs.COMPILE_THREAD]


def exit_process(status: int = 0) -> None:
    """End the process at once if XLA compiles or other hosts have joined, which JAX would wait for.

    For an application that knows its exit code (`status`), as its last call.
    """
    if _leader is not None:
        _leader.close()
    if (_leader is not None and _engine is not None) or compile_threads():
        _end(status)


def register_exit() -> None:
    """Register `leave` to run at exit of an application whose exit code is 0 after a normal end."""
    global _ends_at_exit
    _ends_at_exit = True
    atexit.register(exit_process)


def _end(status: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@atexit.register
def _wait() -> None:
    """Cancel background work and wait for XLA, if the application did not call `exit_process`.

    Only Python knows the exit code.
    """
    if _engine is not None:
        _engine.expect(())
    for thread in compile_threads():
        thread.join()


def current_engine() -> "Engine | None":
    """Return the engine, or None if no stage has made it."""
    return _engine
