"""What a widget may hold, to the last value, and what it says of any other; the settings of a part of the steps."""

import math
from typing import Any

import pytest
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tpu_runtime.model_spec.inputs import (
    BoolInput,
    EnumInput,
    FloatInput,
    IntInput,
    Settings,
    SigmaList,
    drop_zero_sizes,
)
from comfyui_tpu.tpu_runtime.model_spec.step_cache import MagCache, StepCache, make_step_cache

FRAMES = IntInput(default=81, low=17, high=121, multiple_of=4, plus=1)
SIZE = IntInput(default=80, low=16, high=100, multiple_of=16)
ODD = IntInput(default=1, low=1, high=9, multiple_of=2, plus=1)
EVEN = IntInput(default=2, low=2, high=8, multiple_of=2)
COUNT = IntInput(default=1, low=1, high=9)
SCALE = FloatInput(default=5.0, low=0.5, high=9.5)
SIGMAS = SigmaList(most=3)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (FRAMES, (17, 21, 81, 121)), (SIZE, (16, 96)), (COUNT, (1, 9)), (SCALE, (0.5, 5, 9.5)),
        (BoolInput(default=True), (True, False)), (EnumInput(options=("a", "b")), ("a", "b")),
        (SIGMAS, ("", "  ", "1", "1, 0.5,0.25", (1.0, 0.1), ())),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_input_problem_of_allowed_values_is_none(limit: Any, allowed: tuple):
    assert [limit.problem(value) for value in allowed] == [None] * len(allowed)


BREAKS = "settings.breaks_rule"


def between(low: int, high: int) -> Expected:
    return Expected("settings.between", low=low, high=high)


def grid(multiple_of: int, low: int, high: int) -> Expected:
    return Expected("settings.grid", multiple_of=multiple_of, plus=1, rule=between(low, high))


def multiple(multiple_of: int, low: int, high: int) -> Expected:
    return Expected("settings.multiple", multiple_of=multiple_of, rule=between(low, high))


@pytest.mark.parametrize(
    ("limit", "value", "key", "parameters"),
    [
        (FRAMES, 80, BREAKS, {"rule": grid(4, 17, 121), "nearest": [77, 81]}),
        (FRAMES, 16, BREAKS, {"rule": grid(4, 17, 121), "nearest": [17]}),
        (FRAMES, 122, BREAKS, {"rule": grid(4, 17, 121), "nearest": [121]}),
        (FRAMES, 10**30, BREAKS, {"rule": grid(4, 17, 121), "nearest": [121]}),
        (SIZE, 97, BREAKS, {"rule": multiple(16, 16, 100), "nearest": [96, 100]}),
        (SIZE, 17, BREAKS, {"rule": multiple(16, 16, 100), "nearest": [16, 32]}),
        (ODD, 4, BREAKS, {"rule": grid(2, 1, 9), "nearest": [3, 5]}),
        (EVEN, 5, BREAKS, {"rule": multiple(2, 2, 8), "nearest": [4, 6]}),
        (COUNT, 0, BREAKS, {"rule": between(1, 9), "nearest": [1]}),
        (COUNT, 10, BREAKS, {"rule": between(1, 9), "nearest": [9]}),
        (COUNT, 1.0, "settings.not_whole_number", {"low": 1, "high": 9}),
        (COUNT, True, "settings.not_whole_number", {"low": 1, "high": 9}),
        (SCALE, 0.4, "settings.outside", {"low": 0.5, "high": 9.5, "near": 0.5}),
        (SCALE, 10, "settings.outside", {"low": 0.5, "high": 9.5, "near": 9.5}),
        (SCALE, math.nan, "settings.outside", {"low": 0.5, "high": 9.5, "near": 9.5}),
        (SCALE, "5", "settings.not_number", {"low": 0.5, "high": 9.5}),
        (SCALE, False, "settings.not_number", {"low": 0.5, "high": 9.5}),
        (BoolInput(default=True), 1, "settings.not_boolean", {}),
        (EnumInput(options=("a", "b")), "c", "settings.not_an_option", {"others": "", "options": "a, b"}),
        (SIGMAS, 1, "settings.not_text", {}),
        (SIGMAS, "1;2", "settings.not_numbers", {}),
        (SIGMAS, "1,0.8,0.5,0.2", "settings.too_many_numbers", {"count": 4, "most": 3}),
        (SIGMAS, "1,0", "settings.number_outside", {}),
        (SIGMAS, "1.5", "settings.number_outside", {}),
        (SIGMAS, "nan", "settings.number_outside", {}),
        (SIGMAS, (0.5, 0.5), "settings.not_decreasing", {}),
    ],
)
def test_input_problem_names_allowed_values(limit: Any, value: Any, key: str, parameters: dict[str, object]):
    own = {} if "count" in parameters else {"value": repr(value)}
    assert_message(limit.problem(value), key, **own, **parameters)


