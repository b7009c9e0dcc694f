"""What is faster than exact, on the trained miniature of every family: results still show what their prompts say.

Numbers of more prompts are in `docs/quality.md`.
"""

import functools
import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from comfyui_tpu.nodes.headless.compare import MAX_PSNR_DB, psnr
from comfyui_tpu.tests.models.miniatures.clips import frames_of
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import MagCache, MagCacheCurve, Settings

pytestmark = pytest.mark.slow

STEPS = {
    "wan21": 8,
    "wan22i2v": 6,
    "cogvideox": 10,
    "cogvideoxi2v": 10,
    "hunyuan15": 10,
    "flux2klein": 4,
    "zimage": 8,
    "qwenimage": 8,
}
# Which of the held-out tasks: such as exact float32 does by far.
TASKS = {**dict.fromkeys(STEPS, (0, 1)), "hunyuan15": (1, 5)}
# In dB, of the least alike of these results: as measured.
MEASURED = {
    ("wan21", "int8"): 43.5,
    ("wan21", "int8+sparse"): 26.2,
    ("wan21", "MagCache 0.06"): 34.3,
    ("wan22i2v", "int8"): 49.6,
    ("wan22i2v", "int8+sparse"): 36.6,
    ("wan22i2v", "MagCache 0.06"): 38.7,
    ("cogvideox", "int8"): 46.9,
    ("cogvideox", "MagCache 0.06"): 37.4,
    ("cogvideoxi2v", "int8"): 46.9,
    ("cogvideoxi2v", "MagCache 0.06"): 39.0,
    ("hunyuan15", "int8"): 43.5,
    ("hunyuan15", "int8+sparse"): 32.5,
    ("hunyuan15", "MagCache 0.06"): 31.4,
    ("hunyuan15", "DeepCache"): 42.8,
    ("flux2klein", "int8"): 58.4,
    ("zimage", "int8"): 52.7,
    ("qwenimage", "int8"): 41.4,
}
ROOM = 12.0  # dB: four times the error, for another processor rounds otherwise
# MagCache's curve here: after the first steps every other one is left out.
EVERY_OTHER = MagCacheCurve(ratios=((1.0,),), retained=(0.3,), most_skipped=1)


@functools.cache
def runner() -> Runner:
    """None of other tests': its int8 takes few tokens for many."""
    return Runner(jax.devices()[:1])


def settings_of(score: ModuleType, family: str, **inputs: Any) -> Settings:
    spec = score.FAMILIES[family].spec
    sizes = {**spec.miniature.inputs, **({} if spec.is_image else {"num_frames": 9})}
    settings = spec.settings(**{**sizes, "num_inference_steps": STEPS[family], **inputs})
    if isinstance(settings.step_cache, MagCache):
        return replace(settings, step_cache=replace(settings.step_cache, curve=EVERY_OTHER))
    return settings


def tasks_of(score: ModuleType, family: str) -> list[Any]:
    kind, *_ = score.FAMILIES[family].kinds.values()
    tasks = list(itertools.islice(kind(), 1 + max(TASKS[family])))
    return [tasks[index] for index in TASKS[family]]


def results(score: ModuleType, family: str, settings: Settings) -> list[np.ndarray]:
    spec = score.FAMILIES[family].spec
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, precision="float32")
    return [frames_of(model, settings, task.prompt, task.image, runner=runner()) for task in tasks_of(score, family)]


@functools.cache
def exact(score: ModuleType, family: str) -> list[np.ndarray]:
    return results(score, family, settings_of(score, family))


@pytest.mark.recorded  # 25 seconds of a core for a picture's, minutes for HunyuanVideo's
@pytest.mark.parametrize(("family", "form"), MEASURED)
def test_miniature_faster_setting_is_close_to_exact_and_passes_the_judge(
    family: str, form: str, score: ModuleType, quality: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    quality.few_are_many(monkeypatch.setattr)
    spec = score.FAMILIES[family].spec
    _, inputs = quality.forms_of(spec, STEPS[family])[f"{form}, float32"]
    found, wanted = results(score, family, settings_of(score, family, **inputs)), exact(score, family)
    least = min(psnr(one / 255, other / 255) for one, other in zip(found, wanted, strict=True))
    verdicts = [
        (task.judge(one).all, task.judge(other).all)
        for task, one, other in zip(tasks_of(score, family), found, wanted, strict=True)
    ]
    print(f"{family}, {form}: {least:.1f} dB, measured {MEASURED[family, form]:.1f}; {verdicts}")
    assert all(map(all, verdicts))
    assert MEASURED[family, form] - ROOM <= least < MAX_PSNR_DB


def test_miniature_faster_settings_are_all_measured(score: ModuleType, quality: ModuleType):
    """In float32, and of MagCache its default."""
    offered = {
        (family, form.removesuffix(", float32"))
        for family in quality.SHOWN
        for form in quality.forms_of(score.FAMILIES[family].spec, STEPS[family])
        if form != quality.EXACT and form.endswith(", float32")
    }
    assert {one for one in offered if one[1] not in ("MagCache 0.03", "MagCache 0.12")} == set(MEASURED)
