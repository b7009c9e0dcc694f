"""Limits of node inputs, the settings of a generation, and messages for values that are not allowed.

Pure arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ..messages import compose, compose_list
from .quality import QUALITIES, Quality
from .step_cache import MagCache, StepCache


@dataclass(frozen=True, kw_only=True)
class IntInput:
    """An integer input with `low <= value <= high` and `value % multiple_of == plus`."""

    default: int
    low: int
    high: int
    multiple_of: int = 1
    plus: int = 0
    tooltip: str = ""  # of an own input (see `Settings.own`)

    def problem(self, value: object) -> str | None:
        """Return the reason why `value` is not allowed, with the nearest allowed values; None if it is allowed."""
        if isinstance(value, bool) or not isinstance(value, int):
            return compose("settings.not_whole_number", value=repr(value), low=self.low, high=self.high)
        if self.low <= value <= self.high and (value - self.plus) % self.multiple_of == 0:
            return None
        rule = compose("settings.between", low=self.low, high=self.high)
        if self.multiple_of > 1 and self.plus:
            rule = compose("settings.grid", multiple_of=self.multiple_of, plus=self.plus, rule=rule)
        elif self.multiple_of > 1:
            rule = compose("settings.multiple", multiple_of=self.multiple_of, rule=rule)
        return compose("settings.breaks_rule", value=value, rule=rule, nearest=self._nearest(value))

    def largest_allowed(self, value: int) -> int | None:
        """Return the largest allowed value that is not above `value`, or None."""
        below = self._not_above(value)
        return below if self.low <= below <= self.high else None

    def _not_above(self, value: int) -> int:
        return self.plus + (value - self.plus) // self.multiple_of * self.multiple_of

    def _nearest(self, value: int) -> str:
        below = self._not_above(value)
        clipped = sorted({min(max(near, self.low), self.high) for near in (below, below + self.multiple_of)})
        return compose_list(clipped, "or")


@dataclass(frozen=True, kw_only=True)
class FloatInput:
    """A number input with `low <= value <= high`; `step` is only the widget's."""

    default: float
    low: float
    high: float
    step: float = 0.1
    tooltip: str = ""  # of an own input (see `Settings.own`)

    def problem(self, value: object) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return compose("settings.not_number", value=repr(value), low=self.low, high=self.high)
        if self.low <= value <= self.high:
            return None
        near = self.low if value < self.low else self.high
        return compose("settings.outside", value=value, low=self.low, high=self.high, near=near)


@dataclass(frozen=True, kw_only=True)
class BoolInput:
    """A boolean input."""

    default: bool
    tooltip: str = ""  # of an own input (see `Settings.own`)

    def problem(self, value: object) -> str | None:
        return None if isinstance(value, bool) else compose("settings.not_boolean", value=repr(value))


@dataclass(frozen=True, kw_only=True)
class EnumInput:
    """An input that is one of `options`; the first is the default."""

    options: tuple[str, ...]
    elsewhere: tuple[tuple[str, str], ...] = ()  # options of other models, with the names of these models

    @property
    def default(self) -> str:
        return self.options[0]

    def problem(self, value: object) -> str | None:
        if value in self.options:
            return None
        others = next((compose("settings.others_have", who=who) for name, who in self.elsewhere if name == value), "")
        return compose("settings.not_an_option", value=repr(value), others=others, options=", ".join(self.options))


@dataclass(frozen=True, kw_only=True)
class SigmaList:
    """A text input of comma-separated numbers above 0 and up to 1 in decreasing order; may be empty."""

    most: int  # numbers allowed
    default: str = ""

    def problem(self, value: object) -> str | None:
        if not isinstance(value, str | tuple):
            return compose("settings.not_text", value=repr(value))
        try:
            numbers = self.numbers(value)
        except ValueError:
            return compose("settings.not_numbers", value=repr(value))
        if len(numbers) > self.most:
            return compose("settings.too_many_numbers", count=len(numbers), most=self.most)
        if any(not 0 < number <= 1 for number in numbers):
            return compose("settings.number_outside", value=repr(value))
        if any(not low < high for high, low in zip(numbers, numbers[1:], strict=False)):
            return compose("settings.not_decreasing", value=repr(value))
        return None

    @staticmethod
    def numbers(value: str | Sequence[float]) -> tuple[float, ...]:
        """Return the numbers of a text; a sequence of numbers becomes a tuple. Raises `ValueError` for other text."""
        if not isinstance(value, str):
            return tuple(value)
        return tuple(float(part) for part in value.split(",")) if value.strip() else ()


