"""Change of one weight by a file, and its scale factor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..messages import compose
from ..model_spec import RowSlice
from ..redact import SafeError
from .factors import DeltaFactors, Shape, make_factors

# Upper bound of an alpha, above which weights overflow.
_LARGEST_ALPHA = 1e6


class LoraError(SafeError):
    """A LoRA that cannot be used, in a sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class AlphaScaling:
    """PEFT's scale factor of a module in a file without alphas: `alpha / rank ** power`."""

    alpha: float | None = None  # None for a factor of 1
    power: float = 1.0
    rank: int | None = None  # None for that of the module's matrices


@dataclass(frozen=True, kw_only=True)
class WeightChange:
    """A file's change to one weight of one layer."""

    parts: Mapping[str, str]  # tensor names by part (see `factors`)
    rows: RowSlice  # of the weight that are changed
    scaling: AlphaScaling = field(default_factory=AlphaScaling)  # by PEFT's config

    def read(self, path: Path, tensors: Mapping[str, torch.Tensor], shape: Shape) -> tuple[DeltaFactors, float]:
        """Return the factors for the whole weight of `shape`, and their scale factor other than the strength.

        tensors: of the file by part, in float32, as in `factors`: `[rank, in]`, `[out, rank]` or the weight's shape.
        """
        delta = make_factors(tensors, self.rows, shape)
        return delta, self._scale(path, tensors, delta)

    def _scale(self, path: Path, tensors: Mapping[str, torch.Tensor], found: DeltaFactors) -> float:
        is_product = bool(found.pairs) or found.rank is not None
        if is_product and found.rank is not None and "alpha" in tensors:
            return check_alpha(path, self.parts["alpha"], tensors["alpha"].item()) / found.rank
        rank = self.scaling.rank or found.rank
        if not is_product or self.scaling.alpha is None or rank is None:
            return 1.0
        return self.scaling.alpha / rank**self.scaling.power


def check_alpha(path: str | Path, name: str, alpha: Any) -> float:
    """Return an alpha as a float. Raises `LoraError` for values out of bounds.

    path, name: for the message.
    """
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= _LARGEST_ALPHA:
        raise LoraError(compose(
            "lora.alpha_outside", path=path, name=name, alpha=shorten_value(alpha), largest_alpha=f"{_LARGEST_ALPHA:g}",
        ))  # fmt: skip
    return float(alpha)


def shorten_value(value: object) -> str:
    """Return the `repr` of an untrusted value, truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
