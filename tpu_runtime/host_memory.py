"""Available memory of the host, and the error for a request that exceeds it.

Linux kills a process that allocates too much, with all its prompts, so large allocations are checked first. Imports no
JAX.
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from .memory_errors import HostMemoryError
from .messages import compose
from .units import MIB, format_size

try:
    import resource
except ImportError:  # Windows
    resource = None

_ROOT = Path("/")
# Memory to leave free for threads, the log and the answer to the next prompt.
RESERVE_BYTES = 128 * MIB
# Larger than any machine's memory: version 1 of cgroups reports such a limit for "unlimited".
_NO_LIMIT = 2**60
# Errors of torch and of Rust libraries for memory that the kernel refused.
_REFUSED = re.compile(r"DefaultCPUAllocator|\(os error 12\)|Cannot allocate memory")

_WHAT_TO_DO = compose("memory.free_host_memory")


def available_bytes() -> int | None:
    """Return the bytes that this process can still allocate; None if Linux's files do not report them.

    The value is the smallest of the host's free memory and the remainders of the container's and the process's limits.
    """
    remainders = [*_read_host(), *_read_containers(), *_read_process()]
    return max(0, min(remainders)) if remainders else None


def require(size_bytes: int, what: str) -> None:
    """Raise `HostMemoryError` if less than `size_bytes` and `RESERVE_BYTES` are available.

    what: begins the message, such as "Loading X".
    """
    available = available_bytes()
    if available is not None and available < size_bytes + RESERVE_BYTES:
        raise HostMemoryError(compose(
            "memory.host_too_small", what=what, size_bytes=format_size(size_bytes),
            available=format_size(available), reserve_bytes=format_size(RESERVE_BYTES), what_to_do=_WHAT_TO_DO,
        ))  # fmt: skip


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn an error for memory that the kernel refused into a `HostMemoryError`. `what` begins its message."""
    try:
        yield
    except Exception as error:  # libraries raise errors of their own
        if isinstance(error, HostMemoryError) or not _is_refused(error):
            raise
        left = format_size(available_bytes() or 0)
        raise HostMemoryError(compose("memory.host_exhausted", what=what, left=left, what_to_do=_WHAT_TO_DO)) from None


def _is_refused(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    # Errors of a chip's runtime are parsed in `memory_errors`.
    return "RESOURCE_EXHAUSTED" not in str(error) and bool(_REFUSED.search(str(error)))


def _read_host() -> Iterator[int]:
    lines = _table(_ROOT / "proc/meminfo", ":")
    if "MemAvailable" in lines:
        yield (lines["MemAvailable"] + lines.get("SwapFree", 0)) * 1024


def _read_containers() -> Iterator[int]:
    """Yield the remainder of each control group of this process, version 1 or 2; the page cache counts as free."""
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        _, kinds, path = (*line.split(":", 2), "", "")[:3]
        if kinds not in ("", "memory"):
            continue
        root = _ROOT / "sys/fs/cgroup" / kinds
        limit, used = (
            ("memory.max", "memory.current") if not kinds else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        # In a container the path is often the host's, and the mounted tree is the container's own.
        inner = root / path.lstrip("/")
        for folder in {root, *(parent for parent in (inner, *inner.parents) if root in parent.parents)}:
            if (max_bytes := _number(folder / limit)) is None or max_bytes >= _NO_LIMIT:
                continue
            stat = _table(folder / "memory.stat", " ")
            names = ("inactive_file", "active_file") if not kinds else ("total_inactive_file", "total_active_file")
            yield max_bytes - (_number(folder / used) or 0) + sum(stat.get(name, 0) for name in names)


def _read_process() -> Iterator[int]:
    if resource is None:
        return
    status = _table(_ROOT / "proc/self/status", ":")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        max_bytes, _ = resource.getrlimit(limit)
        if max_bytes != resource.RLIM_INFINITY and name in status:
            yield max_bytes - status[name] * 1024


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path, separator: str) -> dict[str, int]:
    """Return the integers of a file by the name before each; lines without an integer are skipped."""
    values = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(separator)
        if (number := value.split()[:1]) and number[0].isdigit():
            values[name] = int(number[0])
    return values
