"""What queries, keys and values go through between their projection and attention, and back: norm, rotary embedding,
and the layout that chips exchange.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ..kernels import prologue
from ..kernels.attention_form import Scores
from ..kernels.chip import LANES
from ..kernels.choice import accepted
from ..kernels.prologue import Norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Prologue:
    """Norms of queries and keys, then the rotary embedding of both: cosines and sines `[rows, seq, head_dim]` of every
    token, of each row or, where there is one, of all.

    The pairs `(2i, 2i + 1)` of a head rotate; each angle stands twice in the tables.
    """

    query_norm: Norm | None = None
    key_norm: Norm | None = None
    tables: Any = None

    @property
    def of_each(self) -> tuple[tuple[Norm | None, Any], ...]:
        """Norm and tables of queries, of keys, of values."""
        return (self.query_norm, self.tables), (self.key_norm, self.tables), (None, None)


NO_PROLOGUE = Prologue()


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """How a chip's arrays of heads of `head_dim` are prepared; `kernel`: by Pallas, unless it refuses their shape.
    `scores_of`: how those to so many keys are computed.
    """

    head_dim: int
    kernel: bool
    interpret: bool = False
    scores_of: Callable[[int], Scores] = lambda num_keys: "exact"

    def parts(self, lanes: int) -> int:
        """The number of parts in which chips exchange `lanes` lanes each: two, so that one part's exchange runs during
        the other's attention, or one where the lanes do not fill registers of both.
        """
        return 2 if self.kernel and lanes >= 2 * LANES and not prologue.refusal(self.head_dim, lanes) else 1

    def divide(
        self, x: Float[Array, "batch seq lanes"], groups: int, parts: int, norm: Norm | None = None, tables: Any = None
    ) -> list[Float[Array, "batch groups seq _"]]:
        """Norm and rotary embedding of `x` in float32, rounded once. The heads follow each other in parts, and those of
        a part in `groups`, one for each chip.
        """
        if groups * parts == 1 and norm is None and tables is None:
            return [x[:, None]]
        if self._by_kernel(x.shape[2] // groups):
            return prologue.divide(x, groups, parts, norm, tables, head_dim=self.head_dim, interpret=self.interpret)
        return prologue.divide_reference(x, groups, parts, norm, tables, head_dim=self.head_dim)

    def take(
        self, x: Float[Array, "batch seq lanes"], chip: Int[Array, ""], groups: int, parts: int, norm: Any, tables: Any
    ) -> list[Float[Array, "batch seq _"]]:
        """Of what `divide` returns, the groups of one `chip`. A chip prepares no more of a replicated array."""
        alone = norm is None or norm.weight.size == self.head_dim
        lanes = x.shape[2] // groups
        if alone and prologue.takes_one(lanes, groups, parts) and self._by_kernel(lanes):
            how = {"head_dim": self.head_dim, "interpret": self.interpret, "chip": chip}
            return [part[:, 0] for part in prologue.divide(x, groups, parts, norm, tables, **how)]
        divided = self.divide(x, groups, parts, norm, tables)
        return [jax.lax.dynamic_index_in_dim(part, chip, 1, keepdims=False) for part in divided]

    def join(self, parts: list[Float[Array, "batch groups seq _"]]) -> Float[Array, "batch seq lanes"]:
        """All heads side by side again."""
        _, groups, _, lanes = parts[0].shape
        if groups * len(parts) == 1:
            return parts[0][:, 0]
        return (
            prologue.join(parts, interpret=self.interpret) if self._by_kernel(lanes) else prologue.join_reference(parts)
        )

    def _by_kernel(self, lanes: int) -> bool:
        return self.kernel and accepted(prologue.refusal(self.head_dim, lanes))
