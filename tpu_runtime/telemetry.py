"""What the process did that costs time: compilations, and what the persistent cache spared."""

import functools
from dataclasses import dataclass

import jax

CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"


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
        elif event == CACHE_MISS:
            counter.compiled += 1

    jax.monitoring.register_event_listener(count)
    return counter
