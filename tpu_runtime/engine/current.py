"""The process's one engine: made by the first stage, only looked at by everything else; and how the process ends while
XLA compiles. Imports no JAX by itself.

XLA cannot be stopped, and looks for signals several times a second: a thread that it does so in after Python has begun
to end is killed within C++, which aborts the process (up to Python 3.13).
"""

import atexit
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine

_engine: "Engine | None" = None
_lock = threading.Lock()


def engine() -> "Engine":
    """The engine, made on first use: only then a device is touched."""
    global _engine
    with _lock:
        if _engine is None:
            from .engine import Engine

            _engine = Engine()
        return _engine


def compilers() -> list[threading.Thread]:
    """The threads in which XLA may be at work, or tracing is."""
    programs = sys.modules.get(f"{__package__}.program_cache")
    return [thread for thread in threading.enumerate() if programs and thread.name == programs.COMPILER]


def leave(status: int = 0) -> None:
    """Ends the process at once if XLA compiles: for a host that knows its exit code, as its last act."""
    if compilers():
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
