"""Which number format which network runs in: `mixed` keeps the encoders of pictures in float32."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime import precision
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family
from comfyui_tpu.tpu_runtime.programs import denoising_plan
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

WITH_PICTURES = [spec for spec in SPECS if spec.pictures.encode is not None]
# Of each encoder the first model.
FIRST = {spec.pictures.encode: spec for spec in reversed(WITH_PICTURES)}.values()
I2V = spec_for_family("Wan22I2V")


@pytest.mark.parametrize(
    ("choice", "platform", "networks", "pictures"),
    [
        ("auto", "tpu", "bfloat16", "bfloat16"),
        ("auto", "cpu", "float32", "float32"),
        ("mixed", "tpu", "bfloat16", "float32"),
        ("mixed", "cpu", "bfloat16", "float32"),
        ("bfloat16", "cpu", "bfloat16", "bfloat16"),
        ("float32", "tpu", "float32", "float32"),
    ],
)
def test_resolve_precision_gives_network_and_image_encoder_dtypes(
    choice: str, platform: str, networks: Any, pictures: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(precision.VARIABLE, raising=False)
    assert (precision.resolve_precision(choice, platform), precision.resolve_image_precision(choice, platform)) == (
        networks,
        pictures,
    )
    assert precision.precision_label(networks, pictures) == ("mixed" if networks != pictures else networks)
    if choice != "auto":  # the environment says what auto is
        monkeypatch.setenv(precision.VARIABLE, choice)
        assert (precision.resolve_precision("auto", "tpu"), precision.resolve_image_precision("auto", "tpu")) == (
            networks,
            pictures,
        )


@pytest.mark.parametrize(
    "spec", slower(WITH_PICTURES, *(spec for spec in WITH_PICTURES if spec not in FIRST)), ids=lambda spec: spec.name
)
def test_list_programs_only_image_encoders_use_image_precision(spec: Any):
    """The programs of the stage `image`, and not the decoder's."""
    tiny = replace(spec, components=tuple(replace(part, config=part.tiny) for part in spec.components))
    settings = tiny.settings(**tiny.miniature.inputs)
    found = denoising_plan.list_programs(
        tiny, settings, jax.devices()[:1], precision="bfloat16", pictures="float32", stages=("image", "decode")
    )
    formats: dict[str, set[str]] = {"float32": set(), "bfloat16": set()}
    for program in found:
        formats[program.precision].update(program.components)
    assert formats["float32"] and formats["float32"] <= spec.image_encoders
    assert formats["bfloat16"] == {spec.vae.component}


def test_encode_image_mixed_precision_equals_float32():
    runner, settings = Runner(jax.devices()[:2]), I2V.settings(**I2V.miniature.inputs)
    image = torch.rand(1, settings.height, settings.width, 3, generator=torch.Generator().manual_seed(0))

    def condition(choice: str) -> np.ndarray:
        model = ModelRef(spec_name=I2V.name, model_id=I2V.miniature.random_id, precision=choice)
        return runner.encode_image(model, image, settings, SilentProgress())["tensors"]["condition"].numpy()

    exact, mixed, coarse = (condition(choice) for choice in ("float32", "mixed", "bfloat16"))
    np.testing.assert_array_equal(mixed, exact)
    assert difference(coarse, exact) > 2**-10
