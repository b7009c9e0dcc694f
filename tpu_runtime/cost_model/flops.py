"""Model FLOPs of a traced program, counted over the mesh: matrix products, convolutions and Pallas kernels.

A kernel counts as its author states (`pl.CostEstimate`), else as the matrix products of its body times its grid.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core

from ...kernels.number_formats import BY_DTYPE
from ..programs.program import Program


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of a program.

    `total / charged` is the share of the bfloat16 peak that the shapes allow: 2/3 for attention with heads of 128 on an
    MXU 256 deep.
    """

    total: float = 0.0  # multiplications and additions
    kernels: float = 0.0  # those of `total` in Pallas kernels, with those in a faster format divided by its speedup
    # `total`, but contractions shallower than the MXU count as if they filled it, and products in a
    # faster format are divided by its speedup.
    charged: float = 0.0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            total=self.total + other.total, kernels=self.kernels + other.kernels, charged=self.charged + other.charged
        )

    def __mul__(self, times: float) -> "Flops":
        return Flops(total=self.total * times, kernels=self.kernels * times, charged=self.charged * times)


def count_flops(jaxpr: core.Jaxpr | core.ClosedJaxpr, mxu_width: int) -> Flops:
    """Return the FLOPs of one run.

    The largest branch of a conditional counts; a loop without a known count runs once.
    """
    total = Flops()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += _RULES.get(equation.primitive.name, _others)(equation, mxu_width)
    return total


def _dot(equation: Any, mxu_width: int) -> Flops:
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    dtype, other = (factor.aval.dtype for factor in equation.invars)
    product = _product(2.0 * depth * equation.outvars[0].aval.size, depth, mxu_width)
    faster = BY_DTYPE.get(dtype) if other == dtype else None
    return replace(product, charged=product.charged / faster.speedup) if faster else product


def _convolution(equation: Any, mxu_width: int) -> Flops:
    numbers = equation.params["dimension_numbers"]
    kernel = equation.invars[1].aval.shape
    depth = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    return _product(2.0 * depth * equation.outvars[0].aval.size, depth, mxu_width)


def _product(flops: float, depth: int, mxu_width: int) -> Flops:
    return Flops(total=flops, charged=flops * max(1.0, mxu_width / max(depth, 1)))


def _cond(equation: Any, mxu_width: int) -> Flops:
    branches = (count_flops(branch, mxu_width) for branch in equation.params["branches"])
    return max(branches, key=lambda flops: flops.total)


def _shard_map(equation: Any, mxu_width: int) -> Flops:
    """Return the FLOPs of all shards.

    Along an axis over which no input is sharded all do the same work, which counts once.
    """
    mesh = equation.params["mesh"]
    axes = {axis for spec in equation.params["in_specs"] for axis in _axes(spec)}
    return count_flops(equation.params["jaxpr"], mxu_width) * math.prod(mesh.shape[axis] for axis in axes)


def _axes(spec: Any) -> Iterator[str]:
    for entry in spec:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple):
            yield from entry


def _pallas(equation: Any, mxu_width: int) -> Flops:
    grid = equation.params["grid_mapping"].grid
    steps = math.prod(size for size in grid if isinstance(size, int))
    body = count_flops(equation.params["jaxpr"], mxu_width) * steps
    stated = equation.params["cost_estimate"]
    total = float(stated.flops) if stated is not None and stated.flops else body.total
    charged = total * (body.charged / body.total if body.total else 1.0)
    return Flops(total=total, kernels=min(total, charged), charged=charged)


def _others(equation: Any, mxu_width: int) -> Flops:
    total = Flops()
    for inner in inner_jaxprs(equation):
        total += count_flops(inner, mxu_width)
    return total


def inner_jaxprs(equation: Any) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    """Yield the programs that `equation` calls."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                yield item


_RULES: Mapping[str, Callable[[Any, int], Flops]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "scan": lambda equation, width: count_flops(equation.params["jaxpr"], width) * equation.params["length"],
    "cond": _cond,
    "shard_map": _shard_map,
    "pallas_call": _pallas,
    # Their rules for derivatives are programs too, but only one of them runs.
    "custom_jvp_call": lambda equation, width: count_flops(equation.params["call_jaxpr"], width),
    "custom_vjp_call": lambda equation, width: count_flops(equation.params["call_jaxpr"], width),
}


def trace_program(program: Program) -> core.ClosedJaxpr:
    """Return the jaxpr of `program`; lowering it before or after is not slower."""
    with jax.sharding.use_abstract_mesh(program.mesh.abstract_mesh):
        return jax.jit(program.fn).trace(*program.arguments).jaxpr
