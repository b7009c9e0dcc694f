"""Recorded compile times of this machine, the estimates of those to come."""

import json

from ..cache.store import Store, signature

# Last compile time of each kind of program and of each model's programs, in seconds.
COMPILE_TIMES = Store("compile_seconds")
# Upper bound of a believable compile time: a cache file may hold anything.
MAX_COMPILE_S = 24 * 3600
# Most programs of a model that are recorded.
MAX_PROGRAMS = 32


def record(kind: str, model: str, program: str, seconds: float) -> None:
    """Record the compile time of a program.

    kind: digest that is equal for programs which differ in their sizes alone.
    model: name of the spec; "" for a program without one.
    program: its name.
    """
    COMPILE_TIMES.put(kind, f"{seconds:.1f}".encode())
    if model:
        times = {**_read_model(model), program: round(seconds, 1)}
        kept = dict(list(times.items())[-MAX_PROGRAMS:])
        COMPILE_TIMES.put(_model_key(model), json.dumps(kept).encode())


def get_last_s(kind: str) -> float:
    """Return the last compile time of a kind of program in seconds; 0 if unknown."""
    try:
        seconds = float(COMPILE_TIMES.get(kind) or 0)
    except ValueError:
        return 0.0
    return seconds if _is_believable(seconds) else 0.0


def get_model_s(model: str, prefix: str) -> float:
    """Return the sum of the last compile times of a model's programs in seconds, at any size; 0 if none is known.

    prefix: of the names of the programs.
    """
    return sum(seconds for program, seconds in _read_model(model).items() if program.startswith(prefix))


def _model_key(model: str) -> str:
    return signature("model", model)


def _read_model(model: str) -> dict[str, float]:
    """Return the seconds of a model's programs by name, without those that are not believable."""
    try:
        found = json.loads(COMPILE_TIMES.get(_model_key(model)) or b"{}")
    except (ValueError, RecursionError):
        return {}
    items = list(found.items())[:MAX_PROGRAMS] if isinstance(found, dict) else []
    return {
        name: float(seconds) for name, seconds in items if type(seconds) in (int, float) and _is_believable(seconds)
    }


def _is_believable(seconds: float) -> bool:
    return 0 < seconds < MAX_COMPILE_S
