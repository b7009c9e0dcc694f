"""Folders that are made in the cache, such as built-in checkpoints. A damaged or incomplete folder is made again.

A folder's manifest has the sizes and digests of its files. Sizes are compared at each use, contents once per process.
Scratch folders of killed processes are removed before the next one is written.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..files import parse_json, report_full_disk, write_file
from ..units import GIB
from .store import VARIABLE, cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

# Above this, by kind, the least recently used folders are removed.
MAX_BYTES = {"tiny": 2 * GIB, "parts": GIB}
# A folder that was used within this time is kept.
IN_USE_S = 3600
_verified: set[tuple[str, int]] = set()
_MAKING = threading.RLock()


def ensure_cached_folder(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` of a kind in the cache.

    make: writes its files into a given scratch folder, if it is absent or not whole.
    Raises the errors of `make`, and `WriteError` if the disk is full.
    """
    folder = cache_folder() / kind / name
    if is_complete(folder):
        return folder
    with _MAKING:
        if is_complete(folder):
            return folder
        if folder.is_dir():
            log.warning("%s is damaged or incomplete; it is rebuilt.", folder)
            _remove(folder)
        with report_full_disk(folder.parent, f"set {VARIABLE} to a folder on another one"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder.parent)
            with open_scratch_folder(folder) as scratch:
                make(scratch)
                entries = _entries(scratch)
            write_file(manifest_path(folder), json.dumps(entries).encode())
        _trim(folder.parent, MAX_BYTES[kind], folder)
    return folder


def manifest_path(folder: Path) -> Path:
    """Return the path of a folder's manifest, next to the folder."""
    return folder.with_name(f".{folder.name}.json")


def is_complete(folder: Path) -> bool:
    """Return whether a folder has all files of its manifest, as they were written. Marks it as used."""
    manifest = manifest_path(folder)
    try:
        manifest_entries = parse_json(manifest.read_bytes())
        stat = manifest.stat()
        key = (str(folder), stat.st_ino)
        is_known = key in _verified
        for name, (size, digest) in manifest_entries.items():
            path = folder / name
            if digest is None:
                if not is_complete(path.resolve()):  # a link to another folder of the cache
                    return False
            elif path.stat().st_size != size or not (is_known or _digest(path) == digest):
                return False
    except (OSError, ValueError, TypeError, AttributeError):
        return False
    _verified.add(key)
    with contextlib.suppress(OSError):
        os.utime(manifest)
    return True


def _entries(folder: Path) -> dict[str, tuple[int, str | None]]:
    """Return the sizes and digests of a folder's files by name; links to other folders have None as digest."""
    entries: dict[str, tuple[int, str | None]] = {}
    for root, inner, files in os.walk(folder):
        for name in inner:
            if (path := Path(root, name)).is_symlink():
                entries[str(path.relative_to(folder))] = (0, None)
        for name in files:
            path = Path(root, name)
            entries[str(path.relative_to(folder))] = (path.stat().st_size, _digest(path))
    return entries


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def open_scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `folder` if the block succeeds, unless another process made that first.

    It is locked while this process writes, so that others can tell it from an abandoned one.
    """
    with contextlib.ExitStack() as stack:
        scratch = _make_locked(folder, stack)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield scratch
        try:
            os.replace(scratch, folder)
        except OSError:
            if not folder.is_dir():
                raise


def _make_locked(folder: Path, stack: contextlib.ExitStack) -> Path:
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        if fcntl is None:
            return scratch
        try:
            descriptor = os.open(scratch, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process took it for an abandoned one
        stack.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if scratch.is_dir() and os.path.samestat(os.stat(scratch), os.fstat(descriptor)):
            return scratch


def _sweep(parent: Path) -> None:
    """Remove scratch folders of processes that have ended."""
    for path in parent.glob(".*"):
        if not path.is_dir() or path.is_symlink() or fcntl is None:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder in one step, however long its files take."""
    removed = Path(tempfile.mkdtemp(prefix=f".{folder.name}-gone-", dir=folder.parent))
    try:
        manifest_path(folder).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, removed / "x")
    finally:
        shutil.rmtree(removed, ignore_errors=True)


def _trim(parent: Path, limit: int, newest: Path) -> None:
    """Remove the least recently used folders until the others hold at most `limit` bytes. Keeps `newest`."""
    folders = []
    for folder in parent.iterdir():
        if folder == newest or folder.name.startswith(".") or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            used = next(path for path in (manifest_path(folder), folder) if path.exists()).stat().st_mtime
            folders.append((used, measure_folder(folder), folder))
    total = measure_folder(newest) + sum(size for _, size, _ in folders)
    for used, size, folder in sorted(folders):
        if total <= limit:
            return
        if 0 <= time.time() - used < IN_USE_S:
            continue
        total -= size
        _remove(folder)


def measure_folder(folder: Path) -> int:
    """Return the bytes of all files below a folder. Another process may remove some meanwhile."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
