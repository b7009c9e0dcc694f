"""Hints of a control network: tokens that are added after some of its blocks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import torch

    from ...programs.sharded_ops import ShardedOps


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Hints of a stack of blocks."""

    values: "torch.Tensor"  # [hints, ..., rows, tokens, dim], placed as the stack's tokens
    every: int  # blocks from one hint to the next; the first block has the first hint
    is_repeated: bool = False  # whether the blocks between have the hint before them too

    def select(self) -> "torch.Tensor":
        """Return the hint `[..., rows, tokens, dim]` of the block that is traced, zeros if it has none."""
        import jax
        import jax.numpy as jnp

        from ...programs import torch_bridge
        from ...programs.upstream_network import layer_index

        def select(values: "jax.Array") -> "jax.Array":
            index, place = layer_index() // self.every, layer_index() % self.every
            has_hint = (index < len(values)) & (self.is_repeated | (place == 0))
            hint = jax.lax.dynamic_index_in_dim(values, jnp.minimum(index, len(values) - 1), 0, keepdims=False)
            return jnp.where(has_hint, hint, jnp.zeros_like(hint))

        return torch_bridge.call_jax(select, self.values)


def place(run: "ShardedOps", hint: "torch.Tensor", num_tokens: int) -> "torch.Tensor":
    """Return a hint `[rows, tokens, dim]` of a sequence's first tokens as the tokens of that sequence.

    run: operations of the sequence. num_tokens: of the sequence. The other tokens are zero.
    """
    import torch

    return run.tokens(torch.nn.functional.pad(hint, (0, 0, 0, num_tokens - hint.shape[1])))
