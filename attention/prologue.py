"""What queries, keys and values go through between their projection and attention, and back: norm, rotary embedding,
and the layout that chips exchange. Flat, `[tokens, heads * head_dim]`, each in one pass over memory.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .kernel_body import LANES

# Tokens a grid step: with 5120 lanes 5 MiB of VMEM, both buffers of both arrays.
BLOCK = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Norm:
    """RMS norm over each head, or over all heads where `weight` `[lanes]` is as long; with a `bias` a layer norm.

    Of arrays, or of anything that stands for them in a tree.
    """

    weight: Any
    bias: Any = None
    eps: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prologue:
    """Norms of queries and keys, then the rotary embedding of both: cosines and sines `[seq, head_dim]` of every token.

    The pairs `(2i, 2i + 1)` of a head rotate; each angle stands twice in the tables.
    """

    query_norm: Norm | None = None
    key_norm: Norm | None = None
    tables: Any = None

    @property
    def of_each(self) -> tuple[tuple[Norm | None, Any], ...]:
        """Norm and tables of queries, of keys, of values."""
        return (self.query_norm, self.tables), (self.key_norm, self.tables), (None, None)


NO_PROLOGUE = Prologue()


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """How a chip's arrays of heads of `head_dim` are prepared; `kernel`: by Pallas, where the shape allows it."""

    head_dim: int
    kernel: bool
    interpret: bool = False

    def parts(self, lanes: int) -> int:
        """In how many parts chips exchange what is `lanes` wide for each: two, so that one part's exchange runs beside
        the other's attention, or one where that is not whole registers.
        """
        return 2 if self._by_kernel(lanes // 2) else 1

    def divide(
        self, x: Float[Array, "batch seq lanes"], groups: int, parts: int, norm: Norm | None = None, tables: Any = None
    ) -> list[Float[Array, "batch groups seq lanes_of_group"]]:
        """Norm and rotary embedding of `x` in float32, rounded once. The heads follow each other in parts, and those of
        a part in `groups`, one for each chip.
        """
        if groups * parts == 1 and norm is None and tables is None:
            return [x[:, None]]
        if self._by_kernel(x.shape[2] // groups // parts):
            return _divide(x, groups, parts, norm, tables, head_dim=self.head_dim, interpret=self.interpret)
        x = _prepared(x, norm, tables, self.head_dim)
        divided = jnp.moveaxis(x.reshape(*x.shape[:2], parts, groups, -1), 1, 3)
        return [divided[:, part] for part in range(parts)]

    def take(
        self, x: Float[Array, "batch seq lanes"], chip: Int[Array, ""], groups: int, parts: int, norm: Any, tables: Any
    ) -> list[Float[Array, "batch seq lanes_of_group"]]:
        """Of what `divide` gives, the groups of one `chip` alone: what is whole on every chip is not all prepared."""
        alone = norm is None or norm.weight.size == self.head_dim
        if alone and self._by_kernel(x.shape[2] // groups // parts):
            how = {"head_dim": self.head_dim, "interpret": self.interpret, "chip": chip}
            return [part[:, 0] for part in _divide(x, groups, parts, norm, tables, **how)]
        divided = self.divide(x, groups, parts, norm, tables)
        return [jax.lax.dynamic_index_in_dim(part, chip, 1, keepdims=False) for part in divided]

    def join(self, parts: list[Float[Array, "batch groups seq lanes_of_group"]]) -> Float[Array, "batch seq lanes"]:
        """All heads side by side again."""
        batch, groups, seq, lanes = parts[0].shape
        if groups * len(parts) == 1:
            return parts[0][:, 0]
        if self._by_kernel(lanes):
            return _join(parts, interpret=self.interpret)
        return jnp.moveaxis(jnp.stack(parts, axis=1), 3, 1).reshape(batch, seq, -1)

    def _by_kernel(self, lanes: int) -> bool:
        return self.kernel and self.head_dim in (LANES // 2, LANES) and lanes % LANES == 0


def normed(x: Float[Array, "... lanes"], norm: Norm, head_dim: int) -> Float[Array, "... lanes"]:
    """In float32, as `torch.nn.RMSNorm` and `LayerNorm` do it."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, norm.weight.size)
    if norm.bias is not None:
        parts = parts - jnp.mean(parts, axis=-1, keepdims=True)
    parts = parts * jax.lax.rsqrt(jnp.mean(jnp.square(parts), axis=-1, keepdims=True) + norm.eps) * norm.weight
    return (parts if norm.bias is None else parts + norm.bias).reshape(x.shape)


def _prepared(x: Array, norm: Norm | None, tables: Any, head_dim: int) -> Array:
    found = x.astype(jnp.float32) if norm is None else normed(x, norm, head_dim)
    if tables is not None:
        heads = found.reshape(*x.shape[:2], -1, head_dim)
        pairs = heads.reshape(*heads.shape[:3], -1, 2)
        partner = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(heads.shape)
        cosines, sines = (table[None, :, None].astype(jnp.float32) for table in tables)
        found = (heads * cosines + partner * sines).reshape(x.shape)
    return found.astype(x.dtype)


def _divide(
    x: Array,
    groups: int,
    parts: int,
    norm: Norm | None,
    tables: Any,
    *,
    head_dim: int,
    interpret: bool,
    chip: Array | None = None,
) -> list[Array]:
    """All groups `[batch, groups, seq, width]` of each part, or those of one `chip` `[batch, 1, seq, width]`."""
    batch, seq, lanes = x.shape
    width = lanes // groups // parts
    vectors = [] if norm is None else [v for v in (norm.weight, norm.bias) if v is not None]
    vectors = [v.astype(jnp.float32)[None] for v in vectors]
    tables = [table.astype(jnp.float32) for table in tables or ()]
    how = _Preparation(head_dim=head_dim, num_vectors=len(vectors), rotates=bool(tables), eps=norm.eps if norm else 0.0)
    written = groups if chip is None else 1
    if chip is None:
        sources = [pl.BlockSpec((None, BLOCK, lanes), lambda row, at, chip: (row, at, 0))]
    else:
        sources = [
            pl.BlockSpec((None, BLOCK, width), lambda row, at, chip, p=p: (row, at, p * groups + chip[0]))
            for p in range(parts)
        ]
    part = pl.BlockSpec((None, written, BLOCK, width), lambda row, at, chip: (row, 0, at, 0))
    found = pl.pallas_call(
        functools.partial(_divide_body, how, len(sources)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(seq, BLOCK)),
            in_specs=[
                *sources,
                *(pl.BlockSpec(v.shape, lambda row, at, chip: (0, 0)) for v in vectors),
                *(pl.BlockSpec((BLOCK, head_dim), lambda row, at, chip: (at, 0)) for _ in tables),
            ],
            out_specs=[part] * parts,
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, written, seq, width), x.dtype)] * parts,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size, transcendentals=0, bytes_accessed=2 * x.nbytes + batch * sum(t.nbytes for t in tables)
        ),
        interpret=interpret,
        name="attention_prologue",
    )(jnp.zeros(1, jnp.int32) if chip is None else chip[None], *[x] * len(sources), *vectors, *tables)
    return list(found)


@dataclass(frozen=True, kw_only=True)
class _Preparation:
    """What a block goes through: `num_vectors` 1 for an RMS norm (its weight), 2 for a layer norm (and its bias)."""

    head_dim: int
    num_vectors: int
    rotates: bool
    eps: float

    def widened(self, x: Float[Array, "rows head_dim"]) -> Float[Array, "rows lanes"]:
        """What holds for each head, for all heads of a register."""
        return jnp.concatenate([x] * (LANES // self.head_dim), axis=1)

    def over_head(self, y: Float[Array, "rows lanes"]) -> Array:
        """The mean of each head in a register."""
        if self.head_dim == LANES:
            return jnp.sum(y, axis=1, keepdims=True) / LANES
        is_left = jax.lax.broadcasted_iota(jnp.int32, y.shape, 1) < self.head_dim
        left, right = (jnp.sum(jnp.where(side, y, 0.0), axis=1, keepdims=True) for side in (is_left, ~is_left))
        return jnp.where(is_left, left, right) / self.head_dim

    def moments(self, mean: Callable[[Callable[[Array], Array]], Array]) -> tuple[Array | float, Array]:
        """What is taken off, and what is multiplied by; `mean` is that of a function of the values."""
        middle = mean(lambda y: y) if self.num_vectors == 2 else 0.0
        return middle, jax.lax.rsqrt(mean(lambda y: jnp.square(y - middle)) + self.eps)


def _divide_body(how: _Preparation, num_sources: int, chip: Any, *refs: Any) -> None:
    sources, refs = refs[:num_sources], refs[num_sources:]
    vectors, refs = refs[: how.num_vectors], refs[how.num_vectors :]
    tables, outs = (refs[:2], refs[2:]) if how.rotates else ((), refs)
    rows, each = sources[0].shape
    lanes = num_sources * each
    groups, _, width = outs[0].shape
    starts = range(0, lanes, LANES)

    def part(start: int) -> Array:
        return sources[start // each][:, pl.ds(start % each, LANES)].astype(jnp.float32)

    over_all = bool(vectors) and vectors[0].shape[1] > how.head_dim
    middle, factor = 0.0, 1.0
    if over_all:
        middle, factor = how.moments(
            lambda function: jnp.sum(sum(function(part(start)) for start in starts), axis=1, keepdims=True) / lanes
        )
    if tables:
        is_even = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) % 2 == 0
        cosines, sines = (how.widened(table[...]) for table in tables)
        sines = jnp.where(is_even, -sines, sines)
    for start in starts:
        y = part(start)
        if vectors:
            if not over_all:
                middle, factor = how.moments(lambda function, y=y: how.over_head(function(y)))
            weight, *bias = (v[:, pl.ds(start, LANES)] if over_all else how.widened(v[...]) for v in vectors)
            y = (y - middle) * factor * weight
            y = y + bias[0] if bias else y
        if tables:
            partner = jnp.where(is_even, pltpu.roll(y, LANES - 1, 1), pltpu.roll(y, 1, 1))
            y = y * cosines + partner * sines
        out_part, group = divmod(start // width, groups)
        outs[out_part][group, :, pl.ds(start % width, LANES)] = y.astype(outs[0].dtype)


def _join(parts: list[Array], *, interpret: bool) -> Array:
    batch, groups, seq, width = parts[0].shape
    lanes = len(parts) * groups * width

    def body(*refs: Any) -> None:
        *parts, out = refs
        for index, part in enumerate(parts):
            for group in range(groups):
                out[:, pl.ds((index * groups + group) * width, width)] = part[group]

    return pl.pallas_call(
        body,
        grid=(batch, pl.cdiv(seq, BLOCK)),
        in_specs=[pl.BlockSpec((None, groups, BLOCK, width), lambda row, at: (row, 0, at, 0))] * len(parts),
        out_specs=pl.BlockSpec((None, BLOCK, lanes), lambda row, at: (row, at, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, seq, lanes), parts[0].dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * len(parts) * parts[0].nbytes),
        interpret=interpret,
        name="attention_join",
    )(*parts)
