"""JAX's stock splash attention kernel for TPU, to compare with: padding to its tiles, masking of the tail, layout.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`; none of its code is copied here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from comfyui_tpu.kernels.hardware import round_up
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from .layout import LANES, KeysOrValues, Queries, padded, scaled


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """In tokens, multiples of 128."""

    block_q: int = 2048
    block_kv: int = 2048
    block_kv_compute: int = 1024


def _tile(seq: int, block: int) -> int:
    """The block for a sequence: as wanted, or the whole sequence where it is shorter."""
    return min(block, round_up(seq, LANES))


def attention(q: Queries, k: KeysOrValues, v: KeysOrValues, tiles: Tiles = Tiles()) -> Queries:  # noqa: B008 - frozen
    """Segment ids keep padding out of the softmax."""
    batch, q_seq, heads, head_dim = q.shape
    kv_seq = k.shape[1]
    block_q, block_kv = _tile(q_seq, tiles.block_q), _tile(kv_seq, tiles.block_kv)
    block_compute = tiles.block_kv_compute if block_kv % tiles.block_kv_compute == 0 else block_kv
    padded_q, padded_kv = round_up(q_seq, block_q), round_up(kv_seq, block_kv)
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
    arrays = padded((scaled(q, head_dim**-0.5), k, v), (block_q, block_kv, block_kv))
    out = jax.vmap(attend)(*arrays, segments)
    assert isinstance(out, jax.Array)  # without residuals
    return jnp.swapaxes(out, 1, 2)[:, :q_seq, :, :head_dim].astype(q.dtype)
