"""Sequence-parallel attention: all-to-all over heads (Ulysses), a ring over the rest.

Tokens lie on `sp`. Of the `sp` chips, as many as divide the heads exchange tokens for heads (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509), so that each holds a longer run of the sequence for fewer heads; the remaining factor
passes keys and values around a ring and merges partial softmaxes (Ring Attention, https://arxiv.org/abs/2310.01889).

Arrays are flat here, `[batch, tokens, heads * head_dim]`: the layout of the kernel and of the projections around it.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .keys import Keys, first

# (q, keys, log_sums=...) -> (out, log-sum-exp[batch, heads, q_seq] or None)
LocalAttention = Callable[..., tuple[Array, Array | None]]

RING, ULYSSES = "ring", "ulysses"


def _split_sequence_axis(mesh: Mesh, heads: int) -> Mesh:
    """The same devices with `sp` split into `(ring, ulysses)`; the heads on a chip divide by `ulysses`."""
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    ulysses = math.gcd(heads // tp, sp)
    return Mesh(mesh.devices.reshape(dp, sp // ulysses, ulysses, tp), ("dp", RING, ULYSSES, "tp"))


def _to_heads(x: Array, ulysses: int) -> Array:
    """A chip's tokens of all heads to all tokens of its heads.

    The columns of each chip are exchanged as a leading dimension, which lands flat: `[tokens, lanes]` as the kernel
    reads it.
    """
    if ulysses == 1:
        return x
    batch, seq, lanes = x.shape
    groups = jnp.moveaxis(x.reshape(batch, seq, ulysses, lanes // ulysses), 2, 1)
    return jax.lax.all_to_all(groups, ULYSSES, 1, 1, tiled=True).reshape(batch, seq * ulysses, -1)


def _to_tokens(x: Array, ulysses: int) -> Array:
    """The reverse of `_to_heads`."""
    if ulysses == 1:
        return x
    batch, seq, lanes = x.shape
    groups = jax.lax.all_to_all(x.reshape(batch, ulysses, seq // ulysses, lanes), ULYSSES, 1, 1, tiled=True)
    return jnp.moveaxis(groups, 1, 2).reshape(batch, seq // ulysses, -1)


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
    attend: LocalAttention, ring_size: int, q: Array, k: Array, v: Array, kv_length: int | Array, *beside: Keys
) -> Array:
    """Attention of this chip's queries to the keys of every chip of the ring, and to those `beside` them."""
    block = k.shape[1]
    index = jax.lax.axis_index(RING)
    neighbours = [(chip, (chip + 1) % ring_size) for chip in range(ring_size)]
    pass_on = functools.partial(jax.lax.ppermute, axis_name=RING, perm=neighbours)
    certain = max(0, kv_length - (ring_size - 1) * block) if isinstance(kv_length, int) else 0
    merged = None
    for hop in range(ring_size):
        owner = (index - hop) % ring_size
        length = jnp.broadcast_to(jnp.clip(kv_length - owner * block, 0, block), q.shape[:1])
        keys = [first(k, v, length, certain=certain), *(beside if hop == 0 else ())]
        out, log_sum = attend(q, keys, log_sums=True)
        assert log_sum is not None  # it was asked for
        part = out.astype(jnp.float32), log_sum
        merged = part if merged is None else _merge(merged, part)
        if hop + 1 < ring_size:
            k, v = pass_on(k), pass_on(v)
    assert merged is not None
    return merged[0].astype(q.dtype)


def _lengths(length: int | Array, batch: int) -> Array:
    return jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch,))


