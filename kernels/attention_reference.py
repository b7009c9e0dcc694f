"""Plain softmax attention in float32, with which the kernel is compared and which stands in for it, and the keys that a
call of either takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

# Stands for minus infinity where the arithmetic must stay finite (a row without any valid key).
NEGATIVE = -1e30
# Scores in memory at once. At a model's size all would be many times the memory of a chip.
SCORES_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The first `rows` rows of `keys` and `values` may be real; what follows may hold anything.

    The first `certain` of them are real in every batch row, of the rest those before `length` (None: all).
    """

    keys: Float[Array, "batch kv_seq lanes"] | Int8[Array, "batch kv_seq lanes"]
    values: Float[Array, "batch kv_seq lanes"]
    rows: int
    certain: int
    length: Int[Array, " batch"] | None = None


def first(keys: Array, values: Array, length: int | Int[Array, " batch"], *, certain: int = 0) -> Keys:
    """The first `length` rows, a number or one for each batch row, of which `certain` are known before the trace."""
    if isinstance(length, int):
        return Keys(keys=keys, values=values, rows=length, certain=length)
    return Keys(keys=keys, values=values, rows=keys.shape[1], certain=certain, length=length)


def flat_attention(
    q: Float[Array, "batch q_seq lanes"], keys: Sequence[Keys], *, head_dim: int, log_sums: bool
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Attention of `q` to the real keys of all parts, and if asked the log-sum-exp of its scores.

    Heads are side by side. Keys and values that are not real are never used: they may hold NaN. A row without keys
    returns zeros and a log-sum-exp of `NEGATIVE`.
    """
    valid = jnp.concatenate([valid_rows(part, len(q)) for part in keys], axis=1)  # [batch, kv_seq]

    def joined(arrays: list[Array]) -> Float[Array, "batch kv_seq heads head_dim"]:
        rows = jnp.concatenate([x[:, : part.rows] for x, part in zip(arrays, keys, strict=True)], axis=1)
        return _heads(jnp.where(valid[:, :, None], rows, 0).astype(jnp.float32), head_dim)

    k, v = joined([part.keys for part in keys]), joined([part.values for part in keys])
    queries = jnp.swapaxes(_heads(q.astype(jnp.float32), head_dim), 1, 2)
    batch, heads, q_seq, _ = queries.shape
    block = max(1, SCORES_BYTES // (4 * batch * heads * max(1, k.shape[1])))
    if block >= q_seq:
        out, log_sum = _attend(queries, k, v, valid)
    else:
        count = -(-q_seq // block)
        padded = jnp.pad(queries, ((0, 0), (0, 0), (0, count * block - q_seq), (0, 0)))
        blocks = jnp.moveaxis(padded.reshape(batch, heads, count, block, head_dim), 2, 0)
        outs, log_sums_of_blocks = jax.lax.map(lambda rows: _attend(rows, k, v, valid), blocks)
        out = jnp.moveaxis(outs, 0, 2).reshape(padded.shape)[:, :, :q_seq]
        log_sum = jnp.moveaxis(log_sums_of_blocks, 0, 2).reshape(batch, heads, -1)[:, :, :q_seq]
    return jnp.swapaxes(out, 1, 2).reshape(q.shape).astype(q.dtype), log_sum if log_sums else None


def _attend(
    queries: Float[Array, "batch heads rows head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    valid: Bool[Array, "batch kv_seq"],
) -> tuple[Float[Array, "batch heads rows head_dim"], Float[Array, "batch heads rows"]]:
    """All scores of these queries at once."""
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhqd,bkhd->bhqk", queries, k, precision=highest) * queries.shape[-1] ** -0.5
    scores = jnp.where(valid[:, None, None, :], scores, NEGATIVE)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=NEGATIVE)
    weights = jnp.where(valid[:, None, None, :], jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)  # [batch, heads, rows, 1]
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v, precision=highest) / jnp.maximum(total, 1e-30)
    return out, jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), NEGATIVE)[..., 0]


def _heads(x: Array, head_dim: int) -> Array:
    return x.reshape(*x.shape[:2], -1, head_dim)


def valid_rows(part: Keys, batch: int) -> Bool[Array, "batch rows"]:
    """Which of a part's `rows` are real."""
    length = jnp.full(batch, part.rows) if part.length is None else part.length
    return jnp.arange(part.rows) < length[:, None]
