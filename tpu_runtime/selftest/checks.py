"""One check: what the chips computed against what the host says, and the verdict on the difference."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..machine.fallbacks import Halted, halted
from ..machine.record import MachineRecord, parsed
from ..progress import Progress
from ..redact import redact

# Of equal name and shape: what the chips computed, and the reference.
Arrays = Mapping[str, Any]


class Wrong(Exception):
    """Something is not as it must be; the message is a sentence. `learnt` is what the machine does without from now
    on.
    """

    def __init__(self, sentence: str, learnt: MachineRecord = MachineRecord()) -> None:  # noqa: B008 (it is frozen)
        super().__init__(sentence)
        self.learnt = learnt


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a check without arrays found out: numbers by name and unit, a `note`, what the machine's record gains."""

    values: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    learnt: MachineRecord = MachineRecord()


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What rounding may do: the largest error, in units of the reference's largest value; and how far the slope of the
    result, fitted on the reference, may be from 1. The slope sees what a largest error forgives: a small factor on
    everything.
    """

    error: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """`run(progress)` returns the chips' arrays and the reference's, or has compared them itself (and raises `Wrong`);
    without a `bound` that is how. `if_lost` is what the machine does without if the check fails, or does not end.
    """

    family: str
    stage: str
    precision: str
    run: Callable[[Progress], tuple[Arrays, Arrays] | Found | None]
    bound: Bound | None = None
    if_lost: MachineRecord = MachineRecord()

    @property
    def title(self) -> str:
        return title(self.family, self.stage, self.precision)


def title(family: str, stage: str, precision: str) -> str:
    return f"{family}: {stage} ({precision})" if precision else f"{family}: {stage}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What came of a check. `error` and `slope` as in `Bound`, None where there are no numbers; `problem` is a
    sentence, empty when all is well. `values`, `note` and `learnt` as in `Found`; `is_lost`: the chips are lost to the
    process that made it. `is_skipped`: nothing was checked, for the reason in `note`.
    """

    family: str
    stage: str
    precision: str
    error: float | None
    slope: float | None
    bound: Bound | None
    seconds: float
    problem: str
    values: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    learnt: MachineRecord = MachineRecord()
    is_lost: bool = False
    is_skipped: bool = False

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.is_skipped

    @property
    def title(self) -> str:
        return title(self.family, self.stage, self.precision)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "learnt": self.learnt.to_json()}


def result(row: Mapping[str, Any]) -> CheckResult:
    """The row of `CheckResult.to_json`."""
    bound = row["bound"] and Bound(**row["bound"])
    return CheckResult(**{**row, "bound": bound, "learnt": parsed(row["learnt"])})


def perform(check: Check, progress: Progress) -> CheckResult:
    """Runs a check. Whatever it raises, but for Ctrl-C, is a row too: the other checks still run."""
    started = time.monotonic()
    error = slope = None
    problem, found, learnt, is_lost = "", Found(), MachineRecord(), False
    try:
        ran = check.run(progress)
        if isinstance(ran, Found):
            found = ran
            learnt = found.learnt
        elif ran is not None:
            assert check.bound is not None, check.stage
            error, slope, problem = judge(*ran, check.bound)
    except Wrong as wrong:
        problem, learnt = str(wrong), wrong.learnt
    except Exception as failure:  # of any kind: it is the finding
        problem = sentence(failure)
        is_lost = isinstance(failure, Halted) or halted(failure, check.title, ()) is not None
    if problem and learnt == MachineRecord():
        learnt = check.if_lost
    return CheckResult(
        family=check.family, stage=check.stage, precision=check.precision, error=error, slope=slope, bound=check.bound,
        seconds=time.monotonic() - started, problem=problem, values=found.values, note=found.note, learnt=learnt,
        is_lost=is_lost,
    )  # fmt: skip


def sentence(failure: Exception) -> str:
    """The first line of what an exception says, without secrets."""
    first = redact(str(failure)).strip().partition("\n")[0]
    return f"{type(failure).__name__}: {first}" if first else type(failure).__name__


def judge(ours: Arrays, reference: Arrays, bound: Bound) -> tuple[float | None, float | None, str]:
    """The worst error and slope of all arrays, and what is wrong with them."""
    if ours.keys() != reference.keys():
        return None, None, f"There are {', '.join(ours)} instead of {', '.join(reference)}."
    errors, slopes = [0.0], [1.0]
    for name, want in reference.items():
        found, want = np.asarray(ours[name]), np.asarray(want)
        if found.shape != want.shape:
            return None, None, f"{name} has shape {found.shape} instead of {want.shape}."
        if np.issubdtype(want.dtype, np.integer) and not np.array_equal(found, want):
            return None, None, f"{name} is {found.tolist()} instead of {want.tolist()}."
        if not np.isfinite(found).all():
            wrong = np.count_nonzero(~np.isfinite(found))
            return None, None, f"{wrong} of {found.size} values of {name} are not finite."
        errors.append(_error(found, want))
        slopes.append(_slope(found, want))
    error, slope = max(errors), max(slopes, key=lambda one: abs(one - 1))
    if error > bound.error:
        return (
            error,
            slope,
            f"The largest error is {error:.1e} of the largest value; {bound.error:.0e} may be rounding.",
        )
    if abs(slope - 1) > bound.slope:
        return error, slope, f"Everything is {abs(slope - 1):.1e} too {'large' if slope > 1 else 'small'}."
    return error, slope, ""


def _error(found: np.ndarray, want: np.ndarray) -> float:
    difference = np.max(np.abs(found.astype(np.float64) - want), initial=0.0)
    return float(difference / max(np.max(np.abs(want), initial=0.0), 1e-30)) if difference else 0.0


def _slope(found: np.ndarray, want: np.ndarray) -> float:
    centred = want.astype(np.float64) - want.mean()
    spread = np.sum(centred**2)
    return float(np.sum(centred * (found - found.mean(dtype=np.float64))) / spread) if spread else 1.0
