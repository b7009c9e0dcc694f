"""What a file changes in one weight, and the number that multiplies it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..model_spec import Rows
from ..redact import SafeError
from .factors import Factors, Shape, factors

# Of an alpha or the rank it is divided by; larger ones make infinities of weights.
_LARGEST_ALPHA = 1e6


class LoraError(SafeError):
    """A LoRA that cannot be used, in a sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What PEFT's config says of a module, for a file without alphas: `alpha / rank ** power`.

    `rank` is None where it is that of the module's own matrices.
    """

    alpha: float | None = None
    power: float = 1.0
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a file changes in one weight of one layer: its tensors' names by part (see `factors`), and of which rows."""

    parts: Mapping[str, str]
    rows: Rows
    scaling: Scaling = field(default_factory=Scaling)

    def read(self, path: Path, tensors: Mapping[str, torch.Tensor], shape: Shape) -> tuple[Factors, float]:
        """The factors for the whole weight of `shape`, and what multiplies them besides the strength. `tensors` are
        the file's by part, in float32.
        """
        found = factors(tensors, self.rows, shape)
        return found, self._scale(path, tensors, found)

    def _scale(self, path: Path, tensors: Mapping[str, torch.Tensor], found: Factors) -> float:
        is_product = bool(found.pairs) or found.rank is not None
        if is_product and found.rank is not None and "alpha" in tensors:
            return check_alpha(path, self.parts["alpha"], tensors["alpha"].item()) / found.rank
        rank = self.scaling.rank or found.rank
        if not is_product or self.scaling.alpha is None or rank is None:
            return 1.0
        return self.scaling.alpha / rank**self.scaling.power


def check_alpha(path: str | Path, name: str, alpha: Any) -> float:
    """An alpha as a number; raises `LoraError` for one that no training has."""
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= _LARGEST_ALPHA:
        raise LoraError(
            f"The LoRA {path}: {name} is {short(alpha)}; an alpha is a number between 0 and {_LARGEST_ALPHA:g}. "
            "Choose another."
        )
    return float(alpha)


def short(value: Any) -> str:
    """At most about sixty letters of a stranger's value."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
