"""What a checkpoint says of guidance: diffusers keeps it with the checkpoint where the pipeline has a `guider`.

A CFG-distilled checkpoint has learnt what guidance does; its guider is off or has scale 1. Guided again, it would be
over-saturated at twice the cost.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from ..files import CheckpointError, read_json
from ..progress import Progress
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

FOLDER, CONFIG = "guider", "guider_config.json"
DEFAULT_SCALE = 7.5  # upstream's
# Fields of upstream's ClassifierFreeGuidance besides its scale, with the values of the plain formula.
_PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


def scale_for(found: Checkpoint, guidance_scale: float, progress: Progress) -> float:
    """`guidance_scale`, or 1, which is no guidance, where the checkpoint's guider has none.

    Raises `CheckpointError` where it guides by another formula than plain classifier-free guidance.
    """
    entry = found.index(progress).get(FOLDER)
    if guidance_scale <= 1 or not isinstance(entry, list) or not any(entry):
        return guidance_scale
    config = read_json(found.folder(FOLDER, progress) / CONFIG)
    scale = config.get("guidance_scale", DEFAULT_SCALE)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise CheckpointError(f"{found.model_id}: guidance_scale is {scale!r} in its {CONFIG}; it must be a number.")
    if _is_off(config):
        log.warning(
            "%s is CFG-distilled (its %s): guidance_scale %s is taken as 1, without a negative prompt.",
            found.model_id, CONFIG, guidance_scale,
        )  # fmt: skip
        progress.text("The checkpoint is CFG-distilled: guidance_scale is taken as 1")
        return 1.0
    _check_plain(found.model_id, config)
    return guidance_scale


def _is_off(config: Mapping[str, Any]) -> bool:
    """As upstream decides it: at this scale its formula returns the prompt's prediction alone."""
    nothing = 0.0 if config.get("use_original_formulation") else 1.0
    return not config.get("enabled", True) or math.isclose(config.get("guidance_scale", DEFAULT_SCALE), nothing)


def _check_plain(model_id: str, config: Mapping[str, Any]) -> None:
    kind = config.get("_class_name")
    if kind != "ClassifierFreeGuidance":
        raise CheckpointError(
            f"{model_id}: its guider is a {kind}; only ClassifierFreeGuidance is supported. Set guidance_scale to 1 to "
            "run without guidance, or use another checkpoint."
        )
    for name, plain in _PLAIN.items():
        if config.get(name, plain) != plain:
            raise CheckpointError(
                f"{model_id}: its guider has {name} {config[name]}; only {plain} is supported. Set guidance_scale to 1 "
                "to run without guidance, or use another checkpoint."
            )
