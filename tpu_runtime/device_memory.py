"""What a device says of its memory."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .units import readable

if TYPE_CHECKING:
    from ..sharding.mesh import Device

# PJRT's names. A runtime may leave out any of them; a CPU says nothing at all.
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
    """Bytes, None where the device does not report them. Arrays are in use, running programs reserve memory next to
    them; neither number counts the other. Peaks are since the process started.
    """

    limit_bytes: int | None = None
    reservable_limit_bytes: int | None = None  # arrays and programs together; a v6e reports 28.76 of 31.25 GiB
    in_use_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_in_use_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    largest_free_bytes: int | None = None

    @property
    def known(self) -> dict[str, int]:
        """What the device says, by field."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        """The peaks, in words."""
        peaks = {"in use": self.peak_in_use_bytes, "reserved": self.peak_reserved_bytes}
        said = [f"{readable(value)} {name}" for name, value in peaks.items() if value is not None]
        if not said:
            return "does not report its memory"
        limit = f", of {readable(self.limit_bytes)}" if self.limit_bytes else ""
        return f"at most {' and '.join(said)}{limit}"


def of(device: "Device") -> DeviceMemory:
    """What one device says now."""
    said = device.memory_stats() or {}
    return DeviceMemory(**{name: int(said[theirs]) for name, theirs in _NAMES.items() if theirs in said})


def fullest(devices: "Iterable[Device]") -> DeviceMemory:
    """The most of each number that one of the devices says."""
    known = [of(device).known for device in devices]
    return DeviceMemory(**{name: max(one[name] for one in known if name in one) for each in known for name in each})
