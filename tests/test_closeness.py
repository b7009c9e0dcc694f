"""The comparison that parity is judged by: what it lets pass, and what not, on every scale."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from comfyui_tpu.tests.support import closeness
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE, ROUNDING

TESTS = Path(__file__).parent
# One of a thousand is an outlier, as in the channels of a text encoder.
ORACLE = np.random.default_rng(0).normal(size=(7, 143))
ORACLE[3, 5] = 45.0


def oracle_with_change(at: tuple[int, int], by: float) -> np.ndarray:
    ours = ORACLE.copy()
    ours[at] += by
    return ours


FAULTS = {
    "a small scale": ORACLE * (1 + 2 * PIPELINE),
    "one wrong value": oracle_with_change((0, 0), 45 * 2 * PIPELINE),
    "all wrong but the outlier": ORACLE + np.where(ORACLE == 45, 0, 8 * PIPELINE),
    "NaN": oracle_with_change((6, 142), np.nan),
    "infinity": oracle_with_change((6, 142), np.inf),
    "nothing": 0 * ORACLE,
}


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20], ids=str)
@pytest.mark.parametrize("ours", FAULTS.values(), ids=FAULTS)
def test_compare_detects_fault_at_every_scale(ours: np.ndarray, scale: float, compare: Callable):
    with pytest.raises(AssertionError, match="^frames"):
        compare("frames", scale * ours, scale * ORACLE)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20], ids=str)
def test_compare_accepts_rounding_at_every_scale(scale: float, compare: Callable):
    rounded = ORACLE.astype(np.float32)
    compare("frames", scale * rounded.astype(np.float64), scale * ORACLE, error=ROUNDING)
    compare("frames", scale * oracle_with_change((0, 0), 45 * PIPELINE / 2), scale * ORACLE)


def test_compare_slope_detects_scale_error_within_coarse_bound(compare: Callable):
    noise = np.random.default_rng(1).normal(size=ORACLE.shape) * 1e-4
    compare("latents, bfloat16", ORACLE + noise, ORACLE, error=5e-2)
    with pytest.raises(AssertionError, match=r"slope 1\.00"):
        compare("latents, bfloat16", 1.002 * ORACLE + noise, ORACLE, error=5e-2)


def test_compare_requires_exact_zeros_and_checks_constants(compare: Callable):
    compare("empty text", np.zeros(5), np.zeros(5))
    compare("mask", np.full(5, 3.0 + 3 * ROUNDING), np.full(5, 3.0))
    with pytest.raises(AssertionError, match="largest error inf of 0"):
        compare("empty text", np.array([0, 0, 1e-30]), np.zeros(3))
    with pytest.raises(AssertionError, match="^mask"):
        compare("mask", np.full(5, 3.001), np.full(5, 3.0))


def test_compare_requires_equal_shapes(compare: Callable):
    with pytest.raises(AssertionError, match=r"frames: \(7, 1\) instead of \(7, 143\)"):
        compare("frames", ORACLE[:, :1], ORACLE)


def test_difference_separates_errors_from_rounding():
    assert (
        closeness.difference(ORACLE.astype(np.float32), ORACLE) < OPERATION < closeness.difference(ORACLE + 1, ORACLE)
    )


def test_suite_contains_no_absolute_bounds():
    """A number in `atol`, or beside a largest difference, is right for one size of values alone."""
    absolute = re.compile(
        r"\batol=|\babs=\d|(?:abs\(|\.abs\(\)).*\.max\(\) [<>]=? \d"
        # These have a bound of their own, which is absolute.
        r"|\b(?:np|torch)\.(?:allclose|isclose)\(|\bassert_close\(|almost_equal\("
    )
    found = [
        f"{path.relative_to(TESTS)}:{number}: {line.strip()}"
        for path in sorted(TESTS.rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if absolute.search(line) and "* largest" not in line and path != Path(__file__)
    ]
    assert found == []


# Sums of so many numbers are divided among threads.
def sum_of_many() -> str:
    return jax.numpy.sum(jax.numpy.linspace(-1, 1, 2**23) ** 3 + 0.1).tobytes().hex()


def test_xla_sum_on_one_core_is_bitwise_equal():
    """XLA divides sums among as many threads as cores, and no fewer than devices, unless PJRT_NPROC says how many."""
    flags = re.sub("device_count=[0-9]+", "device_count=1", os.environ["XLA_FLAGS"])
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}}); import jax\n"
    there = subprocess.run(
        [sys.executable, "-c", f"{pinned}{inspect.getsource(sum_of_many)}print(sum_of_many())"],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout.strip() == sum_of_many()
