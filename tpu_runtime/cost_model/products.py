"""The least cycles of XLA's matrix products: FLOPs by the chip's peak. XLA's own estimate is below that for some."""

import math
import re

import numpy as np

from . import hlo
from .chips import Chip
from .hlo import Instruction

_FLOATS = ("bf16", "f16", "f32")  # narrower formats are faster than the peak that is known


def least_cycles(found: Instruction, module: hlo.Module, chip: Chip) -> float:
    """What the products in `found`, a product or a fusion of several, take at the bfloat16 peak; 0 without any."""
    return _flops(found, None, module) / chip.flop_per_cycle


def _flops(found: Instruction, within: hlo.Computation | None, module: hlo.Module) -> float:
    if found.opcode == "fusion":
        called = module.computations[found.computation("calls")]
        return sum(_flops(each, called, module) for each in called.instructions)
    if found.opcode not in ("convolution", "dot") or within is None:
        return 0.0
    left, right = (within.by_name[operand].arrays[0] for operand in found.operands)
    if not {left.dtype, right.dtype} <= set(_FLOATS):
        return 0.0
    (out,) = found.arrays
    if found.opcode == "dot":
        contracted = re.findall(r"\d+", found.needed("lhs_contracting_dims"))
        return 2.0 * math.prod(out.dims) * math.prod(left.dims[int(dim)] for dim in contracted)
    return 2.0 * _multiplications(found, left, right, out)


def _multiplications(found: Instruction, left: hlo.Array, right: hlo.Array, out: hlo.Array) -> float:
    """Of a convolution, as which XLA writes products too. Places of the window in padding or between values dilated
    apart are left out: products with a batch are written with a window that is mostly there.
    """
    labels = re.split(r"_|->", found.needed("dim_labels"))
    pairs = zip(labels, (left, right, out), strict=True)
    of_left, of_right, of_out = (dict(zip(names, x.dims, strict=True)) for names, x in pairs)
    window = dict(re.findall(r"(\w+)=([\w-]+)", found.attribute("window") or ""))
    total = of_out["b"] * of_out["f"] * of_right["i"]
    for at, dim in enumerate(sorted(name for name in of_out if name.isdigit())):

        def part(name: str, default: str, at: int = at) -> str:
            return window.get(name, "x".join([default] * (at + 1))).split("x")[at]

        before = int(part("pad", "0_0").split("_")[0])
        apart = int(part("lhs_dilate", "1"))
        starts = np.arange(of_out[dim]) * int(part("stride", "1")) - before
        places = starts[:, None] + np.arange(of_right[dim]) * int(part("rhs_dilate", "1"))
        inside = (places >= 0) & (places <= (of_left[dim] - 1) * apart) & (places % apart == 0)
        total *= int(inside.sum())
    return total
