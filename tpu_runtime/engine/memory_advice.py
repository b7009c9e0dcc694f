"""What to do when something does not fit on the devices, in numbers. Imports no JAX."""

import math
import os

from ..model_spec import ModelSpec, Settings
from ..refusal import Refusal

VARIABLE = "COMFYUI_TPU_HBM_GIB"
# A video's sides in the smaller sizes that are proposed.
SHARES = (0.75, 0.5)


class OutOfMemory(RuntimeError):
    """Something does not fit on the devices; the message says what would."""


def sentence(spec: ModelSpec, stage: str, settings: Settings | None, reason: str, num_devices: int) -> str:
    """The message for the user: what happened, what was done, and what would need less."""
    advice = ", or ".join(smaller(spec, settings)) if settings else "smaller or fewer frames"
    limit = os.environ.get(VARIABLE)
    lifted = f" {VARIABLE} limits a chip to {limit} GiB here; raise it if the chip has more." if limit else ""
    return (
        f"{spec.title} ran out of TPU memory in stage {stage} on {num_devices} chips, with everything else unloaded: "
        f"{reason.removesuffix('.')}. All of it was freed. Needs less: {advice}.{lifted} "
        f"`comfyui-tpu plan --model {spec.name}` says beforehand what fits."
    )


def compiler_sentence(
    spec: ModelSpec, stage: str, settings: Settings | None, refused: Refusal, num_devices: int
) -> str:
    """The message for the user where the compiler `refused` a program: whose memory is too small, and what may help."""
    advice = ", or ".join(smaller(spec, settings)) if settings else "smaller or fewer frames"
    if refused.memory == "VMEM":
        return (
            f"{spec.title} does not compile in stage {stage} on {num_devices} chips: {refused.sentence}. Unloading "
            f"models does not help, so it was not tried again. Another size may have other tiles: {advice}. Please "
            "report this sentence, with what `comfyui-tpu doctor` says."
        )
    return (
        f"{spec.title} does not fit a chip's memory (HBM) in stage {stage} on {num_devices} chips: {refused.sentence}. "
        f"Unloading models does not help, so it was not tried again. Needs less: {advice}. "
        f"`comfyui-tpu plan --model {spec.name}` says beforehand what fits."
    )


def smaller(spec: ModelSpec, settings: Settings) -> list[str]:
    """Settings that need less, each with how much less: memory beside the weights grows with the tokens."""
    tokens = _tokens(spec, settings.height, settings.width, settings.num_frames)
    found = []
    if not spec.is_image and (frames := spec.whole_numbers("num_frames").at_most(settings.num_frames // 2)):
        share = _tokens(spec, settings.height, settings.width, frames) / tokens
        found.append(f"num_frames {frames} instead of {settings.num_frames} ({_less(share)})")
    for part in SHARES:
        height, width = (
            spec.whole_numbers(name).at_most(math.ceil(size * part))
            for name, size in (("height", settings.height), ("width", settings.width))
        )
        if height and width:
            share = _tokens(spec, height, width, settings.num_frames) / tokens
            found.append(f"{width}x{height} instead of {settings.width}x{settings.height} ({_less(share)})")
    return found or ["a machine with more chips, which split the weights"]


def _tokens(spec: ModelSpec, height: int, width: int, num_frames: int) -> int:
    frames = spec.geometry.latent_frames(num_frames) if spec.geometry.stride_t else 1
    return frames * height * width


def _less(share: float) -> str:
    return f"{100 * (1 - share):.0f} % less beside the weights"
