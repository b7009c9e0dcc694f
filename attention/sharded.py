"""Sequence-parallel attention: all-to-all over heads (Ulysses), a ring over the rest.

Tokens are sharded on `sp`. As many of the `sp` chips as divide the heads exchange tokens for heads (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509), so that each holds a longer part of the sequence for fewer heads. The remaining
factor passes keys and values around a ring and merges partial softmaxes (Ring Attention,
https://arxiv.org/abs/2310.01889).

Arrays are flat, `[batch, tokens, heads * head_dim]`: the layout of the kernel and of the projections around it.
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
from ..kernels.attention_reference import Int8Keys, Keys, keys_of_length
from .local import LocalAttention
from .prologue import HeadLayout, Prologue
from .tiles import SlidingTileMask

Stream = tuple[Array, Array, Array]  # queries, keys, values
PreparedStream = tuple[Array, Array | Int8Keys, Array]  # a prepared and exchanged `Stream`

RING, ULYSSES = "ring", "ulysses"


def _split_sequence_axis(mesh: Mesh, heads: int) -> Mesh:
    """Return the same devices with `sp` split into `(ring, ulysses)`; `ulysses` divides the heads of a chip."""
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    ulysses = math.gcd(heads // tp, sp)
    return Mesh(mesh.devices.reshape(dp, sp // ulysses, ulysses, tp), ("dp", RING, ULYSSES, "tp"))


def _exchange(groups: Any, ulysses: int) -> Any:
    """Exchange tokens of all heads, `[batch, chips, tokens, lanes]`, for all tokens of a chip's heads; return these.

    The heads of each chip are exchanged as a leading dimension, so that the result is flat, `[tokens, lanes]`, as the
    kernel reads it. Integer keys stay integers.
    """
    if isinstance(groups, Int8Keys):
        return replace(groups, numbers=_exchange(groups.numbers, ulysses))
    if ulysses > 1:
        groups = jax.lax.all_to_all(groups, ULYSSES, 1, 1, tiled=True)
    return groups.reshape(len(groups), groups.shape[2] * ulysses, -1)


def _to_tokens(parts: list[Array], ulysses: int, layout: HeadLayout) -> Array:
    """Return the tokens of all heads, `[batch, tokens, lanes]`: the reverse of `_exchange` for all parts."""

    def exchange(x: Array) -> Array:
        groups = x.reshape(len(x), ulysses, x.shape[1] // ulysses, -1)
        return jax.lax.all_to_all(groups, ULYSSES, 1, 1, tiled=True) if ulysses > 1 else groups

    return layout.join([exchange(part) for part in parts])


def prepare_stream(stream: Stream, ulysses: int, layout: HeadLayout, prologue: Prologue) -> list[Stream]:
    """Return queries, keys and values of one `stream`, prepared, part by part: `[batch, chips, tokens, lanes]` each.

    ulysses: chips that exchange tokens for heads; the second dimension has the heads of each of them.
    layout, prologue: preparation of the heads.
    """
    parts = _num_parts(stream, ulysses, layout)
    divided = (layout.divide(x, ulysses, parts, *how) for x, how in zip(stream, prologue.per_array, strict=True))
    return list(zip(*divided, strict=True))


def prepare_unsharded(stream: Stream, layout: HeadLayout, prologue: Prologue) -> list[Stream]:
    """Return the same as `prepared` for a chip that exchanges nothing: `[batch, tokens, lanes]` each.

    stream, layout, prologue: as for `prepared`.
    """
    return [(q[:, 0], k[:, 0], v[:, 0]) for q, k, v in prepare_stream(stream, 1, layout, prologue)]


def _num_parts(stream: Stream, ulysses: int, layout: HeadLayout) -> int:
    """Return the number of parts in which chips exchange a stream."""
    return layout.parts(stream[0].shape[2] // ulysses) if ulysses > 1 else 1


def _specs(prologue: Prologue, tokens: Any) -> Prologue:
    """Return the partition specs of a prologue: norms replicated, tables sharded like `tokens`, rows on `dp`."""
    specs = jax.tree.map(lambda _: P(), prologue)
    if prologue.tables is None:
        return specs
    table = P("dp" if len(prologue.tables[0]) > 1 else None, tokens)
    return replace(specs, tables=(table, table))


def _merge(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge two partial softmaxes over disjoint keys: float32 `[batch, tokens, lanes]` and log-sum-exps."""
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
    """Return the attention of this chip's queries to the keys of every chip of the ring, and to `replicated` ones.

    passed: keys, values and number of valid tokens of each sequence; keys and values are passed around the ring.
    """
    index = jax.lax.axis_index(RING)
    neighbours = [(chip, (chip + 1) % ring_size) for chip in range(ring_size)]
    pass_on = functools.partial(jax.lax.ppermute, axis_name=RING, perm=neighbours)

    def make_keys(owner: Array, k: Any, v: Array, length: int | Array) -> Keys:
        block = k.shape[1]
        certain = max(0, length - (ring_size - 1) * block) if isinstance(length, int) else 0
        return keys_of_length(
            k, v, jnp.broadcast_to(jnp.clip(length - owner * block, 0, block), q.shape[:1]), certain=certain
        )

    merged = None
    for hop in range(ring_size):
        owner = (index - hop) % ring_size
        keys = [*(make_keys(owner, *key) for key in passed), *(replicated if hop == 0 else ())]
        out, log_sum = attend(q, keys, log_sums=True)
        assert log_sum is not None  # it was asked for
        part = out.astype(jnp.float32), log_sum
        merged = part if merged is None else _merge(merged, part)
        if hop + 1 < ring_size:
            passed = [(*pass_on((k, v)), length) for k, v, length in passed]
    assert merged is not None
    return merged[0].astype(q.dtype)


