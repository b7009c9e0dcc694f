"""Messages with numbers for programs and weights that do not fit on the devices. Imports no JAX."""

import math
import os

from ..memory_errors import MemoryRefusal
from ..messages import compose, compose_list
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
    advice = _advise_smaller(spec, settings)
    limit = os.environ.get(HBM_VARIABLE)
    lifted = compose("memory.limited_here", variable=HBM_VARIABLE, limit=limit) if limit else ""
    return compose(
        "memory.out_of_memory", title=spec.title, stage=stage, num_devices=num_devices,
        reason=reason.removesuffix("."), advice=advice, lifted=lifted, name=spec.name,
    )  # fmt: skip


def compile_refusal_message(
    spec: ModelSpec, stage: str, settings: Settings | None, refused: MemoryRefusal, num_devices: int
) -> str:
    """Return the message for a program that the compiler `refused`: which memory is too small, and what may help.

    spec: the model that ran.
    stage: its name.
    settings: of the generation, None if unknown.
    num_devices: chips in use.
    """
    advice = _advise_smaller(spec, settings)
    if refused.memory == "VMEM":
        return compose(
            "memory.tiles_do_not_fit", title=spec.title, stage=stage, num_devices=num_devices,
            sentence=refused.sentence, advice=advice,
        )  # fmt: skip
    return compose(
        "memory.program_does_not_fit", title=spec.title, stage=stage, num_devices=num_devices,
        sentence=refused.sentence, advice=advice, name=spec.name,
    )  # fmt: skip


def _advise_smaller(spec: ModelSpec, settings: Settings | None) -> str:
    if settings is None:
        return compose("memory.smaller_or_fewer_frames")
    return compose_list(suggest_smaller(spec, settings), "comma_or")


def suggest_smaller(spec: ModelSpec, settings: Settings) -> list[str]:
    """Return settings that need less memory, each with its saving. Memory other than weights grows with the tokens."""
    tokens = _tokens(spec, settings.height, settings.width, settings.num_frames)
    suggestions = []
    if not spec.is_image and (frames := spec.whole_numbers("num_frames").largest_allowed(settings.num_frames // 2)):
        share = _tokens(spec, settings.height, settings.width, frames) / tokens
        suggestions.append(
            compose("memory.fewer_frames", frames=frames, num_frames=settings.num_frames, share=_less(share))
        )
    for factor in SIDE_FACTORS:
        height, width = (
            spec.whole_numbers(name).largest_allowed(math.ceil(size * factor))
            for name, size in (("height", settings.height), ("width", settings.width))
        )
        if height and width:
            share = _tokens(spec, height, width, settings.num_frames) / tokens
            suggestions.append(compose(
                "memory.smaller_size", width=width, height=height, current_width=settings.width,
                current_height=settings.height, share=_less(share),
            ))  # fmt: skip
    return suggestions or [compose("memory.more_chips")]


def _tokens(spec: ModelSpec, height: int, width: int, num_frames: int) -> int:
    """Return a number proportional to the tokens of this size, in pixels and frames."""
    frames = spec.geometry.latent_frames(num_frames) if spec.geometry.stride_t else 1
    return frames * height * width


def _less(share: float) -> str:
    return compose("memory.share_saved", share=f"{100 * (1 - share):.0f}")
