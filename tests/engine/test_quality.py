"""`quality`: what a sampler's widget gives away, and that nothing else is touched."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from comfyui_tpu.attention import policy
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import QUALITIES
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family
from comfyui_tpu.tpu_runtime.programs import generation, weights
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
    assert texts[0] == texts[1]