InputType = IntInput | FloatInput | BoolInput | EnumInput | SigmaList


def is_own(limit: InputType | None) -> TypeGuard[IntInput | FloatInput | BoolInput]:
    """Return whether an input is one of its family alone: it states its tooltip, and the denoiser takes its value."""
    return isinstance(limit, IntInput | FloatInput | BoolInput) and bool(limit.tooltip)


# The size of a result, in pixels and frames.
SIZE_INPUTS = ("height", "width", "num_frames")


def drop_zero_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without sizes of 0, which stand for the encoded image's size or the model's default."""
    return {name: value for name, value in values.items() if value or name not in SIZE_INPUTS}


# Inputs of every sampler that select a range of the steps (see `Settings`).
STEP_RANGE_INPUTS = {
    "start_step": IntInput(default=0, low=0, high=100),
    "end_step": IntInput(default=0, low=0, high=100),
    "add_noise": BoolInput(default=True),
    "return_with_leftover_noise": BoolInput(default=False),
}
# Inputs of video models: whether steps are skipped, and the limit of the accumulated error (see `MagCache`).
MAG_CACHE_INPUTS = {
    "step_cache": BoolInput(default=False),
    "cache_threshold": FloatInput(default=0.06, low=0.01, high=1.0, step=0.01),
}


STEP_INPUTS = {"sigmas": SigmaList(most=100), "quality": EnumInput(options=QUALITIES), **STEP_RANGE_INPUTS}


def quality_input(denoiser: object) -> EnumInput:
    """Return the input for the qualities that a model with this `DenoiserSpec` supports."""
    lacking = [quality for quality in Quality if (field := quality.traits.needs) and not getattr(denoiser, field)]
    return EnumInput(
        options=tuple(quality.value for quality in Quality if quality not in lacking),
        elsewhere=tuple((quality.value, quality.traits.models) for quality in lacking),
    )


# Option of `scheduler`: the one that the checkpoint names.
CHECKPOINT = "checkpoint"
_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
# Alternatives to a flow model's own scheduler: diffusers' classes, with the changes to its config.
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
    """The settings of one generation."""

    height: int  # pixels
    width: int  # pixels
    num_frames: int = 1
    num_inference_steps: int
    guidance_scale: float
    seed: int = 0
    shift: float | None = None  # the scheduler's flow shift; None for the checkpoint's
    guidance_scale_2: float | None = None  # of the second expert; None for the same
    step_cache: StepCache | MagCache | None = None  # skips parts of steps; None to run all steps whole
    quality: str = Quality.EXACT  # one of `QUALITIES`
    scheduler: str = CHECKPOINT  # one of the model's `schedulers`, or `CHECKPOINT`
    use_dynamic_cfg: bool = False  # guidance changes from step to step (see `GuidanceSchedule`)
    sigmas: tuple[float, ...] = ()  # the scheduler's initial ones, one per step; () for its own
    high_noise_steps: int = 0  # run by the first of two experts; 0 for the checkpoint's boundary
    start_step: int = 0  # first step that runs, from 0
    end_step: int = 0  # end of the steps that run; 0 for the last
    add_noise: bool = True  # False to start from latents as they are
    return_with_leftover_noise: bool = False  # keep the noise that is left if the last step does not run
    # Names and values of inputs that only this family has. The denoiser takes each by its name (see `Forward`).
    own: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        dict(self.own)  # raises TypeError or ValueError for anything but pairs

    def with_default_quality(self, of_model: str) -> "Settings":
        """Return settings with the quality of the model's loader, if these have the default one."""
        return self if self.quality != Quality.EXACT else replace(self, quality=of_model)

    @property
    def steps(self) -> range:
        """Steps that run, counted from 0."""
        total = self.num_inference_steps
        return range(self.start_step, min(self.end_step or total, total))

    def check(self, title: str) -> None:
        """Raise `ValueError` if values contradict each other. `title` names the model in the message."""
        total = self.num_inference_steps
        if self.high_noise_steps > total:
            raise ValueError(compose(
                "settings.too_many_high_noise_steps", title=title, high_noise_steps=self.high_noise_steps, total=total,
            ))  # fmt: skip
        if not self.steps:
            raise ValueError(compose(
                "settings.no_step_left", title=title, start_step=self.start_step, end_step=self.end_step, total=total,
            ))  # fmt: skip
