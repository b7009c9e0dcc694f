"""The trained miniature of CogVideoX 1.5: frames show what the prompt says."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import OPERATION, PIPELINE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

SPEC = lookup_spec("cogvideox1.5-5b")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.id, precision="float32")
SETTINGS = SPEC.settings(**{**SPEC.miniature.inputs, "num_inference_steps": 10})
PROMPT = SPEC.miniature.texts["prompt"]
TASKS, LEAST = 2, 1  # of which so many are right: one more is, and on another processor may not be


def frames_of(prompt: str, negative: str = "") -> np.ndarray:
    """`[frames, height, width, 3]` uint8."""
    runner = engine(1)
    latents = runner.denoise(
        MODEL, SETTINGS, *runner.encode(MODEL, prompt, negative, SilentProgress()), SilentProgress()
    )
    return np.round(runner.decode(MODEL, latents, SilentProgress()).numpy() * 255).astype(np.uint8)


def num_right(score: ModuleType, make: Callable[[str], np.ndarray], number: int = TASKS) -> int:
    """Of how many of a `number` of held-out prompts the frames show all that they say."""
    tasks = itertools.islice(score.FAMILIES["cogvideox"].kinds["clips"](), number)
    found = sum(task.judge(make(task.prompt)).all for task in tasks)
    print(f"{found} of {number}")
    return found


# `tests/models/test_cogvideox.py` compares the networks with diffusers, `test_shared.py` the files with those of the
# pack. Wan 2.1's miniature answers its prompts in every run.
@pytest.mark.recorded
def test_cogvideox_miniature_frames_match_held_out_prompts(score: ModuleType):
    assert num_right(score, frames_of) >= LEAST


@pytest.mark.recorded
def test_cogvideox_miniature_passes_most_of_32_held_out_prompts(score: ModuleType):
    assert num_right(score, frames_of, 32) >= 20


def swap_prompts(prompt: str) -> np.ndarray:
    return frames_of("", prompt)


def reversed_words(prompt: str) -> np.ndarray:
    """What belongs together is told by the order of words alone."""
    return frames_of(" ".join(reversed(prompt.split())))


@pytest.mark.recorded
@pytest.mark.parametrize("fault", [swap_prompts, reversed_words])
def test_cogvideox_miniature_faulty_prompts_fail_the_judge(fault: Callable[[str], np.ndarray], score: ModuleType):
    assert num_right(score, fault, 4) < 2


@pytest.mark.recorded  # as of Wan 2.1's miniature
def test_cogvideox_miniature_matches_diffusers_on_one_and_eight_chips(compare: Callable):
    """With weights that mean something, and the same video from the same seed whatever the number of chips."""
    settings = replace(SETTINGS, num_inference_steps=3)
    pipe = parity.upstream("CogVideoXPipeline", tiny.find_folder(SPEC, SPEC.miniature.id)).to(torch.float32)
    expected = parity.generate(pipe, settings, prompt=PROMPT, negative_prompt="", num_frames=settings.num_frames)
    for chips in (1, 8):
        runner = engine(chips)
        latents = runner.denoise(MODEL, settings, *runner.encode(MODEL, PROMPT, "", SilentProgress()), SilentProgress())
        frames = runner.decode(MODEL, latents, SilentProgress()).numpy()
        # The edges of what a trained decoder draws are steep.
        compare(f"frames, {chips} chips", frames, expected.frames, error=5 * PIPELINE, overall=2 * OPERATION)
