"""XLA's own cache of compiled programs: where it is, and what came from it."""

import functools
import threading
from dataclasses import dataclass

import jax

from ..cache.store import cache_folder, holds_own_code, trim_xla, xla_cache_folder
from ..cache.trust import PRIVATE
from .program import log

CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"

_of_thread = threading.local()


@dataclass
class Compilations:
    """XLA programs of this process: `compiled` anew, or taken from the persistent cache (`cached`)."""

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


def use_persistent_cache() -> None:
    """Lets XLA's compiled programs outlive the process. Called before the first compilation."""
    folder = xla_cache_folder()
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("XLA's cache %s cannot be made (%s); programs are compiled anew in each process.", folder, error)
        return
    # A folder of JAX's own variable is the user's decision; JAX trusts it too.
    if cache_folder() in folder.parents and not holds_own_code(folder):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    trim_xla()
