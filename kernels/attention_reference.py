"""Plain softmax attention in float32, the kernel's reference and fallback, and the keys that a call of either takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8

from .hardware import VMEM_MIB, device_kind

# Used instead of minus infinity to keep the arithmetic finite in a row without valid keys.
MASK_VALUE = -1e30
# Bytes of scores in memory at once. At a model's size all scores would exceed a chip's memory many times. On a CPU,
# larger buffers are returned to the system after each use, which takes longer than the arithmetic.
MAX_SCORE_BYTES, MAX_SCORE_BYTES_CPU = 2**29, 2**25
# Blocks per turn of the kernel's loop: sparse calls skip whole turns.
BLOCKS_PER_TURN = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSparsity:
    """Block sparsity: the blocks of keys that each block of queries attends to, known before the trace.

    At least two blocks remain: the kernel processes some outside its loop, and samples the maximum from the first.
    """

    size: int  # rows of a block of keys or queries
    real: Int[np.ndarray, " blocks"]  # leading rows of each block that are valid, at least 1
    kept: Int[
        np.ndarray, "query_blocks count"
    ]  # blocks that each block of queries attends to; one row: the same for all
    left_out: int = 0  # blocks at the end of `kept` that a sparse call skips, a multiple of `BLOCKS_PER_TURN`
    is_sparse: Bool[Array, ""] | None = None  # whether this call is sparse, known at run time; None: it is not

    def __post_init__(self) -> None:
        if self.left_out % BLOCKS_PER_TURN or not (self.left_out == 0 or 0 < self.left_out <= self.kept.shape[1] - 2):
            raise ValueError(
                f"left_out is {self.left_out}; it must be a multiple of {BLOCKS_PER_TURN} and at most "
                f"{self.kept.shape[1] - 2}, so that 2 of {self.kept.shape[1]} blocks remain."
            )

    @property
    def rows(self) -> int:
        return len(self.real) * self.size

    @property
    def valid_mask(self) -> Bool[np.ndarray, " rows"]:
        return (np.arange(self.size) < self.real[:, None]).ravel()

    def block_mask(self, q_seq: int) -> Bool[Array, "q_seq blocks"]:
        """Return the mask of key blocks that each query attends to. Queries after the last block use the last list."""

        def make_mask(kept: Int[np.ndarray, "query_blocks count"]) -> Array:
            mask = np.zeros((len(kept), len(self.real)), bool)
            np.put_along_axis(mask, kept, True, 1)
            return jnp.asarray(mask[np.minimum(np.arange(q_seq) // self.size, len(mask) - 1)])

        dense, sparse = make_mask(self.kept), make_mask(self.kept[:, : self.kept.shape[1] - self.left_out])
        return dense if self.is_sparse is None else jnp.where(self.is_sparse, sparse, dense)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Int8Keys:
    """Quantized keys, see `attention_int8`."""

    numbers: Array  # int8 `[batch, kv_seq, lanes]`
    unit: Array  # scale of each head, `[batch, heads]` float32
    mean: Array  # mean key that was subtracted, `[batch, lanes]`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys and values of one sequence, with padding that may hold anything."""

    # All `Int8Keys` of a call have the same scale and mean.
    keys: Float[Array, "batch kv_seq lanes"] | Int8[Array, "batch kv_seq lanes"] | Int8Keys
    values: Float[Array, "batch kv_seq lanes"]
    rows: int  # leading rows that may be valid; the rest is padding
    certain: int  # leading rows that are valid in every batch row
    length: Int[Array, " batch"] | None = None  # valid rows of each batch row; None: all of `rows`
    blocks: BlockSparsity | None = (
        None  # for the first keys of a call: block sparsity, which states the valid rows instead
    )


def keys_of_length(
    keys: Array | Int8Keys, values: Array, length: int | Int[Array, " batch"], *, certain: int = 0
) -> Keys:
    """Return keys and values `[batch, kv_seq, lanes]` of which the first `length` rows are valid.

    length: a number, or one per batch row. certain: if one per row, the rows that are valid in every batch row.
    """
    if isinstance(length, int):
        return Keys(keys=keys, values=values, rows=length, certain=length)
    return Keys(keys=keys, values=values, rows=keys.shape[1], certain=certain, length=length)


