"""`quality`: what a sampler's widget gives away, and that nothing else is touched."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from comfyui_tpu.attention import local, policy, tiles
from comfyui_tpu.attention.tiles import Tiling
from comfyui_tpu.kernels import dispatch
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import QUALITIES, MagCache, MagCacheCurve, Quality, StepCache
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family
from comfyui_tpu.tpu_runtime.programs import denoise_step, denoising_plan, weights
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

SPEC = spec_for_family("Wan21")


def test_quality_unknown_value_lists_supported_values():
    for spec in SPECS:
        assert spec.inputs["quality"].default == spec.settings().quality == "exact"
        own = QUALITIES if spec.denoiser.tile else QUALITIES[:2]
        assert [spec.settings(quality=quality).quality for quality in own] == list(own)
        options = {"value": "'int4'", "others": "", "options": ", ".join(own)}
        with raises_message(
            ValueError, refused_input("quality", "settings.not_an_option", title=spec.title, **options)
        ):
            spec.settings(quality="int4")


def test_quality_sparse_unsupported_model_names_supported_models():
    titles = {spec.title for spec in SPECS if spec.denoiser.tile}
    assert titles == {
        spec.title for spec in SPECS if spec.title.startswith(("Wan ", "HunyuanVideo ")) and "TI2V" not in spec.title
    }
    others = Expected("settings.others_have", who="Wan, but not TI2V, and HunyuanVideo")
    options = {"value": "'int8+sparse'", "others": others, "options": "exact, int8"}
    for spec in SPECS:
        model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, quality="int8+sparse")
        refusals: list[Callable[[], Any]] = [
            lambda spec=spec: spec.settings(quality="int8+sparse"),
            lambda spec=spec: spec.check_settings(replace(spec.settings(), quality="int8+sparse")),
            model.check,
        ]
        for refusal in refusals:
            if spec.title in titles:
                refusal()
                continue
            expected = refused_input("quality", "settings.not_an_option", title=spec.title, **options)
            with raises_message(ValueError, expected):
                refusal()


FAMILIES = ("Wan21", "Flux2", "HunyuanVideo15", "CogVideoX", "ZImage", "QwenImage")


# `tests/attention/test_prologue.py` has joint attention in int8, and `tests/programs/test_int8_weights.py` FLUX.2's
# layers.
@pytest.mark.parametrize("family", slower(FAMILIES, *(family for family in FAMILIES if family != "Wan21")))
def test_quality_int8_is_close_and_leaves_exact_unchanged(family: str, monkeypatch: pytest.MonkeyPatch):
    """One engine, programs of both at once: neither takes the other's."""
    monkeypatch.setattr(policy, "LONG_SEQUENCE_TOKENS", 0)
    monkeypatch.setattr(weights, "MIN_QUANTIZED_LANES", 0)
    spec, runner = spec_for_family(family), Runner(jax.devices()[:2])
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id)
    shorter = {"num_frames": 9} if family == "Wan21" else {}
    settings = spec.settings(**{**spec.miniature.inputs, **shorter, "num_inference_steps": 1})
    embeds = runner.encode(model, "a red circle moves right on blue", "", SilentProgress())

    def denoised(quality: str) -> Any:
        return runner.denoise(model, replace(settings, quality=quality), *embeds, SilentProgress())["samples"].numpy()

    before, rough, after = (denoised(quality) for quality in ("exact", "int8", "exact"))
    assert np.array_equal(before, after)
    assert 0 < difference(rough, before) < 0.2


