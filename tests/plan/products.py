"""In which precision a program computes its products: read from what it traces to."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from comfyui_tpu.tpu_runtime.cost_model import flops
from comfyui_tpu.tpu_runtime.programs.program import Program


def products(jaxpr: Any, in_kernel: bool = False) -> Iterator[tuple[Any, bool]]:
    """Every product, and whether a kernel computes it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            yield equation, in_kernel
        for inner in flops.inner_jaxprs(equation):
            yield from products(inner, in_kernel or name == "pallas_call")


def is_rounded(equation: Any) -> bool:
    """Whether a TPU rounds an operand of float32 to bfloat16."""
    precisions = equation.params["precision"] or (None, None)
    return any(
        operand.aval.dtype == jnp.float32 and precision != jax.lax.Precision.HIGHEST
        for operand, precision in zip(equation.invars[:2], precisions, strict=True)
    )


def assert_as_written(program: Program) -> int:
    """float32 is multiplied as float32, in bfloat16 programs too. In a kernel nothing may depend on a user's default,
    which may not compile. Returns the number of products.
    """
    found = [*products(flops.trace_program(program))]
    rounded = [str(equation.source_info.name_stack) for equation, _ in found if is_rounded(equation)]
    assert not rounded, program.name
    assert all(equation.params["precision"] for equation, in_kernel in found if in_kernel), program.name
    return len(found)