def attend_stream(
    attend: LocalAttention,
    q: Array,
    keys: Sequence[tuple[Any, Array, int | Array]],
    at: int,
    nearby: SlidingTileMask | None,
    is_sparse: Array | None,
) -> Array:
    """Return the attention of the queries of sequence `at` to all keys and values, `[batch, tokens, lanes]`.

    attend: attention of one chip. q: queries, `[batch, tokens, lanes]`.
    keys: keys, values and number of valid tokens of each sequence.
    nearby, is_sparse: attention mask of the first sequence and whether it is sparse, or None.
    """
    if nearby is None:
        return attend(q, [keys_of_length(*key) for key in keys], log_sums=False)[0]
    assert is_sparse is not None
    (k, v, _), *others = keys
    return nearby.attend(attend, q, (k, v), [keys_of_length(*other) for other in others], is_sparse, is_own=at == 0)


def _lengths(length: int | Array, batch: int) -> Array:
    """Return `length` as one int32 per batch row, `[batch]`."""
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
    """Return the attention of queries sharded on `sp` to replicated keys (a short text). No chip exchanges anything.

    q, k, v: `[batch, seq, lanes]`. kv_length: valid keys, in all batch rows or per row.
    mesh: batch is on `dp`, heads on `tp`. attend: attention of one chip. layout, prologue: preparation of the heads.
    """

    def body(q: Array, k: Array, v: Array, lengths: Array, prologue: Prologue) -> Array:
        length = kv_length if isinstance(kv_length, int) else lengths
        ((q, k, v),) = prepare_unsharded((q, k, v), layout, prologue)
        return attend(q, [keys_of_length(k, v, length)], log_sums=False)[0]

    queries, keys = P("dp", "sp", "tp"), P("dp", None, "tp")
    specs = (queries, keys, keys, P("dp"), _specs(prologue, None))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
    return mapped(q, k, v, _lengths(kv_length, len(q)), prologue)


def _own_heads(text: Stream, ulysses: int, parts: int, layout: HeadLayout, prologue: Prologue) -> list[Stream]:
    """Return this chip's heads of a replicated text, prepared, in the parts in which latents are exchanged."""
    chip = jax.lax.axis_index(ULYSSES)
    taken = (layout.take(x, chip, ulysses, parts, *how) for x, how in zip(text, prologue.per_array, strict=True))
    return [(q[:, None], k[:, None], v[:, None]) for q, k, v in zip(*taken, strict=True)]


