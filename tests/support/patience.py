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


def slower(names: Iterable[str], *chosen: str) -> list[Any]:
    """These names, of which the chosen are `recorded`: theirs is a long run of what others show too."""
    return [pytest.param(name, marks=pytest.mark.recorded) if name in chosen else name for name in names]
