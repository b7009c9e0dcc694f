"""The trained miniature of FLUX.2 klein: pictures show what the prompt says, and of a reference what is to stay."""

import itertools
from collections.abc import Callable
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
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from PIL import Image

pytestmark = pytest.mark.slow

SPEC = lookup_spec("flux2-klein-4b")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision="float32")
SETTINGS = SPEC.settings(**SPEC.miniature.inputs)  # four steps, as the nodes' default
TASKS, LEAST = 7, 4  # of which so many are right


def picture_of(prompt: str, image: np.ndarray | None = None, chips: int = 1) -> np.ndarray:
    """`[1, height, width, 3]` uint8."""
    runner, condition = engine(chips), None
    if image is not None:
        condition = runner.encode_image(
            MODEL, torch.from_numpy(image / np.float32(255))[None], SETTINGS, SilentProgress()
        )
    embeds = runner.encode(MODEL, prompt, "", SilentProgress())
    latents = runner.denoise(MODEL, SETTINGS, *embeds, SilentProgress(), condition)
    return np.round(runner.decode(MODEL, latents, SilentProgress()).numpy() * 255).astype(np.uint8)


def num_right(score: ModuleType, kind: str, make: Callable[..., np.ndarray] = picture_of, number: int = TASKS) -> int:
    """Of how many of a `number` of held-out prompts the pictures show all that they say."""
    tasks = itertools.islice(score.FAMILIES["flux2klein"].kinds[kind](), number)
    found = sum(task.judge(make(task.prompt, task.image)).all for task in tasks)
    print(f"{kind}: {found} of {number}")
    return found


# A reference next to the text leads through the same code, below.
@pytest.mark.recorded
def test_klein_miniature_images_match_held_out_prompts(score: ModuleType):
    assert num_right(score, "pictures") >= LEAST


def test_klein_miniature_edits_match_held_out_prompts(score: ModuleType):
    assert num_right(score, "changes") >= LEAST


@pytest.mark.recorded
@pytest.mark.parametrize(("kind", "least"), [("pictures", 55), ("changes", 48)])
def test_klein_miniature_passes_most_of_64_held_out_prompts(kind: str, least: int, score: ModuleType):
    assert num_right(score, kind, number=64) >= least


def without_reference(prompt: str, image: np.ndarray | None) -> np.ndarray:
    return picture_of(prompt)


def another_prompt(prompt: str, image: np.ndarray | None) -> np.ndarray:
    return picture_of("on white" if "white" not in prompt else "on black", image)


@pytest.mark.recorded
@pytest.mark.parametrize("fault", [without_reference, another_prompt])
def test_klein_miniature_faulty_inputs_fail_the_judge(fault: Callable[..., np.ndarray], score: ModuleType):
    assert num_right(score, "changes", fault) < LEAST


def test_klein_miniature_matches_diffusers_on_one_and_eight_chips(score: ModuleType, compare: Callable):
    """With weights that mean something, and the same picture from the same seed whatever the number of chips."""
    task = next(score.FAMILIES["flux2klein"].kinds["changes"]())
    pipe = parity.upstream("Flux2KleinPipeline", tiny.find_folder(SPEC, SPEC.miniature.id)).to(torch.float32)
    expected = parity.generate(pipe, SETTINGS, prompt=task.prompt, image=[Image.fromarray(task.image)])
    image = torch.from_numpy(task.image / np.float32(255))[None]
    for chips in (1, 8):
        runner = engine(chips)
        condition = runner.encode_image(MODEL, image, SETTINGS, SilentProgress())
        latents = runner.denoise(
            MODEL, SETTINGS, *runner.encode(MODEL, task.prompt, "", SilentProgress()), SilentProgress(), condition
        )
        wanted = expected.latents.swapaxes(1, 2).reshape(latents["samples"].shape)
        compare(f"latents, {chips} chips", latents["samples"].numpy(), wanted)
        # The edges of what a trained decoder draws are steep.
        picture = runner.decode(MODEL, latents, SilentProgress()).numpy()
        compare(f"picture, {chips} chips", picture, expected.frames, error=5 * PIPELINE, overall=2 * OPERATION)


def test_klein_example_uses_prompt_known_to_the_miniature(score: ModuleType):
    workflow = to_api(read_json(examples.FOLDER / "api" / "flux2_klein.json"), HEADLESS_NODES)
    make_tiny(workflow)
    things = (score.still.Thing(colour="red", shape="circle"), score.still.Thing(colour="green", shape="square"))
    asked = {name: value for node in workflow.values() for name, value in node["inputs"].items()}
    assert asked["prompt"] == str(score.still.Picture(things=things, background="blue"))
    assert asked["model_id"] == SPEC.miniature.id and tiny.is_trained(SPEC.miniature.id)