def test_quality_int8_with_few_tokens_compiles_exact_program(caplog: pytest.LogCaptureFixture):
    """Of which int8 would save nothing: the miniature's. It is said."""
    tiny = replace(SPEC, components=tuple(replace(part, config=part.tiny) for part in SPEC.components))
    settings = tiny.settings(**tiny.miniature.inputs)
    texts = [
        next(
            program
            for program in denoising_plan.list_programs(
                tiny, replace(settings, quality=quality), jax.devices()[:1], precision="float32", stages=("denoise",)
            )
        )
        .lower()
        .as_text()
        for quality in QUALITIES
    ]
    assert len(set(texts)) == 1
    said = "Wan 2.1 T2V 14B: quality int8 is exact here: with 175 tokens, these layers and these chips"
    assert len([record for record in caplog.records if record.getMessage().startswith(said)]) == 2


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miniature's tokens, such as 5 x 5 x 7, in tiles of at most 15."""
    monkeypatch.setattr(tiles, "TILE_ROWS_MULTIPLE", 16)
    monkeypatch.setattr(denoise_step, "Tiling", lambda sizes, tile: Tiling(sizes=sizes, tile=(3, 1, 5)))
    monkeypatch.setattr(policy, "LONG_SEQUENCE_TOKENS", 0)
    monkeypatch.setattr(policy.AttentionPolicy, "choose_scores", lambda *_: "exact")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("family", ["Wan21", "HunyuanVideo15"])
def test_quality_sparse_differs_only_in_steps_that_drop_tiles(family: str, caplog: pytest.LogCaptureFixture):
    """On two chips, in float32 and without int8: the order of tokens, and back, is no part of a result."""
    spec, runner = spec_for_family(family), Runner(jax.devices()[:2])
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, precision="float32")
    settings = spec.settings(**{**spec.miniature.inputs, "num_frames": 17, "flow_shift": 2.0})
    embeds = runner.encode(model, "a red circle moves right on blue", "", SilentProgress())

    def apart(steps: int) -> float:
        sparse, int8 = (
            runner.denoise(
                model, replace(settings, quality=quality, num_inference_steps=steps), *embeds, SilentProgress()
            )["samples"].numpy()
            for quality in ("int8+sparse", "int8")
        )  # fmt: skip
        return difference(sparse, int8)

    # Of three steps one leaves out blocks, of two none does: the first and the last attend to all.
    assert 1e-3 < apart(steps=3) < 2
    assert apart(steps=2) < 1e-4
    assert not [record for record in caplog.records if "int8+sparse" in record.message]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("Wan21", MagCache(threshold=0.1, curve=MagCacheCurve(ratios=((1.0,) * 6,), retained=(0.3,), most_skipped=1))),
        # The same blocks on the same tokens, with another start.
        pytest.param("HunyuanVideo15", StepCache(start=1, end=5, interval=2), marks=pytest.mark.recorded),
    ],
)
def test_quality_sparse_with_step_cache_and_all_tiles_equals_int8(
    family: str, cache: MagCache | StepCache, monkeypatch: pytest.MonkeyPatch
):
    """What is kept, and used again, is in the order of tiles. Of six steps two start from it."""
    monkeypatch.setattr(denoise_step, "SPARSE_NOISE_RANGE", (2.0, 2.0))
    spec, runner = spec_for_family(family), Runner(jax.devices()[:2])
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, precision="float32")
    settings = spec.settings(**{**spec.miniature.inputs, "num_inference_steps": 6, "guidance_scale": 1.0})
    settings = replace(settings, step_cache=cache)
    embeds = runner.encode(model, "a red circle moves right on blue", "", SilentProgress())
    assert denoising_plan.DenoisingPlan.published(spec, settings).is_full.count(False) == 2

    def denoised(quality: str) -> Any:
        return runner.denoise(model, replace(settings, quality=quality), *embeds, SilentProgress())["samples"].numpy()

    assert difference(denoised("int8+sparse"), denoised("int8")) < 1e-4


@pytest.mark.usefixtures("small_tiles")
def test_calibrate_sparse_quality_equals_int8():
    """Between tiles is padding, which is no part of it."""
    runner = Runner(jax.devices()[:1])
    model = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision="float32")
    embeds = runner.encode(model, "a red circle moves right on blue", "", SilentProgress())
    settings = SPEC.settings(**{**SPEC.miniature.inputs, "num_inference_steps": 4})
    found = [
        runner.run("calibrate", model, SilentProgress(), settings=replace(settings, quality=quality),
                   prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1])
        for quality in ("int8", "int8+sparse")
    ]  # fmt: skip
    assert found[0] == found[1]


