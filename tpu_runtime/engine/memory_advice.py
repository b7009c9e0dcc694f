"""Messages with numbers for programs and weights that do not fit on the devices. Imports no JAX."""

import math
import os

from ..memory_errors import MemoryRefusal
from ..model_spec import ModelSpec, Settings

HBM_VARIABLE = "COMFYUI_TPU_HBM_GIB"
# Factors for height and width of the proposed smaller sizes.
SIDE_FACTORS = (0.75, 0.5)


class OutOfMemory(RuntimeError):
    """An error for something that does not fit on the devices; the message says what would."""


def out_of_memory_message(spec: ModelSpec, stage: str, settings: Settings | None, reason: str, num_devices: int) -> str:
    """Return the message after out-of-memory retries: the failure, the actions taken and settings that need less.

    spec: the model that ran.
    stage: its name.
    settings: of the generation, None if unknown.
    reason: the first line of the last error.
    num_devices: chips in use.
    """
    advice = ", or ".join(suggest_smaller(spec, settings)) if settings else "smaller or fewer frames"
    limit = os.environ.get(HBM_VARIABLE)
    lifted = f" {HBM_VARIABLE} limits a chip to {limit} GiB here; raise it if the chip has more." if limit else ""
    return (
        f"{spec.title} ran out of TPU memory in stage {stage} on {num_devices} chips, with everything else unloaded: "
        f"{reason.removesuffix('.')}. All of it was freed. Needs less: {advice}.{lifted} "
        f"`comfyui-tpu plan --model {spec.name}` predicts which sizes fit."
    )


def compile_refusal_message(
    spec: ModelSpec, stage: str, settings: Settings | None, refused: MemoryRefusal, num_devices: int
) -> str:
    """Return the message for a program that the compiler `refused`: which memory is too small, and what may help.

    spec: the model that ran.
    stage: its name.
    settings: of the generation, None if unknown.
    num_devices: chips in use.
    """
    advice = ", or ".join(suggest_smaller(spec, settings)) if settings else "smaller or fewer frames"
    if refused.memory == "VMEM":
        return (
            f"{spec.title} does not compile in stage {stage} on {num_devices} chips: {refused.sentence}. Unloading "
            f"models does not help, so it was not tried again. Another size may have other tiles: {advice}. Please "
            "report this sentence with the output of `comfyui-tpu doctor`."
        )
    return (
        f"{spec.title} does not fit a chip's memory (HBM) in stage {stage} on {num_devices} chips: {refused.sentence}. "
        f"Unloading models does not help, so it was not tried again. Needs less: {advice}. "
        f"`comfyui-tpu plan --model {spec.name}` predicts which sizes fit."
    )


def suggest_smaller(spec: ModelSpec, settings: Settings) -> list[str]:
    """Return settings that need less memory, each with its saving. Memory other than weights grows with the tokens."""
    tokens = _tokens(spec, settings.height, settings.width, settings.num_frames)
    suggestions = []
    if not spec.is_image and (frames := spec.whole_numbers("num_frames").largest_allowed(settings.num_frames // 2)):
        share = _tokens(spec, settings.height, settings.width, frames) / tokens
        suggestions.append(f"num_frames {frames} instead of {settings.num_frames} ({_less(share)})")
    for factor in SIDE_FACTORS:
        height, width = (
            spec.whole_numbers(name).largest_allowed(math.ceil(size * factor))
            for name, size in (("height", settings.height), ("width", settings.width))
        )
        if height and width:
            share = _tokens(spec, height, width, settings.num_frames) / tokens
            suggestions.append(f"{width}x{height} instead of {settings.width}x{settings.height} ({_less(share)})")
    return suggestions or ["a machine with more chips, which split the weights"]


def _tokens(spec: ModelSpec, height: int, width: int, num_frames: int) -> int:
    """Return a number proportional to the tokens of this size, in pixels and frames."""
    frames = spec.geometry.latent_frames(num_frames) if spec.geometry.stride_t else 1
    return frames * height * width


def _less(share: float) -> str:
    return f"{100 * (1 - share):.0f} % less next to the weights"
