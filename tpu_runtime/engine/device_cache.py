"""Weights by component and loaded programs on the devices, with eviction of the least recently used.

All sizes are bytes on one chip. The budget covers the weights of all residents, the code of all loaded programs and the
workspace of the program about to run. It is checked before a byte is read.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeGuard

from ...sharding.mesh import Device
from .. import device_memory
from ..cache.store import signature
from ..messages import compose
from ..programs.executables import Executable
from ..programs.step_cache import Runnable
from ..programs.weights import Weights
from ..units import GIB, format_size
from .memory_advice import HBM_VARIABLE, OutOfMemory

log = logging.getLogger(__name__)

# Share of the reported memory lost to the runtime and fragmentation, unless the machine's record has a larger one.
RESERVE_SHARE = 0.04
# Loaded programs kept at most; older ones belong to sizes that are not used any more.
MAX_PROGRAMS = 64

Key = tuple[str, ...]


@dataclass(kw_only=True)
class ResidentWeights:
    """A component's weights on the devices."""

    id: str  # digest of the cache key
    component: str  # name
    model: str  # its id
    weights: Weights  # by name
    size_bytes: int  # on one chip
    variant: str = ""  # digest of the LoRAs merged into them; "" for none
    changed: frozenset[str] = frozenset()  # names of the weights that differ from the checkpoint
    last_used: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def title(self) -> str:
        return f"{self.component} of {self.model}"


def budget_bytes(device: Device, reserve_share: float = RESERVE_SHARE) -> int | None:
    """Return how many bytes one chip may hold; None if the device does not report it and no limit is set.

    reserve_share: of the reported memory, kept free.
    """
    if limit := os.environ.get(HBM_VARIABLE):
        try:
            return int(float(limit) * GIB)
        except ValueError:
            raise ValueError(compose("memory.limit_not_number", hbm_variable=HBM_VARIABLE, limit=repr(limit))) from None
    memory = device_memory.memory_stats(device) if device.platform == "tpu" else device_memory.DeviceMemory()
    if memory.limit_bytes is None:
        return None
    budget = int(memory.limit_bytes * (1 - reserve_share))
    # A runtime may reserve less than its limit for programs and arrays together.
    return budget if memory.reservable_limit_bytes is None else min(budget, memory.reservable_limit_bytes)


