"""The trained miniature of HunyuanVideo 1.5: frames show what the prompt says, from text and from a given frame."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity, test_hunyuan15
from comfyui_tpu.tests.models.miniatures.clips import num_right
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from PIL import Image

pytestmark = pytest.mark.slow

SPECS = {"hunyuan15": lookup_spec("hunyuanvideo1.5-t2v-720p"), "hunyuan15i2v": lookup_spec("hunyuanvideo1.5-i2v-720p")}
STEPS = 6
# How many held-out prompts, and of how many all is right: of two one more is, and on another processor may not be.
FEW = ("hunyuan15", 2, 1)
MORE = [("hunyuan15i2v", 2, 1), ("hunyuan15", 32, 22), ("hunyuan15i2v", 32, 22)]


def model_of(family: str) -> tuple[ModelRef, Settings]:
    spec = SPECS[family]
    model = ModelRef(spec_name=spec.name, model_id=spec.miniature.id, precision="float32")
    return model, spec.settings(**spec.miniature.inputs, num_inference_steps=STEPS, flow_shift=3.0)  # its own, said


# `tests/models/test_hunyuan15.py` compares the networks with diffusers, `test_shared.py` the files with those of the
# pack. Wan 2.1's miniature answers its prompts in every run.
@pytest.mark.recorded
@pytest.mark.parametrize(("family", "number", "least"), [FEW, *MORE])
def test_hunyuan15_miniature_frames_match_held_out_prompts(family: str, number: int, least: int, score: ModuleType):
    assert num_right(score, family, *model_of(family), number) >= least


@pytest.mark.recorded  # a minute; the same with random weights is in `tests/models/test_hunyuan15.py`
@pytest.mark.parametrize("family", SPECS)
def test_hunyuan15_miniature_matches_diffusers_on_one_and_eight_chips(
    family: str, score: ModuleType, compare: Callable
):
    """With weights that mean something, and the same video from the same seed whatever the number of chips."""
    spec, (model, settings) = SPECS[family], model_of(family)
    settings = replace(settings, num_inference_steps=3)
    task, folder = next(score.FAMILIES[family].kinds["clips"]()), tiny.find_folder(spec, spec.miniature.id)
    given: dict[str, Any] = {"height": settings.height, "width": settings.width}
    if task.image is None:
        pipe = parity.upstream("HunyuanVideo15Pipeline", folder)
    else:
        given, pipe = {"image": Image.fromarray(task.image)}, test_hunyuan15.load_image_pipeline(folder)
    expected = test_hunyuan15.generate(pipe.to(torch.float32), spec, settings, task.prompt, **given)
    for chips in (1, 8):
        runner, condition = engine(chips), None
        if task.image is not None:
            image = torch.from_numpy(task.image / np.float32(255))[None]
            condition = runner.encode_image(model, image, settings, SilentProgress())
        embeds = runner.encode(model, task.prompt, test_hunyuan15.NEGATIVE, SilentProgress())
        frames = runner.decode(
            model, runner.denoise(model, settings, *embeds, SilentProgress(), condition), SilentProgress()
        ).numpy()
        # The edges of what a trained decoder draws are steep.
        compare(f"frames, {chips} chips", frames, expected.frames, error=5 * PIPELINE, overall=4 * OPERATION)
