"""Reading JSON and headers that may come from anyone, such as a checkpoint's; what is wrong with one as a sentence.
Writing files completely or not at all.
"""

import contextlib
import errno
import json
import os
import re
import secrets
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


@contextlib.contextmanager
def written_file(path: Path) -> Iterator[Path]:
    """A scratch file of the same ending that becomes `path` if the block ends well, and leaves nothing if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{secrets.token_hex(4)}-{path.name}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)


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

    Raises `OSError`. A process that is killed meanwhile leaves a file whose name begins with a dot.
    """
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # through no link that somebody put there
    try:
        with open(descriptor, "wb") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.writelines(parts)
            file.flush()
            if fcntl is not None:  # while it is held: nobody takes it for what a killed process left
                os.replace(scratch, path)
        if fcntl is None:
            os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
