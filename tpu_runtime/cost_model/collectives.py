"""Collectives in a scheduled program: what is sent, among whom, and where the schedule starts and awaits it."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from . import hlo, interconnect
from .hlo import Instruction

# Of a computation next to this one: on another thread of the chip, as on the SparseCore (`call`).
_THREADS = ("async", "call")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A collective at one place of the schedule. `phase`: "start" and "done" have equal `key`s; "under way" costs
    nothing; "blocking" waits at once. `size` in bytes as `interconnect.link_bytes` wants it.
    """

    instruction: Instruction
    kind: str
    phase: str
    key: str
    size: float = 0.0
    groups: interconnect.Groups = ()

    @property
    def op_name(self) -> str:
        return self.instruction.op_name


def transfer_of(found: Instruction, computation: hlo.Computation, module: hlo.Module) -> Transfer | None:
    """The collective that `found` starts, ends or is; None if it has nothing to do with one."""
    kind, _, phase = found.opcode.rpartition("-")
    if found.opcode in interconnect.KINDS:
        return _sized(found, computation, phase="blocking", key=found.name)
    if kind in interconnect.KINDS and phase == "start":
        return _sized(found, computation, phase="start", key=found.name)
    if kind in (*interconnect.KINDS, *_THREADS) and phase in ("done", "update"):
        start = found
        while start.opcode.endswith(("-done", "-update")):
            start = computation.by_name[start.operands[0]]
        phase = "done" if phase == "done" else "under way"
        return Transfer(instruction=found, kind=kind, phase=phase, key=start.name)
    if found.opcode in ("fusion", "async-start"):
        return _within(found, module.computations[found.computation("calls")])
    if found.opcode == "call-start":
        return _within(found, module.computations[found.computation("to_apply")])
    return None


def _within(found: Instruction, called: hlo.Computation) -> Transfer | None:
    """A collective in a fusion. XLA cuts asynchronous ones into pieces that are fused with computation: one fusion
    starts it, some carry it on, one ends it, and the channel is what they share.
    """
    inner = next((each for each in called.instructions if each.opcode in interconnect.KINDS), None)
    if inner is None:
        return None
    if found.opcode in ("async-start", "call-start"):
        return _sized(inner, called, phase="start", key=found.name)
    targets = {each.attribute("custom_call_target") for each in called.instructions if each.opcode == "custom-call"}
    channel = f"channel {inner.attribute('channel_id')}"
    if '"AsyncCollectiveStart"' in targets:
        return _sized(inner, called, phase="start", key=channel)
    if '"AsyncCollectiveDone"' in targets:
        return Transfer(instruction=inner, kind=inner.opcode, phase="done", key=channel)
    if "async_collective_fusion_config" in inner.attributes:
        return Transfer(instruction=inner, kind=inner.opcode, phase="under way", key=channel)
    scattered = inner.opcode == "all-reduce" and any(each.opcode == "dynamic-slice" for each in called.instructions)
    blocking = _sized(inner, called, phase="blocking", key=found.name)
    return replace(blocking, kind="reduce-scatter") if scattered else blocking


def _sized(found: Instruction, computation: hlo.Computation, *, phase: str, key: str) -> Transfer:
    kind = found.opcode.removesuffix("-start")
    given = [computation.by_name[operand] for operand in found.operands if operand in computation.by_name]
    size = float(sum(operand.size_bytes for operand in given))
    groups = groups_of(found)
    if kind == "all-gather":
        size *= len(groups[0])
    return Transfer(instruction=found, kind=kind, phase=phase, key=key, size=size, groups=groups)


def groups_of(found: Instruction) -> interconnect.Groups:
    """The groups of devices that exchange, or a permute's pairs. Raises `ValueError` if they are not understood."""
    text = found.attribute("source_target_pairs") or found.attribute("replica_groups") or ""
    listed = tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))
    if listed:
        return listed
    # [rows,columns]<=[sizes]T(axes): 0, 1, 2, ... laid out in sizes, transposed, cut into rows.
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", found.attributes)
    if iota:
        return _rows(_ordered(iota.group(3), iota.group(4)), int(iota.group(2)))
    # mesh['a'=2,'b'=4] {'b'}: the groups that differ along the axes in braces. The mesh holds the devices in order, or
    # as device_ids=([sizes]T(axes)) says.
    mesh = re.search(
        r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)+)\}",
        found.attributes,
    )
    if not mesh:
        raise ValueError(f"collective {found.name} has groups of devices that are not understood: {text[:200]!r}.")
    shape = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
    names, along = list(shape), re.findall(r"'(\w+)'", mesh.group(4))
    order = [name for name in names if name not in along] + along
    flat = _transposed(list(shape.values()), [names.index(name) for name in order])
    if mesh.group(2):
        devices = _ordered(mesh.group(2), mesh.group(3))
        flat = [devices[place] for place in flat]
    return _rows(flat, math.prod(shape[name] for name in along))


def _ordered(sizes: str, axes: str | None) -> list[int]:
    """0, 1, 2, ... as XLA writes their order: laid out in `sizes`, transposed by `axes`."""
    dims = [int(size) for size in sizes.split(",")]
    return _transposed(dims, [int(axis) for axis in axes.split(",")] if axes else range(len(dims)))


def _rows(flat: Sequence[int], width: int) -> interconnect.Groups:
    return tuple(tuple(flat[start : start + width]) for start in range(0, len(flat), width))


def _transposed(sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
    """0, 1, 2, ... laid out in `sizes`, with the dimensions permuted, read in order."""
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).ravel().tolist()
