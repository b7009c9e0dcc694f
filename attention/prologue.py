"""Norm and rotary embedding between projection and attention, and the layout that chips exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ..kernels import prologue
from ..kernels.attention_config import Scores
from ..kernels.dispatch import should_use
from ..kernels.hardware import LANES
from ..kernels.prologue import Norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prologue:
    """Norms of queries and keys, then the rotary embedding of both. The pairs `(2i, 2i + 1)` of a head rotate."""

    query_norm: Norm | None = None  # None: none
    key_norm: Norm | None = None  # None: none
    # Cosines and sines of every token, `[batch or 1, seq, head_dim]` each, with each angle twice; None: no rotation.
    tables: Any = None

    @property
    def per_array(self) -> tuple[tuple[Norm | None, Any], ...]:
        """Return norm and tables of queries, of keys and of values."""
        return (self.query_norm, self.tables), (self.key_norm, self.tables), (None, None)


NO_PROLOGUE = Prologue()


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Layout of a chip's heads for attention, and the methods that convert to it and back."""

    head_dim: int
    kernel: bool  # whether to use Pallas, unless the kernels do not support the shape
    interpret: bool = False  # whether to run Pallas in interpret mode
    scores_of: Callable[[int], Scores] = lambda num_keys: "exact"  # number of keys -> how scores are computed

    def parts(self, lanes: int) -> int:
        """Return the number of parts in which chips exchange `lanes` lanes each.

        Two, so that one part is exchanged while the other attends. One if the lanes do not fill registers of both.
        """
        return 2 if self.kernel and lanes >= 2 * LANES and not prologue.check_support(self.head_dim, lanes) else 1

    def divide(
        self, x: Float[Array, "batch seq lanes"], groups: int, parts: int, norm: Norm | None = None, tables: Any = None
    ) -> list[Float[Array, "batch groups seq _"]]:
        """Return `x` after norm and rotary embedding, in `parts` arrays `[batch, groups, seq, lanes]`.

        It is computed in float32 and rounded once.

        x: `[batch, seq, lanes]`. groups: chips that the heads are split over. norm, tables: None for none, see
          `Prologue`.
        """
        if groups * parts == 1 and norm is None and tables is None:
            return [x[:, None]]
        if self._by_kernel(x.shape[2] // groups):
            return prologue.split_heads(
                x, groups, parts, norm, tables, head_dim=self.head_dim, interpret=self.interpret
            )
        return prologue.split_heads_reference(x, groups, parts, norm, tables, head_dim=self.head_dim)

    def take(
        self,
        x: Float[Array, "batch seq lanes"],
        chip: Int[Array, ""],
        groups: int,
        parts: int,
        norm: Norm | None,
        tables: Any,
    ) -> list[Float[Array, "batch seq _"]]:
        """Return the groups of one `chip` of the arrays that `divide` returns, `[batch, seq, lanes]` each.

        A chip prepares only these of a replicated array. x, groups, parts, norm, tables: as for `divide`.
        """
        alone = norm is None or norm.weight.size == self.head_dim
        lanes = x.shape[2] // groups
        if alone and prologue.can_split_one_chip(lanes, groups, parts) and self._by_kernel(lanes):
            options = {"head_dim": self.head_dim, "interpret": self.interpret, "chip": chip}
            return [part[:, 0] for part in prologue.split_heads(x, groups, parts, norm, tables, **options)]
        divided = self.divide(x, groups, parts, norm, tables)
        return [jax.lax.dynamic_index_in_dim(part, chip, 1, keepdims=False) for part in divided]

    def join(self, parts: list[Float[Array, "batch groups seq _"]]) -> Float[Array, "batch seq lanes"]:
        """Return all heads side by side again, `[batch, seq, lanes]`. parts: `[batch, groups, seq, lanes]` each."""
        _, groups, _, lanes = parts[0].shape
        if groups * len(parts) == 1:
            return parts[0][:, 0]
        return (
            prologue.merge_heads(parts, interpret=self.interpret)
            if self._by_kernel(lanes)
            else prologue.merge_heads_reference(parts)
        )

    def _by_kernel(self, lanes: int) -> bool:
        return self.kernel and should_use(prologue.check_support(self.head_dim, lanes))
