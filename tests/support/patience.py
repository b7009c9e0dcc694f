"""Waiting for what happens, not for seconds: tests also run while other work holds every core. And what is not waited
for in every run.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

# Far longer than anything takes on a busy machine; only what never happens costs it.
PATIENCE_S = 600
_LOOK_AGAIN_S = 0.05

Value = TypeVar("Value")


def until(condition: Callable[[], Value], what: str | Callable[[], str] = "it did not happen") -> Value:
    """The first true value of `condition`. `what` says what is wrong when none comes."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(_LOOK_AGAIN_S)
    return value


def slower(cases: Iterable[Value], *chosen: Value) -> list[Any]:
    """These cases, of which the chosen are `recorded`: theirs is a long run of what others show too."""
    all_cases = list(cases)
    assert all(case in all_cases for case in chosen), chosen
    return [pytest.param(case, marks=pytest.mark.recorded) if case in chosen else case for case in all_cases]


def mostly(cases: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """These cases of several parameters, of which all but the kept are `recorded`: those show each value of each."""
    all_cases = list(cases)
    assert all(case in all_cases for case in kept), kept
    return [pytest.param(*case, marks=[] if case in kept else [pytest.mark.recorded]) for case in all_cases]