def test_enum_default_is_first_option_and_sigmas_keep_order():
    assert EnumInput(options=("b", "a")).default == "b"
    assert SigmaList.numbers(" 1, 0.5 ,0.25") == (1.0, 0.5, 0.25)
    assert SigmaList.numbers(" ") == () and SigmaList.numbers([1, 0.5]) == (1, 0.5)


def test_largest_allowed_returns_largest_value_not_above():
    assert [FRAMES.largest_allowed(value) for value in (16, 17, 80, 81, 121, 122, 124, 125)] == [
        None, 17, 77, 81, 121, 121, 121, None
    ]  # fmt: skip


def test_step_cache_is_full_selects_steps():
    cache = StepCache(start=2, end=7, interval=3)
    assert [index for index in range(9) if cache.is_full(index)] == [0, 1, 2, 5, 7, 8]
    assert [index for index in range(5) if StepCache(start=1, end=5, interval=1).is_full(index)] == [0, 1, 2, 3, 4]


def test_make_step_cache_returns_policy_of_widgets():
    widgets = {"step_cache": True, "cache_start": 1, "cache_end": 5, "cache_interval": 2}
    assert make_step_cache(widgets) == StepCache(start=1, end=5, interval=2)
    assert make_step_cache({**widgets, "step_cache": False}) is None and make_step_cache({}) is None
    assert make_step_cache({**widgets, "cache_threshold": 0.0}) == make_step_cache(widgets)
    assert make_step_cache({**widgets, "cache_threshold": 0.1}) == MagCache(threshold=0.1)
    assert make_step_cache({**widgets, "cache_threshold": 0.1, "step_cache": False}) is None


def test_drop_zero_sizes_removes_only_sizes():
    given = {"height": 0, "width": 16, "num_frames": 0, "seed": 0, "fps": 0}
    assert drop_zero_sizes(given) == {"width": 16, "seed": 0, "fps": 0}


def part(**fields: Any) -> Settings:
    return Settings(height=16, width=16, num_inference_steps=6, guidance_scale=5.0, **fields)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, range(6)),
        ({"start_step": 2}, range(2, 6)),
        ({"end_step": 4}, range(4)),
        ({"start_step": 1, "end_step": 2}, range(1, 2)),
        ({"start_step": 5, "end_step": 100}, range(5, 6)),
    ],
)
def test_settings_steps_follow_start_step_and_end_step(fields: dict, steps: range):
    part(**fields).check("A model")
    assert part(**fields).steps == steps


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"high_noise_steps": 7}, Expected("settings.too_many_high_noise_steps", high_noise_steps=7, total=6)),
        ({"start_step": 3, "end_step": 3}, Expected("settings.no_step_left", start_step=3, end_step=3, total=6)),
        ({"start_step": 6}, Expected("settings.no_step_left", start_step=6, end_step=0, total=6)),
    ],
)
def test_settings_invalid_step_combination_raises_value_error(fields: dict, expected: Expected):
    with raises_message(ValueError, expected) as raised:
        part(**fields).check("A model")
    assert str(raised.value).parameters["title"] == "A model"
    part(high_noise_steps=6).check("A model")