def self_attention(
    q: Float[Array, "batch seq lanes"],
    k: Float[Array, "batch seq lanes"],
    v: Float[Array, "batch seq lanes"],
    kv_length: int | Int[Array, " batch"],
    *,
    heads: int,
    mesh: Mesh,
    attend: LocalAttention,
) -> Float[Array, "batch seq lanes"]:
    """Queries and keys of one sequence, sharded on `sp`; batch on `dp`, heads on `tp`. `seq` divides by `sp`."""
    split = _split_sequence_axis(mesh, heads)
    ring_size, ulysses = split.shape[RING], split.shape[ULYSSES]

    def body(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        q, k, v = (_to_heads(x, ulysses) for x in (q, k, v))
        length = kv_length if isinstance(kv_length, int) else lengths
        if ring_size > 1:
            out = _ring(attend, ring_size, q, k, v, length)
        else:
            out = attend(q, [first(k, v, length)], log_sums=False)[0]
        return _to_tokens(out, ulysses)

    tokens = P("dp", (RING, ULYSSES), "tp")
    mapped = jax.shard_map(
        body, mesh=split, in_specs=(tokens, tokens, tokens, P("dp")), out_specs=tokens, check_vma=False
    )
    # Kernels are lowered for the mesh in context, which has to be the split one here.
    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return mapped(q, k, v, _lengths(kv_length, len(q)))


def cross_attention(
    q: Float[Array, "batch q_seq lanes"],
    k: Float[Array, "batch kv_seq lanes"],
    v: Float[Array, "batch kv_seq lanes"],
    kv_length: int | Int[Array, " batch"],
    *,
    mesh: Mesh,
    attend: LocalAttention,
) -> Float[Array, "batch q_seq lanes"]:
    """Queries sharded on `sp`, keys (a short text) whole on every chip of it: nothing is exchanged."""

    def body(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        length = kv_length if isinstance(kv_length, int) else lengths
        return attend(q, [first(k, v, length)], log_sums=False)[0]

    queries, keys = P("dp", "sp", "tp"), P("dp", None, "tp")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(queries, keys, keys, P("dp")), out_specs=queries, check_vma=False)
    return mapped(q, k, v, _lengths(kv_length, len(q)))


Stream = tuple[Array, Array, Array]


def joint_attention(
    latent: Stream,
    text: Stream,
    *,
    heads: int,
    num_tokens: int,
    text_length: int | Array,
    mesh: Mesh,
    attend: LocalAttention,
) -> tuple[Array, Array]:
    """Two sequences attending to both: latents sharded on `sp`, a text that is whole on every chip of it.

    Each chip exchanges latent tokens for heads and takes the same heads of the text; the text's result is gathered over
    heads again. Of the latents the first `num_tokens` are real, of the text `text_length` per row.
    """
    split = _split_sequence_axis(mesh, heads)
    ring_size, ulysses = split.shape[RING], split.shape[ULYSSES]

    def body(latent: Stream, text: Stream, lengths: Array) -> tuple[Array, Array]:
        q, k, v = (_to_heads(x, ulysses) for x in latent)
        lanes = q.shape[2]
        start = jax.lax.axis_index(ULYSSES) * lanes
        text_q, text_k, text_v = (jax.lax.dynamic_slice_in_dim(x, start, lanes, axis=2) for x in text)
        real = first(text_k, text_v, text_length if isinstance(text_length, int) else lengths)

        def attended(queries: Array) -> Array:
            if ring_size > 1:
                return _ring(attend, ring_size, queries, k, v, num_tokens, real)
            return attend(queries, [first(k, v, num_tokens), real], log_sums=False)[0]

        text_out = attended(text_q)
        text_out = jax.lax.all_gather(text_out, ULYSSES, axis=2, tiled=True) if ulysses > 1 else text_out
        return _to_tokens(attended(q), ulysses), text_out

    tokens, whole = P("dp", (RING, ULYSSES), "tp"), P("dp", None, "tp")
    mapped = jax.shard_map(
        body, mesh=split, in_specs=((tokens,) * 3, (whole,) * 3, P("dp")), out_specs=(tokens, whole), check_vma=False
    )
    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return mapped(latent, text, _lengths(text_length, len(text[0])))
