"""MagCache's curves: those that its authors published (`curves.json`), and those that this machine measured."""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..files import parse_json
from ..model_spec import Curve, MagCache, ModelSpec, StepCache
from .store import Store, signature

MEASURED = Store("curves")
# A curve of most steps, as JSON, is smaller.
MOST_BYTES = 2**16


@functools.cache
def _published() -> Mapping[str, Curve]:
    found = parse_json(Path(__file__).with_name("curves.json").read_bytes())["curves"]
    # A name in place of a curve is that of the model whose it is, too.
    return {name: _curve(found[value] if isinstance(value, str) else value) for name, value in found.items()}


def _curve(value: Any) -> Curve:
    """The curve of a JSON object; raises `ValueError` for anything else."""
    if not isinstance(value, dict) or set(value) - set(Curve.__dataclass_fields__):
        raise ValueError("it is no curve")
    try:
        named: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in value.items()}
        rows = {name: tuple(map(tuple, value[name])) for name in ("ratios", "few_steps") if name in value}
        return Curve(**{**named, **rows})
    except (TypeError, KeyError) as error:
        raise ValueError("it is no curve") from error


def keep(spec: ModelSpec, model_id: str, curve: Curve) -> Path:
    """Keeps what was measured of a model, in place of what is known of it; where it is kept. Which steps run whole in
    any case stays as it was published.
    """
    key = signature(spec.name, model_id)
    if spec.name in _published():
        curve = replace(_published()[spec.name], ratios=curve.ratios, few_steps=())
    MEASURED.put(key, json.dumps(asdict(curve)).encode())
    return MEASURED.path(key)


def find(spec: ModelSpec, model_id: str) -> Curve | None:
    """The curve that was measured of a model, or else the published one; None where there is neither."""
    key = signature(spec.name, model_id)
    payload = MEASURED.get(key)
    if payload is not None:
        try:
            if len(payload) > MOST_BYTES:
                raise ValueError(f"it has {len(payload)} bytes")
            return _curve(parse_json(payload))
        except ValueError as error:
            MEASURED.discard(key, str(error))
    return _published().get(spec.name)


def with_curve(spec: ModelSpec, model_id: str, policy: StepCache | MagCache | None) -> StepCache | MagCache | None:
    """MagCache with the curve of the model, other policies as they are; `ValueError` says how to get one."""
    if not isinstance(policy, MagCache) or policy.curve is not None:
        return policy
    if (curve := find(spec, model_id)) is None:
        own = "" if model_id == spec.published.hub_id else f" --model-id {model_id}"
        instead = " set cache_threshold to 0 for DeepCache, or" if spec.denoiser.step_reuse else ""
        raise ValueError(
            f"{spec.title}: cache_threshold is {policy.threshold:g}, but no curve of this model is known. Measure it "
            f"once: `comfyui-tpu calibrate {spec.name}{own}`, or{instead} turn step_cache off."
        )
    return replace(policy, curve=curve)
