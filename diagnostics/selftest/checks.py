"""A check: the chips' results, the host's reference, and the verdict on their difference."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...tpu_runtime.machine.fallbacks import ChipHalted, classify_halt
from ...tpu_runtime.machine.record import MachineRecord, parse_record
from ...tpu_runtime.progress import Progress
from ...tpu_runtime.redact import redact

# Arrays by name. Those of the chips and of the reference have equal names and shapes.
Arrays = Mapping[str, Any]


class CheckFailed(Exception):
    """A check failed; the message is a sentence.

    learnt: the fallbacks that this machine needs from now on.
    """

    def __init__(self, sentence: str, learnt: MachineRecord = MachineRecord()) -> None:  # noqa: B008 (it is frozen)
        super().__init__(sentence)
        self.learnt = learnt


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of a check without arrays."""

    values: Mapping[str, float] = field(default_factory=dict)  # by name, which ends with the unit
    note: str = ""
    learnt: MachineRecord = MachineRecord()  # added to the machine's record


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The tolerance of a check.

    The slope detects a small factor on all values, which the largest error would permit.
    """

    error: float  # the largest error, relative to the reference's largest value
    slope: float  # the largest distance from 1 of the slope of a linear fit on the reference


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a group."""

    family: str
    stage: str
    precision: str
    # Returns the chips' arrays and the reference's; without a `bound` it compares by itself, and raises `CheckFailed`.
    run: Callable[[Progress], tuple[Arrays, Arrays] | Measurement | None]
    bound: Tolerance | None = None
    if_lost: MachineRecord = MachineRecord()  # fallbacks if the check fails or does not end

    @property
    def title(self) -> str:
        return format_title(self.family, self.stage, self.precision)


def format_title(family: str, stage: str, precision: str) -> str:
    return f"{family}: {stage} ({precision})" if precision else f"{family}: {stage}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of a check."""

    family: str
    stage: str
    precision: str
    error: float | None  # see `Tolerance`; None without arrays
    slope: float | None
    bound: Tolerance | None
    seconds: float
    problem: str  # a sentence; "" if the check passed
    values: Mapping[str, float] = field(default_factory=dict)  # see `Found`
    note: str = ""  # for a skipped check the reason
    learnt: MachineRecord = MachineRecord()
    is_lost: bool = False  # the process of the check has lost the chips
    is_skipped: bool = False

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.is_skipped

    @property
    def title(self) -> str:
        return format_title(self.family, self.stage, self.precision)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "learnt": self.learnt.to_json()}


def parse_result(row: Mapping[str, Any]) -> CheckResult:
    """Return the result that `CheckResult.to_json` wrote."""
    bound = row["bound"] and Tolerance(**row["bound"])
    return CheckResult(**{**row, "bound": bound, "learnt": parse_record(row["learnt"])})


def run_check(check: Check, progress: Progress) -> CheckResult:
    """Run a check. Any exception except Ctrl-C becomes a row, so that the other checks still run."""
    started = time.monotonic()
    error = slope = None
    problem, report, learnt, is_lost = "", Measurement(), MachineRecord(), False
    try:
        outcome = check.run(progress)
        if isinstance(outcome, Measurement):
            report = outcome
            learnt = report.learnt
        elif outcome is not None:
            assert check.bound is not None, check.stage
            error, slope, problem = compare_arrays(*outcome, check.bound)
    except CheckFailed as wrong:
        problem, learnt = str(wrong), wrong.learnt
    except Exception as failure:  # of any kind: it is the finding
        problem = summarize_error(failure)
        is_lost = isinstance(failure, ChipHalted) or classify_halt(failure, check.title, ()) is not None
    if problem and learnt == MachineRecord():
        learnt = check.if_lost
    return CheckResult(
        family=check.family, stage=check.stage, precision=check.precision, error=error, slope=slope, bound=check.bound,
        seconds=time.monotonic() - started, problem=problem, values=report.values, note=report.note, learnt=learnt,
        is_lost=is_lost,
    )  # fmt: skip


def summarize_error(failure: Exception) -> str:
    """Return the first line of an exception's message, without secrets."""
    first = redact(str(failure)).strip().partition("\n")[0]
    return f"{type(failure).__name__}: {first}" if first else type(failure).__name__


def compare_arrays(ours: Arrays, reference: Arrays, bound: Tolerance) -> tuple[float | None, float | None, str]:
    """Return the worst error and slope of all arrays, and the problem, or "".

    ours: of the chips. reference: of the host. bound: the tolerance.
    """
    if ours.keys() != reference.keys():
        return None, None, f"There are {', '.join(ours)} instead of {', '.join(reference)}."
    errors, slopes = [0.0], [1.0]
    for name, want in reference.items():
        actual, want = np.asarray(ours[name]), np.asarray(want)
        if actual.shape != want.shape:
            return None, None, f"{name} has shape {actual.shape} instead of {want.shape}."
        if np.issubdtype(want.dtype, np.integer) and not np.array_equal(actual, want):
            return None, None, f"{name} is {actual.tolist()} instead of {want.tolist()}."
        if not np.isfinite(actual).all():
            wrong = np.count_nonzero(~np.isfinite(actual))
            return None, None, f"{wrong} of {actual.size} values of {name} are not finite."
        errors.append(_error(actual, want))
        slopes.append(_slope(actual, want))
    error, slope = max(errors), max(slopes, key=lambda value: abs(value - 1))
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