class DeviceCache:
    """Resident components and loaded programs, in order of use.

    Only one stage uses it at a time; other threads may add and look up programs.
    """

    def __init__(self, device: Device, reserve_share: float | None = None) -> None:
        self._device = device
        self._reserve_share = RESERVE_SHARE if reserve_share is None else reserve_share
        self._held: OrderedDict[Key, ResidentWeights | Executable] = OrderedDict()
        self._workspace_bytes = 0  # of the program that ran last
        self._lock = threading.RLock()

    def get(
        self,
        key: Key,
        *,
        component: str,
        model: str,
        size_bytes: int,
        running: Runnable,
        load: Callable[[ResidentWeights | None], tuple[Weights, frozenset[str]]],
        variant: str = "",
        companions: Mapping[Key, int] = MappingProxyType({}),
    ) -> ResidentWeights:
        """Return the resident component `key`, loaded if need be, with enough free memory to run the program `running`.

        component, model: names for messages.
        size_bytes: of its weights, on one chip.
        load: returns the weights and the names of those that differ from the checkpoint. It gets the resident component
            if that has another `variant`, and then returns the same weights with the differing ones replaced; else
            None.
        variant: digest of the LoRAs; "" for none.
        companions: further components that the program takes, by key, with the bytes of their weights on one chip. They
            stay if they are resident, and there is room for them otherwise.
        Evicts others first if all would not fit. Raises `OutOfMemory` before loading if it cannot fit at all.
        """
        self._make_room(key, f"{component} of {model}", size_bytes, running, companions)
        current = self._held.get(key)
        assert not isinstance(current, Executable)
        if current is None or current.variant != variant:
            try:
                weights, changed = load(current)
            except BaseException:
                if current is not None:  # some of its weights may be deleted
                    self._evict(key)
                raise
            loaded = ResidentWeights(
                id=signature(key), component=component, model=model, weights=weights, size_bytes=size_bytes,
                variant=variant, changed=changed,
            )  # fmt: skip
            with self._lock:
                self._held[key] = loaded
        self._workspace_bytes = running.workspace_bytes
        resident = self._mark_used(key)
        assert isinstance(resident, ResidentWeights)
        resident.last_used = time.time()
        return resident

    def program(self, digest: str) -> Executable | None:
        """Return the loaded program `digest`, or None."""
        key = ("program", digest)
        with self._lock:
            program = self._mark_used(key) if key in self._held else None
        assert not isinstance(program, ResidentWeights)
        return program

    def drop_program(self, digest: str) -> None:
        """Unload a program if it is loaded."""
        with self._lock:
            if ("program", digest) in self._held:
                self._evict(("program", digest))

    def state(self, key: Key, variant: str) -> str:
        """Return whether a component is resident with this `variant`, with another one, or absent."""
        current = self._held.get(key)
        assert not isinstance(current, Executable)
        return "absent" if current is None else "resident" if current.variant == variant else "another"

    def has_room(self, program: Executable, *, runs: bool = False) -> bool:
        """Return whether a program fits next to everything loaded and the program that ran last, without eviction.

        runs: False to load it; True to run one that is loaded already.
        """
        budget = budget_bytes(self._device, self._reserve_share)
        used_bytes = self.size_bytes + self.code_bytes + self._workspace_bytes
        return budget is None or used_bytes + (program.workspace_bytes if runs else program.code_bytes) <= budget

    def add_program(self, digest: str, program: Executable) -> None:
        """Keep a loaded program; evict the least recently used ones above `MAX_PROGRAMS`."""
        with self._lock:
            self._held["program", digest] = program
            programs = [key for key, entry in self._held.items() if not isinstance(entry, ResidentWeights)]
            for key in programs[:-MAX_PROGRAMS]:
                self._evict(key)

    def _mark_used(self, key: Key) -> ResidentWeights | Executable:
        with self._lock:
            self._held.move_to_end(key)
            return self._held[key]

    def _make_room(
        self, key: Key, title: str, size_bytes: int, running: Runnable, companions: Mapping[Key, int]
    ) -> None:
        """Evict the least recently used entries until the components and the program fit. Raises `OutOfMemory`."""
        size_bytes += sum(size for other, size in companions.items() if other != key)
        budget = budget_bytes(self._device, self._reserve_share)
        if budget is None:
            return
        needed = running.workspace_bytes + sum(part.code_bytes for part in running.parts)
        if size_bytes + needed > budget:
            raise OutOfMemory(compose(
                "memory.weights_do_not_fit", title=title, size_bytes=format_size(size_bytes),
                needed=format_size(needed), budget=format_size(budget),
            ))  # fmt: skip
        kept = {id(part) for part in running.parts}
        with self._lock:
            needed_keys = {key, *companions}
            others = [
                other for other, entry in self._held.items() if other not in needed_keys and id(entry) not in kept
            ]
            for other in others:
                if sum(_bytes(self._held[key]) for key in others if key in self._held) + size_bytes + needed <= budget:
                    return
                self._evict(other)

    def _evict(self, key: Key) -> None:
        with self._lock:
            entry = self._held.pop(key)
        if isinstance(entry, ResidentWeights):
            log.info("%s is unloaded from the devices (%s per chip)", entry.title, format_size(entry.size_bytes))
            for array in entry.weights.values():
                array.delete()

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(resident.size_bytes for resident in self.list())

    @property
    def code_bytes(self) -> int:
        """Bytes of all loaded programs."""
        return sum(program.code_bytes for program in self.programs())

    def list(self) -> tuple[ResidentWeights, ...]:
        # Iterate over a copy: the monitor reads from another thread.
        return tuple(entry for entry in tuple(self._held.values()) if isinstance(entry, ResidentWeights))

    def programs(self) -> tuple[Executable, ...]:
        return tuple(entry for entry in tuple(self._held.values()) if not isinstance(entry, ResidentWeights))

    def drop(self, ids: Iterable[str]) -> None:
        """Unload single residents. Ids that are not resident are ignored."""
        chosen = set(ids)
        with self._lock:
            for key, entry in list(self._held.items()):
                if isinstance(entry, ResidentWeights) and entry.id in chosen:
                    self._evict(key)

    def unload_in_stages(self, model: str) -> Iterator[str]:
        """Unload in order of reload cost, and yield the title of every unloaded group.

        The caller can retry in between.

        Compiled programs are unloaded first, then weights of models other than `model` from the least recently used on,
        then everything.
        """
        programs = [key for key, entry in self._held.items() if not isinstance(entry, ResidentWeights)]
        for key in programs:
            self._evict(key)
        if programs:
            yield "compiled programs"
        while others := [(key, entry) for key, entry in self._held.items() if _is_other(entry, model)]:
            key, oldest = others[0]
            self._evict(key)
            yield oldest.title
        self.clear()
        yield "everything else"

    def clear(self) -> None:
        """Unload all weights and programs."""
        with self._lock:
            self._workspace_bytes = 0
            for key in list(self._held):
                self._evict(key)


def _is_other(held: ResidentWeights | Executable, model: str) -> TypeGuard[ResidentWeights]:
    return isinstance(held, ResidentWeights) and held.model != model


def _bytes(held: ResidentWeights | Executable) -> int:
    return held.size_bytes if isinstance(held, ResidentWeights) else held.code_bytes
