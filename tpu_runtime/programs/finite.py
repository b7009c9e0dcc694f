"""Whether what a program computed is finite: a flag beside its results, and the sentence where it is not.

The flag is one reduction inside the program; the host looks at it when it waits for the results anyway.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Bool

from ..precision import Precision


class NotFinite(ValueError):
    """NaN or infinite values, in a sentence for the user."""


def flag(results: Any) -> Bool[Array, ""]:
    """For use inside a program: whether every floating number in a pytree is finite."""
    floating = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating] or [jnp.array(True)]).all()


def failure(title: str, what: str, precision: Precision, changed_by: Sequence[str] = ()) -> NotFinite:
    """The error for `what` (plural), with its likely cause; `changed_by` names the LoRAs merged into the weights."""
    cause = "The checkpoint is probably damaged: download it again, or try another."
    if changed_by:
        cause = (
            f"It is probably caused by {' and '.join(changed_by)}, merged into the weights: lower the strength, or "
            "leave it out."
        )
    elif precision == "bfloat16":
        cause = (
            "Set precision to float32: bfloat16 is probably too coarse for it. If that does not help, the checkpoint "
            "is damaged."
        )
    return NotFinite(f"{title}: {what} are not finite (NaN or infinite), in {precision}. {cause}")


def check_given(title: str, name: str, given: torch.Tensor) -> None:
    """Raises `NotFinite` for what comes in by `name` from another node, or from a file."""
    if not torch.isfinite(given).all():
        raise NotFinite(f"{title}: {name} holds values that are not finite (NaN or infinite). Recreate it.")
