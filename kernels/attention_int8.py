"""Attention with scores of int8 products: not exact, and asked for by name.

Keys lose their mean over tokens, which moves all scores of a query alike (SageAttention, https://arxiv.org/abs/2410.02367),
and are rounded with one scale a head; queries with one a token and head, enlarged until a score's scale is a power of
two. Values, and the weights on them, stay bfloat16. `docs/quality.md` says what it costs, in accuracy too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .attention_body import LOG2_E, Block, KeyBlock, KeyRun, spread
from .attention_reference import NEGATIVE, Keys, WholeKeys, valid_rows
from .chip import LANES, SUBLANES

LARGEST = 127
# Of a query's and of a head's largest value, lest a scale be zero: nor is their product.
LEAST = 1e-15
MANTISSA_BITS = 23


class Spread(NamedTuple):
    """Of the real ones of some keys, lane by lane `[..., lanes]`: their sum, the least and the greatest."""

    total: Array
    least: Array
    most: Array


def spread_of(x: Float[Array, "... kv_seq lanes"], real: Bool[Array, "... kv_seq"]) -> Spread:
    rows, real = x.astype(jnp.float32), real[..., None]
    return Spread(
        jnp.sum(jnp.where(real, rows, 0), axis=-2),
        jnp.min(jnp.where(real, rows, jnp.inf), axis=-2),
        jnp.max(jnp.where(real, rows, -jnp.inf), axis=-2),
    )


def together(spreads: Sequence[Spread]) -> Spread:
    """Of all keys of several parts."""
    total, least, most = (jnp.stack(each) for each in zip(*spreads, strict=True))
    return Spread(total.sum(0), least.min(0), most.max(0))


def scale_of(
    keys: Spread, count: Int[Array, "..."], head_dim: int
) -> tuple[Float[Array, "... heads"], Float[Array, "... lanes"]]:
    """What a whole number of `count` keys is worth in each head, so that none is above 127, and the keys' mean."""
    count = count[..., None]
    mean = keys.total / jnp.maximum(count, 1)
    widest = jnp.where(count > 0, jnp.maximum(keys.most - mean, mean - keys.least), 0)
    widest, middle = (x.reshape(*x.shape[:-1], -1, head_dim) for x in (widest, mean))
    # Whole numbers cannot be NaN, and a maximum need not be: what they are worth says it.
    return (jnp.max(widest, axis=-1) + LEAST) / LARGEST + 0 * jnp.sum(middle, axis=-1), mean


