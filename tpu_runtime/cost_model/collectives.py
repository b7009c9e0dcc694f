"""Collectives in a scheduled program: their sizes and groups, and where the schedule starts and awaits them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..messages import compose
from . import hlo, interconnect
from .hlo import Instruction

# Computations that run at the same time on another thread of the chip, such as the SparseCore (`call`).
_THREADS = ("async", "call")


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Collective at one place of the schedule."""

    instruction: Instruction
    kind: str  # opcode without phase
    phase: str  # "start", "done", "under way", which costs nothing, or "blocking", which waits at once
    key: str  # equal for the phases of one collective
    size: float = 0.0  # bytes, as `interconnect.link_bytes` takes them
    groups: interconnect.Groups = ()

    @property
    def op_name(self) -> str:
        return self.instruction.op_name


def find_transfer(op: Instruction, computation: hlo.Computation, module: hlo.Module) -> Transfer | None:
    """Return the collective that instruction `op` of `computation` starts, ends or is; None for other instructions.

    module: that the computation is part of.
    """
    kind, _, phase = op.opcode.rpartition("-")
    if op.opcode in interconnect.KINDS:
        return _make_transfer(op, computation, phase="blocking", key=op.name)
    if kind in interconnect.KINDS and phase == "start":
        return _make_transfer(op, computation, phase="start", key=op.name)
    if kind in (*interconnect.KINDS, *_THREADS) and phase in ("done", "update"):
        start = op
        while start.opcode.endswith(("-done", "-update")):
            start = computation.by_name[start.operands[0]]
        phase = "done" if phase == "done" else "under way"
        return Transfer(instruction=op, kind=kind, phase=phase, key=start.name)
    if op.opcode in ("fusion", "async-start"):
        return _within(op, module.computations[op.computation("calls")])
    if op.opcode == "call-start":
        return _within(op, module.computations[op.computation("to_apply")])
    return None


def _within(op: Instruction, called: hlo.Computation) -> Transfer | None:
    """Return a collective in a fusion, or None.

    XLA cuts asynchronous collectives into pieces that are fused with computation. One fusion starts it, some continue
    it, one ends it; they share its channel.
    """
    inner = next((op for op in called.instructions if op.opcode in interconnect.KINDS), None)
    if inner is None:
        return None
    if op.opcode in ("async-start", "call-start"):
        return _make_transfer(inner, called, phase="start", key=op.name)
    targets = {op.find_attribute("custom_call_target") for op in called.instructions if op.opcode == "custom-call"}
    channel = f"channel {inner.find_attribute('channel_id')}"
    if '"AsyncCollectiveStart"' in targets:
        return _make_transfer(inner, called, phase="start", key=channel)
    if '"AsyncCollectiveDone"' in targets:
        return Transfer(instruction=inner, kind=inner.opcode, phase="done", key=channel)
    if "async_collective_fusion_config" in inner.attributes:
        return Transfer(instruction=inner, kind=inner.opcode, phase="under way", key=channel)
    scattered = inner.opcode == "all-reduce" and any(op.opcode == "dynamic-slice" for op in called.instructions)
    blocking = _make_transfer(inner, called, phase="blocking", key=op.name)
    return replace(blocking, kind="reduce-scatter") if scattered else blocking


def _make_transfer(op: Instruction, computation: hlo.Computation, *, phase: str, key: str) -> Transfer:
    """Return the transfer of a collective instruction with its size and groups."""
    kind = op.opcode.removesuffix("-start")
    operands = [computation.by_name[operand] for operand in op.operands if operand in computation.by_name]
    size = float(sum(operand.size_bytes for operand in operands))
    groups = parse_groups(op)
    if kind == "all-gather":
        size *= len(groups[0])
    return Transfer(instruction=op, kind=kind, phase=phase, key=key, size=size, groups=groups)


def parse_groups(op: Instruction) -> interconnect.Groups:
    """Return the groups of devices that exchange, or the pairs of a permute.

    Raises `ValueError` for an unknown format.
    """
    text = op.find_attribute("source_target_pairs") or op.find_attribute("replica_groups") or ""
    listed = tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))
    if listed:
        return listed
    # [rows,columns]<=[sizes]T(axes): 0, 1, 2, ... laid out in sizes, transposed, cut into rows.
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", op.attributes)
    if iota:
        return _rows(_parse_order(iota.group(3), iota.group(4)), int(iota.group(2)))
    # mesh['a'=2,'b'=4] {'b'}: the groups that differ along the axes in braces. The mesh holds the devices in order, or
    # in that of device_ids=([sizes]T(axes)).
    mesh = re.search(
        r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)+)\}",
        op.attributes,
    )
    if not mesh:
        raise ValueError(compose("plan.collective_groups_unknown", name=op.name, text=repr(text[:200])))
    shape = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
    names, along = list(shape), re.findall(r"'(\w+)'", mesh.group(4))
    order = [name for name in names if name not in along] + along
    flat = _transpose_indices(list(shape.values()), [names.index(name) for name in order])
    if mesh.group(2):
        devices = _parse_order(mesh.group(2), mesh.group(3))
        flat = [devices[place] for place in flat]
    return _rows(flat, math.prod(shape[name] for name in along))


def _parse_order(sizes: str, axes: str | None) -> list[int]:
    """Return the order of devices as XLA writes it: 0, 1, 2, ... laid out in `sizes` and transposed by `axes`."""
    dims = [int(size) for size in sizes.split(",")]
    return _transpose_indices(dims, [int(axis) for axis in axes.split(",")] if axes else range(len(dims)))


def _rows(flat: Sequence[int], width: int) -> interconnect.Groups:
    return tuple(tuple(flat[start : start + width]) for start in range(0, len(flat), width))


def _transpose_indices(sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
    """Return 0, 1, 2, ... laid out in `sizes`, with the dimensions permuted by `axes`, and read in order."""
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).ravel().tolist()
