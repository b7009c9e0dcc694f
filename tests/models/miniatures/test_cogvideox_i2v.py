"""The trained miniature of CogVideoX 1.5 image to video: the given frame moves as the prompt says."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.miniatures.clips import num_right
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from PIL import Image

# As of Wan 2.2's miniature of a picture, and of this family's of a text.
pytestmark = [pytest.mark.slow, pytest.mark.recorded]

SPEC = lookup_spec("cogvideox1.5-5b-i2v")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision="float32")
SETTINGS = SPEC.settings(**{**SPEC.miniature.inputs, "num_inference_steps": 10})


def test_cogvideox_i2v_miniature_passes_most_of_32_held_out_prompts(score: ModuleType):
    assert num_right(score, "cogvideoxi2v", MODEL, SETTINGS, 32) >= 24


def test_cogvideox_i2v_miniature_matches_diffusers(score: ModuleType, compare: Callable):
    """With weights that mean something."""
    settings = replace(SETTINGS, num_inference_steps=3)
    task = next(score.FAMILIES["cogvideoxi2v"].kinds["clips"]())
    pipe = parity.upstream("CogVideoXImageToVideoPipeline", tiny.find_folder(SPEC, SPEC.miniature.id)).to(torch.float32)
    expected = parity.generate(
        pipe,
        settings,
        prompt=task.prompt,
        negative_prompt="",
        num_frames=settings.num_frames,
        image=Image.fromarray(task.image),
    )
    runner = engine(8)
    condition = runner.encode_image(
        MODEL, torch.from_numpy(task.image / np.float32(255))[None], settings, SilentProgress()
    )
    latents = runner.denoise(
        MODEL, settings, *runner.encode(MODEL, task.prompt, "", SilentProgress()), SilentProgress(), condition
    )
    frames = runner.decode(MODEL, latents, SilentProgress()).numpy()
    # The edges of what a trained decoder draws are steep.
    compare("frames", frames, expected.frames, error=5 * PIPELINE, overall=2 * OPERATION)
