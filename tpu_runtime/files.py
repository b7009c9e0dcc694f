"""Reading JSON and headers that may come from anyone, such as a checkpoint's; what is wrong with one as a sentence.
Writing files completely or not at all.
"""

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

from .redact import SafeError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

if TYPE_CHECKING:
    import torch

# A part of a tensor, a slice of each dimension; () is all of it.
Index = tuple[slice, ...]
# Lists and objects within each other: deeper ones exhaust Python's stack, here or where they are printed.
MOST_LEVELS = 100
# Bytes of a safetensors header: ten times what the largest published files have.
MOST_HEADER = 2**24


class CheckpointError(SafeError):
    """A model id that cannot be used, in a sentence for the user."""


# Errors of a disk that takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


class WriteError(SafeError):
    """A file that was not written, in a sentence for the user."""


@contextlib.contextmanager
def writing(folder: Path, instead: str) -> Iterator[None]:
    """Makes a `WriteError` of a disk that takes no more; `instead` says what to do besides making room there."""
    try:
        yield
    except Exception as error:  # PyAV's errors of the disk are none of Python's
        if (number := _error_number(error)) not in FULL:
            raise
        raise WriteError(
            f"{folder} takes no more ({os.strerror(number)}); nothing of the file is left there. Make room on that "
            f"disk, or {instead}."
        ) from error


def _error_number(error: Exception) -> int | None:
    """Return an error's number. Those of safetensors, which Rust raises, have it in their text alone."""
    number = getattr(error, "errno", None)
    match = _OS_ERROR.search(str(error)) if number is None else None
    return int(match[1]) if match else number


# A scratch file: the machine that writes it, a number, and the ending of the file that it becomes.
_SCRATCH = ".comfyui-tpu-"
_LEFT = re.compile(re.escape(_SCRATCH) + r"([0-9a-f]{8})-[0-9a-f]{16}(?:\.[^.]{1,16})?")
# Another machine's scratch file on a shared disk, whose locks may not be seen here, is older than this when it is left.
ABANDONED_S = 24 * 3600


@contextlib.contextmanager
def written_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """A scratch file of the same ending that becomes `path` if the block ends well, and leaves nothing if not.

    It is locked while it is written. What killed processes left beside it is removed first. `mode` is for a new file,
    less the umask. Raises `OSError`.
    """
    _remove_left(path.parent)
    with contextlib.ExitStack() as stack:
        scratch = _locked_scratch(path, mode, stack)
        try:
            yield scratch
            os.replace(scratch, path)  # while it is locked: nobody takes it for what a killed process left
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def _locked_scratch(path: Path, mode: int, stack: contextlib.ExitStack) -> Path:
    """A new file beside `path`; on Windows, which replaces no open file, it is not held."""
    ending = path.suffix if _LEFT.fullmatch(f"{_SCRATCH}{'0' * 8}-{'0' * 16}{path.suffix}") else ""
    while True:
        scratch = path.with_name(f"{_SCRATCH}{_this_machine()}-{secrets.token_hex(8)}{ending}")
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)  # through no link that is there
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
    """Removes scratch files of this user whose writer was killed: nobody holds them."""
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
    """Removes a regular file of this user that nobody has locked; another machine's only after a day."""
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
    """The value of a JSON text, of UTF-8 where it is bytes, with a byte order mark or without.

    `ValueError` says what is wrong with any other content.
    """
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _entries(outer)]:
        depth += 1
        if depth > MOST_LEVELS:
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    return value


def _entries(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a checkpoint's JSON file; `CheckpointError` for anything else."""
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a JSON {type(found).__name__}; it must be an object. Download it again.")
    return found


class Made(Protocol):
    """How a tensor is made of what a file holds (see `formats`); `read` reads one that is there as it is."""

    def read(self, index: Index, read: "Callable[[TensorFile, Index], torch.Tensor]") -> "torch.Tensor": ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFile:
    """Where a tensor is: the file, its name, its shape and its format (as `BF16`) there.

    One that is `made` of others, such as codes and scales, has their place and name, and the shape and the format that
    it comes in.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"
    made: Made | None = None


def read_header(path: Path) -> tuple[dict[str, TensorFile], Mapping[str, str]]:
    """The tensors of a safetensors file by name, and its metadata; reads no weights.

    Raises `OSError`, safetensors' own `SafetensorError`, or `CheckpointError` for a header longer than any published.
    """
    from safetensors import safe_open

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if MOST_HEADER < size <= os.fstat(file.fileno()).st_size:
            raise CheckpointError(
                f"{path} has a header of {size} bytes; {MOST_HEADER} are read at most. Use a file of one model."
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
    """Raises `CheckpointError` for a tensor's name with what does not print, such as a line break or an escape."""
    for name in names:
        if not name.isprintable():
            raise CheckpointError(
                f"{path} has a tensor named {name[:80]!r}; names must be of printable characters. Download it again."
            )


def write_file(path: Path, *parts: bytes, mode: int = 0o666) -> None:
    """Writes the file completely or not at all, in place of one that is there; `mode` is for a new one, less the umask.

    Raises `OSError`. What a process that is killed meanwhile leaves, the next writer in that folder removes.
    """
    with written_file(path, mode) as scratch:
        # Through no link that somebody put there meanwhile.
        with open(os.open(scratch, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)), "wb") as file:
            file.writelines(parts)
