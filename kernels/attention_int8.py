"""Attention with int8 scores: approximate, and only used on request.

Keys lose their mean over tokens, which shifts all scores of a query equally (SageAttention,
https://arxiv.org/abs/2410.02367). They are quantized with one scale per head, queries with one per token and head. The
query scale is enlarged until the scale of a score is a power of two. Values, and the weights on them, stay bfloat16.
`docs/quality.md` states the accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .attention_kernel import LOG2_E, KeyBlock, KeyChunk, QueryBlock, broadcast_sublanes
from .attention_reference import MASK_VALUE, Int8Keys, Keys, valid_rows
from .hardware import LANES, SUBLANES, Ref, Slice

INT8_MAX = 127
# Added to the largest magnitude of a query and of a head, so that their scales and the product of both are not zero.
EPS = 1e-15
MANTISSA_BITS = 23


class KeyStats(NamedTuple):
    """Statistics of the valid keys of one or more arrays, per lane, `[..., lanes]` float32 each."""

    total: Array  # sum
    least: Array  # minimum, infinity without keys
    most: Array  # maximum, minus infinity without keys


def compute_key_stats(x: Float[Array, "... kv_seq lanes"], real: Bool[Array, "... kv_seq"]) -> KeyStats:
    """Return the statistics of keys `x` `[..., kv_seq, lanes]` over the rows that are `real` `[..., kv_seq]`."""
    values, real = x.astype(jnp.float32), real[..., None]
    return KeyStats(
        jnp.sum(jnp.where(real, values, 0), axis=-2),
        jnp.min(jnp.where(real, values, jnp.inf), axis=-2),
        jnp.max(jnp.where(real, values, -jnp.inf), axis=-2),
    )


def merge_key_stats(spreads: Sequence[KeyStats]) -> KeyStats:
    """Return the statistics of all keys of several arrays."""
    total, least, most = (jnp.stack(arrays) for arrays in zip(*spreads, strict=True))
    return KeyStats(total.sum(0), least.min(0), most.max(0))


def compute_key_scale(
    keys: KeyStats, count: Int[Array, "..."], head_dim: int
) -> tuple[Float[Array, "... heads"], Float[Array, "... lanes"]]:
    """Return the int8 scale of each head, `[..., heads]`, so that no key exceeds 127, and the mean, `[..., lanes]`.

    keys: statistics of the valid keys. count: number of them, `[...]`. head_dim: lanes of a head.
    """
    count = count[..., None]
    mean = keys.total / jnp.maximum(count, 1)
    widest = jnp.where(count > 0, jnp.maximum(keys.most - mean, mean - keys.least), 0)
    widest, middle = (x.reshape(*x.shape[:-1], -1, head_dim) for x in (widest, mean))
    # An integer cannot be NaN, and a maximum may hide one: the scale passes it on.
    return (jnp.max(widest, axis=-1) + EPS) / INT8_MAX + 0 * jnp.sum(middle, axis=-1), mean


def quantize_keys(
    x: Float[Array, "... kv_seq lanes"], unit: Float[Array, "... heads"], mean: Float[Array, "... lanes"]
) -> Float[Array, "... kv_seq lanes"]:
    """Return keys `x` without their mean, quantized: integers in float32, `[..., kv_seq, lanes]`.

    Padding may be anything.

    unit: scale of each head, `[..., heads]`. mean: mean key, `[..., lanes]`.
    """
    lane_units = jnp.repeat(unit, x.shape[-1] // unit.shape[-1], axis=-1)
    return jnp.round((x.astype(jnp.float32) - mean[..., None, :]) / lane_units[..., None, :])


def quantize_all_keys(
    keys: Sequence[Keys], batch: int, head_dim: int
) -> tuple[list[Float[Array, "batch kv_seq lanes"]], Float[Array, "batch heads"], Float[Array, "batch lanes"]]:
    """Return quantized keys of each array, the scale of each head and the mean key over all arrays.

    Keys are integers in float32, `[batch, kv_seq, lanes]`, scales `[batch, heads]`, the mean `[batch, lanes]`. Arrays
    that are `Int8Keys` already are returned as they are. batch, head_dim: sizes of the keys.
    """
    quantized = [part.keys for part in keys if isinstance(part.keys, Int8Keys)]
    if quantized:
        return [array.numbers.astype(jnp.float32) for array in quantized], quantized[0].unit, quantized[0].mean
    masks = [valid_rows(part, batch) for part in keys]
    arrays = [part.keys for part in keys if not isinstance(part.keys, Int8Keys)]
    spreads = [compute_key_stats(x[:, : part.rows], mask) for x, part, mask in zip(arrays, keys, masks, strict=True)]
    unit, mean = compute_key_scale(merge_key_stats(spreads), jnp.concatenate(masks, axis=1).sum(axis=1), head_dim)
    return [quantize_keys(x, unit, mean) for x in arrays], unit, mean


def round_up_to_power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the smallest power of two that is at least `x`, elementwise `[...]`. `x` is positive."""
    below = (1 << MANTISSA_BITS) - 1
    raised = (jax.lax.bitcast_convert_type(x, jnp.int32) + below) & ~below
    return jax.lax.bitcast_convert_type(raised, jnp.float32)


