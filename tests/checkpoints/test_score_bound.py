"""The bound on attention scores: against the largest that queries and keys with those gains can reach."""

from pathlib import Path

import numpy as np
import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, score_bound, tiny, weight_names
from comfyui_tpu.tpu_runtime.model_spec import HeadNorms, ModelSpec
from comfyui_tpu.tpu_runtime.models import SPECS
from safetensors.torch import save_file

NORMS = HeadNorms(queries=("blocks.*.norm_q", "blocks.*.text_q"), keys=("blocks.*.norm_k",))
DIM = 64


def write(folder: Path, **changed: np.ndarray) -> None:
    """Two layers of gains 1 without biases, but for what is `changed` (dots as double underscores)."""
    names = [f"blocks.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("norm_q", "text_q", "norm_k")]
    gains = dict.fromkeys(names, np.ones(DIM)) | {name.replace("__", "."): x for name, x in changed.items()}
    save_file({name: torch.tensor(x, dtype=torch.float32) for name, x in gains.items()}, folder / "w.safetensors")


def bound(folder: Path) -> float:
    return score_bound.compute_score_bound(checkpoint.read_headers(folder, SPECS[0].component("transformer")), NORMS)


def largest_score(gain: np.ndarray, bias: np.ndarray, k_gain: np.ndarray) -> float:
    """The score in base 2 of the worst normalised query and key found by ascent over both."""
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, DIM))
    for _ in range(200):
        q = gain * k_gain * k + 1e-9
        q *= np.sqrt(DIM) / np.linalg.norm(q)
        k = k_gain * (gain * q + bias)
        k *= np.sqrt(DIM) / np.linalg.norm(k)
    return np.log2(np.e) / np.sqrt(DIM) * float((gain * q + bias) @ (k_gain * k))


def test_score_bound_unit_gains_give_root_of_head_size(tmp_path: Path):
    write(tmp_path)
    assert bound(tmp_path) == pytest.approx(np.log2(np.e) * np.sqrt(DIM))


@pytest.mark.parametrize("place", ["blocks__1__norm_q__weight", "blocks__0__text_q__weight"])
def test_score_bound_uses_worst_layer_and_norm(tmp_path: Path, place: str):
    gain = np.ones(DIM)
    gain[7] = -3.0
    write(tmp_path, **{place: gain})
    assert bound(tmp_path) == pytest.approx(3 * np.log2(np.e) * np.sqrt(DIM))


def test_score_bound_multiplies_gains_of_the_same_pair_only(tmp_path: Path):
    gain, key_gain = np.ones(DIM), np.ones(DIM)
    gain[6], key_gain[7], key_gain[30] = 3.0, 2.0, 2.5
    write(tmp_path, blocks__0__norm_q__weight=gain, blocks__0__norm_k__weight=key_gain)
    assert bound(tmp_path) == pytest.approx(6 * np.log2(np.e) * np.sqrt(DIM))


def test_score_bound_covers_worst_query_and_key(tmp_path: Path):
    random = np.random.default_rng(1)
    gain, key_gain = random.uniform(0.5, 2, (2, DIM))
    bias = random.normal(size=DIM) * 0.1
    write(tmp_path, blocks__0__norm_q__weight=gain, blocks__0__norm_q__bias=bias, blocks__0__norm_k__weight=key_gain)
    assert 0.7 * bound(tmp_path) < largest_score(gain, bias, key_gain) <= bound(tmp_path)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_score_bound_finds_head_norms_of_tiny_checkpoints(spec: ModelSpec):
    component = spec.component(spec.denoiser.experts[0])
    folder = tiny.ensure_random(spec) / component.folder
    names = weight_names.key_by_module_name(checkpoint.read_headers(folder, component), component.aliases)
    for norms in spec.denoiser.head_norms:
        assert 0 < score_bound.compute_score_bound(names, norms) < np.inf
    norms_per_head = {name for name in names if ".norm_q.weight" in name and names[name].shape[0] < 100}
    assert bool(spec.denoiser.head_norms) == bool(norms_per_head)
    assert score_bound.is_bounded(spec, component, folder) == bool(spec.denoiser.head_norms)
