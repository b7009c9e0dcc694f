"""Reading of untrusted JSON and headers with errors as sentences, and writing of files completely or not at all."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .messages import compose
from .redact import SafeError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    import torch

# Part of a tensor: a slice per dimension; () is all of it.
Index = tuple[slice, ...]
# Nesting of lists and objects: deeper ones exhaust Python's stack, here or when they are printed.
MAX_JSON_DEPTH = 100
# Bytes of a safetensors header: ten times the largest published ones.
MAX_HEADER_BYTES = 2**24


class CheckpointError(SafeError):
    """An unusable model id or checkpoint, in a sentence for the user."""


# Errors of a full disk.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


class WriteError(SafeError):
    """A file that was not written, in a sentence for the user."""


@contextlib.contextmanager
def report_full_disk(folder: Path, instead: str) -> Iterator[None]:
    """Raise the error of a full disk as `WriteError`; `instead` is advice other than freeing disk space."""
    try:
        yield
    except Exception as error:  # PyAV has error classes of its own for the disk
        if (number := _error_number(error)) not in DISK_FULL_ERRNOS:
            raise
        raise WriteError(
            compose("file.disk_full", folder=folder, strerror=os.strerror(number), instead=instead)
        ) from error


def _error_number(error: Exception) -> int | None:
    """Return an error's number. Those of safetensors, which Rust raises, have it in their text alone."""
    number = getattr(error, "errno", None)
    match = _OS_ERROR.search(str(error)) if number is None else None
    return int(match[1]) if match else number


# A scratch file: the machine that writes it, a number, and the ending of the file that it becomes.
_SCRATCH = ".comfyui-tpu-"
_LEFT = re.compile(re.escape(_SCRATCH) + r"([0-9a-f]{8})-[0-9a-f]{16}(?:\.[^.]{1,16})?")
# Another machine's scratch file on a shared disk is abandoned after this time, because its lock may be invisible.
ABANDONED_S = 24 * 3600


@contextlib.contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a scratch file of the same ending that becomes `path` if the block succeeds, and is removed otherwise.

    It is locked while it is written. Scratch files of killed processes in the folder are removed first.
    mode: of a new file, less the umask.
    Raises `OSError`.
    """
    _remove_left(path.parent)
    with contextlib.ExitStack() as stack:
        scratch = _create_locked_scratch(path, mode, stack)
        try:
            yield scratch
            os.replace(scratch, path)  # while it is locked, so that it is not taken for an abandoned file
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def _create_locked_scratch(path: Path, mode: int, stack: contextlib.ExitStack) -> Path:
    """Return a new file in the folder of `path`, locked until `stack` closes.

    It is not locked on Windows, where an open file cannot be replaced.
    """
    ending = path.suffix if _LEFT.fullmatch(f"{_SCRATCH}{'0' * 8}-{'0' * 16}{path.suffix}") else ""
    while True:
        scratch = path.with_name(f"{_SCRATCH}{_this_machine()}-{secrets.token_hex(8)}{ending}")
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)  # does not follow a link
        if fcntl is None:
            os.close(descriptor)
            return scratch
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(scratch), os.fstat(descriptor)):
                stack.callback(os.close, descriptor)
                return scratch
        os.close(descriptor)  # another process removed it before it was locked


def _remove_left(folder: Path) -> None:
    """Remove scratch files of this user whose writer was killed: they are not locked."""
    if fcntl is None:
        return
    try:
        names = [name for name in os.listdir(folder) if name.startswith(_SCRATCH)]
    except OSError:
        return
    for name in names:
        if match := _LEFT.fullmatch(name):
            with contextlib.suppress(OSError):
                _remove_unheld(folder / name, is_ours=match[1] == _this_machine())


def _remove_unheld(path: Path, *, is_ours: bool) -> None:
    """Remove a regular, unlocked file of this user; another machine's only after `ABANDONED_S`."""
    assert fcntl is not None
    status = os.lstat(path)
    is_old = time.time() - status.st_mtime > ABANDONED_S
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not (is_ours or is_old):
        return
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            path.unlink()
    finally:
        os.close(descriptor)


@functools.cache
def _this_machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; bytes are UTF-8 with or without a byte order mark.

    Raises `ValueError` with the reason for other content.
    """
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(compose("file.json_too_deep", max_json_depth=MAX_JSON_DEPTH)) from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _entries(outer)]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(compose("file.json_too_deep", max_json_depth=MAX_JSON_DEPTH))
    return value


def _entries(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's JSON file. Raises `CheckpointError` for other content."""
    try:
        value = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(compose("file.missing", path=path)) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(compose("file.json_unreadable", path=path, error=error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(compose("file.json_not_object", path=path, type=type(value).__name__))
    return value


class TensorView(Protocol):
    """A view of stored tensors (see `formats`); its `read` calls the given `read` for stored values."""

    def read(self, index: Index, read: "Callable[[TensorFile, Index], torch.Tensor]") -> "torch.Tensor": ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFile:
    """The location of a tensor in a file."""

    path: Path
    name: str  # in the file; a view has that of its first source
    shape: tuple[int, ...]
    dtype: str = "F32"  # as safetensors names it, such as `BF16`
    made: TensorView | None = (
        None  # view that computes the values, such as codes times scales; None for a stored tensor
    )


def read_header(path: Path) -> tuple[dict[str, TensorFile], Mapping[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata. Reads no weights.

    Raises `OSError`, safetensors' `SafetensorError`, or `CheckpointError` for a header longer than any published one.
    """
    from safetensors import safe_open

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if MAX_HEADER_BYTES < size <= os.fstat(file.fileno()).st_size:
            raise CheckpointError(
                compose("file.header_too_large", path=path, size=size, max_header_bytes=MAX_HEADER_BYTES)
            )
    with safe_open(os.fspath(path), framework="pt") as file:
        check_names(path, names := list(file.keys()))
        parts = {name: file.get_slice(name) for name in names}
        tensors = {
            name: TensorFile(path=path, name=name, shape=tuple(part.get_shape()), dtype=part.get_dtype())
            for name, part in parts.items()
        }
        return tensors, file.metadata() or {}


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raise `CheckpointError` for a tensor name with unprintable characters, such as a line break or an escape."""
    for name in names:
        if not name.isprintable():
            raise CheckpointError(compose("file.tensor_name_not_printable", path=path, name=repr(name[:80])))


def write_file(path: Path, *parts: bytes, mode: int = 0o666) -> None:
    """Write the file completely or not at all, replacing an existing one.

    parts: written one after another.
    mode: of a new file, less the umask.
    Raises `OSError`. If the process is killed, the next writer in the folder removes its scratch file.
    """
    with open_atomic(path, mode) as scratch:
        # Does not follow a link that somebody created meanwhile.
        with open(os.open(scratch, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)), "wb") as file:
            file.writelines(parts)
