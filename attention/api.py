"""The one entry point to attention."""

import functools
from typing import Literal

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from . import kernel, reference, sharded
from .keys import first
from .policy import AttentionPolicy


def _local(policy: AttentionPolicy, mesh: Mesh | None, head_dim: int) -> sharded.LocalAttention:
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
    on_tpu = device.platform == "tpu"
    if policy.kernel == "reference" or (policy.kernel == "auto" and not on_tpu):
        return functools.partial(reference.flat_attention, head_dim=head_dim)
    return functools.partial(
        kernel.local_attention, head_dim=head_dim, policy=policy, device_kind=device.device_kind, interpret=not on_tpu
    )


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)


def attention(
    q: Float[Array, "batch q_seq heads head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    *,
    kv_length: int | Int[Array, " batch"] | None = None,
    mesh: Mesh | None = None,
    keys: Literal["sharded", "whole"] = "sharded",
    policy: AttentionPolicy = AttentionPolicy(),  # noqa: B008 - frozen
) -> Float[Array, "batch q_seq heads head_dim"]:
    """Exact softmax attention with scale `head_dim ** -0.5`.

    Only the first `kv_length` keys of a row count (all by default): padding goes last and may hold anything. With a
    `mesh`, batch lies on `dp`, heads on `tp` and queries on `sp`; keys lie on `sp` as well (`"sharded"`: one sequence
    attending to itself) or are whole on every chip (`"whole"`: a short text). Raises `ValueError` where heads, batch or
    sequence do not divide by their axis; the caller pads sequences.
    """
    length = k.shape[1] if kv_length is None else kv_length
    attend = _local(policy, mesh, q.shape[3])
    flat = _flat(q), _flat(k), _flat(v)
    if mesh is None or mesh.size == 1:
        return attend(flat[0], [first(*flat[1:], length)], log_sums=False)[0].reshape(q.shape)
    _check_divides(q, mesh)
    if keys == "sharded":
        out = sharded.self_attention(*flat, length, heads=q.shape[2], mesh=mesh, attend=attend)
    else:
        out = sharded.cross_attention(*flat, length, mesh=mesh, attend=attend)
    return out.reshape(q.shape)


def joint_attention(
    latent: tuple[Array, Array, Array],
    text: tuple[Array, Array, Array],
    *,
    num_tokens: int,
    text_length: Int[Array, " batch"] | None = None,
    mesh: Mesh | None = None,
    policy: AttentionPolicy = AttentionPolicy(),  # noqa: B008 - frozen
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch text heads head_dim"]]:
    """Exact attention of two sequences to each other and to themselves: `(query, key, value)` of each.

    The first `num_tokens` latent tokens and, per row, the first `text_length` text tokens are real (all by default);
    what follows may hold anything. Latents lie on `sp`, the text is whole there; batch on `dp`, heads on `tp`. The
    order of the two does not matter to attention, so none is implied.
    """
    length = text[0].shape[1] if text_length is None else text_length
    queries = latent[0], text[0]
    attend = _local(policy, mesh, queries[0].shape[3])
    latent, text = ((_flat(q), _flat(k), _flat(v)) for q, k, v in (latent, text))
    if mesh is not None and mesh.size > 1:
        _check_divides(queries[0], mesh)
        outs = sharded.joint_attention(
            latent, text, heads=queries[0].shape[2], num_tokens=num_tokens, text_length=length, mesh=mesh, attend=attend
        )
    else:
        keys = [first(*latent[1:], num_tokens), first(*text[1:], length)]
        outs = [attend(stream[0], keys, log_sums=False)[0] for stream in (latent, text)]
    return outs[0].reshape(queries[0].shape), outs[1].reshape(queries[1].shape)


def _check_divides(q: Array, mesh: Mesh) -> None:
    for size, axis, what in ((q.shape[0], "dp", "batch"), (q.shape[1], "sp", "sequence"), (q.shape[2], "tp", "heads")):
        if size % mesh.shape[axis]:
            raise ValueError(f"attention: {what} of {size} does not divide over {axis}={mesh.shape[axis]}.")
