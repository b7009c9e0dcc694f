"""Entries that are kept on disk between runs: written completely or not at all, and checked when they are read.

A cache never stops a run: failures to read or write are logged, and the run continues without the entry.
"""

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..files import ABANDONED_S, DISK_FULL_ERRNOS, write_file
from ..units import GIB, MIB
from . import ownership

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

_LOCK = threading.RLock()
_held = 0

VARIABLE = "COMFYUI_TPU_CACHE"
DEFAULT = "~/.cache/comfyui-tpu"
DIGEST_SIZE = hashlib.sha256().digest_size
SECONDS_BETWEEN_COUNTS = 5
# Above this the least recently used entries are removed.
MAX_BYTES = {"prompts": 4 * GIB, "plans": GIB, "compile_seconds": MIB, "curves": MIB, "xla": 20 * GIB}


def cache_folder() -> Path:
    """Return the pack's cache folder, or a private temporary one if the configured one cannot be written."""
    return _writable(os.environ.get(VARIABLE) or DEFAULT)


@functools.cache
def _writable(path: str) -> Path:
    folder = Path(path)
    try:
        folder = folder.expanduser()
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        if getattr(error, "errno", None) in DISK_FULL_ERRNOS and folder.is_dir():
            return folder  # existing entries can still be read
        return _use_temporary_folder(folder, getattr(error, "strerror", None) or str(error))


def make_private(folder: Path) -> None:
    """Create a private folder; an existing one is not changed."""
    folder.mkdir(mode=ownership.PRIVATE, parents=True, exist_ok=True)


def _use_temporary_folder(folder: Path, reason: str) -> Path:
    try:
        instead = ownership.temporary_folder()
    except OSError as error:
        log.warning(
            "the cache folder %s cannot be written (%s); a temporary one cannot either (%s).", folder, reason, error
        )
        return folder
    log.warning(
        "the cache folder %s cannot be written (%s); using %s. Set %s to a folder that can.",
        folder, reason, instead, VARIABLE,
    )  # fmt: skip
    return instead


@contextlib.contextmanager
def hold_lock() -> Iterator[None]:
    """Hold a lock among all processes and threads that change an existing file of the cache.

    If the cache cannot be written or has no locks, nothing is locked; changes cannot be kept then either.
    """
    global _held
    with _LOCK, contextlib.ExitStack() as stack:
        if not _held and fcntl is not None:  # a thread cannot lock a folder twice
            with contextlib.suppress(OSError):
                make_private(cache_folder())
                descriptor = os.open(cache_folder(), os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        _held += 1
        try:
            yield
        finally:
            _held -= 1


def xla_cache_folder() -> Path:
    """Return the folder of XLA's compiled programs. JAX's own variable has precedence."""
    own_folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(own_folder).expanduser() if own_folder else cache_folder() / "xla"


def signature(*parts: object) -> str:
    """Return a short digest of values with a stable `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def can_trust_code(folder: Path) -> bool:
    """Return whether nobody else can have written programs into `folder`, a part of the cache.

    Logs the reason if not.
    """
    try:
        for trusted in (cache_folder(), folder):
            ownership.check_ownership(trusted)
    except ownership.UntrustedFile as error:
        _say_once(f"compiled programs are not loaded or kept: {error}. Or set {VARIABLE} to a folder of your own.")
        return False
    except FileNotFoundError:
        return True  # no other process has written yet
    except OSError as error:
        _say_once(f"compiled programs are not loaded or kept: {folder} cannot be looked at ({error}).")
        return False
    return True


@functools.cache
def _say_once(warning: str) -> None:
    log.warning("%s", warning)


@dataclass(frozen=True)
class Store:
    """Entries of one kind by key, in a subfolder of the cache, each after its SHA-256."""

    kind: str  # name of the subfolder
    code: bool = False  # whether entries are code, which is only used from folders that nobody else can write to

    @property
    def folder(self) -> Path:
        return cache_folder() / self.kind

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.bin"

    def get(self, key: str) -> bytes | None:
        """Return an entry's bytes, or None. A damaged entry is removed."""
        if not self._is_usable():
            return None
        path = self.path(key)
        try:
            if self.code:
                ownership.check_ownership(path)
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ownership.UntrustedFile) as error:
            log.warning("the cache entry %s cannot be read (%s) and is ignored.", path, error)
            return None
        payload = content[DIGEST_SIZE:]
        if content[:DIGEST_SIZE] != hashlib.sha256(payload).digest():
            self.discard(key, "it is damaged")
            return None
        _touch(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Write an entry, if the folder can be written."""
        if not self._is_usable():
            return
        path = self.path(key)
        try:
            make_private(self.folder)
            trim(self.folder, MAX_BYTES[self.kind] - len(payload))
            write_file(path, hashlib.sha256(payload).digest(), payload, mode=0o600)
        except OSError as error:
            log.warning("the cache entry %s was not written (%s); the run continues without it.", path, error)

    def _is_usable(self) -> bool:
        return not self.code or can_trust_code(self.folder)

    def discard(self, key: str, why: str) -> None:
        """Remove an entry that cannot be used; log the reason `why`."""
        log.warning("the cache entry %s is dropped: %s. It is recreated.", self.path(key), why)
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s).", self.path(key), error)


def trim(folder: Path, limit: int) -> None:
    """Remove the least recently used files of a folder until the others hold at most `limit` bytes.

    Abandoned files are removed too.
    """
    files = sorted((status.st_mtime, status.st_size, path) for path, status in _files(folder))
    newest = files[-1][0] if files else 0.0
    total = sum(size for _, size, _ in files)
    for moment, size, path in files:
        # After a clock was set back, existing files are in the future, and one being written looks old.
        is_abandoned = path.name.startswith(".") and moment < newest - ABANDONED_S and not is_locked(path)
        if is_abandoned or total > limit:
            total -= size
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files of a folder. Another process may remove some at the same time."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield path, status


def is_locked(path: Path) -> bool:
    """Return whether a running process holds the scratch file or folder `path` (see `files.write_file`)."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _touch(path: Path) -> None:
    """Mark an entry as used. In a folder that cannot be written the order stays."""
    try:
        os.utime(path)
    except OSError as error:
        log.debug("%s cannot be marked as used (%s).", path, error)


def measure_usage() -> list[dict[str, object]]:
    """Return `name`, `path`, `files` and `bytes` of each kind in the cache. Counted at most every few seconds."""
    return _usage(cache_folder(), int(time.monotonic() / SECONDS_BETWEEN_COUNTS))


@functools.lru_cache(maxsize=1)
def _usage(folder: Path, moment: int) -> list[dict[str, object]]:
    folders = {kind: Store(kind).folder for kind in MAX_BYTES} | {"xla": xla_cache_folder()}
    return [{"name": name, "path": str(folder), **_size(folder)} for name, folder in folders.items()]


def _size(folder: Path) -> dict[str, int]:
    sizes = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file():
                    sizes.append(entry.stat().st_size)
    except OSError:
        # The folder does not exist yet, or an entry was removed while it was read.
        return {"files": len(sizes), "bytes": sum(sizes)}
    return {"files": len(sizes), "bytes": sum(sizes)}