def whole_numbers(
    x: Float[Array, "... kv_seq lanes"], unit: Float[Array, "... heads"], mean: Float[Array, "... lanes"]
) -> Float[Array, "... kv_seq lanes"]:
    """Keys as whole numbers, in float32, without their mean. Of padding anything."""
    each = jnp.repeat(unit, x.shape[-1] // unit.shape[-1], axis=-1)
    return jnp.round((x.astype(jnp.float32) - mean[..., None, :]) / each[..., None, :])


def whole_keys(
    keys: Sequence[Keys], batch: int, head_dim: int
) -> tuple[list[Float[Array, "batch kv_seq lanes"]], Float[Array, "batch heads"], Float[Array, "batch lanes"]]:
    """Keys as whole numbers, without the mean of the real ones of all parts; what one of these is worth in each head;
    that mean.
    """
    whole = [part.keys for part in keys if isinstance(part.keys, WholeKeys)]
    if whole:
        return [each.numbers.astype(jnp.float32) for each in whole], whole[0].unit, whole[0].mean
    real = [valid_rows(part, batch) for part in keys]
    given = [part.keys for part in keys if not isinstance(part.keys, WholeKeys)]
    found = [spread_of(x[:, : part.rows], each) for x, part, each in zip(given, keys, real, strict=True)]
    unit, mean = scale_of(together(found), jnp.concatenate(real, axis=1).sum(axis=1), head_dim)
    return [whole_numbers(each, unit, mean) for each in given], unit, mean


def power_of_two(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The least power of two that is not below the positive `x`."""
    below = (1 << MANTISSA_BITS) - 1
    raised = (jax.lax.bitcast_convert_type(x, jnp.int32) + below) & ~below
    return jax.lax.bitcast_convert_type(raised, jnp.float32)


def rounded_queries(
    q: Float[Array, "..."], unit: Float[Array, "..."], axis: int
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Scaled queries as whole numbers of at most 127, in float32, and what a score of one is worth; a query's values
    are along `axis`, `unit` is what one of its keys' numbers is worth.
    """
    largest = jnp.max(jnp.abs(q), axis=axis, keepdims=True) + LEAST
    worth = power_of_two(largest * unit / LARGEST) + 0 * (unit + jnp.sum(q, axis=axis, keepdims=True))
    return jnp.round(q * (unit / worth)), worth


def rounded_keys(
    keys: Sequence[Keys], batch: int, head_dim: int
) -> tuple[list[Keys], Float[Array, "batch heads"], Float[Array, "batch lanes"]]:
    """The same keys in int8, and values in bfloat16; what a key's number is worth in each head; the mean they lost."""
    whole, unit, mean = whole_keys(keys, batch, head_dim)
    rounded = [
        replace(part, keys=number.astype(jnp.int8), values=part.values.astype(jnp.bfloat16))
        for part, number in zip(keys, whole, strict=True)
    ]
    return rounded, unit, mean


def with_means(
    sums: Float[Array, "batch heads q_seq"], q: Float[Array, "batch q_seq lanes"], means: Array, scale: float
) -> Float[Array, "batch heads q_seq"]:
    """The log-sum-exp of scores with the keys as they were."""
    by_head = (x.astype(jnp.float32).reshape(*x.shape[:-1], sums.shape[1], -1) for x in (q, means))
    added = scale * jnp.einsum("bqhd,bhd->bhq", *by_head, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(sums > NEGATIVE / 2, sums + added, sums)


def rounded(
    q: Float[Array, "batch q_seq lanes"], keys: Sequence[Keys], head_dim: int, scale: float
) -> tuple[Float[Array, "batch q_seq lanes"], list[Keys]]:
    """Queries and keys in float32, of which exact attention has int8's scores: the reference of the kernel."""
    whole, unit, mean = whole_keys(keys, len(q), head_dim)
    heads = q.astype(jnp.float32).reshape(*q.shape[:2], -1, head_dim) * (scale * LOG2_E)
    numbers, worth = rounded_queries(heads, unit[:, None, :, None], 3)
    each = jnp.repeat(unit, head_dim, axis=1)[:, None]
    queries = numbers * worth / (unit[:, None, :, None] * scale * LOG2_E)
    return queries.reshape(q.shape), [
        replace(part, keys=number * each + mean[:, None]) for part, number in zip(keys, whole, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Int8Block(Block):
    """One grid step. Keys are int8; `units` are what their numbers are worth, head by head, and `worth` in VMEM a
    score's, for each query.

    Products are 256 deep and heads 128 at most: further lanes of 127 beside the keys, and digits beside the queries,
    subtract the maximum inside the product. What comes out is small where weights are large, so that bfloat16 holds it.
    A row of ones below the values makes the second product sum the weights.
    """

    interpreted: bool = False

    def prepare(self, part: KeyBlock) -> None:
        for head in range(self.form.heads):
            numbers, worth = rounded_queries(self.scaled_query(head).T, self.units[head], 0)
            self.vmem.scaled[head, : self.depth] = numbers.astype(jnp.int8)
            self.vmem.worth[head] = spread(worth)
        self.clear()
        if self.form.maximum == "sampled":
            step = part.sample()
            for head, columns in self.pieces():
                self.fold(self.products(step, head, columns), step, head, columns)

    @property
    def depth(self) -> int:
        return max(LANES, self.head_dim)

    def fold(self, products: Array, step: KeyRun, head: int, columns: Any) -> None:
        """Digits that subtract the largest of these products, to the nearest 127, from those to come."""
        most = LARGEST * LARGEST * LANES
        if step.masked:
            products = jnp.where(step.valid(products.shape), products, -most)
        top = jnp.max(products, axis=0, keepdims=True).astype(jnp.float32)
        total = -jnp.round(jnp.clip(top, -most, most) / LARGEST)  # to sum over the lanes
        each = jnp.floor(total / LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, (LANES, total.shape[1]), 0).astype(jnp.float32)
        digits = each + jnp.where(lane < total - LANES * each, 1.0, 0.0)
        self.vmem.scaled[head, self.depth :, columns] = digits.astype(jnp.int8)
        self.vmem.top[0][head, :, columns] = spread(-LARGEST * total * self.vmem.worth[head, :1, columns])

    def products(self, step: KeyRun, head: int, columns: Any, *, folded: bool = False) -> Array:
        """`[keys, queries]` whole numbers."""
        keys, depth = step.part.keys[step.rows, self.lanes(head)], self.depth
        if folded:
            keys = jnp.concatenate([keys, jnp.full((step.size, LANES), LARGEST, jnp.int8)], axis=1)
            depth += LANES
        return jax.lax.dot_general(
            keys, self.vmem.scaled[head, :depth, columns], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        )

    def scores(self, step: KeyRun, head: int, columns: Any) -> Array:
        return self.products(step, head, columns).astype(jnp.float32) * self.vmem.worth[head, :1, columns]

    def exponents(self, step: KeyRun, parity: int, head: int, columns: Any) -> None:
        below = self.products(step, head, columns, folded=True).astype(jnp.float32).astype(jnp.bfloat16)
        exponents = below * self.vmem.worth[head, :1, columns].astype(jnp.bfloat16)
        if self.interpreted:
            # Chips raise two to a bfloat16 and round once. XLA on a CPU rounds log 2, and its product, before that.
            exponents = exponents.astype(jnp.float32)
        self.keep_weights(jnp.exp2(exponents).astype(jnp.bfloat16), step, parity, head, columns)

    def summed(self, weights: Array) -> Array | float:
        return 0.0  # by the second product

    def with_sums(self, values: Array, step: KeyRun) -> Array:
        given = step.part.ones
        ones = jnp.ones((SUBLANES, values.shape[1]), values.dtype) if given is None else given[:, step.rows]
        return jnp.concatenate([values, ones], axis=0)

    def totals(self, head: int) -> Array:
        return self.vmem.out[head, self.head_dim : self.head_dim + 1]
