"""What is kept on disk between runs: an entry is written completely or not at all, and checked when it is read.

A cache never stops a run: what cannot be written or read is logged, and the run goes on without it.
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
from typing import Any

from ..files import ABANDONED_S, FULL, write_file
from ..units import GIB, MIB
from . import trust

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
    """The pack's cache; a private temporary folder where the configured one cannot be written."""
    return _writable(os.environ.get(VARIABLE) or DEFAULT)


@functools.cache
def _writable(wanted: str) -> Path:
    folder = Path(wanted)
    try:
        folder = folder.expanduser()
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where the home is
        if getattr(error, "errno", None) in FULL and folder.is_dir():
            return folder  # what is there can still be read
        return _instead_of(folder, getattr(error, "strerror", None) or str(error))


def make_private(folder: Path) -> None:
    """Creates a private folder; an existing one stays as it is."""
    folder.mkdir(mode=trust.PRIVATE, parents=True, exist_ok=True)


def _instead_of(folder: Path, reason: str) -> Path:
    try:
        instead = trust.temporary_folder()
    except OSError as error:
        log.warning("the cache folder %s cannot be written (%s), nor a temporary one (%s).", folder, reason, error)
        return folder
    log.warning(
        "the cache folder %s cannot be written (%s); using %s. Set %s to a folder that can.",
        folder, reason, instead, VARIABLE,
    )  # fmt: skip
    return instead


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Held by one process and thread at a time, of those that change a file of the cache that is there.

    Where the cache cannot be written, or has no locks, nothing is held: what is changed then cannot be kept either.
    """
    global _held
    with _LOCK, contextlib.ExitStack() as stack:
        if not _held and fcntl is not None:  # a lock of a folder is not this thread's twice
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
    """XLA's compiled programs; JAX's own variable wins."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return Path(given).expanduser() if given else cache_folder() / "xla"


def signature(*parts: Any) -> str:
    """A short key of anything with a stable `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def holds_own_code(folder: Path) -> bool:
    """Whether nobody else can have written programs into `folder`, a part of the cache; if not, the log says why."""
    try:
        for one in (cache_folder(), folder):
            trust.check(one)
    except trust.Untrusted as error:
        _say_once(f"compiled programs are neither loaded nor kept: {error}. Or set {VARIABLE} to a folder of your own.")
        return False
    except FileNotFoundError:
        return True  # there will be none but this process's
    except OSError as error:
        _say_once(f"compiled programs are neither loaded nor kept: {folder} cannot be looked at ({error}).")
        return False
    return True


@functools.cache
def _say_once(warning: str) -> None:
    log.warning("%s", warning)


@dataclass(frozen=True)
class Store:
    """Entries of one kind (a subfolder of the cache) by key, each after its SHA-256. Entries that are `code` exist
    only where nobody else can write.
    """

    kind: str
    code: bool = False

    @property
    def folder(self) -> Path:
        return cache_folder() / self.kind

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.bin"

    def get(self, key: str) -> bytes | None:
        """An entry's bytes; None if there is none. A damaged entry is removed."""
        if not self._is_usable():
            return None
        path = self.path(key)
        try:
            if self.code:
                trust.check(path)
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, trust.Untrusted) as error:
            log.warning("the cache entry %s cannot be read (%s); doing without.", path, error)
            return None
        payload = content[DIGEST_SIZE:]
        if content[:DIGEST_SIZE] != hashlib.sha256(payload).digest():
            self.discard(key, "it is damaged")
            return None
        _touch(path)
        return payload

    def put(self, key: str, payload: bytes) -> None:
        """Writes an entry, if the folder can be written."""
        if not self._is_usable():
            return
        path = self.path(key)
        try:
            make_private(self.folder)
            trim(self.folder, MAX_BYTES[self.kind] - len(payload))
            write_file(path, hashlib.sha256(payload).digest(), payload, mode=0o600)
        except OSError as error:
            log.warning("the cache entry %s was not written (%s); the run goes on without it.", path, error)

    def _is_usable(self) -> bool:
        return not self.code or holds_own_code(self.folder)

    def discard(self, key: str, why: str) -> None:
        """Removes an entry that cannot be used; `why` goes to the log."""
        log.warning("the cache entry %s is dropped: %s. It is recreated.", self.path(key), why)
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s).", self.path(key), error)


def trim(folder: Path, limit: int) -> None:
    """Removes the least recently used files of a folder until the others hold at most `limit` bytes, and abandoned
    scratch files.
    """
    files = sorted((status.st_mtime, status.st_size, path) for path, status in _files(folder))
    newest = files[-1][0] if files else 0.0
    held = sum(size for _, size, _ in files)
    for moment, size, path in files:
        # A clock that was set back leaves files of the future, beside which what is being written looks old.
        is_abandoned = path.name.startswith(".") and moment < newest - ABANDONED_S and not is_written(path)
        if is_abandoned or held > limit:
            held -= size
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files of a folder; another process may remove some at the same time."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield path, status


def is_written(path: Path) -> bool:
    """Whether a living process holds the scratch file or folder `path` (see `files.write_file`)."""
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
    """Marks an entry as used; in a folder that cannot be written the order stays."""
    try:
        os.utime(path)
    except OSError as error:
        log.debug("%s cannot be marked as used (%s).", path, error)


def usage() -> list[dict[str, object]]:
    """What the cache holds, by kind: `name`, `path`, `files`, `bytes`. Counted again every few seconds."""
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
