"""A block's residual sum and the layer norm after it, modulated, in one pass over memory.

As XLA does it, sums and moments are float32 arrays or prologues of products that then run at half their pace.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from . import names
from .chip import LANES, MIB, Interpret
from .choice import KernelRefusal, accepted, is_small

# Bytes of one lane a grid step, 128 tokens of bfloat16: with 6144 lanes 12 MiB of VMEM, both buffers of four arrays.
BLOCK_BYTES = 256

# Of each row of the batch, or of all. A pair, `[_, 2, dim]`, is what the leading tokens have, and all others.
Vectors = Float[Array, "_ dim"] | Float[Array, "_ 2 dim"]


def residual_norm(
    x: Float[Array, "batch seq dim"],
    update: Float[Array, "batch seq dim"] | None,
    gate: Vectors | None,
    scale: Vectors,
    shift: Vectors,
    *,
    eps: float,
    kernel: bool,
    interpret: Interpret = False,
    num_leading: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "batch seq dim"], Float[Array, "batch seq dim"]]:
    """`x + gate * update` (`x` without an update; a gate of 1 by default), and its layer norm `* scale + shift`.

    Sums and moments are float32. `kernel`: by Pallas, unless it refuses the shape. `num_leading` is of those vectors
    that are pairs.
    """
    if kernel and accepted(refusal(x.shape[2])):
        return by_kernel(x, update, gate, scale, shift, num_leading, eps=eps, interpret=interpret)
    return reference(x, update, gate, scale, shift, num_leading, eps=eps)


def refusal(dim: int) -> KernelRefusal:
    """Why the kernel does not take tokens of `dim` lanes."""
    reasons = (f"tokens have {dim} lanes, not a multiple of {LANES}",) if dim % LANES else ()
    return KernelRefusal(kernel=names.RESIDUAL_NORM, reasons=reasons)


def reference(
    x: Array, update: Array | None, gate: Array | None, scale: Array, shift: Array, num_leading: Array | None, *,
    eps: float,
) -> tuple[Array, Array]:  # fmt: skip
    """In float32, rounded where the kernel rounds."""

    def by_token(v: Array) -> Array:
        """`[_, 1 or seq, dim]`."""
        if v.ndim == 2:
            return v[:, None]
        assert num_leading is not None
        return jnp.where(jnp.arange(x.shape[1])[:, None] < num_leading, v[:, :1], v[:, 1:])

    summed = x
    if update is not None:
        added = update.astype(jnp.float32) * (1.0 if gate is None else by_token(gate))
        summed = (x.astype(jnp.float32) + added).astype(x.dtype)
    values = summed.astype(jnp.float32)
    values = values - jnp.mean(values, axis=-1, keepdims=True)
    values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + eps)
    return summed, (values * by_token(scale) + by_token(shift)).astype(x.dtype)


def by_kernel(
    x: Array, update: Array | None, gate: Array | None, scale: Array, shift: Array, num_leading: Array | None, *,
    eps: float, interpret: Interpret = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Raises `NotImplementedError` where the kernel refuses the shape."""
    batch, seq, dim = x.shape
    refusal(dim).check()
    vectors = jax.tree.map(lambda v: v.astype(jnp.float32).reshape(len(v), -1, dim), (gate, scale, shift))
    count = jax.tree.map(lambda count: count.astype(jnp.int32).reshape(1), num_leading)
    block = _block_bytes() // x.dtype.itemsize
    rows = pl.BlockSpec((None, block, dim), lambda row, at: (row, at, 0))
    specs = (
        *jax.tree.map(lambda _: rows, (x, update)),
        *jax.tree.map(lambda v: pl.BlockSpec((None, v.shape[1], dim), _row_of(len(v))), vectors),
        jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), count),
    )
    results = jax.tree.map(lambda _: rows, (update, x))  # without an update the sum is `x`
    num_arrays = len(jax.tree.leaves(results))
    summed, normed = pl.pallas_call(
        functools.partial(_body, eps=eps),
        grid=(batch, pl.cdiv(seq, block)),
        in_specs=specs,
        out_specs=results,
        out_shape=jax.tree.map(lambda _: jax.ShapeDtypeStruct(x.shape, x.dtype), results),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_vmem_bytes(num_arrays, dim)
        ),
        cost_estimate=pl.CostEstimate(flops=8 * x.size, transcendentals=0, bytes_accessed=2 * num_arrays * x.nbytes),
        interpret=interpret,
        name=names.RESIDUAL_NORM,
    )(x, update, *vectors, count)
    return x if update is None else summed, normed


def _row_of(num_rows: int) -> Any:
    return lambda row, at: (row if num_rows > 1 else 0, 0, 0)


def _block_bytes() -> int:
    return BLOCK_BYTES // (1 + is_small(names.RESIDUAL_NORM))


def _vmem_bytes(arrays: int, dim: int) -> int:
    """Both buffers of what is read and written, as much again for the compiler, and 1 MiB."""
    return 2 * (4 * arrays * _block_bytes() * dim) + MIB


def _body(
    x: Any, update: Any, gate: Any, scale: Any, shift: Any, num_leading: Any, summed: Any, normed: Any, *, eps: float
) -> None:
    """What a call does without is None."""
    dim = x.shape[1]
    parts = [pl.ds(start, LANES) for start in range(0, dim, LANES)]
    if num_leading is not None:
        token = pl.program_id(1) * len(x) + jax.lax.broadcasted_iota(jnp.int32, (len(x), LANES), 0)
        is_leading = token < num_leading[0]

    def lanes(vector: Any, at: Any) -> Array:
        return vector[:, at] if len(vector) == 1 else jnp.where(is_leading, vector[:1, at], vector[1:, at])

    source = x
    if update is not None:
        source = summed
        for at in parts:
            added = update[:, at].astype(jnp.float32)
            added = added if gate is None else added * lanes(gate, at)
            source[:, at] = (x[:, at].astype(jnp.float32) + added).astype(source.dtype)

    def mean(function: Any) -> Array:
        return jnp.sum(sum(function(source[:, at].astype(jnp.float32)) for at in parts), axis=1, keepdims=True) / dim

    middle = mean(lambda y: y)
    factor = jax.lax.rsqrt(mean(lambda y: jnp.square(y - middle)) + eps)
    for at in parts:
        y = (source[:, at].astype(jnp.float32) - middle) * factor
        normed[:, at] = (y * lanes(scale, at) + lanes(shift, at)).astype(normed.dtype)
