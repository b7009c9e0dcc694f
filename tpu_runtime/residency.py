"""What is on the devices and why: weights by component, the least recently used leaving when room is needed."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import jax

log = logging.getLogger(__name__)

VARIABLE = "COMFYUI_TPU_HBM_GIB"
GIB = 2**30
# What programs need beside the weights (activations, collectives' buffers), as a share of a chip's memory.
PROGRAM_SHARE = 0.35

Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A component's weights on the devices; `size_bytes` is the share of one chip."""

    title: str
    weights: dict[str, jax.Array]
    size_bytes: int


def budget_bytes(device: jax.Device) -> int | None:
    """Bytes of weights that one chip may hold; None where the device does not say and nobody set a limit."""
    if limit := os.environ.get(VARIABLE):
        try:
            return int(float(limit) * GIB)
        except ValueError:
            raise ValueError(f"{VARIABLE} is {limit!r}; it must be a number of GiB such as 24.") from None
    stats = device.memory_stats() if device.platform == "tpu" else None
    return int(stats["bytes_limit"] * (1 - PROGRAM_SHARE)) if stats and "bytes_limit" in stats else None


class Residency:
    """The resident components, in order of use."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._residents: OrderedDict[Key, Resident] = OrderedDict()

    def get(self, key: Key, title: str, size_bytes: int, load: Callable[[], dict[str, jax.Array]]) -> Resident:
        """The component `key`, loaded if it is not resident; others leave first if it would not fit."""
        if key in self._residents:
            self._residents.move_to_end(key)
            return self._residents[key]
        self._make_room(size_bytes)
        self._residents[key] = Resident(title=title, weights=load(), size_bytes=size_bytes)
        return self._residents[key]

    def _make_room(self, size_bytes: int) -> None:
        budget = budget_bytes(self._device)
        while budget is not None and self._residents and self.size_bytes + size_bytes > budget:
            _, resident = self._residents.popitem(last=False)
            log.info("%s leaves the devices (%.2f GiB per chip)", resident.title, resident.size_bytes / GIB)
            _delete(resident)

    @property
    def size_bytes(self) -> int:
        return sum(resident.size_bytes for resident in self._residents.values())

    def list(self) -> tuple[Resident, ...]:
        return tuple(self._residents.values())

    def clear(self) -> None:
        while self._residents:
            _delete(self._residents.popitem()[1])


def _delete(resident: Resident) -> None:
    for array in resident.weights.values():
        array.delete()
