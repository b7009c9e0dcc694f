"""What the devices hold and may hold."""

import os
from collections.abc import Sequence

import jax

from ..programs.program import shard_bytes
from ..units import GIB
from .memory_advice import VARIABLE

# What a chip's runtime and fragmentation take of the memory that it reports.
RESERVE_SHARE = 0.04


def budget_bytes(device: jax.Device) -> int | None:
    """Bytes that one chip may hold; None where the device does not say and nobody set a limit."""
    if limit := os.environ.get(VARIABLE):
        try:
            return int(float(limit) * GIB)
        except ValueError:
            raise ValueError(f"{VARIABLE} is {limit!r}; it must be a number of GiB such as 24.") from None
    stats = device.memory_stats() if device.platform == "tpu" else None
    return int(stats["bytes_limit"] * (1 - RESERVE_SHARE)) if stats and "bytes_limit" in stats else None


def held_bytes(devices: Sequence[jax.Device]) -> list[int]:
    """Bytes held on each of `devices`: what the device says, or where it does not, this process's live arrays."""
    stats = [device.memory_stats() if device.platform == "tpu" else None for device in devices]
    if all(stats):
        return [int(one["bytes_in_use"]) for one in stats]
    held = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        size = shard_bytes(array)
        for device in array.sharding.device_set:
            if device in held:
                held[device] += size
    return list(held.values())
