"""The three stages as the nodes call them. Cheap to import: torch and JAX come in when a stage runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import checkpoint, models, precision
from .progress import Progress
from .spec import ModelSpec, Settings

if TYPE_CHECKING:
    import torch

# ComfyUI's CONDITIONING: one tensor `[1, length, dim]` with a dict that says where it comes from.
Conditioning = list
# An encoded image: a dict of CPU tensors with the family and the size it was encoded for.
Condition = dict


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """Which model to use: a description, no weights. `folders` are searched for `model_id`."""

    spec_name: str
    model_id: str
    precision: str = "auto"
    folders: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model_id} ({self.precision})"

    @property
    def spec(self) -> ModelSpec:
        return models.spec_by_name(self.spec_name)

    def locate(self) -> checkpoint.Checkpoint:
        return checkpoint.locate(self.spec, self.model_id, self.folders)


def variant(spec: ModelSpec, model_id: str, folders: tuple[str, ...] = ()) -> ModelSpec:
    """The model of the family of `spec` that `model_id` is, by its id or by what its folder says; else `spec` itself.

    A family's models have the same encoders and decoder for text and video, and so the same nodes.
    """
    family = [spec, *(other for other in models.SPECS if other.family == spec.family and other.name != spec.name)]
    for one in family if len(family) > 1 else ():
        if model_id.strip() in (one.hub_id, one.tiny_id):
            return one
    for one in family if len(family) > 1 else ():
        try:
            checkpoint.locate(one, model_id, folders)
        except checkpoint.CheckpointError:
            continue
        return one
    return spec


def check_model(model: ModelRef) -> None:
    """Raises `ValueError` with a sentence for the user where `model` cannot work. Reads no weights, no network."""
    precision.check_choice(model.precision)
    model.locate().check()


def encode_prompt(
    model: ModelRef, prompt: str, negative_prompt: str, *, progress: Progress
) -> tuple[Conditioning, Conditioning | None]:
    """Prompt and negative prompt as CONDITIONING, CPU float32; no negative one where the model has no use for it."""
    from .engine import engine

    return engine().encode(model, prompt, negative_prompt, progress)


def denoise(
    model: ModelRef,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    *,
    progress: Progress,
    condition: Condition | None = None,
) -> dict[str, Any]:
    """From noise to LATENT `{"samples": [1, channels, frames, h, w]}`, CPU float32, in the scale of the VAE."""
    model.spec.check_settings(settings)
    from .engine import engine

    return engine().denoise(model, settings, prompt_embeds, negative_prompt_embeds, progress, condition)


def encode_image(model: ModelRef, image: "torch.Tensor", size: Mapping[str, int], *, progress: Progress) -> Condition:
    """An IMAGE `[1, height, width, 3]` in 0..1 as the condition of a video of `size` (height, width, num_frames)."""
    settings = replace(model.spec.default_settings(), **size)
    model.spec.check_settings(settings)
    from .engine import engine

    return engine().encode_image(model, image, settings, progress)


def decode(model: ModelRef, latents: dict[str, Any], *, progress: Progress) -> "torch.Tensor":
    """LATENT to IMAGE `[frames, height, width, 3]`, CPU float32 in 0..1."""
    from .engine import engine

    return engine().decode(model, latents, progress)


def compilation_summary() -> str:
    """How many XLA programs this process compiled, and how many came from the persistent cache."""
    from .telemetry import compilations

    return str(compilations())


def free() -> None:
    """Drops weights and compiled programs from the devices; the next stage loads what it needs."""
    from .engine import engine

    engine().free()


# --- wip: statistics until telemetry gives them -----------------------------------------------------------------------

_running: dict[str, Any] = {}
_last: dict[str, Any] = {}
_free_everything = free


def free(ids: tuple[str, ...] | None = None) -> None:  # noqa: F811
    from .engine import engine

    if not engine.cache_info().currsize:
        return
    if ids is None:
        _free_everything()
        return
    one = engine()
    with one._lock:
        for key in [key for key in one.residency._residents if "/".join(key) in ids]:
            for array in one.residency._residents.pop(key).weights.values():
                array.delete()


def stats() -> dict[str, Any]:
    import time

    from .cache import cache_folder, xla_cache_folder
    from .engine import engine

    found = {"platform": None, "message": "No run yet: the TPU is started by the first run.", "chips": [],
             "resident": [], "running": None, "last_run": None, "counts": {"load": 0, "encode": 0, "compile": 0}}
    if engine.cache_info().currsize:
        one = engine()
        residents = dict(one.residency._residents)
        used = sum(resident.size_bytes for resident in residents.values())
        found |= {
            "platform": one.devices[0].platform,
            "message": f"no TPU, running on CPU with {len(one.devices)} simulated chips",
            "chips": [{"index": i, "kind": d.device_kind, "coords": None, "hbm_used": used, "hbm_peak": None,
                       "hbm_limit": None, "tensorcore_utilization": None, "duty_cycle": None}
                      for i, d in enumerate(one.devices)],
            "resident": [{"id": "/".join(key), "component": key[0], "model": r.title, "bytes_per_chip": r.size_bytes,
                          "last_used": time.time()} for key, r in residents.items()],
            "counts": {name: one.counts[name] for name in ("load", "encode", "compile")},
        }
    if _running:
        begun = _running["begun"]
        now = {k: v for k, v in _running.items() if k != "begun"} | {"elapsed_s": time.time() - begun}
        found["running"] = now | {"seconds_per_unit": now["elapsed_s"] / now["done"] if now["done"] else None}
    found["last_run"] = dict(_last) or None
    caches = []
    for name, path in (("xla", xla_cache_folder()), ("prompts", cache_folder() / "prompts")):
        files = [p for p in path.glob("*") if p.is_file()] if path.is_dir() else []
        sizes = sum(p.stat().st_size for p in files)
        caches.append({"name": name, "path": str(path), "files": len(files), "bytes": sizes})
    return found | {"caches": caches}


def _tracked(stage: str, function: Any) -> Any:
    import functools
    import time

    @functools.wraps(function)
    def run(model: ModelRef, *args: Any, progress: Progress, **keywords: Any) -> Any:
        class Watched:
            def text(self, message: str) -> None:
                _running.update(text=message, compiling="Preparing" in message)
                progress.text(message)

            def step(self, done: int, total: int, unit: str) -> None:
                _running.update(done=done, total=total, unit=unit, compiling=False)
                progress.step(done, total, unit)

            def check_cancelled(self) -> None:
                progress.check_cancelled()

        _running.update(stage=stage, model=model.model_id, text="", done=0, total=0, unit="", compiling=False,
                        begun=time.time())
        try:
            return function(model, *args, progress=Watched(), **keywords)
        finally:
            if stage == "encode" or _last.get("model") != model.model_id:
                _last.update(model=model.model_id, stages=[], steps_per_second=None, peak_hbm=None)
            seconds = time.time() - _running["begun"]
            _last["stages"] = [*_last["stages"], {"stage": stage, "seconds": seconds}]
            if stage == "denoise":
                _last["steps_per_second"] = _running["done"] / seconds
            _running.clear()

    return run


encode_prompt = _tracked("encode", encode_prompt)
denoise = _tracked("denoise", denoise)
encode_image = _tracked("encode_image", encode_image)
decode = _tracked("decode", decode)
