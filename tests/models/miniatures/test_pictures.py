"""The trained miniatures of FLUX.2 dev, Qwen-Image and Z-Image: pictures show what the prompt says."""

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
from comfyui_tpu.tests.models import parity, test_flux2
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

STEPS = {"flux2dev": 8, "qwenimage": 8, "zimage": 8}
EVERY = {**STEPS, "zimagebase": 10}
EXAMPLES = {"flux2dev": "flux2_t2i", "qwenimage": "qwen_image_2512", "zimage": "z_image_turbo"}
NAMES = {
    "flux2dev": "flux2-dev", "qwenimage": "qwen-image-2512", "zimage": "z-image-turbo", "zimagebase": "z-image",
}  # fmt: skip
TASKS, LEAST = 2, 1  # of which so many are right; the recorded test asks many


def spec_of(family: str) -> ModelSpec:
    return lookup_spec(NAMES[family])


def settings_of(family: str) -> Settings:
    spec = spec_of(family)
    return spec.settings(**spec.miniature.inputs, num_inference_steps=EVERY[family])


def model_of(family: str) -> ModelRef:
    return ModelRef(spec_name=NAMES[family], model_id=spec_of(family).miniature.id, precision="float32")


def picture_of(family: str, prompt: str) -> np.ndarray:
    """`[1, height, width, 3]` uint8."""
    runner, model = engine(1), model_of(family)
    latents = runner.denoise(
        model, settings_of(family), *runner.encode(model, prompt, "", SilentProgress()), SilentProgress()
    )
    return np.round(runner.decode(model, latents, SilentProgress()).numpy() * 255).astype(np.uint8)


def num_right(score: ModuleType, family: str, number: int = TASKS, said: Callable[[str], str] = str) -> int:
    """Of how many of a `number` of held-out prompts the pictures show all that they say."""
    tasks = itertools.islice(score.FAMILIES[family].kinds["pictures"](), number)
    found = sum(task.judge(picture_of(family, said(task.prompt))).all for task in tasks)
    print(f"{family}: {found} of {number}")
    return found


# The families' tests compare the networks with diffusers, `test_shared.py` the files with those of the pack. Klein's
# miniature answers its prompts in every run.
@pytest.mark.recorded
@pytest.mark.parametrize("family", STEPS)
def test_image_miniature_images_match_held_out_prompts(family: str, score: ModuleType):
    assert num_right(score, family) >= LEAST


@pytest.mark.recorded
@pytest.mark.parametrize("family", EVERY)
def test_image_miniature_passes_most_of_64_held_out_prompts(family: str, score: ModuleType):
    assert num_right(score, family, number=64) >= (48 if family == "qwenimage" else 54)


@pytest.mark.recorded
@pytest.mark.parametrize("family", STEPS)
def test_image_miniature_changed_prompts_fail_the_judge(family: str, score: ModuleType):
    assert num_right(score, family, 3, lambda prompt: prompt.replace("circle", "square") + " and a red") < 2


@pytest.mark.recorded  # as of FLUX.2 klein's miniature
@pytest.mark.parametrize("family", STEPS)
def test_image_miniature_matches_diffusers_on_one_and_eight_chips(family: str, score: ModuleType, compare: Callable):
    """With weights that mean something, and the same picture from the same seed whatever the number of chips."""
    spec, model, settings = spec_of(family), model_of(family), settings_of(family)
    task = next(score.FAMILIES[family].kinds["pictures"]())
    folder, theirs, more = tiny.find_folder(spec, spec.miniature.id), settings, {}
    if family == "flux2dev":
        pipe = test_flux2.build_pipeline(folder)
    else:
        pipe = parity.upstream(spec.published.pipeline_classes[0], folder)
    if family == "qwenimage":
        more = {"negative_prompt": "", "true_cfg_scale": settings.guidance_scale}
    if family == "zimage":
        theirs = replace(settings, guidance_scale=settings.guidance_scale - 1)
    expected = parity.generate(pipe.to(torch.float32), theirs, prompt=task.prompt, **more)
    for chips in (1, 8):
        runner = engine(chips)
        latents = runner.denoise(
            model, settings, *runner.encode(model, task.prompt, "", SilentProgress()), SilentProgress()
        )
        picture = runner.decode(model, latents, SilentProgress()).numpy()
        # The edges of what a trained decoder draws are steep.
        compare(f"picture, {chips} chips", picture, expected.frames, error=5 * PIPELINE, overall=2 * OPERATION)


@pytest.mark.parametrize("family", STEPS)
def test_image_example_uses_prompt_known_to_the_miniature(family: str):
    workflow = to_api(read_json(examples.FOLDER / "api" / f"{EXAMPLES[family]}.json"), HEADLESS_NODES)
    make_tiny(workflow)
    asked = {name: value for node in workflow.values() for name, value in node["inputs"].items()}
    spec = spec_of(family)
    assert asked["prompt"] == spec.miniature.texts["prompt"] and tiny.is_trained(spec.miniature.id)