def keys_in_blocks(keys: Array | Int8Keys, values: Array, blocks: BlockSparsity) -> Keys:
    """Return keys and values `[batch, kv_seq, lanes]` in blocks that state which rows are valid."""
    return Keys(keys=keys, values=values, rows=blocks.rows, certain=0, blocks=blocks)


def flat_attention(
    q: Float[Array, "batch q_seq lanes"], keys: Sequence[Keys], *, head_dim: int, log_sums: bool
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Return attention of `q` to the valid keys of all arrays, and the log-sum-exp of its scores.

    Keys and values that are not valid are never used: they may hold NaN. A row without keys returns zeros and a
    log-sum-exp of `NEGATIVE`.

    q: queries of all heads, side by side. keys: arrays of keys and values.
    head_dim: lanes of a head. log_sums: whether to return the log-sum-exp; else None is returned for it.
    """
    valid = jnp.concatenate([valid_rows(part, len(q)) for part in keys], axis=1)  # [batch, kv_seq]
    blocks = keys[0].blocks
    allowed, size = (None, 0) if blocks is None else (blocks.block_mask(q.shape[1]), blocks.size)

    def join(arrays: list[Array]) -> Float[Array, "batch kv_seq heads head_dim"]:
        rows = jnp.concatenate([x[:, : part.rows] for x, part in zip(arrays, keys, strict=True)], axis=1)
        return _heads(jnp.where(valid[:, :, None], rows, 0).astype(jnp.float32), head_dim)

    key_arrays = [part.keys for part in keys if not isinstance(part.keys, Int8Keys)]
    k, v = join(key_arrays), join([part.values for part in keys])
    queries = jnp.swapaxes(_heads(q.astype(jnp.float32), head_dim), 1, 2)
    batch, heads, q_seq, _ = queries.shape
    max_bytes = MAX_SCORE_BYTES if device_kind() in VMEM_MIB else MAX_SCORE_BYTES_CPU
    block = max(1, max_bytes // (4 * batch * heads * max(1, k.shape[1])))
    if block >= q_seq:
        out, log_sum = _attend(queries, k, v, valid, allowed, size)
    else:
        count = -(-q_seq // block)
        padded = jnp.pad(queries, ((0, 0), (0, 0), (0, count * block - q_seq), (0, 0)))
        parts = jnp.moveaxis(padded.reshape(batch, heads, count, block, head_dim), 2, 0)
        masks = None
        if allowed is not None:
            masks = jnp.pad(allowed, ((0, count * block - q_seq), (0, 0))).reshape(count, block, -1)
        outs, log_sums_of_blocks = jax.lax.map(
            lambda part: _attend(part[0], k, v, valid, part[1], size), (parts, masks)
        )
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
    """Return the attention of these queries and its log-sum-exp, with all of their scores in memory at once.

    It makes few passes over the scores, because on a CPU these take most of a step. A masked key adds exactly nothing,
    also in a row without valid keys: the row's maximum is far above the mask's value.

    valid: mask of the keys. allowed: mask of the blocks of `size` keys that each query attends to, of the first array.
    """
    mask = valid[:, None, None, :]
    if allowed is not None:
        key_mask = jnp.repeat(allowed, size, axis=1)
        mask = mask & jnp.pad(key_mask, ((0, 0), (0, k.shape[1] - key_mask.shape[1])), constant_values=True)
    highest = jax.lax.Precision.HIGHEST
    queries = queries * queries.shape[-1] ** -0.5
    scores = jnp.einsum("bhqd,bkhd->bhqk", queries, k, precision=highest) + jnp.where(mask, 0, MASK_VALUE)
    top = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=MASK_VALUE), MASK_VALUE / 2)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)  # [batch, heads, rows, 1]
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v, precision=highest) / jnp.maximum(total, 1e-30)
    return out, jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), MASK_VALUE)[..., 0]


def _heads(x: Array, head_dim: int) -> Array:
    return x.reshape(*x.shape[:2], -1, head_dim)


def valid_rows(part: Keys, batch: int) -> Bool[Array, "batch rows"]:
    """Return the mask of a part's valid rows, `[batch, rows]`."""
    if part.blocks is not None:
        return jnp.broadcast_to(jnp.asarray(part.blocks.valid_mask)[None], (batch, part.rows))
    length = jnp.full(batch, part.rows) if part.length is None else part.length
    return jnp.arange(part.rows) < length[:, None]
