"""Memory statistics that a device reports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .units import format_size

if TYPE_CHECKING:
    from ..sharding.mesh import Device

# PJRT's names. A runtime may omit any of them; a CPU reports none of them.
_NAMES = {
    "limit_bytes": "bytes_limit",
    "reservable_limit_bytes": "bytes_reservable_limit",
    "in_use_bytes": "bytes_in_use",
    "reserved_bytes": "bytes_reserved",
    "peak_in_use_bytes": "peak_bytes_in_use",
    "peak_reserved_bytes": "peak_bytes_reserved",
    "largest_free_bytes": "largest_free_block_bytes",
}


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory statistics of one device in bytes; None if the device does not report a number."""

    limit_bytes: int | None = None
    reservable_limit_bytes: int | None = None  # arrays and programs together; a v6e reports 28.76 of 31.25 GiB
    in_use_bytes: int | None = None  # arrays, without the memory of running programs
    reserved_bytes: int | None = None  # running programs, without arrays
    peak_in_use_bytes: int | None = None  # since the process started
    peak_reserved_bytes: int | None = None  # since the process started
    largest_free_bytes: int | None = None

    @property
    def known(self) -> dict[str, int]:
        """Return the numbers that the device reports, by field."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        """Return the peaks as a sentence."""
        peaks = {"in use": self.peak_in_use_bytes, "reserved": self.peak_reserved_bytes}
        texts = [f"{format_size(value)} {name}" for name, value in peaks.items() if value is not None]
        if not texts:
            return "does not report its memory"
        limit = f", of {format_size(self.limit_bytes)}" if self.limit_bytes else ""
        return f"at most {' and '.join(texts)}{limit}"


def memory_stats(device: "Device") -> DeviceMemory:
    """Return the current statistics of one device."""
    stats = device.memory_stats() or {}
    return DeviceMemory(**{name: int(stats[theirs]) for name, theirs in _NAMES.items() if theirs in stats})


def max_memory_stats(devices: "Iterable[Device]") -> DeviceMemory:
    """Return the maximum of each statistic over the devices."""
    known = [memory_stats(device).known for device in devices]
    names = {name for stats in known for name in stats}
    return DeviceMemory(**{name: max(stats[name] for stats in known if name in stats) for name in names})
