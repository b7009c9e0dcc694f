"""Prefetch of weight files into the kernel's page cache: loading then reads memory, not the disk."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from ..host_memory import available_bytes
from ..units import GIB

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20
# Share of the available memory. Reading more would only evict the files read first.
MAX_MEMORY_SHARE = 0.5


def prefetch_files(files: Iterable[Path], check: Callable[[], None]) -> int:
    """Read files in order, as many as memory holds, and return the bytes read. `check` raises to end it."""
    available = available_bytes() or 0
    room = available * MAX_MEMORY_SHARE
    piece, done = bytearray(CHUNK_BYTES), 0
    for path in files:
        if done + path.stat().st_size > room:
            log.info("%s is not read ahead: %.1f GiB of memory are available.", path.name, available / GIB)
            break
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                done += count
                check()
    return done
