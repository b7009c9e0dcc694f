"""What a widget may hold, what a generation is asked for, and the sentence for what may not be. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .step_cache import MagCache, StepCache


@dataclass(frozen=True, kw_only=True)
class IntLimit:
    """A whole number with `low <= value <= high` and `value % multiple_of == plus`."""

    default: int
    low: int
    high: int
    multiple_of: int = 1
    plus: int = 0

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, with the nearest values that would do; None if it is fine."""
        if isinstance(value, bool) or not isinstance(value, int):
            return f"is {value!r}; it must be a whole number between {self.low} and {self.high}."
        if self.low <= value <= self.high and (value - self.plus) % self.multiple_of == 0:
            return None
        rule = f"between {self.low} and {self.high}"
        if self.multiple_of > 1 and self.plus:
            rule = f"{self.multiple_of}k + {self.plus} {rule}"
        elif self.multiple_of > 1:
            rule = f"a multiple of {self.multiple_of} {rule}"
        return f"is {value}; it must be {rule}. Use {self._nearest(value)}."

    def at_most(self, value: int) -> int | None:
        """The largest allowed value that is not above `value`; None if there is none."""
        below = self._not_above(value)
        return below if self.low <= below <= self.high else None

    def _not_above(self, value: int) -> int:
        return self.plus + (value - self.plus) // self.multiple_of * self.multiple_of

    def _nearest(self, value: int) -> str:
        below = self._not_above(value)
        clipped = sorted({min(max(near, self.low), self.high) for near in (below, below + self.multiple_of)})
        return " or ".join(str(near) for near in clipped)


