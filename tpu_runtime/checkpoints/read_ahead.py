"""Weight files into the kernel's page cache before they are needed: loading then reads memory, not the disk."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from ..units import GIB

log = logging.getLogger(__name__)

PIECE_BYTES = 16 * 2**20
# Of what is available. More would only push out what was read first.
MOST_OF_MEMORY = 0.5
_MEMORY = Path("/proc/meminfo")


def read_ahead(files: Iterable[Path], check: Callable[[], None]) -> int:
    """Reads files in order, as many as memory takes, and returns how many bytes; `check` raises to end it."""
    room = available_bytes() * MOST_OF_MEMORY
    piece, done = bytearray(PIECE_BYTES), 0
    for path in files:
        if done + path.stat().st_size > room:
            log.info("%s is not read ahead: %.1f GiB of memory are available.", path.name, available_bytes() / GIB)
            break
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                done += count
                check()
    return done


def available_bytes() -> int:
    """What the host can still take; 0 where it does not say so as Linux does."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
