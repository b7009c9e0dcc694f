"""How an attention call is computed: a frozen value that a model's spec chooses, never a branch on its name."""

from dataclasses import dataclass
from typing import Literal

from ..kernels.attention_form import Form, Maximum

SCORE_BOUND = 100  # in base 2: exponentials of up to 2^27 such scores sum to less than float32's largest number
Kernel = Literal["auto", "reference", "pallas"]


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy:
    """`kernel`: `"auto"` is the Pallas kernel on a TPU and the reference elsewhere.

    `bounded`: the weights guarantee scores within `SCORE_BOUND` of zero in base 2, so no maximum is needed.
    `form` None: the fastest that fits the chip, see `attention_form.fastest`.
    """

    kernel: Kernel = "auto"
    bounded: bool = False
    form: Form | None = None

    @property
    def maximum(self) -> Maximum:
        return "zero" if self.bounded else "sampled"

    def takes_kernel(self, platform: str) -> bool:
        """Whether Pallas kernels run on devices of `platform` (in interpret mode on any but a TPU)."""
        return self.kernel == "pallas" or (self.kernel == "auto" and platform == "tpu")
