"""Sequence-parallel attention: all-to-all over heads (Ulysses), a ring over the rest.

Tokens lie on `sp`. Of the `sp` chips, as many as divide the heads exchange tokens for heads (DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509), so that each holds a longer run of the sequence for fewer heads; the remaining factor
passes keys and values around a ring and merges partial softmaxes (Ring Attention, https://arxiv.org/abs/2310.01889).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

# (q, k, v, kv_length[batch] or None, log_sums=...) -> (out, log-sum-exp[batch, heads, q_seq] or None)
LocalAttention = Callable[..., tuple[Array, Array]]

RING, ULYSSES = "ring", "ulysses"


def _split_sequence_axis(mesh: Mesh, heads: int) -> Mesh:
    """The same devices with `sp` split into `(ring, ulysses)`; the heads on a chip divide by `ulysses`."""
    dp, sp, tp = (mesh.shape[axis] for axis in ("dp", "sp", "tp"))
    if heads % tp:
        raise ValueError(f"{heads} heads do not divide over tp={tp}.")
    ulysses = math.gcd(heads // tp, sp)
    return Mesh(mesh.devices.reshape(dp, sp // ulysses, ulysses, tp), ("dp", RING, ULYSSES, "tp"))


def _merge(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
    """Joins two partial softmaxes over disjoint keys; `out` in float32."""
    (out1, log1), (out2, log2) = one, two
    top = jnp.maximum(log1, log2)
    weight1, weight2 = jnp.exp(log1 - top), jnp.exp(log2 - top)
    total = weight1 + weight2

    def share(weight: Array) -> Array:  # [batch, heads, q_seq] -> [batch, q_seq, heads, 1]
        return jnp.swapaxes(weight / total, 1, 2)[..., None]

    return out1 * share(weight1) + out2 * share(weight2), top + jnp.log(total)


def _ring(
    attend: LocalAttention, ring_size: int, q: Array, k: Array, v: Array, kv_length: Array
) -> tuple[Array, Array]:
    """Attention of this chip's queries to the keys of every chip of the ring; float32, with the log-sum-exp."""
    block = k.shape[1]
    index = jax.lax.axis_index(RING)
    neighbours = [(chip, (chip + 1) % ring_size) for chip in range(ring_size)]
    pass_on = functools.partial(jax.lax.ppermute, axis_name=RING, perm=neighbours)
    merged = None
    for hop in range(ring_size):
        owner = (index - hop) % ring_size
        out, log_sum = attend(q, k, v, jnp.clip(kv_length - owner * block, 0, block), log_sums=True)
        part = out.astype(jnp.float32), log_sum
        merged = part if merged is None else _merge(merged, part)
        if hop + 1 < ring_size:
            k, v = pass_on(k), pass_on(v)
    assert merged is not None
    return merged


