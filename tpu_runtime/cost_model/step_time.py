"""Time of a compiled program, predicted from its schedule.

It is the cycles of XLA's operations and of kernels, plus the part of the collectives that no computation covers. No
measurement is involved. It ranks designs and detects regressions.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from ...sharding.mesh import Device
from . import hlo, interconnect, matmul, trip_count
from .bundles import Cost
from .chips import Chip
from .collectives import Transfer, find_transfer
from .hlo import Instruction
from .kernels import parse_kernel

# Opcodes without a cost of their own: copies between memories overlap with the computation.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "optimization-barrier copy-start copy-done slice-start slice-done dynamic-slice-start dynamic-slice-done "
    "async-start async-update async-done domain".split()
)
_FREE_CALLS = ('"ConcatBitcast"', '"AllocateBuffer"', '"Sharding"')
_TRIVIAL_BYTES = 4096  # smaller results without an estimate are scalars and indices
Counted = TypeVar("Counted", "Operation", "Collective")
_HIDDEN = 0.05  # a collective is overlapped if at most this share of it is waited for


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Instruction over all its executions."""

    name: str
    opcode: str
    op_name: str
    source: str  # `file:line`
    shape: str
    cycles: float  # over all executions
    times: float = 1  # executions


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collective instruction over all its executions."""

    name: str
    kind: str
    op_name: str
    source: str  # `file:line`
    bytes: float  # on the busiest link, per execution
    times: float  # executions
    seconds: float  # over all executions
    exposed_s: float  # seconds that no computation covers

    @property
    def overlapped(self) -> bool:
        return self.exposed_s <= _HIDDEN * self.seconds


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Cycles per device, over all trips of loops."""

    xla: float = 0.0  # XLA's operations
    kernels: float = 0.0
    waiting: float = 0.0  # exposed collectives
    reruns: float = 0.0  # additional, if every kernel with a rerun needs it at every step of its grid
    operations: tuple[Operation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    uncounted: tuple[str, ...] = ()  # names of instructions without an estimate

    @property
    def cycles(self) -> float:
        return self.xla + self.kernels + self.waiting

    def __add__(self, other: "Timing") -> "Timing":
        return Timing(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

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
class TimingTarget:
    """Hardware and assumptions that a schedule is timed with."""

    chip: Chip
    devices: Sequence[Device]  # in the order of the program's mesh
    kernels: Mapping[str, Cost] = field(default_factory=dict)  # costs by key
    # Whether the cheapest of alternatives runs (branches of a conditional, exclusive parts of a kernel), not the most
    # expensive.
    at_best: bool = False
    start_s: float = interconnect.START_S  # seconds before a collective's first byte


def predict_timing(module: hlo.Module, machine: TimingTarget) -> Timing:
    """Return the timing of one run. Raises `NotImplementedError` if the count of a loop depends on data."""
    scope = trip_count.Scope(module=module, computation=module.computations[module.entry])
    return _Schedule(machine=machine, scope=scope).run()


@dataclass(kw_only=True)
class _Schedule:
    """Simulation of one computation, with its clock and one clock per link, which carries one transfer at a time.

    A transfer that waits for its links starts when they are free.
    """

    machine: TimingTarget
    scope: trip_count.Scope
    total: Timing = field(default_factory=Timing)
    links_free: dict[interconnect.Cable, float] = field(default_factory=dict)
    started: dict[str, tuple[Collective, float]] = field(default_factory=dict)  # key -> record, and cycle of its end

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
        elif (kernel := parse_kernel(found)) is not None:
            self._kernel(found, kernel.moved_bytes, self.machine.kernels.get(kernel.key, Cost()))
        elif (transfer := find_transfer(found, self.scope.computation, module)) is not None:
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
        cycles = self._copy_cycles(found) if found.estimated_cycles is None else found.estimated_cycles
        if least := matmul.min_matmul_cycles(found, self.scope.module, self.machine.chip):
            cycles = max(cycles or 0.0, least)
        if cycles is not None:
            self.total += Timing(xla=cycles, operations=(self._operation(found, cycles),))
        elif not _is_free(found):
            self.total += Timing(uncounted=(found.name,))

    def _copy_cycles(self, found: Instruction) -> float | None:
        """Return the cycles of a copy or reshape without an estimate, at the memory's bandwidth; None for others."""
        if found.opcode not in ("copy", "reshape") or found.size_bytes <= _TRIVIAL_BYTES:
            return None
        source = self.scope.computation.by_name[found.operands[0]]
        return self._memory_cycles(found.size_bytes * sum("S(" not in shape for shape in (found.shape, source.shape)))

    def _memory_cycles(self, size_bytes: float) -> float:
        chip = self.machine.chip
        return size_bytes / (chip.hbm_gb_s / chip.devices * 1e9) * chip.clock_hz

    def _kernel(self, found: Instruction, moved_bytes: int | None, cost: Cost) -> None:
        arrays = found, *(self.scope.computation.by_name[operand] for operand in found.operands)
        # libtpu's own estimate omits the transfers of some kernels: each array is moved at least once.
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
    target = found.find_attribute("custom_call_target") if found.opcode == "custom-call" else None
    return found.opcode in _FREE or target in _FREE_CALLS or found.size_bytes <= _TRIVIAL_BYTES


def _branches(conditional: Instruction) -> list[str]:
    listed = conditional.find_attribute("branch_computations")
    if listed:
        return re.findall(r"%([^\s,{}]+)", listed)
    return [conditional.computation("true_computation"), conditional.computation("false_computation")]


def most_expensive(timing: Timing, count: int) -> list[Operation]:
    """Return the `count` most expensive operations; operations of equal source, opcode, shape and cost are merged."""

    def place(op: Operation) -> tuple[object, ...]:
        return op.source, op.op_name, op.opcode, op.shape, op.cycles / max(op.times, 1)

    joined = _merge(timing.operations, place, ("cycles", "times"))
    return sorted(joined, key=lambda operation: operation.cycles, reverse=True)[:count]


def merge_collectives(collectives: Iterable[Collective]) -> list[Collective]:
    """Return collectives with those of equal kind, bytes and overlap merged, the longest first."""
    joined = _merge(collectives, lambda op: (op.kind, op.bytes, op.overlapped), ("times", "seconds", "exposed_s"))
    return sorted(joined, key=lambda op: op.seconds, reverse=True)


def _merge(records: Iterable[Counted], place: Callable[[Counted], object], summed: Sequence[str]) -> list[Counted]:
    """Return the records with those of the same `place` merged, with the sums of their fields `summed`."""
    merged: dict[object, Counted] = {}
    for record in records:
        first = merged.get(place(record))
        sums = {name: getattr(first, name) + getattr(record, name) for name in summed} if first else {}
        merged[place(record)] = replace(first or record, **sums)
    return list(merged.values())
