"""The process's one engine: made by the first stage, only looked at by everything else. Imports no JAX by itself."""

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


def current() -> "Engine | None":
    """The engine, if a stage has made it."""
    return _engine
