"""Residual sum of a block and the modulated layer norm after it, in one pass over memory, by a Pallas kernel.

XLA computes sums and moments as float32 arrays, or in prologues of products, which then run at half their speed.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from . import registry
from .dispatch import KernelUnsupported, should_use, uses_small_tiles
from .hardware import LANES, MIB, Interpret, Ref, Scalar, Slice

# Bytes per lane of a grid step: 128 tokens of bfloat16. With 6144 lanes the two buffers of four arrays take 12 MiB.
BLOCK_BYTES = 256

# One vector for each batch row, or one for all. A pair, `[_, 2, dim]`, is for the leading tokens and for the others.
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
    """Return `x + gate * update`, and its layer norm `* scale + shift`; both `[batch, seq, dim]`.

    Sums and moments are float32.

    x, update: `[batch, seq, dim]`; update None: the sum is `x`.
    gate, scale, shift: vectors `[batch or 1, dim]`, or pairs of them `[batch or 1, 2, dim]`; gate None: 1.
    eps: of the norm. kernel: whether to use Pallas, unless the kernel does not support the shape.
    num_leading: tokens that use the first vector of each pair; None without pairs.
    interpret: how to run without a TPU, see `hardware.Interpret`.
    """
    if kernel and should_use(check_support(x.shape[2])):
        return residual_norm_kernel(x, update, gate, scale, shift, num_leading, eps=eps, interpret=interpret)
    return residual_norm_reference(x, update, gate, scale, shift, num_leading, eps=eps)


def check_support(dim: int) -> KernelUnsupported:
    """Return the reasons why the kernel cannot process tokens of `dim` lanes."""
    reasons = (f"tokens have {dim} lanes, not a multiple of {LANES}",) if dim % LANES else ()
    return KernelUnsupported(kernel=registry.RESIDUAL_NORM, reasons=reasons)


def residual_norm_reference(
    x: Array, update: Array | None, gate: Array | None, scale: Array, shift: Array, num_leading: Array | None, *,
    eps: float,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the same as `residual_norm`, `[batch, seq, dim]` both, computed by XLA and rounded at the same places.

    x, update, gate, scale, shift, num_leading, eps: as for `residual_norm`.
    """

    def by_token(v: Array) -> Array:
        """Return the vectors for each token, `[batch or 1, seq or 1, dim]`."""
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


def residual_norm_kernel(
    x: Array, update: Array | None, gate: Array | None, scale: Array, shift: Array, num_leading: Array | None, *,
    eps: float, interpret: Interpret = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the same as `residual_norm`, `[batch, seq, dim]` both, by Pallas.

    Raises `NotImplementedError` if the kernel does not support the shape.
    x, update, gate, scale, shift, num_leading, eps, interpret: as for `residual_norm`.
    """
    batch, seq, dim = x.shape
    check_support(dim).check()
    vectors = jax.tree.map(lambda v: v.astype(jnp.float32).reshape(len(v), -1, dim), (gate, scale, shift))
    count = jax.tree.map(lambda count: count.astype(jnp.int32).reshape(1), num_leading)
    block = _block_bytes() // x.dtype.itemsize
    rows = pl.BlockSpec((None, block, dim), lambda row, at: (row, at, 0))
    specs = (
        *jax.tree.map(lambda _: rows, (x, update)),
        *jax.tree.map(lambda v: pl.BlockSpec((None, v.shape[1], dim), _vector_index(len(v))), vectors),
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
        name=registry.RESIDUAL_NORM,
    )(x, update, *vectors, count)
    return x if update is None else summed, normed


def _vector_index(num_rows: int) -> Callable[[Scalar, Scalar], tuple[Scalar, ...]]:
    """Return the index map of vectors: those of each batch row, or the only ones."""
    return lambda row, at: (row if num_rows > 1 else 0, 0, 0)


def _block_bytes() -> int:
    return BLOCK_BYTES // (1 + uses_small_tiles(registry.RESIDUAL_NORM))


def _vmem_bytes(arrays: int, dim: int) -> int:
    """Return the kernel's limit of VMEM: two buffers of each array, as much again for the compiler, and 1 MiB."""
    return 2 * (4 * arrays * _block_bytes() * dim) + MIB


def _body(
    x: Ref, update: Ref | None, gate: Ref | None, scale: Ref, shift: Ref, num_leading: Ref | None, summed: Ref | None,
    normed: Ref, *, eps: float,
) -> None:  # fmt: skip
    """Compute a block of tokens. update, gate, num_leading, summed: None if the call has none."""
    dim = x.shape[1]
    parts = [pl.ds(start, LANES) for start in range(0, dim, LANES)]
    is_leading: Array | None = None
    if num_leading is not None:
        token = pl.program_id(1) * len(x) + jax.lax.broadcasted_iota(jnp.int32, (len(x), LANES), 0)
        is_leading = token < num_leading[0]

    def lanes(vector: Ref, at: Slice) -> Array:
        if len(vector) == 1:
            return vector[:, at]
        assert is_leading is not None
        return jnp.where(is_leading, vector[:1, at], vector[1:, at])

    source = x
    if update is not None and summed is not None:
        source = summed
        for part in parts:
            added = update[:, part].astype(jnp.float32)
            added = added if gate is None else added * lanes(gate, part)
            source[:, part] = (x[:, part].astype(jnp.float32) + added).astype(source.dtype)

    def mean(function: Callable[[Array], Array]) -> Array:
        total = sum(function(source[:, part].astype(jnp.float32)) for part in parts)
        return jnp.sum(total, axis=1, keepdims=True) / dim

    middle = mean(lambda y: y)
    factor = jax.lax.rsqrt(mean(lambda y: jnp.square(y - middle)) + eps)
    for part in parts:
        y = (source[:, part].astype(jnp.float32) - middle) * factor
        normed[:, part] = (y * lanes(scale, part) + lanes(shift, part)).astype(normed.dtype)
