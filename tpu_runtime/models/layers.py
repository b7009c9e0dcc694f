"""What several denoisers share: rotary embedding, patches, attention of latents and text that stay apart."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import torch

# Weights of one layer, or of scanned blocks, that are split over `fsdp` and gathered for use: layout and fallback.
GATHERED = (("fsdp", None), ((None, "fsdp"),))
BLOCK_GATHERED = ((None, "fsdp", None), ((None, None, "fsdp"),))


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


def enter_joint(sequence: Any, tables: str, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of blocks that keep latents and text apart: latents and the rotary `tables` split by tokens."""
    rotary = tuple(
        sequence.constrain(sequence.pad_tokens(table[None, :, None]), None, "sp", None, None)
        for table in values[tables]
    )
    return {
        **values,
        "hidden_states": sequence.shard_tokens(values["hidden_states"]),
        "encoder_hidden_states": sequence.constrain(values["encoder_hidden_states"], "dp", None, None),
        tables: rotary,
    }


class JointProcessor:
    """Attention of latents and text that stay apart, each with projections and norms of its own, in JAX.

    As `HunyuanVideo15AttnProcessor2_0`, whose mask is the text's length here and whose text has no positions, and as
    `Flux2AttnProcessor`, which has no mask.
    """

    def __init__(self, attend: "Callable[..., tuple[jax.Array, jax.Array]]") -> None:
        self.attend = attend

    def __call__(
        self,
        attn: Any,
        hidden_states: "torch.Tensor",
        encoder_hidden_states: "torch.Tensor",
        attention_mask: "torch.Tensor | None",
        image_rotary_emb: tuple,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """`image_rotary_emb`: cosines and sines for the latents, or a pair of such pairs, the text's first."""
        from ..programs import torch_bridge

        def heads(source: "torch.Tensor", projections: tuple, norms: tuple, tables: tuple | None) -> "tuple[Any, ...]":
            query, key, value = (project(source).unflatten(2, (attn.heads, -1)) for project in projections)
            query, key = (norm(x) for norm, x in zip(norms, (query, key), strict=True))
            if tables is not None:
                query, key = (torch_bridge.call_jax(rotate, x, *tables) for x in (query, key))
            return query, key, value

        first, tables = image_rotary_emb
        text_tables, tables = (first, tables) if isinstance(first, tuple) else (None, image_rotary_emb)
        latent = heads(hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), tables)
        text_projections, text_norms, text_out = self.of_text(attn)
        text = heads(encoder_hidden_states, text_projections, text_norms, text_tables)
        outputs = torch_bridge.call_jax(self.attend, latent, text, attention_mask)
        return attn.to_out[0](outputs[0].flatten(2)), text_out(outputs[1].flatten(2))

    def of_text(self, attn: Any) -> tuple[tuple, tuple, Any]:
        """The text's projections and norms, and what its output goes through."""
        return (
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
            attn.to_add_out,
        )


def valid_first(parts: "tuple[jax.Array, ...]", lengths: "tuple[jax.Array, ...]") -> "tuple[jax.Array, jax.Array]":
    """Joins sequences `[rows, size, dim]` so that the first `lengths` tokens of each come first, in order.

    What follows them is not defined. Gives the total lengths too, `[rows]`.
    """
    import jax.numpy as jnp

    position = jnp.arange(sum(part.shape[1] for part in parts))[None, :]
    source = jnp.zeros_like(position)
    start, offset = jnp.zeros_like(lengths[0]), 0
    for part, length in zip(parts, lengths, strict=True):
        # The later part overrides from where it starts on.
        source = jnp.where(position >= start[:, None], offset + position - start[:, None], source)
        start, offset = start + length, offset + part.shape[1]
    joined = jnp.concatenate(parts, axis=1)
    source = jnp.clip(source, 0, joined.shape[1] - 1)
    return jnp.take_along_axis(joined, source[:, :, None], axis=1), start
