"""MagCache's curves: those published by its authors (`curves.json`), and those measured on this machine."""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..files import parse_json
from ..messages import compose
from ..model_spec import MagCache, MagCacheCurve, ModelSpec, StepCache
from .store import Store, signature

MEASURED = Store("curves")
# Larger than the JSON of a curve with the most steps.
MAX_CURVE_BYTES = 2**16


@functools.cache
def _load_published() -> Mapping[str, MagCacheCurve]:
    entries = parse_json(Path(__file__).with_name("curves.json").read_bytes())["curves"]
    # A name instead of a curve refers to the model with the same curve.
    return {name: _curve(entries[value] if isinstance(value, str) else value) for name, value in entries.items()}


def _curve(value: object) -> MagCacheCurve:
    """Return the curve of a JSON object. Raises `ValueError` for anything else."""
    if not isinstance(value, dict) or set(value) - set(MagCacheCurve.__dataclass_fields__):
        raise ValueError("it is not a curve")
    try:
        named: dict[str, Any] = {
            name: tuple(entry) if isinstance(entry, list) else entry for name, entry in value.items()
        }
        rows = {name: tuple(map(tuple, value[name])) for name in ("ratios", "few_steps") if name in value}
        return MagCacheCurve(**{**named, **rows})
    except (TypeError, KeyError) as error:
        raise ValueError("it is not a curve") from error


def save_curve(spec: ModelSpec, model_id: str, curve: MagCacheCurve) -> Path:
    """Save a measured curve of a model, replacing an earlier one, and return the file's path.

    spec, model_id: the model that was measured.
    The steps that always run whole stay as published.
    """
    key = signature(spec.name, model_id)
    if spec.name in _load_published():
        curve = replace(_load_published()[spec.name], ratios=curve.ratios, few_steps=())
    MEASURED.put(key, json.dumps(asdict(curve)).encode())
    return MEASURED.path(key)


def find_curve(spec: ModelSpec, model_id: str) -> MagCacheCurve | None:
    """Return the measured curve of a model, or else the published one, or None."""
    key = signature(spec.name, model_id)
    payload = MEASURED.get(key)
    if payload is not None:
        try:
            if len(payload) > MAX_CURVE_BYTES:
                raise ValueError(f"it has {len(payload)} bytes")
            return _curve(parse_json(payload))
        except ValueError as error:
            MEASURED.discard(key, str(error))
    return _load_published().get(spec.name)


def attach_curve(spec: ModelSpec, model_id: str, policy: StepCache | MagCache | None) -> StepCache | MagCache | None:
    """Return MagCache with the model's curve, other policies as they are. Raises `ValueError` if no curve is known.

    spec, model_id: the model.
    policy: the step cache of a generation; None for none.
    """
    if not isinstance(policy, MagCache) or policy.curve is not None:
        return policy
    if (curve := find_curve(spec, model_id)) is None:
        option = "" if model_id == spec.published.hub_id else f" --model-id {model_id}"
        instead = " set cache_threshold to 0 for DeepCache, or" if spec.denoiser.step_reuse else ""
        raise ValueError(compose(
            "settings.no_curve", title=spec.title, threshold=f"{policy.threshold:g}",
            name=spec.name, option=option, instead=instead,
        ))  # fmt: skip
    return replace(policy, curve=curve)
