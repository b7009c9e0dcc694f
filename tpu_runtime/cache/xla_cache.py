"""JAX's persistent cache of compiled programs, in the pack's cache folder, with counters of hits and misses.

A process that finds its programs there still traces and lowers them. That takes 2.6 to 9.3 s of processor time for a
generation, of which its user waits for at most 0.5 s (docs/LOG.md, 2026-11-24): the rest is done while weights are read
and steps run. So the pack serializes no executables of its own.
JAX's public settings and events give the folder, hits and misses. Two private functions of JAX are replaced in
addition. If a JAX lacks one, or has it with other parameters, only the benefit of its replacement is lost.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from . import store
from .store import Store, cache_folder, xla_cache_folder

log = logging.getLogger(__name__)

CACHE_HIT = "/jax/compilation_cache/cache_hits"
CACHE_MISS = "/jax/compilation_cache/cache_misses"
STORE = Store("xla", code=True)

_of_thread = threading.local()


@dataclass(frozen=True)
class _Private:
    """A private function of JAX with its parameters in versions 0.10 to 0.12.

    Some versions have the `optional` ones.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def find(self) -> Callable[..., Any] | None:
        """Return the function, or None if this JAX does not have it with these parameters."""
        try:
            function = getattr(importlib.import_module(self.module), self.name)
            parameters = inspect.signature(function).parameters.values()
        except (ImportError, AttributeError, TypeError, ValueError):
            return None
        required = {parameter.name for parameter in parameters if parameter.default is parameter.empty} - set(
            self.optional
        )
        has_all = set(self.parameters) <= {parameter.name for parameter in parameters}
        return function if has_all and required <= set(self.parameters) else None

    def replace(self, by: Callable[..., Any]) -> None:
        setattr(importlib.import_module(self.module), self.name, by)

    def say_lost(self, loss: str) -> None:
        _warn_once(f"JAX {jax.__version__} has no {self.module}.{self.name} as 0.10 to 0.12 have it: {loss}.")


_OPEN = _Private("jax._src.compilation_cache", "get_file_cache", ("path",))
_PUT = _Private(
    "jax._src.compilation_cache", "put_executable_and_time",
    ("cache_key", "module_name", "executable", "backend", "compile_time"),
)  # fmt: skip
_WRITE = _Private(
    "jax._src.compiler", "_cache_write", ("cache_key", "compile_time_secs", "module_name", "backend", "executable"),
    optional=("host_callbacks",),
)  # fmt: skip


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


@dataclass
class Compilations:
    """Counts of this process's XLA programs."""

    compiled: int = 0  # by XLA
    cached: int = 0  # taken from the persistent cache

    def __str__(self) -> str:
        return f"{self.compiled} compiled, {self.cached} from the cache"


@functools.cache
def count_compilations() -> Compilations:
    """Return the process's counter, which counts from the first call on."""
    counter = Compilations()

    def count(event: str, **_: object) -> None:
        if event == CACHE_HIT:
            counter.cached += 1
            _of_thread.cached = count_thread_hits() + 1
        elif event == CACHE_MISS:
            counter.compiled += 1

    jax.monitoring.register_event_listener(count)
    return counter


def count_thread_hits() -> int:
    """Return how many XLA programs this thread took from the persistent cache.

    Counted since `compilations` was first called.
    """
    return getattr(_of_thread, "cached", 0)


@contextlib.contextmanager
def on_cache_miss(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` before XLA compiles in this thread because the persistent cache lacks a program."""
    _of_thread.missed = tell
    try:
        yield
    finally:
        del _of_thread.missed


def use_persistent_cache() -> None:
    """Keep XLA's compiled programs on disk. Call it before the first compilation, after the devices are started.

    A folder of JAX's own variable is the user's decision: JAX trusts it and writes it as usual.
    """
    folder = xla_cache_folder()
    is_own = cache_folder() in folder.parents
    if not _replace_entries(is_own) and is_own and not _leave_to_jax(folder):
        return
    if is_own and jax.process_index() > 0:
        _write_on_this_host()
    _set("jax_compilation_cache_dir", str(folder))
    _set("jax_persistent_cache_min_compile_time_secs", 0)
    _set("jax_persistent_cache_min_entry_size_bytes", -1)
    # That is for GPUs, and puts the folder's path into every key, so that a copy of the folder could not be used.
    _set("jax_persistent_cache_enable_xla_caches", "none")


def _set(name: str, value: object) -> None:
    try:
        jax.config.update(name, value)
    except (AttributeError, ValueError) as error:
        _warn_once(f"JAX {jax.__version__} rejects {name} ({error}): the cache of programs works without it.")


def _replace_entries(is_own: bool) -> bool:
    """Make JAX keep its entries in this pack's store, or report misses in the user's folder.

    Return False if that fails.
    """
    jaxs = _OPEN.find()
    if jaxs is None:
        _OPEN.say_lost("JAX writes its files itself, and a compilation is reported only when it is done")
        return False
    jaxs = getattr(jaxs, "jaxs", jaxs)

    def open_entries(path: str) -> Any:
        if is_own:
            return _Announced(_InStore(path)), path
        opened = jaxs(path)
        return opened and (_Announced(opened[0]), opened[1])

    open_entries.jaxs = jaxs  # type: ignore[attr-defined]
    _OPEN.replace(open_entries)
    return True


def _leave_to_jax(folder: Path) -> bool:
    """Return whether JAX's own files may be in this pack's folder.

    JAX writes them in place. A killed process or a full disk leaves a file that stays damaged.
    """
    with contextlib.suppress(OSError):  # reported by the next call
        store.make_private(folder)
    if not store.can_trust_code(folder):
        return False
    _set("jax_compilation_cache_max_size", store.MAX_BYTES[STORE.kind])
    return True


def _write_on_this_host() -> None:
    """Keep entries on hosts other than the first, too. JAX writes only there, assuming a shared folder.

    Hosts have folders of their own, and the others would compile for minutes at each start.
    """
    write, put = _WRITE.find(), _PUT.find()
    if write is None or put is None:
        (_PUT if write else _WRITE).say_lost("this host compiles its programs again at every start")
        return
    parameters = inspect.signature(write)

    def write_here(*given: Any, **named: Any) -> None:
        try:
            asked = parameters.bind(*given, **named).arguments
            if not asked.get("host_callbacks"):
                names = ("cache_key", "module_name", "executable", "backend")
                put(*(asked[name] for name in names), int(asked["compile_time_secs"]))
        except Exception as error:  # the program is there, and runs
            log.warning("a compiled program was not stored (%s); the run continues.", error)

    write_here.__signature__ = parameters  # type: ignore[attr-defined]
    _WRITE.replace(write_here)


class _Announced:
    """Entries of a store that report a missing one to the thread (see `on_cache_miss`)."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entries, name)

    def get(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None and (tell := getattr(_of_thread, "missed", None)):
            tell()
        return entry


class _InStore:
    """JAX's entries in this pack's store, each written completely or not at all."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def get(self, key: str) -> bytes | None:
        return STORE.get(key)

    def put(self, key: str, value: bytes) -> None:
        STORE.put(key, value)
