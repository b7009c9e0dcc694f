"""Entry point to attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..kernels.prologue import Norm, apply_norm
from . import local, sharded
from .policy import AttentionPolicy
from .prologue import NO_PROLOGUE, Prologue
from .tiles import SlidingTileMask

Placement = Literal["sharded", "replicated"]  # how tokens are placed on the chips of `sp`


def _flat(x: Array) -> Array:
    """Return `[batch, seq, heads, head_dim]` as `[batch, seq, lanes]`."""
    return x.reshape(*x.shape[:2], -1)


def attention(
    q: Float[Array, "batch q_seq heads head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    *,
    kv_length: int | Int[Array, " batch"] | None = None,
    mesh: Mesh | None = None,
    keys: Placement = "sharded",
    prologue: Prologue = NO_PROLOGUE,
    policy: AttentionPolicy = AttentionPolicy(),  # noqa: B008 - frozen
    nearby: SlidingTileMask | None = None,
) -> Float[Array, "batch q_seq heads head_dim"]:
    """Return softmax attention with scale `head_dim ** -0.5`, exact unless the `policy` allows approximation.

    Raises `ValueError` if heads, batch or sequence do not divide by their mesh axis; the caller pads sequences.

    q, k, v: `[batch, seq, heads, head_dim]`; padding goes last and may hold anything.
    kv_length: valid keys, in all batch rows or per row; None: all.
    mesh: batch is sharded on `dp`, heads on `tp` and queries on `sp`; None: one device.
    keys: "sharded" like queries (one sequence attending to itself), or "replicated" (a short text).
    prologue: norms and rotary embedding that queries and keys go through first.
    policy: choice of kernel and precision. nearby: for one sequence in tiles, the keys that each query attends to.
    """
    length = k.shape[1] if kv_length is None else kv_length
    if keys == "sharded" or mesh is None or mesh.size == 1:
        streams = {"lengths": (length,), "placements": ("sharded",), "prologues": (prologue,)}
        return joint_attention((q, k, v), **streams, mesh=mesh, policy=policy, nearby=nearby)[0]
    _check_divides(q, mesh)
    attend, layout = local.choose_attention(policy, mesh, q.shape[3])
    flat, prologue = _norms_over_chips((_flat(q), _flat(k), _flat(v)), prologue, q.shape[3], mesh)
    out = sharded.cross_attention(*flat, length, mesh=mesh, attend=attend, layout=layout, prologue=prologue)
    return out.reshape(q.shape)


def _norms_over_chips(
    stream: sharded.Stream, prologue: Prologue, head_dim: int, mesh: Mesh
) -> tuple[sharded.Stream, Prologue]:
    """Return the stream and prologue with norms over sharded heads applied: the partitioner sums them over chips."""

    def ready(x: Array, norm: Norm | None) -> tuple[Array, Norm | None]:
        if norm is None or norm.weight.size == head_dim or mesh.shape["tp"] == 1:
            return x, norm
        return apply_norm(x, norm, head_dim).astype(x.dtype), None

    (q, query_norm), (k, key_norm) = ready(stream[0], prologue.query_norm), ready(stream[1], prologue.key_norm)
    return (q, k, stream[2]), replace(prologue, query_norm=query_norm, key_norm=key_norm)


def joint_attention(
    *streams: tuple[Array, Array, Array],
    lengths: Sequence[int | Int[Array, " batch"]],
    placements: Sequence[Placement],
    mesh: Mesh | None = None,
    prologues: Sequence[Prologue] | None = None,
    policy: AttentionPolicy = AttentionPolicy(),  # noqa: B008 - frozen
    nearby: SlidingTileMask | None = None,
) -> tuple[Float[Array, "batch _ heads head_dim"], ...]:
    """Return the attention of several sequences, each to all of them: `[batch, seq, heads, head_dim]` of each.

    The order of the sequences does not matter to attention.

    streams: query, key and value of each sequence, `[batch, seq, heads, head_dim]` each.
    lengths: valid tokens of each sequence, in all batch rows or per row; padding goes last and may hold anything.
    placements: whether each sequence is sharded on `sp` or replicated there. Batch is on `dp`, heads on `tp`.
    mesh: None: one device. prologues: of each sequence; None: none. policy: choice of kernel and precision.
    nearby: the first sequence is in tiles, and this states which of its keys a query has; other sequences have all
      keys.
    """
    head_dim, heads = streams[0][0].shape[3], streams[0][0].shape[2]
    prologues = prologues or (NO_PROLOGUE,) * len(streams)
    attend, layout = local.choose_attention(policy, mesh, head_dim)
    flat = [(_flat(q), _flat(k), _flat(v)) for q, k, v in streams]
    if mesh is not None and mesh.size > 1:
        for stream, placement in zip(streams, placements, strict=True):
            if placement == "sharded":
                _check_divides(stream[0], mesh)
        ready = [_norms_over_chips(s, p, head_dim, mesh) for s, p in zip(flat, prologues, strict=True)]
        outs = sharded.joint_attention(
            [stream for stream, _ in ready], lengths, heads=heads, mesh=mesh, attend=attend, layout=layout,
            replicated=[p == "replicated" for p in placements], prologues=[prologue for _, prologue in ready],
            nearby=nearby,
        )  # fmt: skip
    else:
        flat = [sharded.prepare_unsharded(s, layout, p)[0] for s, p in zip(flat, prologues, strict=True)]
        keys = [(k, v, length) for (_, k, v), length in zip(flat, lengths, strict=True)]
        is_sparse = None if nearby is None else nearby.is_sparse
        outs = [sharded.attend_stream(attend, s[0], keys, index, nearby, is_sparse) for index, s in enumerate(flat)]
    return tuple(out.reshape(stream[0].shape) for out, stream in zip(outs, streams, strict=True))


def _check_divides(q: Array, mesh: Mesh) -> None:
    """Raise `ValueError` if a dimension of `q` `[batch, seq, heads, head_dim]` does not divide by its mesh axis."""
    for size, axis, name in ((q.shape[0], "dp", "batch"), (q.shape[1], "sp", "sequence"), (q.shape[2], "tp", "heads")):
        if size % mesh.shape[axis]:
            raise ValueError(f"attention: {name} of {size} does not divide over {axis}={mesh.shape[axis]}.")
