"""The one entry point to attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..kernels.prologue import Norm, normed
from . import local, sharded
from .policy import AttentionPolicy
from .prologue import NO_PROLOGUE, Prologue
from .tiles import Nearby

Placement = Literal["sharded", "replicated"]  # of tokens, over the chips of `sp`


def _flat(x: Array) -> Array:
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
    nearby: Nearby | None = None,
) -> Float[Array, "batch q_seq heads head_dim"]:
    """Softmax attention with scale `head_dim ** -0.5`, of queries and keys that went through the `prologue`; exact, but
    for what the `policy` gives away.

    Only the first `kv_length` keys of a row count (all by default): padding goes last and may hold anything. With a
    `mesh`, batch is sharded on `dp`, heads on `tp` and queries on `sp`; so are keys (one sequence attending to itself),
    or they are `"replicated"` (a short text). Raises `ValueError` where heads, batch or sequence do not divide by their
    axis; the caller pads sequences. Of one sequence in tiles, `nearby` says which keys a query has.
    """
    length = k.shape[1] if kv_length is None else kv_length
    if keys == "sharded" or mesh is None or mesh.size == 1:
        streams = {"lengths": (length,), "placements": ("sharded",), "prologues": (prologue,)}
        return joint_attention((q, k, v), **streams, mesh=mesh, policy=policy, nearby=nearby)[0]
    _check_divides(q, mesh)
    attend, layout = local.chosen(policy, mesh, q.shape[3])
    flat, prologue = _norms_over_chips((_flat(q), _flat(k), _flat(v)), prologue, q.shape[3], mesh)
    out = sharded.cross_attention(*flat, length, mesh=mesh, attend=attend, layout=layout, prologue=prologue)
    return out.reshape(q.shape)


def _norms_over_chips(
    stream: sharded.Stream, prologue: Prologue, head_dim: int, mesh: Mesh
) -> tuple[sharded.Stream, Prologue]:
    """Norms over all heads where heads are sharded, computed before: the partitioner sums over chips what they need."""

    def ready(x: Array, norm: Norm | None) -> tuple[Array, Norm | None]:
        if norm is None or norm.weight.size == head_dim or mesh.shape["tp"] == 1:
            return x, norm
        return normed(x, norm, head_dim).astype(x.dtype), None

    (q, query_norm), (k, key_norm) = ready(stream[0], prologue.query_norm), ready(stream[1], prologue.key_norm)
    return (q, k, stream[2]), replace(prologue, query_norm=query_norm, key_norm=key_norm)


def joint_attention(
    *streams: tuple[Array, Array, Array],
    lengths: Sequence[int | Int[Array, " batch"]],
    placements: Sequence[Placement],
    mesh: Mesh | None = None,
    prologues: Sequence[Prologue] | None = None,
    policy: AttentionPolicy = AttentionPolicy(),  # noqa: B008 - frozen
    nearby: Nearby | None = None,
) -> tuple[Float[Array, "batch _ heads head_dim"], ...]:
    """Attention of several sequences, each to all of them: `(query, key, value)` of each, `[batch, seq, heads,
    head_dim]`, which first go through their prologues.

    Of each the first `lengths` tokens are real, in all rows or per row; what follows may hold anything. A sequence
    is sharded on `sp` or replicated there; batch on `dp`, heads on `tp`. Their order does not matter to attention, so
    none is implied. With `nearby` the first is in tiles, and the others have all keys.
    """
    head_dim, heads = streams[0][0].shape[3], streams[0][0].shape[2]
    prologues = prologues or (NO_PROLOGUE,) * len(streams)
    attend, layout = local.chosen(policy, mesh, head_dim)
    flat = [(_flat(q), _flat(k), _flat(v)) for q, k, v in streams]
    if mesh is not None and mesh.size > 1:
        for stream, how in zip(streams, placements, strict=True):
            if how == "sharded":
                _check_divides(stream[0], mesh)
        ready = [_norms_over_chips(*each, head_dim, mesh) for each in zip(flat, prologues, strict=True)]
        outs = sharded.joint_attention(
            [stream for stream, _ in ready], lengths, heads=heads, mesh=mesh, attend=attend, layout=layout,
            replicated=[how == "replicated" for how in placements], prologues=[prologue for _, prologue in ready],
            nearby=nearby,
        )  # fmt: skip
    else:
        flat = [sharded.alone(s, layout, p)[0] for s, p in zip(flat, prologues, strict=True)]
        keys = [(k, v, length) for (_, k, v), length in zip(flat, lengths, strict=True)]
        is_sparse = None if nearby is None else nearby.is_sparse
        outs = [sharded.attended(attend, stream[0], keys, at, nearby, is_sparse) for at, stream in enumerate(flat)]
    return tuple(out.reshape(stream[0].shape) for out, stream in zip(outs, streams, strict=True))


def _check_divides(q: Array, mesh: Mesh) -> None:
    for size, axis, what in ((q.shape[0], "dp", "batch"), (q.shape[1], "sp", "sequence"), (q.shape[2], "tp", "heads")):
        if size % mesh.shape[axis]:
            raise ValueError(f"attention: {what} of {size} does not divide over {axis}={mesh.shape[axis]}.")
