"""Check for NaN and infinity: a flag that programs return with their results, and the error message.

The flag is one reduction inside the program. The host reads it when it waits for the results anyway.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Bool, PyTree

from ..messages import compose
from ..precision import Precision


class NotFinite(ValueError):
    """NaN or infinite values, with a message for the user."""


def all_finite(results: PyTree) -> Bool[Array, ""]:
    """Return whether every floating number in a pytree is finite, a bool scalar `[]`. For use inside a program."""
    floating = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floating] or [jnp.array(True)]).all()


def not_finite_error(title: str, what: str, precision: Precision, changed_by: Sequence[str] = ()) -> NotFinite:
    """Return the error for non-finite values, with their likely cause.

    title: of the model. what: the values, in plural. precision: of the network. changed_by: LoRAs merged into the
      weights.
    """
    cause = compose("program.cause_checkpoint")
    if changed_by:
        cause = compose("program.cause_loras", changed_by=" and ".join(changed_by))
    elif precision == "bfloat16":
        cause = compose("program.cause_precision")
    return NotFinite(compose("program.result_not_finite", title=title, what=what, precision=precision, cause=cause))


def check_finite(title: str, name: str, given: torch.Tensor) -> None:
    """Raise `NotFinite` if `given` `[...]`, the input `name` from another node or a file, is not finite.

    title: of the model.
    """
    if not torch.isfinite(given).all():
        raise NotFinite(compose("program.input_not_finite", title=title, name=name))
