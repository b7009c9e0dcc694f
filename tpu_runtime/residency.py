"""What is on the devices and why: weights by component, the least recently used leaving when room is needed.

All sizes are bytes on one chip. A budget holds the weights of all residents and the memory that the program about to
run needs beside them; it is checked before a byte is read.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax

from .cache import signature
from .memory_advice import VARIABLE, OutOfMemory
from .sizes import GIB, readable

log = logging.getLogger(__name__)

# What a chip's runtime and fragmentation take of the memory that it reports.
RESERVE_SHARE = 0.04

Key = tuple[str, ...]


@dataclass(kw_only=True)
class Resident:
    """A component's weights on the devices."""

    id: str
    component: str
    model: str
    weights: dict[str, jax.Array]
    size_bytes: int
    last_used: float = field(default_factory=time.time)

    @property
    def title(self) -> str:
        return f"{self.component} of {self.model}"


def budget_bytes(device: jax.Device) -> int | None:
    """Bytes that one chip may hold; None where the device does not say and nobody set a limit."""
    if limit := os.environ.get(VARIABLE):
        try:
            return int(float(limit) * GIB)
        except ValueError:
            raise ValueError(f"{VARIABLE} is {limit!r}; it must be a number of GiB such as 24.") from None
    stats = device.memory_stats() if device.platform == "tpu" else None
    return int(stats["bytes_limit"] * (1 - RESERVE_SHARE)) if stats and "bytes_limit" in stats else None


class Residency:
    """The resident components, in order of use."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._residents: OrderedDict[Key, Resident] = OrderedDict()

    def get(
        self,
        key: Key,
        *,
        component: str,
        model: str,
        size_bytes: int,
        workspace_bytes: int,
        load: Callable[[], dict[str, jax.Array]],
    ) -> Resident:
        """The component `key`, loaded if it is not resident, with `workspace_bytes` free for the program beside it.

        Others leave first if all would not fit. Raises `OutOfMemory` before loading what cannot fit at all.
        """
        self._make_room(key, f"{component} of {model}", size_bytes, workspace_bytes)
        if key not in self._residents:
            weights = load()
            self._residents[key] = Resident(
                id=signature(key), component=component, model=model, weights=weights, size_bytes=size_bytes
            )
        self._residents.move_to_end(key)
        self._residents[key].last_used = time.time()
        return self._residents[key]

    def _make_room(self, key: Key, title: str, size_bytes: int, workspace_bytes: int) -> None:
        budget = budget_bytes(self._device)
        if budget is None:
            return
        if size_bytes + workspace_bytes > budget:
            raise OutOfMemory(
                f"{title} needs {readable(size_bytes)} for its weights and {readable(workspace_bytes)} to run, on each "
                f"chip; a chip has {readable(budget)}."
            )
        for other in [resident for resident in self._residents if resident != key]:
            held = self.size_bytes + (0 if key in self._residents else size_bytes)
            if held + workspace_bytes <= budget:
                return
            self._evict(other)

    def _evict(self, key: Key) -> None:
        resident = self._residents.pop(key)
        log.info("%s leaves the devices (%s a chip)", resident.title, readable(resident.size_bytes))
        for array in resident.weights.values():
            array.delete()

    @property
    def size_bytes(self) -> int:
        return sum(resident.size_bytes for resident in self._residents.values())

    def list(self) -> tuple[Resident, ...]:
        return tuple(self._residents.values())

    def drop(self, ids: Iterable[str]) -> None:
        """Unloads single residents; ids that are not resident are passed over."""
        for key in [key for key, resident in self._residents.items() if resident.id in set(ids)]:
            self._evict(key)

    def clear(self) -> None:
        for key in list(self._residents):
            self._evict(key)