def _quantize_keys(
    keys: Sequence[Array],
    real: Sequence[Bool[Array, "batch _"]],
    count: Int[Array, " batch"],
    replicated: Sequence[bool],
    head_dim: int,
) -> list[Int8Keys]:
    """Return the keys of all sequences quantized, before chips exchange them: half of the bytes of bfloat16.

    keys: `[batch, chips, tokens, lanes]`. real: mask of the valid keys of each. count: valid keys of all sequences.
    replicated: whether a sequence is replicated; it has only this chip's heads. head_dim: lanes of a head.
    """
    chip = jax.lax.axis_index(ULYSSES)
    spreads = [attention_int8.compute_key_stats(x, mask[:, None]) for x, mask in zip(keys, real, strict=True)]
    sharded = [spread for spread, is_replicated in zip(spreads, replicated, strict=True) if not is_replicated]
    joined = attention_int8.merge_key_stats(sharded)
    axes = (RING, ULYSSES)
    low, high = jax.lax.pmax((-joined.least, joined.most), axes)
    all_spreads = [attention_int8.KeyStats(jax.lax.psum(joined.total, axes), -low, high)]
    for spread, is_replicated in zip(spreads, replicated, strict=True):
        if is_replicated:
            all_spreads.append(jax.tree.map(lambda x: jax.lax.all_gather(x, ULYSSES, axis=1, tiled=True), spread))
    unit, mean = attention_int8.compute_key_scale(attention_int8.merge_key_stats(all_spreads), count[:, None], head_dim)

    def of_chip(x: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(x, chip, 1)

    quantized = []
    for x, is_replicated in zip(keys, replicated, strict=True):
        scale = (of_chip(unit), of_chip(mean)) if is_replicated else (unit, mean)
        numbers = attention_int8.quantize_keys(x, *scale).astype(jnp.int8)
        quantized.append(Int8Keys(numbers=numbers, unit=of_chip(unit)[:, 0], mean=of_chip(mean)[:, 0]))
    return quantized


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
    nearby: SlidingTileMask | None = None,
) -> tuple[Array, ...]:
    """Return the attention of several sequences, each to all of them: `[batch, seq, lanes]` of each.

    Each chip exchanges its tokens for heads. It takes the same heads of a replicated sequence, whose result is gathered
    over heads. Keys with int8 scores are quantized before the exchange.

    streams: queries, keys and values of each sequence, `[batch, seq, lanes]` each.
    lengths: valid tokens of each sequence, in all batch rows or per row. heads: number of heads, over all chips.
    replicated: whether each sequence is replicated on `sp`, as a text is, or sharded. mesh: batch on `dp`, heads on
      `tp`.
    attend: attention of one chip. layout, prologues: preparation of the heads of each sequence.
    nearby: attention mask of the first sequence, in tiles; heads must then divide over all of `sp`. None: all keys.
    """
    split = _split_sequence_axis(mesh, heads)
    ring_size, ulysses = split.shape[RING], split.shape[ULYSSES]
    assert nearby is None or ring_size == 1

    def ready(stream: Stream, prologue: Prologue, is_replicated: bool) -> list[Stream]:
        if not is_replicated:
            return prepare_stream(stream, ulysses, layout, prologue)
        return _own_heads(stream, ulysses, _num_parts(stream, ulysses, layout), layout, prologue)

    def body(
        streams: tuple[Stream, ...], rows: tuple[Array, ...], prologues: Any, is_sparse: Array | None
    ) -> tuple[Array, ...]:
        real = [length if isinstance(length, int) else row for length, row in zip(lengths, rows, strict=True)]
        divided = list(zip(*map(ready, streams, prologues, replicated), strict=True))
        chips = [1 if is_replicated else ulysses for is_replicated in replicated]
        sizes = [stream[0].shape[1] * count for stream, count in zip(streams, chips, strict=True)]
        num_keys = sum(min(n, size) if isinstance(n, int) else size for n, size in zip(real, sizes, strict=True))
        is_int8 = layout.scores_of(num_keys) == "int8"
        chip = jax.lax.axis_index((RING, ULYSSES))

        def is_real(at: int, stream: Stream) -> Array:
            """Return the mask of this chip's valid tokens of sequence `at`, `[batch, tokens]`."""
            place = jnp.arange(stream[0].shape[1]) + (0 if replicated[at] else chip * stream[0].shape[1])
            if nearby is not None and at == 0:
                table = jnp.asarray(nearby.tiles.blocks(None).valid_mask)
                mask = table.at[place].get(mode="fill", fill_value=False)
                return jnp.broadcast_to(mask, (len(stream[0]), len(place)))
            return place < rows[at][:, None]

        def exchange(part: tuple[Stream, ...]) -> tuple[PreparedStream, ...]:
            keys: list[Any] = [k for _, k, _ in part]
            if is_int8:
                flags = [*map(is_real, range(len(streams)), streams)]
                keys = _quantize_keys(keys, flags, jnp.stack(rows).sum(0), replicated, layout.head_dim)
            return tuple(
                (_exchange(q, count), _exchange(k, count), _exchange(v, count))
                for (q, _, v), k, count in zip(part, keys, chips, strict=True)
            )

        parts = [*map(exchange, divided)]

        def gather(out: Array) -> Array:
            return jax.lax.all_gather(out, ULYSSES, axis=1) if ulysses > 1 else out[:, None]

        outs = []
        for index, is_replicated in enumerate(replicated):
            results = []
            for part in parts:
                queries, keys = part[index][0], [(k, v, n) for (_, k, v), n in zip(part, real, strict=True)]
                if ring_size == 1:
                    results.append(attend_stream(attend, queries, keys, index, nearby, is_sparse))
                    continue
                passed = [key for key, is_whole in zip(keys, replicated, strict=True) if not is_whole]
                kept = [keys_of_length(*key) for key, is_whole in zip(keys, replicated, strict=True) if is_whole]
                results.append(_ring(attend, ring_size, queries, passed, *kept))
            joined = layout.join([*map(gather, results)]) if is_replicated else _to_tokens(results, ulysses, layout)
            outs.append(joined)
        return tuple(outs)

    axes_of = [None if is_replicated else (RING, ULYSSES) for is_replicated in replicated]
    tokens = tuple(P("dp", axes, "tp") for axes in axes_of)
    norms = tuple(_specs(prologue, axes) for prologue, axes in zip(prologues, axes_of, strict=True))
    specs = tuple((spec,) * 3 for spec in tokens), (P("dp"),) * len(tokens), norms, None if nearby is None else P()
    mapped = jax.shard_map(body, mesh=split, in_specs=specs, out_specs=tokens, check_vma=False)
    rows = tuple(_lengths(length, len(stream[0])) for length, stream in zip(lengths, streams, strict=True))
    # Kernels are lowered for the mesh in context, which must be the split one here.
    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return mapped(tuple(streams), rows, tuple(prologues), None if nearby is None else nearby.is_sparse)
