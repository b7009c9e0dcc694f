"""JAX's stock splash attention kernel for TPU, to compare with: padding to its tiles, masking of the tail, layout.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`; nothing of it is copied here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float

LANES = 128


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """In tokens, multiples of 128."""

    block_q: int = 2048
    block_kv: int = 2048
    block_kv_compute: int = 1024


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tile(seq: int, block: int) -> int:
    """The block for a sequence: as wanted, or the whole sequence where it is shorter."""
    return min(block, _round_up(seq, LANES))


def _pad(x: Array, seq: int, head_dim: int) -> Array:
    """`[batch, seq, heads, head_dim]` to `[batch, heads, padded seq, padded head_dim]`, filled with zeros."""
    padded = jnp.pad(x, ((0, 0), (0, seq - x.shape[1]), (0, 0), (0, head_dim - x.shape[3])))
    return jnp.swapaxes(padded, 1, 2)


def attention(
    q: Float[Array, "batch q_seq heads head_dim"],
    k: Float[Array, "batch kv_seq heads head_dim"],
    v: Float[Array, "batch kv_seq heads head_dim"],
    tiles: Tiles = Tiles(),  # noqa: B008 - frozen
) -> Float[Array, "batch q_seq heads head_dim"]:
    """Segment ids keep padding out of the softmax."""
    batch, q_seq, heads, head_dim = q.shape
    kv_seq = k.shape[1]
    block_q, block_kv = _tile(q_seq, tiles.block_q), _tile(kv_seq, tiles.block_kv)
    block_compute = tiles.block_kv_compute if block_kv % tiles.block_kv_compute == 0 else block_kv
    padded_q, padded_kv = _round_up(q_seq, block_q), _round_up(kv_seq, block_kv)
    padded_dim = _round_up(head_dim, LANES)
    segments = None
    if padded_kv != kv_seq:
        segments = kernel.SegmentIds(
            q=jnp.zeros((batch, padded_q), jnp.int32),
            kv=jnp.broadcast_to(jnp.arange(padded_kv) >= kv_seq, (batch, padded_kv)).astype(jnp.int32),
        )
    attend = kernel.make_splash_mha(
        mask=masks.MultiHeadMask([masks.FullMask((padded_q, padded_kv))] * heads),
        block_sizes=kernel.BlockSizes(block_q=block_q, block_kv=block_kv, block_kv_compute=block_compute),
        head_shards=1,
        q_seq_shards=1,
    )
    scaled = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
    padded = [_pad(x, seq, padded_dim) for x, seq in ((scaled, padded_q), (k, padded_kv), (v, padded_kv))]
    out = jax.vmap(attend)(*padded, segments)
    assert isinstance(out, jax.Array)  # without residuals
    return jnp.swapaxes(out, 1, 2)[:, :q_seq, :, :head_dim].astype(q.dtype)
