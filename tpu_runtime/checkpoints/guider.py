"""Guidance settings of a checkpoint: diffusers stores them with it if the pipeline has a `guider`.

A CFG-distilled checkpoint has guidance built in; its guider is off or has scale 1. A second guidance would
over-saturate at twice the cost.
"""

import logging
import math

from ..files import CheckpointError, read_json
from ..model_spec import Json
from ..progress import Progress
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

FOLDER, CONFIG = "guider", "guider_config.json"
DEFAULT_SCALE = 7.5  # upstream's
# Fields of upstream's ClassifierFreeGuidance besides its scale, with the values of the plain formula.
_PLAIN = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}


def resolve_guidance_scale(found: Checkpoint, guidance_scale: float, progress: Progress) -> float:
    """Return `guidance_scale`, or 1 (no guidance) if the checkpoint's guider is off.

    found: the checkpoint.
    Raises `CheckpointError` if the guider uses a formula other than plain classifier-free guidance.
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


def _is_off(config: Json) -> bool:
    """Return whether upstream's formula returns the prompt's prediction alone at this scale."""
    nothing = 0.0 if config.get("use_original_formulation") else 1.0
    return not config.get("enabled", True) or math.isclose(config.get("guidance_scale", DEFAULT_SCALE), nothing)


def _check_plain(model_id: str, config: Json) -> None:
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
