"""The one entry point to attention."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from . import reference, sharded, splash
from .policy import AttentionPolicy


def _local(policy: AttentionPolicy, mesh: Mesh | None) -> sharded.LocalAttention:
    device = mesh.devices.flat[0] if mesh is not None else jax.devices()[0]
    on_tpu = device.platform == "tpu"
    if policy.kernel == "reference" or (policy.kernel == "auto" and not on_tpu):
        return reference.local_attention
    return functools.partial(splash.local_attention, tiles=policy.tiles_for(device.device_kind), interpret=not on_tpu)


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
    attend = _local(policy, mesh)
    if mesh is None or mesh.size == 1:
        return sharded.attend_to_real(attend, q, k, v, length)
    _check_divides(q, mesh)
    form = sharded.self_attention if keys == "sharded" else sharded.cross_attention
    return form(q, k, v, length, mesh=mesh, attend=attend)


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
    attend = _local(policy, mesh)
    if mesh is not None and mesh.size > 1:
        _check_divides(latent[0], mesh)
        return sharded.joint_attention(
            latent, text, num_tokens=num_tokens, text_length=length, mesh=mesh, attend=attend
        )
    queries = jnp.concatenate([latent[0], text[0]], axis=1)
    out = sharded.attend_to_both(attend, queries, latent[1:], text[1:], num_tokens, length)
    return out[:, : latent[0].shape[1]], out[:, latent[0].shape[1] :]


def _check_divides(q: Array, mesh: Mesh) -> None:
    for size, axis, what in ((q.shape[0], "dp", "batch"), (q.shape[1], "sp", "sequence"), (q.shape[2], "tp", "heads")):
        if size % mesh.shape[axis]:
            raise ValueError(f"attention: {what} of {size} does not divide over {axis}={mesh.shape[axis]}.")
