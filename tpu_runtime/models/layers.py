"""What several denoisers share: rotary embedding, patches."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import torch


def rotate(x: "jax.Array", cos: "jax.Array", sin: "jax.Array") -> "jax.Array":
    """Rotary embedding of the pairs `(2i, 2i + 1)` of `[batch, seq, heads, head_dim]`; tables `[1, seq, 1, head_dim]`.

    The partner of each element comes from a product with a matrix of one +1 or -1 per row, which is exact in any
    format. Strided writes would become scatters, and rolls relayouts: 17 of 37 million cycles of a 14B block.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    swap = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
    even = np.arange(0, x.shape[-1], 2)
    swap[even + 1, even], swap[even, even + 1] = -1.0, 1.0
    partner = jnp.matmul(x, jnp.asarray(swap, x.dtype), precision=jax.lax.Precision.HIGHEST)
    return (x * cos + partner * sin).astype(x.dtype)


def embed_patches(embedding: Any, latents: "torch.Tensor") -> "torch.Tensor":
    """The patch convolution as one matrix product over patches.

    A convolution's output cannot be split by tokens; the patches can, and are 80 times smaller.
    """
    pt, ph, pw = embedding.kernel_size
    rows, channels, frames, height, width = latents.shape
    patches = latents.reshape(rows, channels, frames // pt, pt, height // ph, ph, width // pw, pw)
    patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)
    tokens = patches.to(embedding.weight.dtype) @ embedding.weight.flatten(1).T + embedding.bias
    return tokens.transpose(1, 2)
