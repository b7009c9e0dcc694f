"""Number formats of approximate products, one row each: the functions that compute with a format, and its savings.

`sharding/chips.py` states which chips a format makes faster, and `model_spec/quality.py` which quality asks for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..sharding.chips import CHIPS
from . import attention_int8, linear_int8, registry
from .hardware import INT8_ROWS

EXACT = "exact"  # name for the format of the weights and tokens themselves, which has no row


@dataclass(frozen=True, kw_only=True)
class ScoreFormat:
    """Attention scores in a format. `attention_config.SCORE_TILES` has the tiles of its kernel."""

    row_multiple: int  # rows of a register of keys
    fake_quantize: Callable[..., tuple[Array, list[Any]]]  # see `attention_int8.fake_quantize`


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Linear layers, and perhaps attention scores, in a format."""

    name: str
    dtype: jnp.dtype  # of weights and tokens
    speedup: float  # of products, against bfloat16
    kernel: str  # name of the kernel of linear layers; where it is switched off, they are exact
    multiply: Callable[..., list[Array]]  # see `linear_int8.linear_int8`
    multiply_in_kernel: Callable[..., list[Array]]  # the same by the kernel alone, for the self-test
    quantize_weight: Callable[..., tuple[Array, Array]]  # see `linear_int8.quantize_weight`
    quantize_tokens: Callable[..., Any] | None = None  # see `linear_int8.quantize_tokens`; None: not before a product
    scores: ScoreFormat | None = None  # None: scores stay exact


FORMATS = {
    row.name: row
    for row in (
        NumberFormat(
            name="int8", dtype=jnp.dtype(jnp.int8), speedup=2.0, kernel=registry.LINEAR_INT8,
            multiply=linear_int8.linear_int8, multiply_in_kernel=linear_int8.linear_int8_kernel,
            quantize_weight=linear_int8.quantize_weight, quantize_tokens=linear_int8.quantize_tokens,
            scores=ScoreFormat(row_multiple=INT8_ROWS, fake_quantize=attention_int8.fake_quantize),
        ),
    )
}  # fmt: skip
BY_DTYPE = {row.dtype: row for row in FORMATS.values()}
SCORES = {name: row.scores for name, row in FORMATS.items() if row.scores is not None}
# JAX's names of the chips on which a format saves time.
LINEAR_CHIPS = {name: tuple(c.device_kind for c in CHIPS if name in c.linear_formats) for name in FORMATS}
SCORE_CHIPS = {name: tuple(c.device_kind for c in CHIPS if name in c.score_formats) for name in SCORES}
