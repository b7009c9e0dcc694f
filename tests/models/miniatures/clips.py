"""Whether the frames of a trained miniature show what their prompts say, and first the picture that is given."""

import itertools
from types import ModuleType

import numpy as np
import torch
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.progress import SilentProgress

# Of 255, in the mean: what the first frame may be away from the given one. Another scene's is over ten times as far.
FIRST = 6.0


def frames_of(
    model: ModelRef,
    settings: Settings,
    prompt: str,
    image: np.ndarray | None = None,
    negative: str = "",
    runner: Runner | None = None,
) -> np.ndarray:
    """`[frames, height, width, 3]` uint8, of one chip."""
    runner, condition = runner or engine(1), None
    if image is not None:
        condition = runner.encode_image(
            model, torch.from_numpy(image / np.float32(255))[None], settings, SilentProgress()
        )
    latents = runner.denoise(
        model, settings, *runner.encode(model, prompt, negative, SilentProgress()), SilentProgress(), condition
    )
    return np.round(runner.decode(model, latents, SilentProgress()).numpy() * 255).astype(np.uint8)


def num_right(score: ModuleType, family: str, model: ModelRef, settings: Settings, number: int) -> int:
    """Of how many of a `number` of held-out prompts the frames show all that they say, a given one first."""
    right = 0
    for task in itertools.islice(score.FAMILIES[family].kinds["clips"](), number):
        frames = frames_of(model, settings, task.prompt, task.image)
        away = 0.0 if task.image is None else np.abs(frames[0].astype(float) - task.image).mean()
        right += task.judge(frames).all and away < FIRST
        print(task.prompt, task.judge(frames), f"first frame {away:.1f} away")
    print(f"{right} of {number}")
    return right
