"""The time of a compiled program, predicted from its schedule: cycles of XLA's operations and of kernels, plus the part
of the collectives that no computation covers. No measurement is in it; it ranks designs and gates regressions.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from ...sharding.mesh import Device
from . import hlo, interconnect, products, trip_count
from .bundles import Cost
from .chips import Chip
from .collectives import Transfer, transfer_of
from .hlo import Instruction
from .kernels import kernel_of

# These cost nothing, or nothing of their own: copies between memories overlap with the computation.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "optimization-barrier copy-start copy-done slice-start slice-done dynamic-slice-start dynamic-slice-done "
    "async-start async-update async-done domain".split()
)
_FREE_CALLS = ('"ConcatBitcast"', '"AllocateBuffer"', '"Sharding"')
_TRIVIAL_BYTES = 4096  # smaller results without an estimate are scalars and indices
Counted = TypeVar("Counted", "Operation", "Collective")
_HIDDEN = 0.05  # a collective is overlapped if less of it than this is waited for


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One instruction over all its executions. `source` is `file:line`."""

    name: str
    opcode: str
    op_name: str
    source: str
    shape: str
    cycles: float
    times: float = 1


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction over all its `times`. `bytes` are those on the busiest link each time."""

    name: str
    kind: str
    op_name: str
    source: str
    bytes: float
    times: float
    seconds: float
    exposed_s: float

    @property
    def overlapped(self) -> bool:
        return self.exposed_s <= _HIDDEN * self.seconds


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where the time goes. Cycles are per device, over all loops' trips; `waiting` are those of exposed collectives.

    `reruns` come on top if every kernel that can fail does, at every step of its grid.
    """

    xla: float = 0.0
    kernels: float = 0.0
    waiting: float = 0.0
    reruns: float = 0.0
    operations: tuple[Operation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def cycles(self) -> float:
        return self.xla + self.kernels + self.waiting

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})

    def __mul__(self, times: int) -> "Timing":
        return replace(
            self,
            xla=self.xla * times,
            kernels=self.kernels * times,
            waiting=self.waiting * times,
            reruns=self.reruns * times,
            operations=tuple(replace(o, cycles=o.cycles * times, times=o.times * times) for o in self.operations),
            collectives=tuple(
                replace(c, times=c.times * times, seconds=c.seconds * times, exposed_s=c.exposed_s * times)
                for c in self.collectives
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a schedule is timed on. `devices` in the order of the program's mesh. `at_best`: of alternatives (a
    conditional's branches, parts of a kernel that exclude each other) the cheapest runs, not the dearest. `start_s`:
    seconds before a collective's first byte.
    """

    chip: Chip
    devices: Sequence[Device]
    kernels: Mapping[str, Cost] = field(default_factory=dict)
    at_best: bool = False
    start_s: float = interconnect.START_S


def timing(module: hlo.Module, machine: Machine) -> Timing:
    """The timing of one run. Raises `NotImplementedError` for loops whose count depends on data."""
    scope = trip_count.Scope(module=module, computation=module.computations[module.entry])
    return _Schedule(machine=machine, scope=scope).run()


@dataclass(kw_only=True)
class _Schedule:
    """A walk through one computation with a clock of the computation and one of each link, one transfer at a time: a
    transfer that waits for its links starts when they are free.
    """

    machine: Machine
    scope: trip_count.Scope
    total: Timing = field(default_factory=Timing)
    links_free: dict[interconnect.Cable, float] = field(default_factory=dict)
    started: dict[str, tuple[Collective, float]] = field(default_factory=dict)  # -> record, when it is through

    def run(self) -> Timing:
        for instruction in self.scope.computation.instructions:
            self._step(instruction)
        for record, _ in self.started.values():
            self.total += Timing(collectives=(record,))
        return self.total

    def _step(self, found: Instruction) -> None:
        module = self.scope.module
        if found.opcode == "while":
            self.total += self._inner(trip_count.body_scope(found, self.scope)) * trip_count.trip_count(
                found, self.scope
            )
        elif found.opcode == "conditional":
            branches = [self._inner(self._plain(name)) for name in _branches(found)]
            choose = min if self.machine.at_best else max
            self.total += choose(branches, key=lambda branch: branch.cycles)
        elif found.opcode == "call":
            self.total += self._inner(self._plain(found.computation("to_apply")))
        elif (kernel := kernel_of(found)) is not None:
            self._kernel(found, kernel.moved_bytes, self.machine.kernels.get(kernel.key, Cost()))
        elif (transfer := transfer_of(found, self.scope.computation, module)) is not None:
            self._transfer(found, transfer)
        else:
            self._plain_operation(found)

    def _plain(self, name: str) -> trip_count.Scope:
        return trip_count.Scope(module=self.scope.module, computation=self.scope.module.computations[name])

    def _inner(self, scope: trip_count.Scope) -> Timing:
        return _Schedule(machine=self.machine, scope=scope).run()

    def _operation(self, found: Instruction, cycles: float) -> Operation:
        return Operation(
            name=found.name,
            opcode=found.opcode,
            op_name=found.op_name,
            source=self.scope.module.source(found),
            shape=" ".join(map(str, found.arrays[:3])),
            cycles=cycles,
        )

    def _plain_operation(self, found: Instruction) -> None:
        cycles = self._moved_cycles(found) if found.estimated_cycles is None else found.estimated_cycles
        if least := products.least_cycles(found, self.scope.module, self.machine.chip):
            cycles = max(cycles or 0.0, least)
        if cycles is not None:
            self.total += Timing(xla=cycles, operations=(self._operation(found, cycles),))
        elif not _is_free(found):
            self.total += Timing(uncounted=(found.name,))

    def _moved_cycles(self, found: Instruction) -> float | None:
        """The compiler has no estimate for some copies and reshapes: they move at the memory's bandwidth."""
        if found.opcode not in ("copy", "reshape") or found.size_bytes <= _TRIVIAL_BYTES:
            return None
        source = self.scope.computation.by_name[found.operands[0]]
        return self._memory_cycles(found.size_bytes * sum("S(" not in shape for shape in (found.shape, source.shape)))

    def _memory_cycles(self, size_bytes: float) -> float:
        chip = self.machine.chip
        return size_bytes / (chip.hbm_gb_s / chip.devices * 1e9) * chip.clock_hz

    def _kernel(self, found: Instruction, moved_bytes: int | None, cost: Cost) -> None:
        arrays = found, *(self.scope.computation.by_name[operand] for operand in found.operands)
        # libtpu's own estimate leaves some kernels' transfers out: each array is moved once at least.
        all_bytes = sum(array.size_bytes for array in arrays if "S(" not in array.shape)
        moved = self._memory_cycles(all_bytes if moved_bytes is None else moved_bytes)
        cycles = max(moved, cost.cycles_at_best if self.machine.at_best else cost.cycles)
        self.total += Timing(kernels=cycles, reruns=cost.rerun, operations=(self._operation(found, cycles),))
        if cost.error or not cost.longest:
            self.total += Timing(uncounted=(found.name,))

    def _transfer(self, found: Instruction, transfer: Transfer) -> None:
        if found.estimated_cycles is not None:
            self._plain_operation(found)
        clock = self.machine.chip.clock_hz
        if transfer.phase in ("start", "blocking"):
            loads = interconnect.link_bytes(transfer.kind, transfer.size, transfer.groups, self.machine.devices)
            size = max(loads.values(), default=0.0)
            cycles_per_byte = clock / (self.machine.chip.link_gb_s * 1e9)
            start_s = self.machine.start_s if interconnect.is_exchange(transfer.groups) else 0.0
            record = Collective(
                name=found.name,
                kind=transfer.kind,
                op_name=transfer.op_name,
                source=self.scope.module.source(transfer.instruction),
                bytes=size,
                times=1,
                seconds=start_s + size * cycles_per_byte / clock,
                exposed_s=0.0,
            )
            now = self.total.cycles
            through = {
                link: max(now, self.links_free.get(link, 0.0)) + start_s * clock + load * cycles_per_byte
                for link, load in loads.items()
            }
            self.links_free |= through
            self.started[transfer.key] = (record, max(through.values(), default=now + start_s * clock))
        if transfer.phase in ("done", "blocking") and transfer.key in self.started:
            record, through = self.started.pop(transfer.key)
            waiting = max(0.0, through - self.total.cycles)
            record = replace(record, exposed_s=waiting / clock)
            self.total += Timing(waiting=waiting, collectives=(record,))


def _is_free(found: Instruction) -> bool:
    target = found.attribute("custom_call_target") if found.opcode == "custom-call" else None
    return found.opcode in _FREE or target in _FREE_CALLS or found.size_bytes <= _TRIVIAL_BYTES


def _branches(conditional: Instruction) -> list[str]:
    listed = conditional.attribute("branch_computations")
    if listed:
        return re.findall(r"%([^\s,{}]+)", listed)
    return [conditional.computation("true_computation"), conditional.computation("false_computation")]


def dearest(timing: Timing, count: int) -> list[Operation]:
    """The `count` dearest operations; equal ones (same source, opcode, shape and cost) are one."""

    def place(each: Operation) -> tuple[object, ...]:
        return each.source, each.op_name, each.opcode, each.shape, each.cycles / max(each.times, 1)

    joined = _joined(timing.operations, place, ("cycles", "times"))
    return sorted(joined, key=lambda operation: operation.cycles, reverse=True)[:count]


def merged(collectives: Iterable[Collective]) -> list[Collective]:
    """Collectives of equal kind, bytes and fate as one; the longest first."""
    joined = _joined(
        collectives, lambda each: (each.kind, each.bytes, each.overlapped), ("times", "seconds", "exposed_s")
    )
    return sorted(joined, key=lambda each: each.seconds, reverse=True)


def _joined(records: Iterable[Counted], place: Callable[[Counted], Any], summed: Sequence[str]) -> list[Counted]:
    """Records of the same `place` as one, with the sums of their fields `summed`."""
    found: dict[Any, Counted] = {}
    for each in records:
        seen = found.get(place(each))
        sums = {name: getattr(seen, name) + getattr(each, name) for name in summed} if seen else {}
        found[place(each)] = replace(seen or each, **sums)
    return list(found.values())