def quantize_queries(
    q: Float[Array, "..."], unit: Float[Array, "..."], axis: int
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return scaled queries quantized, integers up to 127 in float32, and the scale of their scores; `[...]` both.

    q: queries times the scale of attention. axis: of a query's values; its scale has size 1 there. unit: scale of the
      keys.
    """
    largest = jnp.max(jnp.abs(q), axis=axis, keepdims=True) + EPS
    score_scale = round_up_to_power_of_two(largest * unit / INT8_MAX) + 0 * (
        unit + jnp.sum(q, axis=axis, keepdims=True)
    )
    return jnp.round(q * (unit / score_scale)), score_scale


def to_int8_keys(
    keys: Sequence[Keys], batch: int, head_dim: int
) -> tuple[list[Keys], Float[Array, "batch heads"], Float[Array, "batch lanes"]]:
    """Return the same keys in int8 with bfloat16 values, the scale of each head and the mean key that was subtracted.

    Scales are `[batch, heads]`, the mean is `[batch, lanes]`; batch, head_dim: sizes of the keys.
    """
    integers, unit, mean = quantize_all_keys(keys, batch, head_dim)
    int8_keys = [
        replace(part, keys=number.astype(jnp.int8), values=part.values.astype(jnp.bfloat16))
        for part, number in zip(keys, integers, strict=True)
    ]
    return int8_keys, unit, mean


def restore_means(
    sums: Float[Array, "batch heads q_seq"], q: Float[Array, "batch q_seq lanes"], means: Array, scale: float
) -> Float[Array, "batch heads q_seq"]:
    """Return the log-sum-exp of scores with the keys' mean restored, `[batch, heads, q_seq]`.

    sums: log-sum-exp without the mean. q: queries, `[batch, q_seq, lanes]`. means: the mean keys, `[batch, lanes]`.
      scale: of attention.
    """
    by_head = (x.astype(jnp.float32).reshape(*x.shape[:-1], sums.shape[1], -1) for x in (q, means))
    added = scale * jnp.einsum("bqhd,bhd->bhq", *by_head, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(sums > MASK_VALUE / 2, sums + added, sums)


def fake_quantize(
    q: Float[Array, "batch q_seq lanes"], keys: Sequence[Keys], head_dim: int, scale: float
) -> tuple[Float[Array, "batch q_seq lanes"], list[Keys]]:
    """Return float32 queries and keys whose exact attention has int8's scores: the kernel's reference.

    q: `[batch, q_seq, lanes]`. head_dim: lanes of a head. scale: of attention.
    """
    key_integers, unit, mean = quantize_all_keys(keys, len(q), head_dim)
    heads = q.astype(jnp.float32).reshape(*q.shape[:2], -1, head_dim) * (scale * LOG2_E)
    numbers, score_scale = quantize_queries(heads, unit[:, None, :, None], 3)
    lane_units = jnp.repeat(unit, head_dim, axis=1)[:, None]
    queries = numbers * score_scale / (unit[:, None, :, None] * scale * LOG2_E)
    return queries.reshape(q.shape), [
        replace(part, keys=number * lane_units + mean[:, None]) for part, number in zip(keys, key_integers, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Int8QueryBlock(QueryBlock):
    """A block of queries with int8 keys.

    `units` are the scales of the keys, `vmem.worth` that of the scores of each query.

    Products are 256 deep and heads at most 128. Further lanes of 127 in the keys, and digits in the queries, subtract
    the maximum inside the product. The result is then small where weights are large, so bfloat16 represents it. A row
    of ones below the values makes the second product sum the weights.
    """

    interpreted: bool = False  # whether the kernel runs in interpret mode

    def prepare(self, part: KeyBlock) -> None:
        for head in range(self.form.heads):
            numbers, score_scale = quantize_queries(self.scale_query(head).T, self.units[head], 0)
            self.vmem.scaled[head, : self.depth] = numbers.astype(jnp.int8)
            self.score_scales[head] = broadcast_sublanes(score_scale)
        self.clear()
        if self.form.maximum == "sampled":
            step = part.sample()
            for head, columns in self.pieces():
                self.fold(self.products(step, head, columns), step, head, columns)

    @property
    def depth(self) -> int:
        return max(LANES, self.head_dim)

    @property
    def score_scales(self) -> Ref:
        assert self.vmem.worth is not None
        return self.vmem.worth

    def fold(self, products: Array, step: KeyChunk, head: int, columns: Slice) -> None:
        """Set the queries' digits so that later products have the maximum of these subtracted, to the nearest 127.

        products: int8 products of the keys of `step` and the queries `columns` of `head`, `[keys, queries]` int32.
        """
        most = INT8_MAX * INT8_MAX * LANES
        if step.masked:
            products = jnp.where(step.valid(products.shape), products, -most)
        top = jnp.max(products, axis=0, keepdims=True).astype(jnp.float32)
        total = -jnp.round(jnp.clip(top, -most, most) / INT8_MAX)  # to sum over the lanes
        quotient = jnp.floor(total / LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, total.shape[1]), 0).astype(jnp.float32)
        digits = quotient + jnp.where(lane < total - LANES * quotient, 1.0, 0.0)
        self.vmem.scaled[head, self.depth :, columns] = digits.astype(jnp.int8)
        self.vmem.top[0][head, :, columns] = broadcast_sublanes(
            -INT8_MAX * total * self.score_scales[head, :1, columns]
        )

    def products(self, step: KeyChunk, head: int, columns: Slice, *, folded: bool = False) -> Array:
        """Return the products of the int8 keys of `step` and the queries `columns` of `head`, `[keys, queries]` int32.

        folded: whether to subtract the maximum, by the digits that `fold` has set.
        """
        keys, depth = step.part.keys[step.rows, self.head_lanes(head)], self.depth
        if folded:
            keys = jnp.concatenate([keys, jnp.full((step.size, LANES), INT8_MAX, jnp.int8)], axis=1)
            depth += LANES
        return jax.lax.dot_general(
            keys, self.vmem.scaled[head, :depth, columns], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        )

    def scores(self, step: KeyChunk, head: int, columns: Slice) -> Array:
        return self.products(step, head, columns).astype(jnp.float32) * self.score_scales[head, :1, columns]

    def exponentiate(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> None:
        below = self.products(step, head, columns, folded=True).astype(jnp.float32).astype(jnp.bfloat16)
        exponents = below * self.score_scales[head, :1, columns].astype(jnp.bfloat16)
        if self.interpreted:
            # Chips raise two to a bfloat16 and round once. XLA on a CPU also rounds log 2 and its product.
            exponents = exponents.astype(jnp.float32)
        self.store_weights(jnp.exp2(exponents).astype(jnp.bfloat16), step, parity, head, columns)

    def sum_weights(self, weights: Array) -> Array | float:
        return 0.0  # by the second product

    def append_sum_rows(self, values: Array, step: KeyChunk) -> Array:
        valid = step.part.ones
        ones = jnp.ones((SUBLANES, values.shape[1]), values.dtype) if valid is None else valid[:, step.rows]
        return jnp.concatenate([values, ones], axis=0)

    def denominators(self, head: int) -> Array:
        return self.vmem.out[head, self.head_dim : self.head_dim + 1]
