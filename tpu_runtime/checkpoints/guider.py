"""Guidance settings of a checkpoint: diffusers stores them with it if the pipeline has a `guider`.

A CFG-distilled checkpoint has guidance built in; its guider is off or has scale 1. A second guidance would
over-saturate at twice the cost.
"""

import logging
import math

from ..files import CheckpointError, read_json
from ..messages import compose
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
        raise CheckpointError(
            compose("checkpoint.guidance_scale_not_number", model_id=found.model_id, scale=repr(scale), config=CONFIG)
        )
    if _is_off(config):
        log.warning(
            "%s is CFG-distilled (its %s): guidance_scale is 1 instead of %s, without a negative prompt.",
            found.model_id, CONFIG, guidance_scale,
        )  # fmt: skip
        progress.text(compose("checkpoint.cfg_distilled"))
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
        raise CheckpointError(compose("checkpoint.guider_class_unsupported", model_id=model_id, kind=kind))
    for name, plain in _PLAIN.items():
        if config.get(name, plain) != plain:
            raise CheckpointError(compose(
                "checkpoint.guider_option_unsupported", model_id=model_id, name=name, config=config[name], plain=plain,
            ))  # fmt: skip
