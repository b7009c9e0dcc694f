"""Norm and rotary embedding of queries and keys, in the layout that chips exchange, and the way back.

The kernels `divide` and `join` take flat arrays, `[batch, tokens, heads * head_dim]`. Each makes one pass over memory.
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

from . import registry
from .dispatch import KernelUnsupported, uses_small_tiles
from .hardware import LANES, Interpret, Ref, matmul_precision, round_up

# Tokens of a grid step. With 5120 lanes both buffers of both arrays take 5 MiB of VMEM.
BLOCK = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Norm:
    """Norm of queries or keys: over each head, or over all heads if `weight` has all lanes.

    Its fields are arrays, or their specs in a tree of equal structure.
    """

    weight: Any  # `[head_dim]` or `[lanes]`
    bias: Any = None  # None: an RMS norm; else a layer norm, of the weight's shape
    eps: float = field(metadata={"static": True})


def check_support(head_dim: int, lanes: int) -> KernelUnsupported:
    """Return the reasons why the kernels cannot process heads of `head_dim`, with `lanes` of each array per chip."""
    reasons = []
    if head_dim not in (LANES // 2, LANES):
        reasons.append(f"heads have {head_dim} lanes, not {LANES // 2} or {LANES}")
    if lanes % LANES:
        reasons.append(f"a chip's heads have {lanes} lanes, not a multiple of {LANES}")
    return KernelUnsupported(kernel=registry.PROLOGUE, reasons=tuple(reasons))


def can_split_one_chip(lanes: int, groups: int, parts: int) -> bool:
    """Return whether `divide` can write the groups of one chip alone: it reads each part in blocks of the part's width.

    lanes: of one chip. groups, parts: as for `divide`.
    """
    return all(groups * start % width == 0 for start, width in _parts(lanes, parts))


def _parts(lanes: int, parts: int) -> list[tuple[int, int]]:
    """Return the start, in whole registers, and the width of each part of a chip's lanes.

    Widths are equal, or nearly so.
    """
    starts = [round_up(lanes * part // parts, LANES) for part in range(parts)]
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], lanes], strict=True)]


def _block() -> int:
    return BLOCK // (1 + uses_small_tiles(registry.PROLOGUE))


# --- the reference ----------------------------------------------------------------------------------------------------


def apply_norm(x: Float[Array, "... lanes"], norm: Norm, head_dim: int) -> Float[Array, "... lanes"]:
    """Return the norm of `x` `[..., lanes]` in float32, as `torch.nn.RMSNorm` and `LayerNorm` compute it.

    norm: its weight is as long as a head, or as all lanes. head_dim: not used, since the weight decides the length.
    """
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, norm.weight.size)
    if norm.bias is not None:
        parts = parts - jnp.mean(parts, axis=-1, keepdims=True)
    parts = parts * jax.lax.rsqrt(jnp.mean(jnp.square(parts), axis=-1, keepdims=True) + norm.eps) * norm.weight
    return (parts if norm.bias is None else parts + norm.bias).reshape(x.shape)


def split_heads_reference(
    x: Float[Array, "batch seq lanes"], groups: int, parts: int, norm: Norm | None, tables: Any, *, head_dim: int
) -> list[Float[Array, "batch groups seq _"]]:
    """Return the same as `divide` for all groups, computed by XLA.

    x, groups, parts, norm, tables, head_dim: as for `divide`.
    """
    result = x.astype(jnp.float32) if norm is None else apply_norm(x, norm, head_dim)
    if tables is not None:
        heads = result.reshape(*x.shape[:2], -1, head_dim)
        pairs = heads.reshape(*heads.shape[:3], -1, 2)
        partner = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(heads.shape)
        cosines, sines = (table[:, :, None].astype(jnp.float32) for table in tables)
        result = (heads * cosines + partner * sines).reshape(x.shape)
    result = result.astype(x.dtype)
    return [
        jnp.moveaxis(result[..., groups * start : groups * (start + width)].reshape(*x.shape[:2], groups, width), 2, 1)
        for start, width in _parts(x.shape[2] // groups, parts)
    ]


def merge_heads_reference(parts: list[Float[Array, "batch groups seq _"]]) -> Float[Array, "batch seq lanes"]:
    """Return the same as `join`, computed by XLA. parts: `[batch, groups, seq, lanes]` each."""
    batch, _, seq, _ = parts[0].shape
    return jnp.concatenate([jnp.moveaxis(part, 1, 2).reshape(batch, seq, -1) for part in parts], axis=2)


# --- the kernels ------------------------------------------------------------------------------------------------------


def split_heads(
    x: Float[Array, "batch seq lanes"],
    groups: int,
    parts: int,
    norm: Norm | None,
    tables: Any,
    *,
    head_dim: int,
    interpret: Interpret = False,
    chip: Int[Array, ""] | None = None,
) -> list[Float[Array, "batch written seq _"]]:
    """Return the norm and rotary embedding of `x` in parts of each chip's heads, `[batch, groups, seq, lanes]` each.

    It is computed in float32 and rounded once. The result is a list with one array per part.

    x: `[batch, seq, lanes]`. groups: chips that the heads are split over. parts: arrays that the heads of a chip are
      split into.
    norm: None for none. tables: cosines and sines of the rotary embedding, `[rows, seq, head_dim]` each; None for none.
    head_dim: 64 or 128; raises `NotImplementedError` for another.
    chip: the only group to write, which then is the only one in the result; None: all groups.
    interpret: how to run without a TPU, see `hardware.Interpret`.
    """
    batch, seq, lanes = x.shape
    check_support(head_dim, lanes // groups).check()
    places, block = _parts(lanes // groups, parts), _block()
    written = groups if chip is None else 1
    if chip is None:
        sources = [pl.BlockSpec((None, block, lanes), lambda row, at, chip: (row, at, 0))]
    else:
        sources = [
            pl.BlockSpec(
                (None, block, width), lambda row, at, chip, first=groups * start // width: (row, at, first + chip[0])
            )
            for start, width in places
        ]
    vectors = (None, None) if norm is None else (norm.weight, norm.bias)
    vectors = jax.tree.map(lambda v: v.astype(jnp.float32)[None], vectors)
    tables = jax.tree.map(lambda table: table.astype(jnp.float32), tables or (None, None))
    specs = (
        *jax.tree.map(lambda v: pl.BlockSpec(v.shape, lambda row, at, chip: (0, 0)), vectors),
        *jax.tree.map(lambda table: pl.BlockSpec((None, block, head_dim), _table_index(len(table))), tables),
    )
    outs = [pl.BlockSpec((None, written, block, width), lambda row, at, chip: (row, 0, at, 0)) for _, width in places]
    (results,) = pl.pallas_call(
        functools.partial(_divide_body, head_dim=head_dim, eps=norm.eps if norm else 0.0),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(seq, block)),
            in_specs=[tuple(sources), *specs],
            out_specs=[tuple(outs)],
        ),
        out_shape=[tuple(jax.ShapeDtypeStruct((batch, written, seq, width), x.dtype) for _, width in places)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=0,
            bytes_accessed=2 * x.nbytes + sum(batch // len(t) * t.nbytes for t in jax.tree.leaves(tables)),
        ),
        interpret=interpret,
        name=registry.PROLOGUE,
    )(jnp.zeros(1, jnp.int32) if chip is None else chip[None], (x,) * len(sources), *vectors, *tables)
    return list(results)


def _table_index(rows: int) -> Callable[..., tuple[Any, ...]]:
    """Return the index map of a table: its own row for each batch row, or the only row."""
    return lambda row, at, chip: (row if rows > 1 else 0, at, 0)


def _divide_body(
    chip: Ref, sources: tuple[Ref, ...], weight: Ref | None, bias: Ref | None, cosines: Ref | None, sines: Ref | None,
    outs: tuple[Ref, ...], *, head_dim: int, eps: float,
) -> None:  # fmt: skip
    """Compute `divide` for a block of tokens.

    sources: all lanes in one array, or one array per part with the lanes of one chip.
    weight, bias: None without a norm. cosines, sines: None without a rotary embedding.
    """
    rows = sources[0].shape[0]
    # Where each register of lanes is read and where it is written, in order.
    reads = [(source, lane) for source in sources for lane in range(0, source.shape[1], LANES)]
    writes = [(o, group, lane) for o in outs for group in range(o.shape[0]) for lane in range(0, o.shape[2], LANES)]
    lanes = len(reads) * LANES
    starts = range(0, lanes, LANES)
    widened = functools.partial(_widen, head_dim=head_dim)
    moments = functools.partial(
        _moments, is_centred=bias is not None, eps=eps, is_short=sources[0].dtype == jnp.bfloat16
    )

    def part(start: int) -> Array:
        source, lane = reads[start // LANES]
        return source[:, pl.ds(lane, LANES)].astype(jnp.float32)

    over_all = weight is not None and weight.shape[1] > head_dim
    middle, factor = 0.0, 1.0
    if over_all:
        middle, factor = moments(
            lambda function, _: jnp.sum(sum(function(part(start)) for start in starts), axis=1, keepdims=True) / lanes
        )
    rotation: tuple[Array, Array, Array] | None = None
    if cosines is not None and sines is not None:
        is_even = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) % 2 == 0
        by_cosines, by_sines = widened(cosines[...]), widened(sines[...])
        rotation = is_even, by_cosines, jnp.where(is_even, -by_sines, by_sines)
    for start in starts:
        y = part(start)

        def vector(ref: Ref, start: int = start) -> Array:
            return ref[:, pl.ds(start, LANES)] if over_all else widened(ref[...])

        if weight is not None:
            if not over_all:
                middle, factor = moments(lambda function, terms, y=y: _over_head(function(y), head_dim, terms))
            gain, offset = vector(weight), None if bias is None else vector(bias)
            y = (y - middle) * factor * gain
            y = y if offset is None else y + offset
        if rotation is not None:
            is_even, by_cosines, by_sines = rotation
            partner = jnp.where(is_even, pltpu.roll(y, LANES - 1, 1), pltpu.roll(y, 1, 1))
            y = y * by_cosines + partner * by_sines
        out, group, lane = writes[start // LANES]
        out[group, :, pl.ds(lane, LANES)] = y.astype(out.dtype)


def _widen(x: Float[Array, "rows head_dim"], head_dim: int) -> Float[Array, "rows lanes"]:
    """Return a vector of one head, repeated for all heads of a register."""
    return jnp.concatenate([x] * (LANES // head_dim), axis=1)


def _over_head(y: Float[Array, "rows lanes"], head_dim: int, terms: int) -> Array:
    """Return the mean over each head in a register of values that are sums of `terms` bfloat16 numbers.

    Three terms represent any float32. The mean is computed by the matrix unit: its products with ones are exact, its
    sums float32. Sums across lanes would take longer than everything else. Terms are concatenated, because the unit is
    deeper than a register is wide.
    """
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (terms * LANES, LANES), axis) % LANES for axis in (0, 1))
    is_same_head = jnp.where(rows // head_dim == columns // head_dim, 1.0, 0.0).astype(jnp.bfloat16)
    summands, rest = [], y
    for _ in range(terms):
        summands.append(rest.astype(jnp.bfloat16))
        rest = rest - summands[-1].astype(jnp.float32)
    total = jax.lax.dot(
        jnp.concatenate(summands, axis=1),
        is_same_head,
        preferred_element_type=jnp.float32,
        precision=matmul_precision(is_same_head.dtype),
    )
    return total / head_dim


def _moments(
    mean: Callable[[Callable[[Array], Array], int], Array], *, is_centred: bool, eps: float, is_short: bool
) -> tuple[Array | float, Array]:
    """Return the mean to subtract, 0 for an RMS norm, and the factor of a norm.

    mean: returns the mean of a function of the values, whose results are sums of the given number of bfloat16 numbers.
    is_short: whether values are bfloat16. Two terms then represent their squares exactly. They miss the square of a
      deviation by at most 2^-17, 1/256 of the rounding of the result.
    """
    middle = mean(lambda y: y, 1 if is_short else 3) if is_centred else 0.0
    return middle, jax.lax.rsqrt(mean(lambda y: jnp.square(y - middle), 2 if is_short else 3) + eps)


def merge_heads(
    parts: list[Float[Array, "batch groups seq _"]], *, interpret: Interpret = False
) -> Float[Array, "batch seq lanes"]:
    """Return all heads side by side again, `[batch, seq, lanes]`: the inverse of `divide` for all groups.

    parts: `[batch, groups, seq, lanes]` each. interpret: how to run without a TPU, see `hardware.Interpret`.
    """
    batch, groups, seq, _ = parts[0].shape
    lanes, block = groups * sum(part.shape[3] for part in parts), _block()
    return pl.pallas_call(
        _join_body,
        grid=(batch, pl.cdiv(seq, block)),
        in_specs=[
            tuple(pl.BlockSpec((None, groups, block, part.shape[3]), lambda row, at: (row, 0, at, 0)) for part in parts)
        ],
        out_specs=pl.BlockSpec((None, block, lanes), lambda row, at: (row, at, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, seq, lanes), parts[0].dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * sum(part.nbytes for part in parts)
        ),
        interpret=interpret,
        name=registry.JOIN,
    )(tuple(parts))


def _join_body(parts: tuple[Ref, ...], out: Ref) -> None:
    start = 0
    for part in parts:
        groups, _, width = part.shape
        for group in range(groups):
            out[:, pl.ds(start, width)] = part[group]
            start += width