@dataclass(frozen=True, kw_only=True)
class FloatLimit:
    """A number with `low <= value <= high`; `step` is only the widget's."""

    default: float
    low: float
    high: float
    step: float = 0.1

    def problem(self, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is {value!r}; it must be a number between {self.low} and {self.high}."
        if self.low <= value <= self.high:
            return None
        near = self.low if value < self.low else self.high
        return f"is {value}; it must be between {self.low} and {self.high}. Use {near}."


@dataclass(frozen=True, kw_only=True)
class Switch:
    """On or off."""

    default: bool

    def problem(self, value: Any) -> str | None:
        return None if isinstance(value, bool) else f"is {value!r}; it must be true or false."


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of some names; the first is the default. `elsewhere` are names that other models have, and which."""

    options: tuple[str, ...]
    elsewhere: tuple[tuple[str, str], ...] = ()

    @property
    def default(self) -> str:
        return self.options[0]

    def problem(self, value: Any) -> str | None:
        if value in self.options:
            return None
        others = "".join(f", which {who} have" for name, who in self.elsewhere if name == value)
        return f"is {value!r}{others}; it must be one of {', '.join(self.options)}."


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers between 0 and 1 as text with commas between them, each smaller than the one before; may be empty."""

    most: int
    default: str = ""

    def problem(self, value: Any) -> str | None:
        if not isinstance(value, str | tuple):
            return f"is {value!r}; it must be text: numbers with commas between them."
        try:
            numbers = self.numbers(value)
        except ValueError:
            return f"is {value!r}; it must be numbers with commas between them, such as 1, 0.75, 0.5, 0.25, or empty."
        if len(numbers) > self.most:
            return f"has {len(numbers)} numbers; at most {self.most} are allowed."
        if any(not 0 < number <= 1 for number in numbers):
            return f"is {value!r}; each number must be above 0 and at most 1. The 0 at the end is added by itself."
        if any(not low < high for high, low in zip(numbers, numbers[1:], strict=False)):
            return f"is {value!r}; each number must be smaller than the one before."
        return None

    @staticmethod
    def numbers(value: str | Sequence[float]) -> tuple[float, ...]:
        """The numbers of the text; what are numbers already stay so. Raises `ValueError` for other text."""
        if not isinstance(value, str):
            return tuple(value)
        return tuple(float(part) for part in value.split(",")) if value.strip() else ()


Limit = IntLimit | FloatLimit | Switch | Choice | Numbers


# The size of a result, in pixels and frames.
SIZE = ("height", "width", "num_frames")


def without_zero_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without sizes of 0, which stand for the encoded picture's, or for the model's own."""
    return {name: value for name, value in values.items() if value or name not in SIZE}


# What a sampler of any model may be told to run a part of the steps only, and of the steps; see `Settings`.
PART = {
    "start_step": IntLimit(default=0, low=0, high=100),
    "end_step": IntLimit(default=0, low=0, high=100),
    "add_noise": Switch(default=True),
    "return_with_leftover_noise": Switch(default=False),
}
# Of a video model: whether steps are left out, and how much error may add up (see `MagCache`).
MAG_CACHE = {
    "step_cache": Switch(default=False),
    "cache_threshold": FloatLimit(default=0.06, low=0.01, high=1.0, step=0.01),
}
# What may be traded for time; the first gives nothing away. `docs/quality.md` says what each costs.
SPARSE = "int8+sparse"
QUALITIES = ("exact", "int8", SPARSE)
STEP_INPUTS = {"sigmas": Numbers(most=100), "quality": Choice(options=QUALITIES), **PART}
# Of a model whose attention leaves no blocks out.
DENSE_QUALITY = Choice(options=QUALITIES[:2], elsewhere=((SPARSE, "Wan, but not TI2V, and HunyuanVideo"),))

# As a scheduler: the one that the checkpoint names.
CHECKPOINT = "checkpoint"
_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
# What may run in place of a flow model's own: diffusers' classes, with what is to change in its config.
FLOW_SCHEDULERS = {
    name: {"_class_name": name, **changes}
    for name, changes in {
        "FlowMatchEulerDiscreteScheduler": {},
        "UniPCMultistepScheduler": _FLOW,
        "DPMSolverMultistepScheduler": {**_FLOW, "algorithm_type": "dpmsolver++"},
        "FlowMatchLCMScheduler": {},
    }.items()
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one generation is asked for. Sizes in pixels and frames; `shift` is the scheduler's flow shift.

    With a `step_cache` some steps are only approximated, and with another `quality` than the first of `QUALITIES` every
    one. `scheduler` is one of the model's `schedulers`, or `CHECKPOINT`. With `use_dynamic_cfg` guidance changes from
    step to step (see `GuidanceAt`).

    `sigmas`, if there are any, are those that the scheduler starts from, one for each step. Of two experts the second
    has `guidance_scale_2` (None: the same), and the first runs `high_noise_steps` (0: while the checkpoint says so). Of
    all steps `start_step` to `end_step` run (0: the last). They begin with latents that were given, with noise added
    unless `add_noise` is off; what noise is left before the last step stays with `return_with_leftover_noise`.
    """

    height: int
    width: int
    num_frames: int = 1
    num_inference_steps: int
    guidance_scale: float
    seed: int = 0
    shift: float | None = None
    guidance_scale_2: float | None = None
    step_cache: StepCache | MagCache | None = None
    quality: str = QUALITIES[0]
    scheduler: str = CHECKPOINT
    use_dynamic_cfg: bool = False
    sigmas: tuple[float, ...] = ()
    high_noise_steps: int = 0
    start_step: int = 0
    end_step: int = 0
    add_noise: bool = True
    return_with_leftover_noise: bool = False

    def in_quality(self, of_model: str) -> "Settings":
        """With the quality that the model's loader asks for, where these ask for none."""
        return self if self.quality != QUALITIES[0] else replace(self, quality=of_model)

    @property
    def steps(self) -> range:
        """The steps that run, counted from 0."""
        total = self.num_inference_steps
        return range(self.start_step, min(self.end_step or total, total))

    def check(self, title: str) -> None:
        """Raises `ValueError` with a sentence about the model of this `title` where values do not go together."""
        total = self.num_inference_steps
        if self.high_noise_steps > total:
            raise ValueError(
                f"{title}: high_noise_steps is {self.high_noise_steps}, but there are {total} steps. Use at most that "
                "many, or 0 for as many as the checkpoint says."
            )
        if not self.steps:
            raise ValueError(
                f"{title}: start_step is {self.start_step} and end_step {self.end_step}, of {total} steps: none is "
                "left to run. Steps count from 0; start_step must be below end_step, where 0 stands for the end."
            )
