"""The three stages as the nodes call them. Cheap to import: torch and JAX come in when a stage runs."""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import models, precision
from .checkpoints import checkpoint, compatibility
from .engine.memory_advice import OutOfMemory as OutOfMemory  # nodes catch it
from .monitor import snapshot as stats_module
from .progress import Progress
from .spec import ModelSpec, Settings

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

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


def variant(
    spec: ModelSpec, model_id: str, folders: tuple[str, ...] = (), progress: Progress | None = None
) -> ModelSpec:
    """The model of the family of `spec` that `model_id` is, by its id or by what its index says; else `spec` itself.

    A family's models have the same encoders and decoder for text and video, and so the same nodes. With `progress`
    the index of a model on the Hub is fetched; without it, an index that is not on this machine decides nothing.
    """
    family = [spec, *(other for other in models.SPECS if other.family == spec.family and other.name != spec.name)]
    named = [one for one in family if model_id.strip() in (one.hub_id, one.tiny_id)]
    if named or len(family) == 1:
        return (named or family)[0]
    index = checkpoint.find_index(model_id, folders, parts=spec.parts, progress=progress)
    if index is None:
        return spec
    alike = [one for one in family if compatibility.is_pipeline(one, index)]
    fitting = [one for one in alike if compatibility.index_problem(one, model_id, index) is None]
    return (fitting or alike or family)[0]


def check_model(model: ModelRef) -> None:
    """Raises `ValueError` with a sentence for the user where `model` cannot work. Reads no weights, asks no network."""
    precision.check_choice(model.precision)
    model.locate().check()


def encode_prompt(
    model: ModelRef, prompt: str, negative_prompt: str, *, progress: Progress
) -> tuple[Conditioning, Conditioning | None]:
    """Prompt and negative prompt as CONDITIONING, CPU float32; no negative one where the model has no use for it."""
    from .engine.engine import engine

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
    advice = model.spec.advice(settings)
    if advice is not None and model.model_id != model.spec.tiny_id:
        _warn_once(f"{model.spec.title}: {advice}")
    from .engine.engine import engine

    return engine().denoise(model, settings, prompt_embeds, negative_prompt_embeds, progress, condition)


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def encode_image(model: ModelRef, image: "torch.Tensor", size: Mapping[str, int], *, progress: Progress) -> Condition:
    """An IMAGE `[1, height, width, 3]` in 0..1 as the condition of a video of `size` (height, width, num_frames)."""
    settings = model.spec.settings(**size)
    from .engine.engine import engine

    return engine().encode_image(model, image, settings, progress)


def join_references(conditions: Sequence[Condition]) -> Condition:
    """Encoded references of several calls as one condition, in that order."""
    arrays = [array for condition in conditions for array in condition["tensors"].values()]
    return {**conditions[0], "tensors": {f"reference_{index}": array for index, array in enumerate(arrays)}}


def decode(model: ModelRef, latents: dict[str, Any], *, progress: Progress) -> "torch.Tensor":
    """LATENT to IMAGE `[frames, height, width, 3]`, CPU float32 in 0..1."""
    from .engine.engine import engine

    return engine().decode(model, latents, progress)


def compilation_summary() -> str:
    """How many XLA programs this process compiled, and how many came from the persistent cache."""
    from .engine.telemetry import compilations

    return str(compilations())


def warmup(model: ModelRef, settings: Settings, *, progress: Progress) -> int:
    """Compiles every program of a generation with these settings, loading no weights; how many were not there yet."""
    model.spec.check_settings(settings)
    from .engine.engine import engine

    return engine().warmup(model, settings, progress)


def free(ids: Iterable[str] | None = None) -> None:
    """Drops weights and compiled programs from the devices; the next stage loads what it needs.

    With `ids` (see `stats`), the weights of those residents alone. Waits for a running stage; starts no device.
    """
    if engine := stats_module.engine_if_any():
        engine.free(ids)


def resident_bytes() -> int:
    """Bytes of weights on one chip; 0 before the first run."""
    engine = stats_module.engine_if_any()
    return engine.residency.size_bytes if engine else 0


def stats() -> dict[str, Any]:
    """The monitor's numbers (see `stats.py`)."""
    return stats_module.stats()
