"""How large attention scores can become, from the gains of a checkpoint's norms: below a bound they need no maximum."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ...attention.policy import SCORE_BOUND
from ..files import TensorFile
from ..model_spec import Component, HeadNorms, ModelSpec
from .checkpoint import read_headers
from .load import Reader
from .weight_names import by_own_names

LOG2_E = math.log2(math.e)

Added = Mapping[str, torch.Tensor]
NOTHING: Added = {}


def is_bounded(spec: ModelSpec, component: Component, folder: Path, added: Added = NOTHING) -> bool:
    """Whether no score of the denoiser in `folder` can exceed `SCORE_BOUND`, in base 2, whatever the input.

    `added` are what is added to weights, by name.
    """
    if not spec.denoiser.head_norms:
        return False
    tensors = by_own_names(read_headers(folder, component), component.aliases)
    return all(score_bound(tensors, norms, added) <= SCORE_BOUND for norms in spec.denoiser.head_norms)


def score_bound(tensors: Mapping[str, TensorFile], norms: HeadNorms, added: Added = NOTHING) -> float:
    """The largest score of any layer, in base 2 and with the scale of attention.

    A normalised head has length `sqrt(head_dim)`, and its rotary embedding turns pairs of neighbours: so a score is at
    most the sum over pairs of the products of their gains, and what biases add (see `docs/attention.md`).
    """
    prefix, _, _ = norms.queries[0].partition("*")
    layers = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    if not layers:
        return math.inf
    return max(_layer_bound(tensors, norms, layer, added) for layer in layers)


def _layer_bound(tensors: Mapping[str, TensorFile], norms: HeadNorms, layer: str, added: Added) -> float:
    def gains(names: Sequence[str]) -> list[tuple[np.ndarray, float]]:
        return [_gain_and_bias(tensors, name.replace("*", layer), added) for name in names]

    return max(_bound(*query, *key) for query, key in itertools.product(gains(norms.queries), gains(norms.keys)))


def _bound(q_gain: np.ndarray, q_bias: float, k_gain: np.ndarray, k_bias: float) -> float:
    """`gain` is that of each pair, `[head_dim / 2]`, `bias` the length of the full vector."""
    head_dim = 2 * q_gain.size
    length = math.sqrt(head_dim)
    product = head_dim * (q_gain * k_gain).max()
    biases = length * (q_gain.max() * k_bias + k_gain.max() * q_bias) + q_bias * k_bias
    return LOG2_E / length * (product + biases)


def _gain_and_bias(tensors: Mapping[str, TensorFile], norm: str, added: Added) -> tuple[np.ndarray, float]:
    """The larger gain of each pair of neighbours, and the length of the bias."""

    def read(name: str) -> np.ndarray:
        more = added.get(name)
        return _read(tensors[name]) + (0.0 if more is None else more.to(torch.float64).numpy())

    gain = np.abs(read(f"{norm}.weight"))
    bias = read(f"{norm}.bias") if f"{norm}.bias" in tensors else np.zeros(1)
    return gain.reshape(-1, 2).max(axis=1), float(np.linalg.norm(bias))


def _read(file: TensorFile) -> np.ndarray:
    with contextlib.ExitStack() as stack:
        return Reader(stack, lambda: None).slice(file, ()).to(torch.float64).numpy()
