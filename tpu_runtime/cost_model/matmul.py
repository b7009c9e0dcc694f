"""Minimum cycles of XLA's matrix products: FLOPs by the chip's peak. XLA's own estimate is lower for some."""

import math
import re

import numpy as np

from . import hlo
from .chips import Chip
from .hlo import Instruction

_FLOATS = ("bf16", "f16", "f32")  # narrower formats are faster than the known peak


def min_matmul_cycles(op: Instruction, module: hlo.Module, chip: Chip) -> float:
    """Return the cycles of an instruction's products at the bfloat16 peak; 0 without any.

    op: a product, or a fusion of several. module: that it is part of. chip: whose peak.
    """
    return _flops(op, None, module) / chip.flop_per_cycle


def _flops(op: Instruction, within: hlo.Computation | None, module: hlo.Module) -> float:
    if op.opcode == "fusion":
        called = module.computations[op.computation("calls")]
        return sum(_flops(inner, called, module) for inner in called.instructions)
    if op.opcode not in ("convolution", "dot") or within is None:
        return 0.0
    left, right = (within.by_name[operand].arrays[0] for operand in op.operands)
    if not {left.dtype, right.dtype} <= set(_FLOATS):
        return 0.0
    (out,) = op.arrays
    if op.opcode == "dot":
        contracted = re.findall(r"\d+", op.require_attribute("lhs_contracting_dims"))
        return 2.0 * math.prod(out.dims) * math.prod(left.dims[int(dim)] for dim in contracted)
    return 2.0 * _multiplications(op, left, right, out)


def _multiplications(op: Instruction, left: hlo.Array, right: hlo.Array, out: hlo.Array) -> float:
    """Return the multiplications of a convolution, as which XLA writes products too.

    Places of the window in padding, or between dilated values, are left out: products with a batch are written with a
    window that is mostly there.
    """
    labels = re.split(r"_|->", op.require_attribute("dim_labels"))
    pairs = zip(labels, (left, right, out), strict=True)
    of_left, of_right, of_out = (dict(zip(names, x.dims, strict=True)) for names, x in pairs)
    window = dict(re.findall(r"(\w+)=([\w-]+)", op.find_attribute("window") or ""))
    total = of_out["b"] * of_out["f"] * of_right["i"]
    for index, dim in enumerate(sorted(name for name in of_out if name.isdigit())):

        def part(name: str, default: str, index: int = index) -> str:
            return window.get(name, "x".join([default] * (index + 1))).split("x")[index]

        before = int(part("pad", "0_0").split("_")[0])
        apart = int(part("lhs_dilate", "1"))
        starts = np.arange(of_out[dim]) * int(part("stride", "1")) - before
        places = starts[:, None] + np.arange(of_right[dim]) * int(part("rhs_dilate", "1"))
        inside = (places >= 0) & (places <= (of_left[dim] - 1) * apart) & (places % apart == 0)
        total *= int(inside.sum())
    return total
