"""Selection of the steps of a generation that run whole; the others reuse an earlier one.

Known before the first step. Pure arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Limits of a curve: the number of steps, and each ratio.
MAX_STEPS, MAX_RATIO = 1000, 100.0


@dataclass(frozen=True, kw_only=True)
class StepCache:
    """DeepCache: full steps before `start` and from `end` on.

    Between them every `interval`-th step is full, beginning with `start`.
    """

    start: int
    end: int
    interval: int

    @property
    def widgets(self) -> dict[str, int]:
        return {"cache_start": self.start, "cache_end": self.end, "cache_interval": self.interval}

    def is_full(self, index: int) -> bool:
        """Return whether step `index`, counted from 0, runs the full denoiser."""
        return not self.start <= index < self.end or (index - self.start) % self.interval == 0

    def full_steps(self, experts: Sequence[str]) -> tuple[bool, ...]:
        """Return for each step whether it runs the full denoiser.

        experts: the expert of each step. An expert's first step is full, because it cannot use the features of another
            one.
        """
        return tuple(
            self.is_full(index) or index == 0 or expert != experts[index - 1] for index, expert in enumerate(experts)
        )


@dataclass(frozen=True, kw_only=True)
class MagCacheCurve:
    """MagCache's measurement of a model. Raises `ValueError` for invalid values."""

    # per guidance branch and step: mean ratio of the length of the blocks' residual to that of the previous step
    ratios: tuple[tuple[float, ...], ...]
    few_steps: tuple[tuple[float, ...], ...] = ()  # ratios for runs of at most this many steps; () without such
    # share of an expert's first steps that run whole; one for all experts, or one each
    retained: tuple[float, ...] = (0.2,)
    most_skipped: int = 2  # consecutive steps that may be skipped

    def __post_init__(self) -> None:
        for rows in (self.ratios, *([self.few_steps] if self.few_steps != () else [])):
            if (
                not isinstance(rows, tuple)
                or not 1 <= len(rows) <= 2
                or not all(isinstance(row, tuple) for row in rows)
            ):
                raise ValueError("ratios are not those of one branch or two")
            if not 1 <= len(rows[0]) <= MAX_STEPS or len({*map(len, rows)}) > 1:
                raise ValueError(f"ratios are not of one number of steps, at most {MAX_STEPS}")
            if not all(_is_number(ratio, MAX_RATIO) and ratio > 0 for row in rows for ratio in row):
                raise ValueError(f"a ratio is not a number between 0 and {MAX_RATIO:g}")
        shares = self.retained
        if (
            not isinstance(shares, tuple)
            or not 1 <= len(shares) <= 2
            or not all(_is_number(share, 1) for share in shares)
        ):
            raise ValueError("a retained share is not a number between 0 and 1")
        if type(self.most_skipped) is not int or not 0 <= self.most_skipped <= MAX_STEPS:
            raise ValueError("most_skipped is not a whole number")

    def resample(self, num_steps: int) -> list[list[float]]:
        """Return the ratios for another number of steps, each the nearest."""
        rows = self.few_steps if self.few_steps and num_steps <= len(self.few_steps[0]) else self.ratios
        scale = (len(rows[0]) - 1) / max(num_steps - 1, 1)
        indices = [round(index * scale) for index in range(num_steps)] if num_steps > 1 else [-1]
        return [[row[index] for index in indices] for row in rows]


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """MagCache, https://arxiv.org/abs/2506.09045.

    A skipped step reuses the blocks' total residual of the last full step.

    Steps are skipped while the accumulated error that the `curve` predicts is below `threshold`. Without a curve all
    steps are full, and the curve is measured.
    """

    threshold: float
    curve: MagCacheCurve | None = None

    def __post_init__(self) -> None:
        if type(self.threshold) not in (int, float):
            raise TypeError(f"threshold is {self.threshold!r:.60}; it must be a number")
        if not isinstance(self.curve, MagCacheCurve | None):
            raise TypeError(f"curve is a {type(self.curve).__name__}; it must be a Curve or None")

    @property
    def widgets(self) -> dict[str, float]:
        return {"cache_threshold": self.threshold}

    def full_steps(self, experts: Sequence[str]) -> tuple[bool, ...]:
        """Return for each step whether it runs the full denoiser, as `StepCache.full_steps`.

        experts: the expert of each step.
        The branches of guidance share a call: a step is full if it is for one of them.
        """
        if self.curve is None:
            return (True,) * len(experts)
        rows, order = self.curve.resample(len(experts)), list(dict.fromkeys(experts))
        shares = dict(zip(order, (*self.curve.retained, *self.curve.retained[-1:] * len(order)), strict=False))
        is_full_step: list[bool] = []
        errors, drift, skipped = [0.0] * len(rows), [1.0] * len(rows), 0
        for index, expert in enumerate(experts):
            expert_index = index - experts.index(expert)
            is_full = expert_index < max(1, int(shares[expert] * experts.count(expert) + 0.5))
            if not is_full:
                drift = [value * row[index] for value, row in zip(drift, rows, strict=True)]
                errors = [error + abs(1 - value) for error, value in zip(errors, drift, strict=True)]
                skipped += 1
                is_full = max(errors) >= self.threshold or skipped > self.curve.most_skipped
            if is_full:
                errors, drift, skipped = [0.0] * len(rows), [1.0] * len(rows), 0
            is_full_step.append(is_full)
        return tuple(is_full_step)


def make_step_cache(widgets: Mapping[str, Any]) -> StepCache | MagCache | None:
    """Return the step cache that the widgets select, or None.

    widgets: `step_cache` is on or off. A `cache_threshold` above 0 selects MagCache; otherwise DeepCache has
        `cache_start`, `cache_end` and `cache_interval`.
    """
    if not widgets.get("step_cache", False):
        return None
    if threshold := widgets.get("cache_threshold", 0.0):
        return MagCache(threshold=float(threshold))
    return StepCache(start=widgets["cache_start"], end=widgets["cache_end"], interval=widgets["cache_interval"])
