"""What is on the devices and why: weights by component, loaded programs, the least recently used leaving when room is
needed.

All sizes are bytes on one chip. A budget holds the weights of all residents, the code of all loaded programs and the
memory that the one about to run needs beside them; it is checked before a byte is read.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

from ...sharding.mesh import Device
from .. import device_memory
from ..cache.store import signature
from ..programs.executables import Executable
from ..programs.step_reuse import Runnable
from ..programs.weights import Weights
from ..units import GIB, readable
from .memory_advice import VARIABLE, OutOfMemory

log = logging.getLogger(__name__)

# What a chip's runtime and fragmentation take of the memory that it reports, unless the machine's record says more.
RESERVE_SHARE = 0.04
# More loaded programs than this are those of sizes that nobody runs any more.
MAX_PROGRAMS = 64

Key = tuple[str, ...]


@dataclass(kw_only=True)
class Resident:
    """A component's weights on the devices.

    `variant` says what was done to them, and `changed` names those that are not as the checkpoint has them.
    """

    id: str
    component: str
    model: str
    weights: Weights
    size_bytes: int
    variant: str = ""
    changed: frozenset[str] = frozenset()
    last_used: float = field(default_factory=time.time)

    @property
    def title(self) -> str:
        return f"{self.component} of {self.model}"


def budget_bytes(device: Device, reserve_share: float = RESERVE_SHARE) -> int | None:
    """Bytes that one chip may hold; None where the device does not say and nobody set a limit."""
    if limit := os.environ.get(VARIABLE):
        try:
            return int(float(limit) * GIB)
        except ValueError:
            raise ValueError(f"{VARIABLE} is {limit!r}; it must be a number of GiB such as 24.") from None
    memory = device_memory.of(device) if device.platform == "tpu" else device_memory.DeviceMemory()
    if memory.limit_bytes is None:
        return None
    budget = int(memory.limit_bytes * (1 - reserve_share))
    # A runtime may reserve less than it has for programs and arrays together.
    return budget if memory.reservable_limit_bytes is None else min(budget, memory.reservable_limit_bytes)


class DeviceCache:
    """Resident components and loaded programs, in order of use. One stage at a time uses it; programs may be added, and
    looked up, by other threads.
    """

    def __init__(self, device: Device, reserve_share: float | None = None) -> None:
        self._device = device
        self._reserve_share = RESERVE_SHARE if reserve_share is None else reserve_share
        self._held: OrderedDict[Key, Resident | Executable] = OrderedDict()
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
        load: Callable[[Resident | None], tuple[Weights, frozenset[str]]],
        variant: str = "",
    ) -> Resident:
        """The component `key`, loaded if it is not resident, with room for the program `running` on it.

        `load` returns weights and the names of those that are changed; if another `variant` of the component is
        resident, it gets that, and returns the same weights with what differs replaced. Others leave first if all
        would not fit.
        Raises `OutOfMemory` before loading what cannot fit at all.
        """
        self._make_room(key, f"{component} of {model}", size_bytes, running)
        held = self._held.get(key)
        assert not isinstance(held, Executable)
        if held is None or held.variant != variant:
            try:
                weights, changed = load(held)
            except BaseException:
                if held is not None:  # some of its weights may be gone
                    self._evict(key)
                raise
            resident = Resident(
                id=signature(key), component=component, model=model, weights=weights, size_bytes=size_bytes,
                variant=variant, changed=changed,
            )  # fmt: skip
            with self._lock:
                self._held[key] = resident
        self._workspace_bytes = running.workspace_bytes
        resident = self._used(key)
        assert isinstance(resident, Resident)
        resident.last_used = time.time()
        return resident

    def program(self, digest: str) -> Executable | None:
        """The loaded program `digest`; None if there is none."""
        key = ("program", digest)
        with self._lock:
            program = self._used(key) if key in self._held else None
        assert not isinstance(program, Resident)
        return program

    def drop_program(self, digest: str) -> None:
        """Unloads a program, if it is loaded."""
        with self._lock:
            if ("program", digest) in self._held:
                self._evict(("program", digest))

    def state(self, key: Key, variant: str) -> str:
        """Of a component: whether it is resident as `variant`, as another one, or not."""
        held = self._held.get(key)
        assert not isinstance(held, Executable)
        return "absent" if held is None else "resident" if held.variant == variant else "another"

    def has_room(self, program: Executable, *, runs: bool = False) -> bool:
        """Whether a program may be loaded beside what is held and the one that ran last, with nothing leaving; one that
        `runs`, is held already, run beside that.
        """
        budget = budget_bytes(self._device, self._reserve_share)
        held = self.size_bytes + self.code_bytes + self._workspace_bytes
        return budget is None or held + (program.workspace_bytes if runs else program.code_bytes) <= budget

    def add_program(self, digest: str, program: Executable) -> None:
        """Keeps a loaded program; the longest unused leaves when there are too many."""
        with self._lock:
            self._held["program", digest] = program
            programs = [key for key, held in self._held.items() if not isinstance(held, Resident)]
            for key in programs[:-MAX_PROGRAMS]:
                self._evict(key)

    def _used(self, key: Key) -> Resident | Executable:
        with self._lock:
            self._held.move_to_end(key)
            return self._held[key]

    def _make_room(self, key: Key, title: str, size_bytes: int, running: Runnable) -> None:
        budget = budget_bytes(self._device, self._reserve_share)
        if budget is None:
            return
        beside = running.workspace_bytes + sum(part.code_bytes for part in running.parts)
        if size_bytes + beside > budget:
            raise OutOfMemory(
                f"{title} needs {readable(size_bytes)} for its weights and {readable(beside)} to run, on each chip; a "
                f"chip has {readable(budget)}."
            )
        staying = {id(part) for part in running.parts}
        with self._lock:
            others = [other for other, held in self._held.items() if other != key and id(held) not in staying]
            for other in others:
                if sum(_bytes(self._held[one]) for one in others if one in self._held) + size_bytes + beside <= budget:
                    return
                self._evict(other)

    def _evict(self, key: Key) -> None:
        with self._lock:
            held = self._held.pop(key)
        if isinstance(held, Resident):
            log.info("%s leaves the devices (%s a chip)", held.title, readable(held.size_bytes))
            for array in held.weights.values():
                array.delete()

    @property
    def size_bytes(self) -> int:
        """Of all weights."""
        return sum(resident.size_bytes for resident in self.list())

    @property
    def code_bytes(self) -> int:
        """Of all loaded programs."""
        return sum(program.code_bytes for program in self.programs())

    def list(self) -> tuple[Resident, ...]:
        # Of a copy: the monitor asks from another thread.
        return tuple(held for held in tuple(self._held.values()) if isinstance(held, Resident))

    def programs(self) -> tuple[Executable, ...]:
        return tuple(held for held in tuple(self._held.values()) if not isinstance(held, Resident))

    def drop(self, ids: Iterable[str]) -> None:
        """Unloads single residents; ids that are not resident are passed over."""
        wanted = set(ids)
        with self._lock:
            for key, held in list(self._held.items()):
                if isinstance(held, Resident) and held.id in wanted:
                    self._evict(key)

    def release_in_stages(self, model: str) -> Iterator[str]:
        """Unload what costs least to bring back first, and yield what was unloaded, so that a caller can try between.

        Compiled programs go first, then weights of other models than `model` from the least recently used on, then
        everything.
        """
        programs = [key for key, held in self._held.items() if not isinstance(held, Resident)]
        for key in programs:
            self._evict(key)
        if programs:
            yield "compiled programs"
        while others := [(key, held) for key, held in self._held.items() if _is_other(held, model)]:
            key, oldest = others[0]
            self._evict(key)
            yield oldest.title
        self.clear()
        yield "everything else"

    def clear(self) -> None:
        """Drops all weights and programs."""
        with self._lock:
            self._workspace_bytes = 0
            for key in list(self._held):
                self._evict(key)


def _is_other(held: Resident | Executable, model: str) -> TypeGuard[Resident]:
    return isinstance(held, Resident) and held.model != model


def _bytes(held: Resident | Executable) -> int:
    return held.size_bytes if isinstance(held, Resident) else held.code_bytes
