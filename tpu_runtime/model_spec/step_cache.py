"""Which steps of a generation run whole and which reuse an earlier one, known before the first. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Of a curve: at most so many steps, each ratio below this.
MOST_STEPS, MOST_RATIO = 1000, 100.0


@dataclass(frozen=True, kw_only=True)
class StepCache:
    """DeepCache: full steps before `start` and from `end` on; between them each `interval`-th, `start` first."""

    start: int
    end: int
    interval: int

    @property
    def widgets(self) -> dict[str, Any]:
        return {"cache_start": self.start, "cache_end": self.end, "cache_interval": self.interval}

    def is_full(self, index: int) -> bool:
        """Whether step `index`, counted from 0, runs the full denoiser."""
        return not self.start <= index < self.end or (index - self.start) % self.interval == 0

    def full_steps(self, experts: Sequence[str]) -> tuple[bool, ...]:
        """For each step, by the expert that runs it, whether it is a full one.

        The features of one expert mean nothing to another: its first step is full.
        """
        return tuple(
            self.is_full(index) or index == 0 or expert != experts[index - 1] for index, expert in enumerate(experts)
        )


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What MagCache knows of a model: `ratios`, for each branch of guidance and each step, of the length of what the
    blocks add to a token to that of the step before, on average.

    Of each expert's steps the first run whole, by a share for the first expert and one for the second (or one for
    both); then at most `most_skipped` in a row do not. `few_steps`, where there are any, are the ratios of as many
    steps as these are, or fewer. Raises ValueError for what no curve can be.
    """

    ratios: tuple[tuple[float, ...], ...]
    few_steps: tuple[tuple[float, ...], ...] = ()
    retained: tuple[float, ...] = (0.2,)
    most_skipped: int = 2

    def __post_init__(self) -> None:
        for rows in (self.ratios, *([self.few_steps] if self.few_steps != () else [])):
            if (
                not isinstance(rows, tuple)
                or not 1 <= len(rows) <= 2
                or not all(isinstance(row, tuple) for row in rows)
            ):
                raise ValueError("ratios are not those of one branch or two")
            if not 1 <= len(rows[0]) <= MOST_STEPS or len({*map(len, rows)}) > 1:
                raise ValueError(f"ratios are not of one number of steps, at most {MOST_STEPS}")
            if not all(_is_number(ratio, MOST_RATIO) and ratio > 0 for row in rows for ratio in row):
                raise ValueError(f"a ratio is not a number between 0 and {MOST_RATIO:g}")
        shares = self.retained
        if not isinstance(shares, tuple) or not 1 <= len(shares) <= 2 or not all(_is_number(one, 1) for one in shares):
            raise ValueError("a retained share is not a number between 0 and 1")
        if type(self.most_skipped) is not int or not 0 <= self.most_skipped <= MOST_STEPS:
            raise ValueError("most_skipped is not a whole number")

    def of(self, num_steps: int) -> list[list[float]]:
        """The ratios for another number of steps, each the nearest."""
        rows = self.few_steps if self.few_steps and num_steps <= len(self.few_steps[0]) else self.ratios
        scale = (len(rows[0]) - 1) / max(num_steps - 1, 1)
        at = [round(index * scale) for index in range(num_steps)] if num_steps > 1 else [-1]
        return [[row[index] for index in at] for row in rows]


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


@dataclass(frozen=True, kw_only=True)
class MagCache:
    """MagCache, https://arxiv.org/abs/2506.09045: what all blocks together add to the tokens is that of the last full
    step, while its error, which the `curve` foretells, adds up to less than `threshold`.

    Without a curve all steps are full, and the curve is measured.
    """

    threshold: float
    curve: Curve | None = None

    def __post_init__(self) -> None:
        if type(self.threshold) not in (int, float):
            raise TypeError("what is said to be a threshold is no number")
        if not isinstance(self.curve, Curve | None):
            raise TypeError("what is said to be a curve is none")

    @property
    def widgets(self) -> dict[str, Any]:
        return {"cache_threshold": self.threshold}

    def full_steps(self, experts: Sequence[str]) -> tuple[bool, ...]:
        """As `StepCache.full_steps`. The branches of guidance share a call: a step is full if it is for one of them."""
        if self.curve is None:
            return (True,) * len(experts)
        rows, order = self.curve.of(len(experts)), list(dict.fromkeys(experts))
        shares = dict(zip(order, (*self.curve.retained, *self.curve.retained[-1:] * len(order)), strict=False))
        found: list[bool] = []
        errors, drift, skipped = [0.0] * len(rows), [1.0] * len(rows), 0
        for index, expert in enumerate(experts):
            own = index - experts.index(expert)
            is_full = own < max(1, int(shares[expert] * experts.count(expert) + 0.5))
            if not is_full:
                drift = [one * row[index] for one, row in zip(drift, rows, strict=True)]
                errors = [error + abs(1 - one) for error, one in zip(errors, drift, strict=True)]
                skipped += 1
                is_full = max(errors) >= self.threshold or skipped > self.curve.most_skipped
            if is_full:
                errors, drift, skipped = [0.0] * len(rows), [1.0] * len(rows), 0
            found.append(is_full)
        return tuple(found)


def policy_of(widgets: Mapping[str, Any]) -> StepCache | MagCache | None:
    """The policy that the widgets ask for: `step_cache` is on or off; `cache_threshold` is MagCache's, or with 0 or
    without it DeepCache has `cache_start`, `cache_end` and `cache_interval`.
    """
    if not widgets.get("step_cache", False):
        return None
    if threshold := widgets.get("cache_threshold", 0.0):
        return MagCache(threshold=float(threshold))
    return StepCache(start=widgets["cache_start"], end=widgets["cache_end"], interval=widgets["cache_interval"])
