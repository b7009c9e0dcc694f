"""Plain softmax attention in float32, with which the kernel is compared and which stands in for it, and the keys that a
call of either takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8

from .chip import VMEM_MIB, device_kind

# Stands for minus infinity where the arithmetic must stay finite (a row without any valid key).
NEGATIVE = -1e30
# Scores in memory at once. At a model's size all would be many times the memory of a chip. On a CPU larger pieces go
# back to the system each time, which takes longer than the arithmetic.
SCORES_BYTES, SCORES_BYTES_OF_A_CPU = 2**29, 2**25
# Blocks that are left out by a turn of the kernel's loop that is not taken.
TOGETHER = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Keys in blocks of `size` rows, of which the first `real` are real, one at least; known before the trace.

    A block of as many queries attends to those of its row in `kept`, but where `is_sparse`, which the program knows
    when it runs, not to the last `left_out`, a multiple of `TOGETHER`. Two at least are kept, for the kernel goes
    through some out of its loop, and takes the first maximum from the first. All queries have the same where there is
    one row.
    """

    size: int
    real: Int[np.ndarray, " blocks"]
    kept: Int[np.ndarray, "query_blocks count"]
    left_out: int = 0
    is_sparse: Bool[Array, ""] | None = None

    def __post_init__(self) -> None:
        if self.left_out % TOGETHER or not (self.left_out == 0 or 0 < self.left_out <= self.kept.shape[1] - 2):
            raise ValueError(
                f"of {self.kept.shape[1]} blocks {self.left_out} cannot be left out: in {TOGETHER}s, but for two."
            )

    @property
    def rows(self) -> int:
        return len(self.real) * self.size

    @property
    def is_real(self) -> Bool[np.ndarray, " rows"]:
        return (np.arange(self.size) < self.real[:, None]).ravel()

    def allowed(self, q_seq: int) -> Bool[Array, "q_seq blocks"]:
        """Which blocks of keys each query attends to; those behind the last block of queries to any."""

        def to(kept: Int[np.ndarray, "query_blocks count"]) -> Array:
            found = np.zeros((len(kept), len(self.real)), bool)
            np.put_along_axis(found, kept, True, 1)
            return jnp.asarray(found[np.minimum(np.arange(q_seq) // self.size, len(found) - 1)])

        every, few = to(self.kept), to(self.kept[:, : self.kept.shape[1] - self.left_out])
        return every if self.is_sparse is None else jnp.where(self.is_sparse, few, every)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class WholeKeys:
    """Keys as whole numbers in int8, `[batch, kv_seq, lanes]`; what one is worth, float32 `[batch, heads]`; the mean
    that they lost, `[batch, lanes]`: see `attention_int8`.
    """

    numbers: Any
    unit: Any
    mean: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The first `rows` rows of `keys` and `values` may be real; what follows may hold anything.

    The first `certain` of them are real in every batch row, of the rest those before `length` (None: all). Of keys in
    `blocks`, which a call's first may be, these say what is real. Of `WholeKeys` all parts have one unit and mean.
    """

    keys: Float[Array, "batch kv_seq lanes"] | Int8[Array, "batch kv_seq lanes"] | WholeKeys
    values: Float[Array, "batch kv_seq lanes"]
    rows: int
    certain: int
    length: Int[Array, " batch"] | None = None
    blocks: Blocks | None = None


def first(keys: Array | WholeKeys, values: Array, length: int | Int[Array, " batch"], *, certain: int = 0) -> Keys:
    """The first `length` rows, a number or one for each batch row, of which `certain` are known before the trace."""
    if isinstance(length, int):
        return Keys(keys=keys, values=values, rows=length, certain=length)
    return Keys(keys=keys, values=values, rows=keys.shape[1], certain=certain, length=length)


def in_blocks(keys: Array | WholeKeys, values: Array, blocks: Blocks) -> Keys:
    return Keys(keys=keys, values=values, rows=blocks.rows, certain=0, blocks=blocks)


def flat_attention(
    q: Float[Array, "batch q_seq lanes"], keys: Sequence[Keys], *, head_dim: int, log_sums: bool
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Attention of `q` to the real keys of all parts, and if asked the log-sum-exp of its scores.

    Heads are side by side. Keys and values that are not real are never used: they may hold NaN. A row without keys
    returns zeros and a log-sum-exp of `NEGATIVE`.
    """
    valid = jnp.concatenate([valid_rows(part, len(q)) for part in keys], axis=1)  # [batch, kv_seq]
    blocks = keys[0].blocks
    allowed, size = (None, 0) if blocks is None else (blocks.allowed(q.shape[1]), blocks.size)

    def joined(arrays: list[Array]) -> Float[Array, "batch kv_seq heads head_dim"]:
        rows = jnp.concatenate([x[:, : part.rows] for x, part in zip(arrays, keys, strict=True)], axis=1)
        return _heads(jnp.where(valid[:, :, None], rows, 0).astype(jnp.float32), head_dim)

    given = [part.keys for part in keys if not isinstance(part.keys, WholeKeys)]
    k, v = joined(given), joined([part.values for part in keys])
    queries = jnp.swapaxes(_heads(q.astype(jnp.float32), head_dim), 1, 2)
    batch, heads, q_seq, _ = queries.shape
    room = SCORES_BYTES if device_kind() in VMEM_MIB else SCORES_BYTES_OF_A_CPU
    block = max(1, room // (4 * batch * heads * max(1, k.shape[1])))
    if block >= q_seq:
        out, log_sum = _attend(queries, k, v, valid, allowed, size)
    else:
        count = -(-q_seq // block)
        padded = jnp.pad(queries, ((0, 0), (0, 0), (0, count * block - q_seq), (0, 0)))
        parts = jnp.moveaxis(padded.reshape(batch, heads, count, block, head_dim), 2, 0)
        own = None
        if allowed is not None:
            own = jnp.pad(allowed, ((0, count * block - q_seq), (0, 0))).reshape(count, block, -1)
        outs, log_sums_of_blocks = jax.lax.map(lambda each: _attend(each[0], k, v, valid, each[1], size), (parts, own))
        out = jnp.moveaxis(outs, 0, 2).reshape(padded.shape)[:, :, :q_seq]
        log_sum = jnp.moveaxis(log_sums_of_blocks, 0, 2).reshape(batch, heads, -1)[:, :, :q_seq]
    return jnp.swapaxes(out, 1, 2).reshape(q.shape).astype(q.dtype), log_sum if log_sums else None


def _attend(
    queries: Float[Array, "batch heads rows head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    valid: Bool[Array, "batch kv_seq"],
    allowed: Bool[Array, "rows blocks"] | None,
    size: int,
) -> tuple[Float[Array, "batch heads rows head_dim"], Float[Array, "batch heads rows"]]:
    """All scores of these queries at once. `allowed`: the blocks of `size` keys that each attends to, of the first.

    Few passes over the scores, for on a CPU these take most of a step. A key that is not seen adds exactly nothing,
    also to a row that sees none: its maximum is far above what it was masked with.
    """
    counts = valid[:, None, None, :]
    if allowed is not None:
        own = jnp.repeat(allowed, size, axis=1)
        counts = counts & jnp.pad(own, ((0, 0), (0, k.shape[1] - own.shape[1])), constant_values=True)
    highest = jax.lax.Precision.HIGHEST
    queries = queries * queries.shape[-1] ** -0.5
    scores = jnp.einsum("bhqd,bkhd->bhqk", queries, k, precision=highest) + jnp.where(counts, 0, NEGATIVE)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=NEGATIVE), NEGATIVE / 2)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)  # [batch, heads, rows, 1]
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v, precision=highest) / jnp.maximum(total, 1e-30)
    return out, jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), NEGATIVE)[..., 0]


def _heads(x: Array, head_dim: int) -> Array:
    return x.reshape(*x.shape[:2], -1, head_dim)


def valid_rows(part: Keys, batch: int) -> Bool[Array, "batch rows"]:
    """Which of a part's `rows` are real."""
    if part.blocks is not None:
        return jnp.broadcast_to(jnp.asarray(part.blocks.is_real)[None], (batch, part.rows))
    length = jnp.full(batch, part.rows) if part.length is None else part.length
    return jnp.arange(part.rows) < length[:, None]