def self_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq heads head_dim"],
    v: Float[Array, "batch seq heads head_dim"],
    kv_length: int | Int[Array, " batch"],
    *,
    mesh: Mesh,
    attend: LocalAttention,
) -> Float[Array, "batch seq heads head_dim"]:
    """Queries and keys of one sequence, sharded on `sp`; batch on `dp`, heads on `tp`. `seq` divides by `sp`."""
    split = _split_sequence_axis(mesh, q.shape[2])
    lengths = jnp.broadcast_to(jnp.asarray(kv_length, jnp.int32), q.shape[:1])
    ring_size = split.shape[RING]
    exchange = functools.partial(jax.lax.all_to_all, axis_name=ULYSSES, tiled=True)

    def body(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        if ring_size > 1:
            out = _ring(attend, ring_size, q, k, v, lengths)[0].astype(q.dtype)
        else:
            out = attend_to_real(attend, q, k, v, kv_length if isinstance(kv_length, int) else lengths)
        return exchange(out, split_axis=1, concat_axis=2)

    tokens = P("dp", (RING, ULYSSES), "tp", None)
    mapped = jax.shard_map(
        body, mesh=split, in_specs=(tokens, tokens, tokens, P("dp")), out_specs=tokens, check_vma=False
    )
    # Kernels are lowered for the mesh in context, which has to be the split one here.
    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return mapped(q, k, v, lengths)


def attend_to_real(
    attend: LocalAttention, q: Array, k: Array, v: Array, kv_length: int | Int[Array, " batch"]
) -> Array:
    """Attention on one chip. A length known before the trace cuts the keys, which costs less than a mask."""
    if isinstance(kv_length, int):
        return attend(q, k[:, :kv_length], v[:, :kv_length], None, log_sums=False)[0]
    return attend(q, k, v, kv_length, log_sums=False)[0]


def cross_attention(
    q: Float[Array, "batch q_seq heads head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    kv_length: int | Int[Array, " batch"],
    *,
    mesh: Mesh,
    attend: LocalAttention,
) -> Float[Array, "batch q_seq heads head_dim"]:
    """Queries sharded on `sp`, keys (a short text) whole on every chip of it: nothing is exchanged."""
    lengths = jnp.broadcast_to(jnp.asarray(kv_length, jnp.int32), q.shape[:1])

    def body(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        return attend_to_real(attend, q, k, v, kv_length if isinstance(kv_length, int) else lengths)

    queries, keys = P("dp", "sp", "tp", None), P("dp", None, "tp", None)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(queries, keys, keys, P("dp")), out_specs=queries, check_vma=False)
    return mapped(q, k, v, lengths)


Stream = tuple[Array, Array, Array]


def joint_attention(
    latent: Stream, text: Stream, *, num_tokens: int, text_length: int | Array, mesh: Mesh, attend: LocalAttention
) -> tuple[Array, Array]:
    """Two sequences attending to both: latents sharded on `sp`, a text that is whole on every chip of it.

    Each chip exchanges latent tokens for heads and takes the same heads of the text; the text's result is gathered over
    heads again. Of the latents the first `num_tokens` are real, of the text `text_length` per row.
    """
    split = _split_sequence_axis(mesh, latent[0].shape[2])
    ring_size, ulysses = split.shape[RING], split.shape[ULYSSES]
    exchange = functools.partial(jax.lax.all_to_all, axis_name=ULYSSES, tiled=True)
    lengths = jnp.broadcast_to(jnp.asarray(text_length, jnp.int32), text[0].shape[:1])

    def body(latent: Stream, text: Stream, lengths: Array) -> tuple[Array, Array]:
        q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in latent)
        heads = q.shape[2]
        start = jax.lax.axis_index(ULYSSES) * heads
        text_q, text_k, text_v = (jax.lax.dynamic_slice_in_dim(x, start, heads, axis=2) for x in text)
        queries = jnp.concatenate([q, text_q], axis=1)
        if ring_size > 1:
            part = _ring(attend, ring_size, queries, k, v, jnp.full_like(lengths, num_tokens))
            text_part, log_sum = attend(queries, text_k, text_v, lengths, log_sums=True)
            out = _merge(part, (text_part.astype(jnp.float32), log_sum))[0].astype(q.dtype)
        else:
            real = text_length if isinstance(text_length, int) else lengths
            out = attend_to_both(attend, queries, (k, v), (text_k, text_v), num_tokens, real)
        latent_out, text_out = out[:, : q.shape[1]], out[:, q.shape[1] :]
        text_out = jax.lax.all_gather(text_out, ULYSSES, axis=2, tiled=True) if ulysses > 1 else text_out
        return exchange(latent_out, split_axis=1, concat_axis=2), text_out

    tokens, whole = P("dp", (RING, ULYSSES), "tp", None), P("dp", None, "tp", None)
    mapped = jax.shard_map(
        body,
        mesh=split,
        in_specs=((tokens,) * 3, (whole,) * 3, P("dp")),
        out_specs=(tokens, whole),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(split.abstract_mesh):
        return mapped(latent, text, lengths)


def attend_to_both(
    attend: LocalAttention,
    q: Array,
    latent: tuple[Array, Array],
    text: tuple[Array, Array],
    num_tokens: int,
    text_length: int | Array,
) -> Array:
    """Queries to the real latent keys followed by the text's, whose padding is last and so is masked by a length."""
    k, v = (jnp.concatenate([x[:, :num_tokens], y], axis=1) for x, y in zip(latent, text, strict=True))
    return attend_to_real(attend, q, k, v, num_tokens + text_length)
