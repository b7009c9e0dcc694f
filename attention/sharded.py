"""Sequence-parallel attention: all-to-all over heads (Ulysses), a ring over the rest.

Tokens are sharded on `sp`. Of the `sp` chips, as many as divide the heads exchange tokens for heads (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509), so that each holds a longer run of the sequence for fewer heads; the remaining factor
passes keys and values around a ring and merges partial softmaxes (Ring Attention, https://arxiv.org/abs/2310.01889).

Arrays are flat here, `[batch, tokens, heads * head_dim]`: the layout of the kernel and of the projections around it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from ..kernels import attention_int8
from ..kernels.attention_reference import Keys, WholeKeys, first
from .local import LocalAttention
from .prologue import HeadLayout, Prologue
from .tiles import Nearby

Stream = tuple[Array, Array, Array]  # queries, keys, values
Ready = tuple[Array, Any, Array]  # as attention takes them; keys may be `WholeKeys`

RING, ULYSSES = "ring", "ulysses"


def _split_sequence_axis(mesh: Mesh, heads: int) -> Mesh:
    """The same devices with `sp` split into `(ring, ulysses)`; the heads on a chip divide by `ulysses`."""
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    ulysses = math.gcd(heads // tp, sp)
    return Mesh(mesh.devices.reshape(dp, sp // ulysses, ulysses, tp), ("dp", RING, ULYSSES, "tp"))


def _exchanged(groups: Any, ulysses: int) -> Any:
    """A chip's tokens of all heads, `[batch, chips, tokens, lanes]`, to all tokens of its heads.

    The heads of each chip are exchanged as a leading dimension, which lands flat: `[tokens, lanes]` as the kernel reads
    it. Integer keys stay integers.
    """
    if isinstance(groups, WholeKeys):
        return replace(groups, numbers=_exchanged(groups.numbers, ulysses))
    if ulysses > 1:
        groups = jax.lax.all_to_all(groups, ULYSSES, 1, 1, tiled=True)
    return groups.reshape(len(groups), groups.shape[2] * ulysses, -1)


def _to_tokens(parts: list[Array], ulysses: int, layout: HeadLayout) -> Array:
    """The reverse of `_exchanged`, of all parts."""

    def exchanged(x: Array) -> Array:
        groups = x.reshape(len(x), ulysses, x.shape[1] // ulysses, -1)
        return jax.lax.all_to_all(groups, ULYSSES, 1, 1, tiled=True) if ulysses > 1 else groups

    return layout.join([exchanged(part) for part in parts])


def prepared(stream: Stream, ulysses: int, layout: HeadLayout, prologue: Prologue) -> list[Stream]:
    """Queries, keys and values of one sequence, each chip's heads together, part by part: `[batch, chips, tokens,
    lanes]` of each.
    """
    parts = _num_parts(stream, ulysses, layout)
    found = (layout.divide(x, ulysses, parts, *how) for x, how in zip(stream, prologue.of_each, strict=True))
    return list(zip(*found, strict=True))


def alone(stream: Stream, layout: HeadLayout, prologue: Prologue) -> list[Stream]:
    """As `prepared`, of a chip that exchanges nothing: `[batch, tokens, lanes]` of each."""
    return [(q[:, 0], k[:, 0], v[:, 0]) for q, k, v in prepared(stream, 1, layout, prologue)]


def _num_parts(stream: Stream, ulysses: int, layout: HeadLayout) -> int:
    return layout.parts(stream[0].shape[2] // ulysses) if ulysses > 1 else 1


def _specs(prologue: Prologue, tokens: Any) -> Prologue:
    """Where a prologue's arrays are: norms replicated, tables with their `tokens`, and rows where each has its own."""
    specs = jax.tree.map(lambda _: P(), prologue)
    if prologue.tables is None:
        return specs
    table = P("dp" if len(prologue.tables[0]) > 1 else None, tokens)
    return replace(specs, tables=(table, table))


def _merge(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
    """Joins two partial softmaxes over disjoint keys; `out` in float32."""
    (out1, log1), (out2, log2) = one, two
    top = jnp.maximum(log1, log2)
    weight1, weight2 = jnp.exp(log1 - top), jnp.exp(log2 - top)
    total = weight1 + weight2
    head_dim = out1.shape[2] // log1.shape[1]

    def share(weight: Array) -> Array:  # [batch, heads, q_seq] -> [batch, q_seq, lanes]
        return jnp.repeat(jnp.swapaxes(weight / total, 1, 2), head_dim, axis=2)

    return out1 * share(weight1) + out2 * share(weight2), top + jnp.log(total)


def _ring(
    attend: LocalAttention, ring_size: int, q: Array, passed: list[tuple[Any, Array, int | Array]], *replicated: Keys
) -> Array:
    """Attention of this chip's queries to the keys of every chip of the ring, and to `replicated` ones.

    `passed` around are keys and values of sequences, with the number of real tokens of each.
    """
    index = jax.lax.axis_index(RING)
    neighbours = [(chip, (chip + 1) % ring_size) for chip in range(ring_size)]
    pass_on = functools.partial(jax.lax.ppermute, axis_name=RING, perm=neighbours)

    def keys_of(owner: Array, k: Any, v: Array, length: int | Array) -> Keys:
        block = k.shape[1]
        certain = max(0, length - (ring_size - 1) * block) if isinstance(length, int) else 0
        return first(k, v, jnp.broadcast_to(jnp.clip(length - owner * block, 0, block), q.shape[:1]), certain=certain)

    merged = None
    for hop in range(ring_size):
        owner = (index - hop) % ring_size
        keys = [*(keys_of(owner, *each) for each in passed), *(replicated if hop == 0 else ())]
        out, log_sum = attend(q, keys, log_sums=True)
        assert log_sum is not None  # it was asked for
        part = out.astype(jnp.float32), log_sum
        merged = part if merged is None else _merge(merged, part)
        if hop + 1 < ring_size:
            passed = [(*pass_on((k, v)), length) for k, v, length in passed]
    assert merged is not None
    return merged[0].astype(q.dtype)


def attended(
    attend: LocalAttention,
    q: Array,
    keys: Sequence[tuple[Any, Array, int | Array]],
    at: int,
    nearby: Nearby | None,
    is_sparse: Array | None,
) -> Array:
    """Attention of the queries of sequence `at` to keys and values of all, with the number of real tokens of each."""
    if nearby is None:
        return attend(q, [first(*each) for each in keys], log_sums=False)[0]
    assert is_sparse is not None
    (k, v, _), *others = keys
    return nearby.attend(attend, q, (k, v), [first(*each) for each in others], is_sparse, is_own=at == 0)


def _lengths(length: int | Array, batch: int) -> Array:
    return jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch,))


def cross_attention(
    q: Float[Array, "batch q_seq lanes"],
    k: Float[Array, "batch kv_seq lanes"],
    v: Float[Array, "batch kv_seq lanes"],
    kv_length: int | Int[Array, " batch"],
    *,
    mesh: Mesh,
    attend: LocalAttention,
    layout: HeadLayout,
    prologue: Prologue,
) -> Float[Array, "batch q_seq lanes"]:
    """Queries sharded on `sp`, keys (a short text) replicated: nothing is exchanged."""

    def body(q: Array, k: Array, v: Array, lengths: Array, prologue: Prologue) -> Array:
        length = kv_length if isinstance(kv_length, int) else lengths
        ((q, k, v),) = alone((q, k, v), layout, prologue)
        return attend(q, [first(k, v, length)], log_sums=False)[0]

    queries, keys = P("dp", "sp", "tp"), P("dp", None, "tp")
    specs = (queries, keys, keys, P("dp"), _specs(prologue, None))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
    return mapped(q, k, v, _lengths(kv_length, len(q)), prologue)


def _own_heads(text: Stream, ulysses: int, parts: int, layout: HeadLayout, prologue: Prologue) -> list[Stream]:
    """A chip's heads of a replicated text, prepared, in the parts in which latents are exchanged."""
    chip = jax.lax.axis_index(ULYSSES)
    taken = (layout.take(x, chip, ulysses, parts, *how) for x, how in zip(text, prologue.of_each, strict=True))
    return [(q[:, None], k[:, None], v[:, None]) for q, k, v in zip(*taken, strict=True)]


def _whole_keys(
    keys: Sequence[Array],
    real: Sequence[Bool[Array, "batch _"]],
    count: Int[Array, " batch"],
    replicated: Sequence[bool],
    head_dim: int,
) -> list[WholeKeys]:
    """Keys `[batch, chips, tokens, lanes]` of all sequences as whole numbers, before chips exchange them: half of what
    they would else. Of a `replicated` one there are this chip's heads alone. `count` keys are real in all.
    """
    chip = jax.lax.axis_index(ULYSSES)
    own = [attention_int8.spread_of(x, some[:, None]) for x, some in zip(keys, real, strict=True)]
    sharded = [each for each, is_replicated in zip(own, replicated, strict=True) if not is_replicated]
    joined = attention_int8.together(sharded)
    axes = (RING, ULYSSES)
    low, high = jax.lax.pmax((-joined.least, joined.most), axes)
    every = [attention_int8.Spread(jax.lax.psum(joined.total, axes), -low, high)]
    for each, is_replicated in zip(own, replicated, strict=True):
        if is_replicated:
            every.append(jax.tree.map(lambda x: jax.lax.all_gather(x, ULYSSES, axis=1, tiled=True), each))
    unit, mean = attention_int8.scale_of(attention_int8.together(every), count[:, None], head_dim)

    def of_chip(x: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(x, chip, 1)

    found = []
    for x, is_replicated in zip(keys, replicated, strict=True):
        scale = (of_chip(unit), of_chip(mean)) if is_replicated else (unit, mean)
        numbers = attention_int8.whole_numbers(x, *scale).astype(jnp.int8)
        found.append(WholeKeys(numbers=numbers, unit=of_chip(unit)[:, 0], mean=of_chip(mean)[:, 0]))
    return found


def joint_attention(
    streams: Sequence[Stream],
    lengths: Sequence[int | Array],
    *,
    heads: int,
    replicated: Sequence[bool],
    mesh: Mesh,
    attend: LocalAttention,
    layout: HeadLayout,
    prologues: Sequence[Prologue],
    nearby: Nearby | None = None,
) -> tuple[Array, ...]:
    """Several sequences, each attending to all: sharded on `sp`, or `replicated` there as a text is.

    Each chip exchanges its tokens for heads and takes the same heads of a replicated sequence, whose result is gathered
    over heads again. Keys whose scores are of int8 products are rounded before. Of each the first `lengths` tokens are
    real, the same for all rows or per row. With `nearby`, for which the heads must divide over all of `sp`, the first
    sequence is in tiles.
    """
    split = _split_sequence_axis(mesh, heads)
    ring_size, ulysses = split.shape[RING], split.shape[ULYSSES]
    assert nearby is None or ring_size == 1

    def ready(stream: Stream, prologue: Prologue, is_replicated: bool) -> list[Stream]:
        if not is_replicated:
            return prepared(stream, ulysses, layout, prologue)
        return _own_heads(stream, ulysses, _num_parts(stream, ulysses, layout), layout, prologue)

    def body(
        streams: tuple[Stream, ...], rows: tuple[Array, ...], prologues: Any, is_sparse: Array | None
    ) -> tuple[Array, ...]:
        real = [given if isinstance(given, int) else each for given, each in zip(lengths, rows, strict=True)]
        divided = list(zip(*map(ready, streams, prologues, replicated), strict=True))
        chips = [1 if is_replicated else ulysses for is_replicated in replicated]
        sizes = [stream[0].shape[1] * count for stream, count in zip(streams, chips, strict=True)]
        num_keys = sum(min(n, size) if isinstance(n, int) else size for n, size in zip(real, sizes, strict=True))
        is_whole = layout.scores_of(num_keys) == "int8"
        chip = jax.lax.axis_index((RING, ULYSSES))

        def is_real(at: int, stream: Stream) -> Array:
            """Of this chip's tokens."""
            place = jnp.arange(stream[0].shape[1]) + (0 if replicated[at] else chip * stream[0].shape[1])
            if nearby is not None and at == 0:
                table = jnp.asarray(nearby.tiles.blocks(None).is_real)
                found = table.at[place].get(mode="fill", fill_value=False)
                return jnp.broadcast_to(found, (len(stream[0]), len(place)))
            return place < rows[at][:, None]

        def exchanged(part: tuple[Stream, ...]) -> tuple[Ready, ...]:
            keys: list[Any] = [k for _, k, _ in part]
            if is_whole:
                flags = [*map(is_real, range(len(streams)), streams)]
                keys = _whole_keys(keys, flags, jnp.stack(rows).sum(0), replicated, layout.head_dim)
            return tuple(
                (_exchanged(q, count), _exchanged(k, count), _exchanged(v, count))
                for (q, _, v), k, count in zip(part, keys, chips, strict=True)
            )

        parts = [*map(exchanged, divided)]

        def of_part(at: int, part: tuple[Ready, ...]) -> Array:
            queries, keys = part[at][0], [(k, v, length) for (_, k, v), length in zip(part, real, strict=True)]
            if ring_size == 1:
                return attended(attend, queries, keys, at, nearby, is_sparse)
            passed = [each for each, is_replicated in zip(keys, replicated, strict=True) if not is_replicated]
            kept = [first(*each) for each, is_replicated in zip(keys, replicated, strict=True) if is_replicated]
            return _ring(attend, ring_size, queries, passed, *kept)

        def gathered(out: Array) -> Array:
            return jax.lax.all_gather(out, ULYSSES, axis=1) if ulysses > 1 else out[:, None]

        outs = []
        for at, is_replicated in enumerate(replicated):
            found = [of_part(at, part) for part in parts]
            outs.append(layout.join([*map(gathered, found)]) if is_replicated else _to_tokens(found, ulysses, layout))
        return tuple(outs)

    axes_of = [None if is_replicated else (RING, ULYSSES) for is_replicated in replicated]
    tokens = tuple(P("dp", axes, "tp") for axes in axes_of)
    ways = tuple(_specs(prologue, axes) for prologue, axes in zip(prologues, axes_of, strict=True))
    specs = tuple((each,) * 3 for each in tokens), (P("dp"),) * len(tokens), ways, None if nearby is None else P()
    mapped = jax.shard_map(body, mesh=split, in_specs=specs, out_specs=tokens, check_vma=False)
    rows = tuple(_lengths(length, len(stream[0])) for length, stream in zip(lengths, streams, strict=True))
    # Kernels are lowered for the mesh in context, which has to be the split one here.
    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return mapped(tuple(streams), rows, tuple(prologues), None if nearby is None else nearby.is_sparse)
