"""Number format of the networks. Schedulers and latents are always float32."""

import os
from typing import Literal

from .messages import compose

Precision = Literal["bfloat16", "float32"]
# "mixed": bfloat16, with image encoders in float32.
CHOICES = ("auto", "bfloat16", "mixed", "float32")
VARIABLE = "COMFYUI_TPU_PRECISION"


def check_choice(choice: str) -> None:
    """Raise `ValueError` if `choice` is not in `CHOICES`."""
    if choice not in CHOICES:
        raise ValueError(compose("settings.precision_unknown", choice=repr(choice), choices=", ".join(CHOICES)))


def resolve_precision(choice: str, platform: str) -> Precision:
    """Return the precision given a node's `choice`, on `platform`.

    "auto" uses the environment variable if it is set, else bfloat16 on a TPU and float32 elsewhere. A CPU has no fast
    bfloat16, and is only used for testing; a TPU's matrix unit multiplies bfloat16.
    """
    return "float32" if _resolve_auto(choice, platform) == "float32" else "bfloat16"


def resolve_image_precision(choice: str, platform: str) -> Precision:
    """Return the precision of networks that encode images as conditions, given a node's `choice`, on `platform`."""
    return "bfloat16" if _resolve_auto(choice, platform) == "bfloat16" else "float32"


def precision_label(precision: Precision, pictures: Precision | None) -> str:
    """Return the choice for networks in `precision` and image encoders in precision `pictures`; None: the same."""
    return precision if pictures in (None, precision) else "mixed"


def _resolve_auto(choice: str, platform: str) -> str:
    """Return one of `CHOICES` except "auto". Raises `ValueError` for an unknown choice or environment variable."""
    check_choice(choice)
    if choice == "auto":
        choice = os.environ.get(VARIABLE, "auto") or "auto"
        if choice not in CHOICES:
            raise ValueError(compose(
                "settings.choice_unknown", variable=VARIABLE, choice=repr(choice), choices=", ".join(CHOICES[1:]),
            ))  # fmt: skip
    return ("bfloat16" if platform == "tpu" else "float32") if choice == "auto" else choice
