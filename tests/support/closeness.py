"""How close a result is to its oracle, in numbers without a unit: they mean the same whatever is compared."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

# What rounding to float32 may change, of the rounded number.
ROUNDING = 2.0**-24
# What the roundings of a computation in float32 may add up to, by its depth; CONTRIBUTING.md has the rule, and
# `tests/test_closeness.py` what was seen. One operation: a norm, a softmax, a sum of products.
OPERATION = 64 * ROUNDING
# Operations in a row: a text encoder, one call of a denoiser.
NETWORK = 512 * ROUNDING
# Networks in a row: the steps of a solver, with guidance, and the autoencoder.
PIPELINE = 1024 * ROUNDING


@dataclass(frozen=True)
class Closeness:
    """How far a result is from its oracle.

    `largest` is the largest error, of the oracle's largest magnitude `size`. One outlier makes that forgive all other
    values, so there is `overall`: the root mean square of all errors, of that of the oracle's values. Both are zero
    where there is no error, and infinite where an oracle of nothing but zeros is missed. `slope` is that of the result
    fitted on the oracle, and 1 where all values of the oracle are equal.
    """

    largest: float
    overall: float
    slope: float
    size: float

    def __str__(self) -> str:
        return (
            f"largest error {self.largest:.1e} of {self.size:.3g}, overall {self.overall:.1e}, slope {self.slope:.6f}"
        )


def measure(ours: ArrayLike, oracle: ArrayLike) -> Closeness:
    """How close `ours` is to `oracle`, arrays of one shape, in float64."""
    found, wanted = (np.asarray(x, np.float64) for x in (ours, oracle))
    errors, centred = found - wanted, wanted - wanted.mean()
    size, spread = float(np.abs(wanted).max()), float(np.sum(centred**2))
    return Closeness(
        largest=_share(float(np.abs(errors).max()), size),
        overall=_share(float(np.linalg.norm(errors)), float(np.linalg.norm(wanted))),
        slope=float(np.sum(centred * (found - found.mean()))) / spread if spread else 1.0,
        size=size,
    )


def difference(one: ArrayLike, other: ArrayLike) -> float:
    """The largest difference of two results, of the other's largest magnitude: how much something counts."""
    return measure(one, other).largest


def _share(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return part / whole if whole else math.inf
