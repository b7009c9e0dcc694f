"""The memory that this process can still take of its host, and the error where something would take more.

Linux ends a process that takes too much, with all its prompts; so what is large asks before it begins. Imports no JAX.
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from .memory_errors import HostMemoryError
from .units import MIB, format_size

try:
    import resource
except ImportError:  # Windows
    resource = None

_ROOT = Path("/")
# What stays free: threads, the log, and the next prompt's answer have to go on.
RESERVE_BYTES = 128 * MIB
# More than any machine has: what version 1 of cgroups says where there is no limit.
_NO_LIMIT = 2**60
# What torch says of memory that the kernel refused, and Rust's libraries.
_REFUSED = re.compile(r"DefaultCPUAllocator|\(os error 12\)|Cannot allocate memory")

_WHAT_TO_DO = (
    "End other programs, give this machine or its container more memory, or choose a smaller model, size or number of "
    "frames."
)


def available_bytes() -> int | None:
    """What this process can still take: the least of what the host, its container and its own limits leave.

    None where nobody says so as Linux does.
    """
    found = [*_of_host(), *_of_containers(), *_of_process()]
    return max(0, min(found)) if found else None


def require(size_bytes: int, what: str) -> None:
    """Raises `HostMemoryError` where `what`, as "Loading X", would take more than there is."""
    available = available_bytes()
    if available is not None and available < size_bytes + RESERVE_BYTES:
        raise HostMemoryError(
            f"{what} needs {format_size(size_bytes)} of the host's memory, and {format_size(available)} are free, of "
            f"which {format_size(RESERVE_BYTES)} must stay so. {_WHAT_TO_DO}"
        )


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Makes a `HostMemoryError` of memory that the kernel refuses while `what` is done."""
    try:
        yield
    except Exception as error:  # libraries raise errors of their own
        if isinstance(error, HostMemoryError) or not _is_refused(error):
            raise
        left = format_size(available_bytes() or 0)
        raise HostMemoryError(
            f"{what} got no more of the host's memory, of which {left} are free. {_WHAT_TO_DO}"
        ) from None


def _is_refused(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    # What a chip's runtime says is its own matter, see `refusal`.
    return "RESOURCE_EXHAUSTED" not in str(error) and bool(_REFUSED.search(str(error)))


def _of_host() -> Iterator[int]:
    lines = _table(_ROOT / "proc/meminfo", ":")
    if "MemAvailable" in lines:
        yield (lines["MemAvailable"] + lines.get("SwapFree", 0)) * 1024


def _of_containers() -> Iterator[int]:
    """What each control group leaves that this process is in, of version 1 or 2; pages of files can be taken back."""
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        _, kinds, place = (*line.split(":", 2), "", "")[:3]
        if kinds not in ("", "memory"):
            continue
        root = _ROOT / "sys/fs/cgroup" / kinds
        limit, used = (
            ("memory.max", "memory.current") if not kinds else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        # In a container the place is often the host's, and what is mounted is the container's own.
        inner = root / place.lstrip("/")
        for folder in {root, *(one for one in (inner, *inner.parents) if root in one.parents)}:
            if (most := _number(folder / limit)) is None or most >= _NO_LIMIT:
                continue
            found = _table(folder / "memory.stat", " ")
            names = ("inactive_file", "active_file") if not kinds else ("total_inactive_file", "total_active_file")
            yield most - (_number(folder / used) or 0) + sum(found.get(name, 0) for name in names)


def _of_process() -> Iterator[int]:
    if resource is None:
        return
    held = _table(_ROOT / "proc/self/status", ":")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and name in held:
            yield most - held[name] * 1024


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path, separator: str) -> dict[str, int]:
    """The whole numbers of a file of lines, by what stands before them."""
    found = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(separator)
        if (number := value.split()[:1]) and number[0].isdigit():
            found[name] = int(number[0])
    return found