def int8_fallback_reason(caplog: pytest.LogCaptureFixture, spec: Any, shape: MeshShape, **inputs: Any) -> str:
    caplog.clear()
    config = spec.component(spec.denoiser.experts[0]).config
    target = CompileTarget(devices=tuple(jax.devices()[: shape.num_devices]), precision="bfloat16")
    mesh = target.mesh(shape)
    latent_shape = spec.geometry.latent_shape(spec.settings(**inputs))
    if (
        denoise_step.choose_tiling(spec, config, latent_shape, mesh, policy.AttentionPolicy(), target, Quality.SPARSE)
        is not None
    ):
        return ""
    (record,) = caplog.records
    return record.message.removeprefix(f"{spec.title}: quality int8+sparse is int8 here: ")


def test_choose_tiling_unsupported_size_logs_int8_fallback(caplog: pytest.LogCaptureFixture):
    assert int8_fallback_reason(caplog, SPEC, MeshShape(dp=2, sp=4)) == ""
    assert int8_fallback_reason(caplog, SPEC, MeshShape(sp=3)) == "40 heads do not divide over 3 chips."
    small = {"width": 320, "height": 192, "num_frames": 17}
    assert int8_fallback_reason(caplog, SPEC, MeshShape(), **small) == "a video of 1200 tokens would be no faster."
    large = {"width": 1920, "height": 1920, "num_frames": 241}
    assert (
        int8_fallback_reason(caplog, SPEC, MeshShape(), **large)
        == "872 tiles are more than the 160 whose lists fit on a chip."
    )


@pytest.mark.parametrize(("kind", "fit"), [("TPU v6 lite", True), ("TPU v5 lite", True), ("TPU v4", False)])
def test_all_keys_fit_vmem_depends_on_chip(kind: str, fit: bool):
    size = {"heads": 10, "head_dim": 128, "itemsize": 2}
    assert local.all_keys_fit_vmem(policy.AttentionPolicy(scores="int8"), kind, 76800, **size) == fit


@pytest.mark.parametrize(
    "rungs", [dispatch.KernelFallbacks(off=("attention_int8",)), dispatch.KernelFallbacks(small=("attention_int8",))]
)
def test_all_keys_fit_vmem_shrinks_with_kernel_fallbacks(rungs: dispatch.KernelFallbacks):
    """Without int8's kernel keys take more of the memory, and with small tiles there is half of it."""

    def most() -> int:
        size = {"heads": 10, "head_dim": 128, "itemsize": 2}
        fits = (
            local.all_keys_fit_vmem(policy.AttentionPolicy(scores="int8"), "TPU v6 lite", n << 13, **size)
            for n in range(99)
        )
        return sum(fits)

    with dispatch.use_fallbacks(rungs):
        found = most()
    assert 0 < found < most() < 99


def test_is_sparse_step_excludes_first_and_last_steps():
    """Of flow steps with shift 5; the four of a distilled model have one between."""

    def sparse(steps: int) -> list[bool]:
        times = np.linspace(1, 0, steps + 1)
        times = 1000 * 5 * times / (1 + 4 * times)
        pairs = zip(times[:-1, None], times[1:, None], strict=True)
        return [bool(denoise_step.is_sparse_step(t, {"next_timestep": then})) for t, then in pairs]

    assert [n for n, each in enumerate(sparse(50)) if each] == list(range(21, 44))
    assert sparse(4) == [False, False, True, False]
    # A sampler that does not say where a step ends.
    assert [bool(denoise_step.is_sparse_step(np.array([t]), {})) for t in (881, 880, 360, 359)] == [
        False,
        True,
        True,
        False,
    ]
