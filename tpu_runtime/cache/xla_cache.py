"""JAX's persistent cache of compiled programs, in the pack's cache folder, and what came from it.

A process that finds its programs there still traces and lowers them. That takes 2.6 to 9.3 s of processor time for a
generation, of which its user waits for at most 0.5 s (docs/LOG.md, 2026-11-24): the rest is done while weights are read
and steps run. So the pack serializes no executables of its own.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler
from jax._src.compilation_cache_interface import CacheInterface

from .store import Store, cache_folder, xla_cache_folder

CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"
STORE = Store("xla", code=True)

_JAX_READ = compiler._cache_read
_of_thread = threading.local()


@dataclass
class Compilations:
    """XLA programs of this process: `compiled`, or taken from the persistent cache (`cached`)."""

    compiled: int = 0
    cached: int = 0

    def __str__(self) -> str:
        return f"{self.compiled} compiled, {self.cached} from the cache"


@functools.cache
def compilations() -> Compilations:
    """The process's counter; it counts from the first call on."""
    counter = Compilations()

    def count(event: str, **_: object) -> None:
        if event == CACHE_HIT:
            counter.cached += 1
            _of_thread.cached = cached_by_thread() + 1
        elif event == CACHE_MISS:
            counter.compiled += 1

    jax.monitoring.register_event_listener(count)
    return counter


def cached_by_thread() -> int:
    """How many XLA programs this thread took from the persistent cache, since `compilations` was first called."""
    return getattr(_of_thread, "cached", 0)


@contextlib.contextmanager
def when_missed(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` when JAX did not find in the persistent cache what this thread asks for, before XLA begins."""
    _of_thread.missed = tell
    try:
        yield
    finally:
        del _of_thread.missed


def _read(*asked: Any) -> Any:
    found = _JAX_READ(*asked)
    if found[0] is None and (tell := getattr(_of_thread, "missed", None)):
        tell()
    return found


def use_persistent_cache() -> None:
    """Lets XLA's compiled programs outlive the process. Called before the first compilation.

    A folder of JAX's own variable is the user's decision: JAX trusts it, and writes it as it always does.
    """
    folder = xla_cache_folder()
    if cache_folder() in folder.parents:
        compilation_cache.get_file_cache = lambda path: (_XlaEntries(path), path)
        compiler._cache_write = _write
    compiler._cache_read = _read
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # What this adds is for GPUs, and it puts the folder's path into every key: a copy of the folder would be of no use.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


class _XlaEntries(CacheInterface):
    """JAX's entries in our store. JAX's own writes them in place: a process that is killed meanwhile, or a full disk,
    leaves one that is damaged for good.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def get(self, key: str) -> bytes | None:
        return STORE.get(key)

    def put(self, key: str, value: bytes) -> None:
        STORE.put(key, value)


def _write(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any) -> None:
    """Keeps an entry on every host. JAX does so on the first alone, for a bucket behind the folder; but hosts have
    folders of their own, and the others would compile for minutes at each start.
    """
    if not callbacks:
        compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
