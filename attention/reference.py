"""Plain softmax attention in float32: what every other implementation is compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Stands for minus infinity where the arithmetic must stay finite (a row without any valid key).
NEGATIVE = -1e30


def local_attention(
    q: Float[Array, "batch q_seq heads head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    kv_length: Int[Array, " batch"] | None,
    *,
    log_sums: bool,
) -> tuple[Float[Array, "batch q_seq heads head_dim"], Float[Array, "batch heads q_seq"] | None]:
    """Attention over the first `kv_length` keys of each row (None: all), and if asked the log-sum-exp of its scores.

    Keys and values past the length are never touched: they may hold NaN. A row with length 0 gives zeros and a
    log-sum-exp of `NEGATIVE`.
    """
    kv_length = jnp.full(k.shape[:1], k.shape[1]) if kv_length is None else kv_length
    valid = jnp.arange(k.shape[1]) < kv_length[:, None]  # [batch, kv_seq]
    keys = jnp.where(valid[:, :, None, None], k, 0).astype(jnp.float32)
    values = jnp.where(valid[:, :, None, None], v, 0).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), keys, precision=highest) * q.shape[-1] ** -0.5
    scores = jnp.where(valid[:, None, None, :], scores, NEGATIVE)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(valid[:, None, None, :], jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)  # [batch, heads, q_seq, 1]
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, values, precision=highest) / jnp.maximum(total, 1e-30)
    log_sum = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), NEGATIVE)[..., 0]
    return jnp.swapaxes(out, 1, 2).astype(q.dtype), log_sum if log_sums else None
