"""Adapter to JAX's stock splash attention kernel for TPU: padding to its tiles, masking of the tail, layout.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`; nothing of it is copied here.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from .policy import Tiles
from .reference import NEGATIVE

LANES = 128


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tile(seq: int, block: int) -> int:
    """The block for a sequence: as wanted, or the whole sequence where it is shorter."""
    return min(block, _round_up(seq, LANES))


def _pad(x: Array, seq: int, head_dim: int) -> Array:
    """`[batch, seq, heads, head_dim]` to `[batch, heads, padded seq, padded head_dim]`, filled with zeros."""
    padded = jnp.pad(x, ((0, 0), (0, seq - x.shape[1]), (0, 0), (0, head_dim - x.shape[3])))
    return jnp.swapaxes(padded, 1, 2)


def local_attention(
    q: Float[Array, "batch q_seq heads head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    kv_length: Int[Array, " batch"] | None,
    *,
    log_sums: bool,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Float[Array, "batch q_seq heads head_dim"], Float[Array, "batch heads q_seq"] | None]:
    """Like `reference.local_attention`, on the TPU. Segment ids keep padding out of the softmax."""
    batch, q_seq, heads, head_dim = q.shape
    kv_seq = k.shape[1]
    block_q, block_kv = _tile(q_seq, tiles.block_q), _tile(kv_seq, tiles.block_kv)
    block_compute = tiles.block_kv_compute if block_kv % tiles.block_kv_compute == 0 else block_kv
    padded_q, padded_kv = _round_up(q_seq, block_q), _round_up(kv_seq, block_kv)
    padded_dim = _round_up(head_dim, LANES)
    segments = None
    if kv_length is not None:
        # Values past the length must not be NaN: 0 * NaN would survive the mask.
        valid = jnp.arange(kv_seq) < kv_length[:, None]
        k, v = (jnp.where(valid[:, :, None, None], x, 0) for x in (k, v))
    if kv_length is not None or padded_kv != kv_seq:
        real = jnp.full((batch,), kv_seq) if kv_length is None else kv_length
        segments = kernel.SegmentIds(
            q=jnp.zeros((batch, padded_q), jnp.int32),
            kv=(jnp.arange(padded_kv) >= real[:, None]).astype(jnp.int32),
        )
    attend = kernel.make_splash_mha(
        mask=masks.MultiHeadMask([masks.FullMask((padded_q, padded_kv))] * heads),
        block_sizes=kernel.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=block_compute),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=log_sums,
        interpret=interpret,
    )
    scaled = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
    padded = [_pad(x, seq, padded_dim) for x, seq in ((scaled, padded_q), (k, padded_kv), (v, padded_kv))]
    results = jax.vmap(attend)(*padded, segments)
    out, log_sum = (results[0], results[1][0][:, :, :q_seq]) if log_sums else (results, None)
    out = jnp.swapaxes(out, 1, 2)[:, :q_seq, :, :head_dim].astype(q.dtype)
    if log_sum is None or kv_length is None:
        return out, log_sum
    # A row without keys leaves the kernel's running maximum, not a meaningful sum.
    empty = (kv_length <= 0)[:, None, None]
    return jnp.where(empty[..., None], 0, out), jnp.where(empty, NEGATIVE, log_sum)
