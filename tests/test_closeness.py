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


def changed(at: tuple[int, int], by: float) -> np.ndarray:
    ours = ORACLE.copy()
    ours[at] += by
    return ours


FAULTS = {
    "a small scale": ORACLE * (1 + 2 * PIPELINE),
    "one wrong value": changed((0, 0), 45 * 2 * PIPELINE),
    "all wrong but the outlier": ORACLE + np.where(ORACLE == 45, 0, 8 * PIPELINE),
    "NaN": changed((6, 142), np.nan),
    "infinity": changed((6, 142), np.inf),
    "nothing": 0 * ORACLE,
}


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20], ids=str)
@pytest.mark.parametrize("ours", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen_on_every_scale(ours: np.ndarray, scale: float, compare: Callable):
    with pytest.raises(AssertionError, match="^frames"):
        compare("frames", scale * ours, scale * ORACLE)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20], ids=str)
def test_rounding_passes_on_every_scale(scale: float, compare: Callable):
    rounded = ORACLE.astype(np.float32)
    compare("frames", scale * rounded.astype(np.float64), scale * ORACLE, error=ROUNDING)
    compare("frames", scale * changed((0, 0), 45 * PIPELINE / 2), scale * ORACLE)


def test_a_scale_within_a_coarse_bound_is_seen_by_the_slope(compare: Callable):
    noise = np.random.default_rng(1).normal(size=ORACLE.shape) * 1e-4
    compare("latents, bfloat16", ORACLE + noise, ORACLE, error=5e-2)
    with pytest.raises(AssertionError, match=r"slope 1\.00"):
        compare("latents, bfloat16", 1.002 * ORACLE + noise, ORACLE, error=5e-2)


def test_zeros_must_be_zeros_and_what_is_constant_has_no_slope(compare: Callable):
    compare("empty text", np.zeros(5), np.zeros(5))
    compare("mask", np.full(5, 3.0 + 3 * ROUNDING), np.full(5, 3.0))
    with pytest.raises(AssertionError, match="largest error inf of 0"):
        compare("empty text", np.array([0, 0, 1e-30]), np.zeros(3))
    with pytest.raises(AssertionError, match="^mask"):
        compare("mask", np.full(5, 3.001), np.full(5, 3.0))


def test_shapes_must_be_equal(compare: Callable):
    with pytest.raises(AssertionError, match=r"frames: \(7, 1\) instead of \(7, 143\)"):
        compare("frames", ORACLE[:, :1], ORACLE)


def test_what_counts_is_told_from_rounding():
    assert (
        closeness.difference(ORACLE.astype(np.float32), ORACLE) < OPERATION < closeness.difference(ORACLE + 1, ORACLE)
    )


def test_no_bound_is_absolute():
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


def test_a_process_with_one_device_on_one_core_has_the_bits_of_this_one():
    """XLA divides sums among as many threads as cores, and no fewer than devices, unless PJRT_NPROC says how many."""
    flags = re.sub("device_count=[0-9]+", "device_count=1", os.environ["XLA_FLAGS"])
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}}); import jax\n"
    there = subprocess.run(
        [sys.executable, "-c", f"{pinned}{inspect.getsource(sum_of_many)}print(sum_of_many())"],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout.strip() == sum_of_many()
