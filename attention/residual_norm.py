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

from .kernel_body import LANES

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
    interpret: bool = False,
    num_leading: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "batch seq dim"], Float[Array, "batch seq dim"]]:
    """`x + gate * update` (`x` without an update; a gate of 1 by default), and its layer norm `* scale + shift`.

    Sums and moments are float32. `kernel`: by Pallas, where `dim` is whole registers. `num_leading` is of those vectors
    that are pairs.
    """
    if kernel and x.shape[2] % LANES == 0:
        return _by_kernel(x, update, gate, scale, shift, num_leading, eps=eps, interpret=interpret)

    def by_token(v: Array) -> Array:
        """`[_, 1 or seq, dim]`."""
        if v.ndim == 2:
            return v[:, None]
        assert num_leading is not None
        return jnp.where(jnp.arange(x.shape[1])[:, None] < num_leading, v[:, :1], v[:, 1:])

    if update is not None:
        added = update.astype(jnp.float32) * (1.0 if gate is None else by_token(gate))
        x = (x.astype(jnp.float32) + added).astype(x.dtype)
    values = x.astype(jnp.float32)
    values = values - jnp.mean(values, axis=-1, keepdims=True)
    values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + eps)
    return x, (values * by_token(scale) + by_token(shift)).astype(x.dtype)


def _by_kernel(
    x: Array,
    update: Array | None,
    gate: Array | None,
    scale: Array,
    shift: Array,
    num_leading: Array | None,
    *,
    eps: float,
    interpret: bool,
) -> tuple[Array, Array]:
    batch, seq, dim = x.shape
    arrays = [x] if update is None else [x, update]
    vectors = [v.astype(jnp.float32).reshape(len(v), -1, dim) for v in (gate, scale, shift) if v is not None]
    counts = [] if num_leading is None else [num_leading.astype(jnp.int32).reshape(1)]
    block = BLOCK_BYTES // x.dtype.itemsize
    rows = pl.BlockSpec((None, block, dim), lambda row, at: (row, at, 0))
    found = pl.pallas_call(
        functools.partial(_body, has_update=update is not None, has_gate=gate is not None, eps=eps),
        grid=(batch, pl.cdiv(seq, block)),
        in_specs=[
            *(rows for _ in arrays),
            *(pl.BlockSpec((None, v.shape[1], dim), _of_row if len(v) > 1 else _of_all) for v in vectors),
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in counts),
        ],
        out_specs=[rows for _ in arrays],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _ in arrays],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_vmem_bytes(len(arrays), dim)
        ),
        cost_estimate=pl.CostEstimate(flops=8 * x.size, transcendentals=0, bytes_accessed=2 * len(arrays) * x.nbytes),
        interpret=interpret,
        name="residual_norm",
    )(*arrays, *vectors, *counts)
    return (x if update is None else found[0]), found[-1]


def _of_row(row: Any, at: Any) -> tuple:
    return row, 0, 0


def _of_all(row: Any, at: Any) -> tuple:
    return 0, 0, 0


def _vmem_bytes(arrays: int, dim: int) -> int:
    """Both buffers of what is read and written, and as much again for what the compiler keeps."""
    return 2 * (4 * arrays * BLOCK_BYTES * dim) + 2**20


def _body(x: Any, *refs: Any, has_update: bool, has_gate: bool, eps: float) -> None:
    left = list(refs)
    update = left.pop(0) if has_update else None
    gate = left.pop(0) if has_gate else None
    scale, shift = left.pop(0), left.pop(0)
    num_leading = left.pop(0) if len(left) > 1 + has_update else None
    outs, dim = left, x.shape[1]
    parts = [pl.ds(start, LANES) for start in range(0, dim, LANES)]
    if num_leading is not None:
        token = pl.program_id(1) * len(x) + jax.lax.broadcasted_iota(jnp.int32, (len(x), LANES), 0)
        is_leading = token < num_leading[0]

    def lanes(vector: Any, at: Any) -> Array:
        return vector[:, at] if len(vector) == 1 else jnp.where(is_leading, vector[:1, at], vector[1:, at])

    source = x
    if update is not None:
        source = outs[0]
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
        outs[-1][:, at] = (y * lanes(scale, at) + lanes(shift, at)).astype(outs[-1].dtype)
