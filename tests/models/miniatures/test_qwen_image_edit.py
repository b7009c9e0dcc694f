"""The trained tiny model of Qwen-Image Edit changes what the prompt names in an image, and keeps the rest.

It encodes an image to 4104 tokens, as the real model does. An image takes a minute, so tests that generate images are
marked `recorded`.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.overrides import read_json
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.models.test_qwen_image_edit import build_pipeline
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from PIL import Image

pytestmark = pytest.mark.slow

SPEC = lookup_spec("qwen-image-edit-2511")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision="float32")
SETTINGS = SPEC.settings(**SPEC.miniature.inputs, num_inference_steps=8)
LEAST = 11  # of 24


def picture_of(prompt: str, image: np.ndarray, chips: int = 1, *, steps: int = 8) -> np.ndarray:
    """Return an image `[1, height, width, 3]` in 0..1."""
    runner, settings = engine(chips), replace(SETTINGS, num_inference_steps=steps)
    condition = runner.encode_image(MODEL, torch.from_numpy(image / np.float32(255))[None], settings, SilentProgress())
    embeds = runner.run("encode", MODEL, SilentProgress(), prompt=prompt, negative_prompt="", condition=condition)
    latents = runner.denoise(MODEL, settings, *embeds, SilentProgress(), condition=condition)
    return runner.decode(MODEL, latents, SilentProgress()).numpy()


def num_right(score: ModuleType, number: int, make: Callable[..., np.ndarray] = picture_of) -> int:
    """Return how many of `number` held-out changes the images show completely, with the rest unchanged."""
    tasks = itertools.islice(score.FAMILIES["qwenimageedit"].kinds["changes"](), number)
    found = sum(task.judge(np.round(make(task.prompt, task.image) * 255).astype(np.uint8)).all for task in tasks)
    print(f"{found} of {number}")
    return found


@pytest.mark.recorded
def test_qwen_edit_miniature_passes_held_out_edits(score: ModuleType):
    assert num_right(score, 24) >= LEAST


@pytest.mark.recorded
def test_qwen_edit_miniature_blank_image_fails_the_judge(score: ModuleType):
    def with_another(prompt: str, image: np.ndarray) -> np.ndarray:
        return picture_of(prompt, np.full_like(image, 128))

    assert num_right(score, 8, with_another) < 3


@pytest.mark.recorded
def test_qwen_edit_miniature_matches_diffusers_on_one_and_eight_chips(score: ModuleType, compare: Callable):
    """The weights are trained; the same seed gives the same image on any number of chips."""
    task = next(score.FAMILIES["qwenimageedit"].kinds["changes"]())
    assert task.image is not None
    pipe = build_pipeline(tiny.find_folder(SPEC, SPEC.miniature.id)).to(torch.float32)
    settings = replace(SETTINGS, num_inference_steps=3)
    expected = parity.generate(
        pipe, settings, prompt=task.prompt, image=[Image.fromarray(task.image)], negative_prompt="",
        true_cfg_scale=settings.guidance_scale,
    )  # fmt: skip
    for chips in (1, 8):
        picture = picture_of(task.prompt, task.image, chips, steps=3)
        # A trained decoder draws steep edges.
        compare(f"picture, {chips} chips", picture, expected.frames, error=5 * PIPELINE, overall=2 * OPERATION)


def test_qwen_edit_example_uses_image_and_prompt_known_to_the_miniature(score: ModuleType):
    workflow = to_api(read_json(examples.FOLDER / "api" / "qwen_image_edit_2511.json"), HEADLESS_NODES)
    make_tiny(workflow)
    asked = {name: value for node in workflow.values() for name, value in node["inputs"].items() if value != ["1", 0]}
    assert asked["image"] == SPEC.miniature.picture and asked["prompt"] == SPEC.miniature.texts["prompt"]
    with Image.open(examples.FOLDER / asked["image"]) as picture:
        shown = np.asarray(picture.convert("RGB"))
    circle = score.still.Thing(colour="red", shape="circle")
    assert score.still.judge(shown, score.still.Picture(things=(circle,), background="blue", place="left")).all
    assert asked["model_id"] == SPEC.miniature.id and tiny.is_trained(SPEC.miniature.id)
