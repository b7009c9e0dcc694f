"""Folders that are made in the cache, such as built-in checkpoints: each whole or made again, by itself.

A folder's manifest names its files with their sizes and digests. Sizes are compared at each use, contents once a
process. What a killed writer left is removed as soon as another one writes.
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

from ..files import parse_json, write_file, writing
from ..units import GIB
from .store import VARIABLE, cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

# Above this, by kind, the folders that were used longest ago are removed.
MAX_BYTES = {"tiny": 2 * GIB, "parts": GIB}
# A folder that was used within this time is not removed for others.
IN_USE_S = 3600
_verified: set[tuple[str, int]] = set()
_MAKING = threading.RLock()


def kept(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of a kind in the cache, which `make` writes where it is not there or not whole.

    Raises what `make` raises, `WriteError` where the disk takes no more.
    """
    folder = cache_folder() / kind / name
    if is_whole(folder):
        return folder
    with _MAKING:
        if is_whole(folder):
            return folder
        if folder.is_dir():
            log.warning("%s is damaged or incomplete; it is made again.", folder)
            _remove(folder)
        with writing(folder.parent, f"set {VARIABLE} to a folder on another one"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder.parent)
            with scratch_for(folder) as scratch:
                make(scratch)
                entries = _entries(scratch)
            write_file(manifest_of(folder), json.dumps(entries).encode())
        _trim(folder.parent, MAX_BYTES[kind], folder)
    return folder


def manifest_of(folder: Path) -> Path:
    """The file beside a folder that says what is in it."""
    return folder.with_name(f".{folder.name}.json")


def is_whole(folder: Path) -> bool:
    """Whether a folder has all files of its manifest, as they were written; marks it as used."""
    manifest = manifest_of(folder)
    try:
        said = parse_json(manifest.read_bytes())
        stat = manifest.stat()
        key = (str(folder), stat.st_ino)
        is_known = key in _verified
        for name, (size, digest) in said.items():
            path = folder / name
            if digest is None:
                if not is_whole(path.resolve()):  # a link to another folder of the cache
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
    """The sizes and digests of a folder's files by name; links to other folders have none."""
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
def scratch_for(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` if the block ends well. Where another process was first, its one stays.

    It is locked while this process writes, so that others can tell it from what a killed one left.
    """
    with contextlib.ExitStack() as stack:
        scratch = _locked(folder, stack)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield scratch
        try:
            os.replace(scratch, folder)
        except OSError:
            if not folder.is_dir():
                raise


def _locked(folder: Path, stack: contextlib.ExitStack) -> Path:
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        if fcntl is None:
            return scratch
        try:
            descriptor = os.open(scratch, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process took it for what a killed one left
        stack.callback(os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if scratch.is_dir() and os.path.samestat(os.stat(scratch), os.fstat(descriptor)):
            return scratch


def _sweep(parent: Path) -> None:
    """Removes scratch folders that nobody writes any more."""
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
    """Removes a folder at once, however long its files take."""
    gone = Path(tempfile.mkdtemp(prefix=f".{folder.name}-gone-", dir=folder.parent))
    try:
        manifest_of(folder).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, gone / "x")
    finally:
        shutil.rmtree(gone, ignore_errors=True)


def _trim(parent: Path, limit: int, newest: Path) -> None:
    """Removes the folders that were used longest ago until the others hold at most `limit` bytes."""
    found = []
    for folder in parent.iterdir():
        if folder == newest or folder.name.startswith(".") or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            used = next(one for one in (manifest_of(folder), folder) if one.exists()).stat().st_mtime
            found.append((used, size_of(folder), folder))
    held = size_of(newest) + sum(size for _, size, _ in found)
    for used, size, folder in sorted(found):
        if held <= limit:
            return
        if 0 <= time.time() - used < IN_USE_S:
            continue
        held -= size
        _remove(folder)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder; another process may remove some meanwhile."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
