"""How an attention call is computed: a frozen value that a model's spec chooses, never a branch on its name."""

from dataclasses import dataclass
from typing import Literal

from ..kernels.attention_form import TAKES_INT8, Form, Maximum, Scores

SCORE_BOUND = 100  # in base 2: exponentials of up to 2^27 such scores sum to less than float32's largest number
MANY_KEYS = 16384  # from which on int8 saves more than rounding keys costs
Kernel = Literal["auto", "reference", "pallas"]


def are_many(num_keys: int) -> bool:
    """Whether attention to so many takes long enough for less of it to save time."""
    return num_keys >= MANY_KEYS


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy:
    """`kernel`: `"auto"` is the Pallas kernel on a TPU and the reference elsewhere.

    `bounded`: the weights guarantee scores within `SCORE_BOUND` of zero in base 2, so no maximum is needed.
    `form` None: the fastest that fits the chip, see `attention_form.fastest`. `scores` of int8 products are not exact,
    and taken where they save time: for `MANY_KEYS` at least, and on chips of `TAKES_INT8`.
    """

    kernel: Kernel = "auto"
    bounded: bool = False
    scores: Scores = "exact"
    form: Form | None = None

    def maximum(self, scores: Scores = "exact") -> Maximum:
        return "zero" if self.bounded and scores == "exact" else "sampled"

    def scores_of(self, num_keys: int, device_kind: str | None = None) -> Scores:
        """Of a call with so many keys, on a chip or by the reference."""
        pays = are_many(num_keys) and (device_kind is None or device_kind in TAKES_INT8)
        return self.scores if pays else "exact"

    def takes_kernel(self, platform: str) -> bool:
        """Whether Pallas kernels run on devices of `platform` (in interpret mode on any but a TPU)."""
        return self.kernel == "pallas" or (self.kernel == "auto" and platform == "tpu")
