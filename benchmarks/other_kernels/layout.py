"""Conversion of arguments and results of the kernels to compare with: order of dimensions, and padding."""

from collections.abc import Sequence

import jax.numpy as jnp
from comfyui_tpu.kernels.hardware import round_up
from jaxtyping import Array, Float

LANES = 128
Queries = Float[Array, "batch q_seq heads head_dim"]
KeysOrValues = Float[Array, "batch kv_seq heads head_dim"]


def scaled(q: Queries, factor: float) -> Queries:
    """In float32, as the scores will be."""
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def padded(arrays: Sequence[Array], blocks: Sequence[int]) -> list[Float[Array, "batch heads seq dim"]]:
    """Each with whole blocks of tokens and whole lanes, filled with zeros."""

    def pad(x: Array, block: int) -> Array:
        seq, head_dim = x.shape[1], x.shape[3]
        widths = ((0, 0), (0, 0), (0, round_up(seq, block) - seq), (0, round_up(head_dim, LANES) - head_dim))
        return jnp.pad(jnp.swapaxes(x, 1, 2), widths)

    return [pad(x, block) for x, block in zip(arrays, blocks, strict=True)]
