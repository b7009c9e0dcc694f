"""Policy of an attention call: a frozen value in a model's spec, so that no code branches on a model's name."""

from dataclasses import dataclass
from typing import Literal

from ..kernels.attention_config import AttentionConfig, Maximum, Scores
from ..kernels.number_formats import EXACT, SCORE_CHIPS

MAX_BOUNDED_SCORE = 100  # in base 2: the exponentials of up to 2^27 such scores sum to less than float32's maximum
LONG_SEQUENCE_TOKENS = 16384  # from this length on, approximate scores save more time than quantizing the keys takes
Kernel = Literal["auto", "reference", "pallas"]


def is_long_sequence(num_keys: int) -> bool:
    """Return whether attention to `num_keys` keys takes long enough for an approximation to save time."""
    return num_keys >= LONG_SEQUENCE_TOKENS


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy:
    """Choice of kernel, precision and tile sizes of attention."""

    kernel: Kernel = "auto"  # "auto": Pallas on a TPU, the reference elsewhere
    bounded: bool = False  # the weights guarantee scores within `MAX_BOUNDED_SCORE`, so that no maximum is needed
    # Other scores are approximate, and used where they are faster: for at least `LONG_SEQUENCE_TOKENS` on
    # `SCORE_CHIPS`.
    scores: Scores = EXACT
    form: AttentionConfig | None = None  # None: the fastest that fits the chip, see `attention_config.choose_config`

    def maximum(self, scores: Scores = EXACT) -> Maximum:
        """Return how the kernel finds the maximum of the scores, see `AttentionConfig`."""
        return "zero" if self.bounded and scores == EXACT else "sampled"

    def choose_scores(self, num_keys: int, device_kind: str | None = None) -> Scores:
        """Return how scores of `num_keys` keys are computed on chips `device_kind`, or, if None, by the reference."""
        pays = is_long_sequence(num_keys) and (device_kind is None or device_kind in SCORE_CHIPS.get(self.scores, ()))
        return self.scores if pays else EXACT

    def uses_kernels(self, platform: str) -> bool:
        """Return whether Pallas kernels are used on devices of `platform`; all but TPUs run them in interpret mode."""
        return self.kernel == "pallas" or (self.kernel == "auto" and platform == "tpu")
