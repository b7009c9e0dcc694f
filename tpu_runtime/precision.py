"""Which number format the networks run in. Schedulers and latents are float32 whatever this says."""

import os
from typing import Literal

Precision = Literal["bfloat16", "float32"]
CHOICES = ("auto", "bfloat16", "float32")
VARIABLE = "COMFYUI_TPU_PRECISION"


def check_choice(choice: str) -> None:
    """Raises `ValueError` for anything that is not in `CHOICES`."""
    if choice not in CHOICES:
        raise ValueError(f"precision is {choice!r}; it must be one of {', '.join(CHOICES)}.")


def resolve(choice: str, platform: str) -> Precision:
    """The precision for a node's choice: `"auto"` asks the environment, then takes bfloat16 on a TPU, else float32.

    A CPU has no fast bfloat16, and runs there are for testing; on a TPU the MXU multiplies bfloat16.
    """
    check_choice(choice)
    if choice == "auto":
        choice = os.environ.get(VARIABLE, "auto") or "auto"
        if choice not in CHOICES:
            raise ValueError(f"{VARIABLE} is {choice!r}; it must be one of bfloat16, float32.")
    if choice == "auto":
        return "bfloat16" if platform == "tpu" else "float32"
    return "float32" if choice == "float32" else "bfloat16"
