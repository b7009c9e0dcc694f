"""`quality`: what a sampler's widget gives away, and that nothing else is touched."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from comfyui_tpu.attention import local, policy, tiles
from comfyui_tpu.attention.tiles import Tiling
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import QUALITIES
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family
from comfyui_tpu.tpu_runtime.programs import denoise_step, generation, weights
from comfyui_tpu.tpu_runtime.progress import Silent

SPEC = spec_for_family("Wan21")


def test_every_model_offers_every_quality_and_refuses_others():
    for spec in SPECS:
        assert spec.inputs["quality"].default == spec.settings().quality == "exact"
        with pytest.raises(ValueError) as error:
            spec.settings(quality="int4")
        assert str(error.value) == f"{spec.title}: quality is 'int4'; it must be one of {', '.join(QUALITIES)}."


@pytest.mark.parametrize("family", ["Wan21", "Flux2", "HunyuanVideo15", "CogVideoX", "ZImage", "QwenImage"])
def test_int8_gives_nearly_the_same_and_leaves_exact_alone(family: str, monkeypatch: pytest.MonkeyPatch):
    """One engine, programs of both at once: neither takes the other's."""
    monkeypatch.setattr(policy, "MANY_KEYS", 0)
    monkeypatch.setattr(weights, "FEWEST_LANES", 0)
    spec, runner = spec_for_family(family), Runner(jax.devices()[:2])
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id)
    settings = spec.settings(**{**spec.miniature.inputs, "num_inference_steps": 2})
    embeds = runner.encode(model, "a red circle moves right on blue", "", Silent())

    def denoised(quality: str) -> Any:
        return runner.denoise(model, replace(settings, quality=quality), *embeds, Silent())["samples"].numpy()

    before, rough, after = (denoised(quality) for quality in ("exact", "int8", "exact"))
    assert np.array_equal(before, after)
    assert 0 < difference(rough, before) < 0.2


def test_few_tokens_are_attended_to_exactly():
    """Of which int8 would save nothing: the miniature's."""
    tiny = replace(SPEC, components=tuple(replace(part, config=part.tiny) for part in SPEC.components))
    settings = tiny.settings(**tiny.miniature.inputs)
    texts = [
        next(
            program
            for program in generation.for_spec(
                tiny, replace(settings, quality=quality), jax.devices()[:1], precision="float32", stages=("denoise",)
            )
        )
        .lower()
        .as_text()
        for quality in QUALITIES
    ]
    assert len(set(texts)) == 1


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Tiling:
    """The miniature's 5 x 5 x 7 tokens in 12 tiles of which none has the most."""
    found = Tiling(sizes=(5, 5, 7), tile=(3, 3, 3))
    monkeypatch.setattr(tiles, "ROWS", 16)
    monkeypatch.setattr(Tiling, "like", lambda sizes, wanted: found)
    monkeypatch.setattr(policy, "MANY_KEYS", 0)
    monkeypatch.setattr(policy.AttentionPolicy, "scores_of", lambda *_: "exact")
    return found


def test_tiles_that_are_all_kept_change_nothing_and_left_out_little(
    small_tiles: Tiling, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """On two chips, in float32 and without int8: the order of tokens, and back, is no part of a result."""
    runner = Runner(jax.devices()[:2])
    model = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision="float32")
    settings = SPEC.settings(**{**SPEC.miniature.inputs, "num_inference_steps": 4})
    embeds = runner.encode(model, "a red circle moves right on blue", "", Silent())

    def denoised(quality: str) -> Any:
        return runner.denoise(model, replace(settings, quality=quality), *embeds, Silent())["samples"].numpy()

    int8, sparse = denoised("int8"), denoised("int8+sparse")
    assert 1e-3 < difference(sparse, int8) < 2
    monkeypatch.setattr(denoise_step, "SPARSE_NOISE", (2.0, 2.0))
    runner = Runner(jax.devices()[:2])
    assert difference(denoised("int8+sparse"), int8) < 1e-4
    assert not [record for record in caplog.records if "int8+sparse" in record.message]


def why_not(caplog: pytest.LogCaptureFixture, spec: Any, shape: MeshShape, **inputs: Any) -> str:
    caplog.clear()
    config = spec.component(spec.denoiser.experts[0]).config
    mesh = make_mesh(jax.devices()[: shape.num_devices], shape)
    settings = spec.settings(quality="int8+sparse", **inputs)
    if denoise_step.tiles_of(spec, config, settings, mesh, policy.AttentionPolicy()) is not None:
        return ""
    (record,) = caplog.records
    return record.message.removeprefix(f"{spec.title}: quality int8+sparse is int8 here: ")


def test_where_blocks_cannot_be_left_out_int8_is_taken_and_the_log_says_why(caplog: pytest.LogCaptureFixture):
    assert why_not(caplog, SPEC, MeshShape(dp=2, sp=4)) == ""
    assert why_not(caplog, SPEC, MeshShape(sp=3)) == "40 heads do not divide over 3 chips."
    small = {"width": 320, "height": 192, "num_frames": 17}
    assert why_not(caplog, SPEC, MeshShape(), **small) == "a video of 1200 tokens would be no faster."
    large = {"width": 1920, "height": 1920, "num_frames": 241}
    reason = "the keys of 878400 tokens do not fit the chip's VMEM at once."
    assert why_not(caplog, SPEC, MeshShape(), **large) == reason
    for family in ("Wan22I2V", "CogVideoX", "Flux2"):
        spec = next(each for each in SPECS if each.family == family and each.denoiser.tile is None)
        assert why_not(caplog, spec, MeshShape()) == "this model's attention leaves no blocks out."


@pytest.mark.parametrize(("kind", "fit"), [("TPU v6 lite", True), ("TPU v5 lite", True), ("TPU v4", False)])
def test_blocks_are_left_out_where_all_keys_fit_the_chip(kind: str, fit: bool):
    size = {"heads": 10, "head_dim": 128}
    assert local.keys_fit(policy.AttentionPolicy(scores="int8"), kind, 76800, **size) == fit


def test_first_and_last_steps_attend_to_all():
    """Of flow steps with shift 5; the four of a distilled model have one between."""

    def sparse(steps: int) -> list[bool]:
        times = np.linspace(1, 0, steps + 1)
        times = 1000 * 5 * times / (1 + 4 * times)
        pairs = zip(times[:-1, None], times[1:, None], strict=True)
        return [bool(denoise_step.is_sparse(t, {"next_timestep": then})) for t, then in pairs]

    assert [n for n, each in enumerate(sparse(50)) if each] == list(range(21, 44))
    assert sparse(4) == [False, False, True, False]
    # A sampler that does not say where a step ends.
    assert [bool(denoise_step.is_sparse(np.array([t]), {})) for t in (881, 880, 360, 359)] == [False, True, True, False]
