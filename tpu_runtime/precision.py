"""Which number format the networks run in. Schedulers and latents are float32 whatever this says."""

import os
from typing import Literal

Precision = Literal["bfloat16", "float32"]
# "mixed" is bfloat16, with the encoders of pictures in float32.
CHOICES = ("auto", "bfloat16", "mixed", "float32")
VARIABLE = "COMFYUI_TPU_PRECISION"


def check_choice(choice: str) -> None:
    """Raises `ValueError` for anything that is not in `CHOICES`."""
    if choice not in CHOICES:
        raise ValueError(f"precision is {choice!r}; it must be one of {', '.join(CHOICES)}.")


def resolve(choice: str, platform: str) -> Precision:
    """The precision for a node's choice: `"auto"` asks the environment, then takes bfloat16 on a TPU, else float32.

    A CPU has no fast bfloat16, and runs there are for testing; on a TPU the MXU multiplies bfloat16.
    """
    return "float32" if _chosen(choice, platform) == "float32" else "bfloat16"


def of_pictures(choice: str, platform: str) -> Precision:
    """The precision of what encodes pictures as conditions, for a node's choice."""
    return "bfloat16" if _chosen(choice, platform) == "bfloat16" else "float32"


def title(precision: Precision, pictures: Precision | None) -> str:
    """The choice that stands for both."""
    return precision if pictures in (None, precision) else "mixed"


def _chosen(choice: str, platform: str) -> str:
    """One of `CHOICES` but `"auto"`."""
    check_choice(choice)
    if choice == "auto":
        choice = os.environ.get(VARIABLE, "auto") or "auto"
        if choice not in CHOICES:
            raise ValueError(f"{VARIABLE} is {choice!r}; it must be one of {', '.join(CHOICES[1:])}.")
    return ("bfloat16" if platform == "tpu" else "float32") if choice == "auto" else choice
