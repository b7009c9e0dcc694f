"""The attention kernel in interpret mode inside every family's denoiser, on every arrangement of chips.

The reference attention is compared with upstream's pipelines by the families' own tests; here the kernel takes its
place and nothing may change. `pytest tests/models --attention pallas` asks those tests themselves.
"""

import functools
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from comfyui_tpu.attention import local
from comfyui_tpu.kernels import prologue, residual_norm
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.support.closeness import NETWORK
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

KERNELS = (
    (local, "attend_with_kernel"), (prologue, "split_heads"), (prologue, "merge_heads"),
    (residual_norm, "residual_norm_kernel"),
)  # fmt: skip
# All-to-alls where heads divide by it, else a ring, or both: the miniatures have 2 to 6 heads.
CHIPS = (1, 2, 3, 8)
# Every family's blocks once, every arrangement once: `--attention pallas` asks for the rest.
FAMILIES = ("wan2.1-t2v-14b", "hunyuanvideo1.5-t2v-720p", "flux2-dev", "cogvideox1.5-5b")
CASES = [(lookup_spec(name), count) for name, count in zip(FAMILIES, CHIPS, strict=True)]


def odd_settings(spec: ModelSpec) -> Settings:
    """The tiny size, one cell taller, so that tokens divide by no number of chips."""
    sizes = {**spec.miniature.inputs}
    sizes["height"] += spec.whole_numbers("height").multiple_of
    return spec.settings(**sizes, num_inference_steps=1)


@functools.cache
def random_inputs(name: str) -> dict[str, np.ndarray]:
    """Texts of different lengths for the rows, and a condition, by the names of the denoiser's inputs."""
    spec, random = lookup_spec(name), np.random.default_rng(7)
    config = checkpoint.locate(spec, spec.miniature.random_id).config(
        spec.component(spec.denoiser.experts[0]), SilentProgress()
    )
    settings = odd_settings(spec)
    rows = spec.branches(settings.guidance_scale)
    found: dict[str, np.ndarray] = {}
    for text in spec.text_encoders:
        shape = (rows, text.max_length, int(config[text.width_key]))
        found[text.name] = random.normal(size=shape).astype(np.float32)
        found[f"{text.name}_length"] = np.array([text.max_length, 3][:rows], np.int32)
    for condition, shape in spec.condition_shapes(config, spec.geometry.latent_shape(settings)).items():
        found[condition] = random.normal(size=shape).astype(np.float32)
    return found


def run_denoiser(spec: ModelSpec, mesh: MeshShape) -> np.ndarray:
    settings = odd_settings(spec)
    sample = parity.random_latents(spec, settings)
    return parity.denoise_once(spec, settings, sample, random_inputs(spec.name), timestep=700, mesh=mesh)


@functools.cache
def reference_output(name: str) -> np.ndarray:
    return run_denoiser(lookup_spec(name), MeshShape())


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "chips"), CASES, ids=lambda case: getattr(case, "name", f"{case} chips"))
def test_denoiser_with_attention_kernel_matches_reference(
    spec: ModelSpec, chips: int, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    expected = reference_output(spec.name)
    parity.poison_padding(monkeypatch)
    parity.use_kernel(monkeypatch)
    ran = mock.Mock(wraps=local.attend_with_kernel)
    monkeypatch.setattr(local, "attend_with_kernel", ran)
    compare(f"{spec.name}, kernel, {chips} chips", run_denoiser(spec, MeshShape(sp=chips)), expected, error=NETWORK)
    assert ran.called


# Heads of the published size, two for each of two chips, which exchange them in two parts.
REAL_HEADS = {
    "wan2.1-t2v-14b": {"attention_head_dim": 128},
    "wan2.1-flf2v-14b-720p": {"attention_head_dim": 128, "added_kv_proj_dim": 4 * 128},
    "hunyuanvideo1.5-t2v-720p": {"attention_head_dim": 128, "rope_axes_dim": (16, 56, 56)},
    "flux2-dev": {"attention_head_dim": 128, "axes_dims_rope": (32, 32, 32, 32), "num_single_layers": 1},
    "cogvideox1.5-5b": {"attention_head_dim": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slower(REAL_HEADS, *set(REAL_HEADS) - {"wan2.1-t2v-14b"}))
def test_denoiser_with_published_head_size_runs_every_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    spec, changes = lookup_spec(name), {**REAL_HEADS[name], "num_attention_heads": 4, "num_layers": 1}
    settings = odd_settings(spec)
    sample = parity.random_latents(spec, settings)

    def denoised() -> np.ndarray:
        return parity.denoise_once(
            spec, settings, sample, random_inputs(name), timestep=700, mesh=MeshShape(sp=2), changes=changes
        )

    expected = denoised()
    parity.poison_padding(monkeypatch)
    parity.use_kernel(monkeypatch)
    ran = {}
    for room, function in KERNELS:
        ran[room.__name__, function] = mock.Mock(wraps=getattr(room, function))
        monkeypatch.setattr(room, function, ran[room.__name__, function])
    compare(f"{spec.name}, heads of the published size", denoised(), expected, error=NETWORK)
    assert all(spy.called for spy in ran.values()), ran
