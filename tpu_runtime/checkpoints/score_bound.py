"""Upper bound of attention scores from the gains of a checkpoint's norms. Bounded scores need no running maximum."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ...attention.policy import MAX_BOUNDED_SCORE
from ..files import TensorFile
from ..model_spec import Component, HeadNorms, ModelSpec
from .checkpoint import read_headers
from .weight_loader import TensorReader
from .weight_names import key_by_module_name

LOG2_E = math.log2(math.e)

WeightDeltas = Mapping[str, torch.Tensor]
NO_DELTAS: WeightDeltas = {}


def is_bounded(spec: ModelSpec, component: Component, folder: Path, added: WeightDeltas = NO_DELTAS) -> bool:
    """Return whether no score of the denoiser in `folder` can exceed `MAX_BOUNDED_SCORE`, in base 2, for any input.

    component: the denoiser.
    added: differences of LoRAs by weight name.
    """
    if not spec.denoiser.head_norms:
        return False
    tensors = key_by_module_name(read_headers(folder, component), component.aliases)
    return all(compute_score_bound(tensors, norms, added) <= MAX_BOUNDED_SCORE for norms in spec.denoiser.head_norms)


def compute_score_bound(tensors: Mapping[str, TensorFile], norms: HeadNorms, added: WeightDeltas = NO_DELTAS) -> float:
    """Return the largest possible score of any layer, in base 2 and with the scale of attention.

    A normalised head has length `sqrt(head_dim)`, and its rotary embedding turns pairs of neighbours. A score is
    therefore at most the sum over pairs of the products of their gains, plus the contribution of biases (see
    `docs/attention.md`).
    tensors: by name, of the denoiser.
    norms: of one stack of blocks.
    added: differences of LoRAs by weight name.
    """
    prefix, _, _ = norms.queries[0].partition("*")
    layers = {name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)}
    if not layers:
        return math.inf
    return max(_layer_bound(tensors, norms, layer, added) for layer in layers)


def _layer_bound(tensors: Mapping[str, TensorFile], norms: HeadNorms, layer: str, added: WeightDeltas) -> float:
    def gains(names: Sequence[str]) -> list[tuple[np.ndarray, float]]:
        return [_gain_and_bias(tensors, name.replace("*", layer), added) for name in names]

    return max(_bound(*query, *key) for query, key in itertools.product(gains(norms.queries), gains(norms.keys)))


def _bound(q_gain: np.ndarray, q_bias: float, k_gain: np.ndarray, k_bias: float) -> float:
    """Return the bound of one pair of norms.

    `gain` is per pair of neighbours, `[head_dim / 2]`; `bias` is a vector's length.
    """
    head_dim = 2 * q_gain.size
    length = math.sqrt(head_dim)
    product = head_dim * (q_gain * k_gain).max()
    biases = length * (q_gain.max() * k_bias + k_gain.max() * q_bias) + q_bias * k_bias
    return LOG2_E / length * (product + biases)


def _gain_and_bias(tensors: Mapping[str, TensorFile], norm: str, added: WeightDeltas) -> tuple[np.ndarray, float]:
    """Return the larger gain of each pair of neighbours, `[head_dim / 2]`, and the length of the bias."""

    def read(name: str) -> np.ndarray:
        more = added.get(name)
        return _read(tensors[name]) + (0.0 if more is None else more.to(torch.float64).numpy())

    gain = np.abs(read(f"{norm}.weight"))
    bias = read(f"{norm}.bias") if f"{norm}.bias" in tensors else np.zeros(1)
    return gain.reshape(-1, 2).max(axis=1), float(np.linalg.norm(bias))


def _read(file: TensorFile) -> np.ndarray:
    with contextlib.ExitStack() as stack:
        return TensorReader(stack, lambda: None).slice(file, ()).to(torch.float64).numpy()
