"""The runtime's public API: the stages as nodes call them, and what happens before, between and after them.

All other names are imported from the packages that own them. Cheap to import: torch and JAX are imported when a stage
runs.
"""

import functools
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.multihost.rank import HostRank
from .cache import magcache_curves
from .checkpoints.model_ref import Lora, ModelRef, PlannedGeneration
from .checkpoints.prefetch import list_call_stages
from .engine.lifecycle import current_engine, get_engine
from .engine.memory_advice import HBM_VARIABLE as HBM_VARIABLE
from .engine.stage_values import Conditioning, ImageCondition, Latent
from .messages import compose
from .model_spec import MagCacheCurve, ModelSpec, Quality, Settings
from .monitor import snapshot
from .precision import resolve_precision as resolve_precision
from .progress import Progress

if TYPE_CHECKING:
    import torch

    from ..distributed.remote.client import Client
    from .engine.engine import Engine

log = logging.getLogger(__name__)

# Planned generations of the running prompt on other machines, by `str(ModelRef)`, which has no LoRAs. Each stage has a
# client of its own, which sends its generation.
_elsewhere: dict[str, PlannedGeneration] = {}


# Notes of the stages that ran within `noted`; None outside of it.
_notes: ContextVar[list[dict[str, Any]] | None] = ContextVar("notes", default=None)


@contextmanager
def record_stages() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that gets a note of every stage that ends within the block.

    A note has `stage`, `model`, `quality`, `precision`, `chips` and `seconds`, but no prompt, path or address of the
    user's.
    """
    notes: list[dict[str, Any]] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _note(stage: str, model: ModelRef, quality: str, began: float) -> dict[str, Any]:
    """Return the note of a stage; `began` is its start in monotonic seconds."""
    here = None if model.address else current_engine()
    platform = here.devices[0].platform if here else ""
    return {
        "stage": stage,
        "model": model.model_id if model.model_id in model.spec.miniature.ids else model.spec.title,
        "quality": quality,
        "precision": resolve_precision(model.precision, platform) if here else model.precision,
        "chips": snapshot.describe_chips(here) if here else "another machine",
        "seconds": round(time.monotonic() - began, 3),
    }


def _runner(model: ModelRef, progress: Progress) -> "Engine | Client":
    """Return the runner of a model's stages: this process's engine, or a client of the model's machine."""
    if not model.address:
        return get_engine(progress)
    from ..distributed.remote.client import Client

    return Client(model.address, _elsewhere.get(str(model)))


def check_address(address: str) -> None:
    """Raise `ValueError` for an invalid list of addresses. Opens no connection."""
    from ..distributed.remote.client import parse_addresses

    parse_addresses(address)


def choose_remote_model(
    address: str,
    spec: ModelSpec,
    model_id: str,
    *,
    precision: str = "auto",
    quality: str = Quality.EXACT,
    progress: Progress,
) -> ModelRef:
    """Return the model of a family that `model_id` is on another machine, which then runs its stages.

    address: of one machine, or several with commas between them, each of which runs some of the stages.
    spec: a model of the family.
    model_id, precision, quality: of the `ModelRef`.
    progress: for the connection.
    Raises `ValueError` if `quality` is not supported.
    """
    from ..distributed.remote.client import Client

    name = Client(address).choose(spec.family, model_id, precision, progress)
    model = ModelRef(spec_name=name, model_id=model_id, precision=precision, quality=quality, address=address)
    model.spec.check_input("quality", quality)
    return model


def run_stage(stage: str, model: ModelRef, progress: Progress, **arguments: Any) -> Any:
    """Run one stage on the model's machine and return its result.

    stage: a key of `engine.stage_functions.STAGE_FUNCTIONS`.
    model: the reference.
    progress: of the application.
    arguments: of that function. Settings must be checked; a warning about unusual ones is logged once.
    """
    if (settings := arguments.get("settings")) is not None:
        if not model.address:
            settings = arguments["settings"] = _with_curve(model, settings)
        is_published = stage == "denoise" and model.model_id not in model.spec.miniature.ids
        if is_published and (advice := model.spec.recipe.advice(settings)) is not None:
            _warn_once(f"{model.spec.title}: {advice}")
    began = time.monotonic()
    result = _runner(model, progress).run(stage, model, progress, **arguments)
    if (notes := _notes.get()) is not None:
        notes.append(_note(stage, model, settings.quality if settings else model.quality, began))
    return result


def encode_prompt(
    model: ModelRef, prompt: str, negative_prompt: str, *, progress: Progress, condition: ImageCondition | None = None
) -> tuple[Conditioning, Conditioning | None]:
    """Return prompt and negative prompt as CONDITIONING, CPU float32.

    The negative one is None for a model without guidance.

    model: the reference.
    prompt, negative_prompt: texts.
    progress: of the application.
    condition: an encoded image for a text encoder that takes image embeddings; else None.
    """
    return run_stage("encode", model, progress, prompt=prompt, negative_prompt=negative_prompt, condition=condition)


def denoise(
    model: ModelRef,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    *,
    progress: Progress,
    condition: ImageCondition | None = None,
    latents: Mapping[str, Any] | None = None,
) -> Latent:
    """Return a LATENT `{"samples": [1, channels, frames, h, w]}`, CPU float32, in the scale of the VAE.

    model: the reference.
    settings: of the generation.
    prompt_embeds, negative_prompt_embeds: CONDITIONING; the negative one may be None without guidance.
    progress: of the application.
    condition: an encoded image or None.
    latents: a LATENT to start from (see `Settings`); None for noise.
    With leftover noise the LATENT also holds the solver's state (see `engine.denoise`).
    """
    return run_stage(
        "denoise", model, progress, settings=settings, prompt_embeds=prompt_embeds,
        negative_prompt_embeds=negative_prompt_embeds, condition=condition, latents=latents,
    )  # fmt: skip


def calibrate(
    model: ModelRef,
    settings: Settings,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    *,
    progress: Progress,
    condition: ImageCondition | None = None,
) -> "tuple[MagCacheCurve, Path]":
    """Measure MagCache's curve of a model in one generation, save it, and return it with the file's path.

    model: the reference.
    settings: of the generation; its step cache is ignored.
    prompt_embeds, negative_prompt_embeds: CONDITIONING; the negative one may be None without guidance.
    progress: of the application.
    condition: an encoded image or None.
    """
    curve = run_stage(
        "calibrate", model, progress, settings=replace(settings, step_cache=None), prompt_embeds=prompt_embeds,
        negative_prompt_embeds=negative_prompt_embeds, condition=condition,
    )  # fmt: skip
    return curve, magcache_curves.save_curve(model.spec, model.model_id, curve)


def _with_curve(model: ModelRef, settings: Settings) -> Settings:
    """Return the settings with MagCache's curve of the model. Raises `ValueError` if it is not known."""
    return replace(settings, step_cache=magcache_curves.attach_curve(model.spec, model.model_id, settings.step_cache))


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def encode_image(
    model: ModelRef, image: "torch.Tensor", size: Mapping[str, int], *, progress: Progress
) -> ImageCondition:
    """Return the condition of an IMAGE `[N, height, width, 3]` in 0..1: a first frame, and a last one if N is 2.

    model: the reference.
    image: of the video's size; references may have any size.
    size: of the video, by name (height, width, num_frames).
    progress: of the application.
    """
    return run_stage("image", model, progress, image=image, settings=model.spec.settings(**size))


def join_references(conditions: Sequence[ImageCondition]) -> ImageCondition:
    """Return encoded references of several calls as one condition, in that order."""
    joined: dict[str, torch.Tensor] = {}
    for condition in conditions:
        before = sum(name.startswith("reference_") for name in joined)
        for name, array in condition["tensors"].items():
            kind, _, index = name.rpartition("_")
            joined[f"{kind}_{before + int(index)}"] = array
    return {**conditions[0], "tensors": joined}


def add_lora(model: ModelRef, lora: Lora, *, progress: Progress) -> tuple[ModelRef, str]:
    """Return the model with one more LoRA, and a report on it. Raises `ValueError` if nothing of it matches.

    model: the reference.
    lora: to be added.
    progress: of the application.
    """
    if model.address:
        from ..distributed.remote.client import Client

        return Client(model.address).add_lora(model, lora, progress)
    from .loras import apply

    return apply.add_lora(model, lora, progress)


def decode(model: ModelRef, latents: Latent, *, progress: Progress) -> "torch.Tensor":
    """Return IMAGE frames `[frames, height, width, 3]` of a LATENT, CPU float32 in 0..1.

    model: the reference.
    latents: samples `[batch, channels, ...]`.
    progress: of the application.
    """
    return run_stage("decode", model, progress, latents={"samples": latents["samples"]})


def announce_generations(generations: Iterable[PlannedGeneration], *, progress: Progress) -> None:
    """Announce the generations about to run, on this and other machines.

    While a stage runs, programs of the next are compiled.
    """
    planned = list(generations)
    _elsewhere.clear()
    _elsewhere.update({str(generation.model): generation for generation in planned if generation.model.address})
    announce_local_generations(
        [generation for generation in planned if not generation.model.address], progress=progress
    )


def announce_local_generations(generations: Sequence[PlannedGeneration], *, progress: Progress) -> None:
    """Announce generations of this machine alone (see `expect`)."""
    if generations or current_engine():
        get_engine(progress, generations).expect(map(_as_it_runs, generations))


def _as_it_runs(expected: PlannedGeneration) -> PlannedGeneration:
    """Return a planned generation with its final settings, None if these will be refused."""
    try:
        settings = expected.settings and _with_curve(expected.model, expected.settings)
    except ValueError:
        settings = None
    return replace(expected, settings=settings)


def precompile_calls(calls: Iterable[tuple[ModelRef, dict[str, Any]]], *, progress: Progress) -> None:
    """Compile the programs of calls by ComfyUI's own nodes in the background, and read their weights ahead.

    calls: see `Engine.prepare`. They are iterated in another thread, unless the devices are not open yet: then weights
        are read while these open.
    """
    expected: list[PlannedGeneration] = []
    if current_engine() is None:
        calls = _list_known(calls)
        expected = [PlannedGeneration(model=model, stages=tuple(list_call_stages(given))) for model, given in calls]
    get_engine(progress, expected).prepare(calls)


def list_programs(calls: Iterable[tuple[ModelRef, dict[str, Any]]]) -> list[str]:
    """Return a message for each program of calls by ComfyUI's own nodes, with its last compile time on this machine.

    calls: see `Engine.prepare`, up to the first that cannot be predicted. Opens no devices.
    """
    from .engine import compile_estimates

    return compile_estimates.list_programs(_list_known(calls))


def _list_known(calls: Iterable[tuple[ModelRef, dict[str, Any]]]) -> list[tuple[ModelRef, dict[str, Any]]]:
    """Return the calls up to the first that cannot be predicted."""
    known: list[tuple[ModelRef, dict[str, Any]]] = []
    try:
        known.extend(calls)
    except Exception as error:  # of any kind: nothing fails because it cannot be compiled ahead
        log.warning("Nothing more is prepared in the background: %s: %s", type(error).__name__, error)
    return known


def follow_leader(place: HostRank, chips: Callable[[Any], list[dict[str, Any]]]) -> None:
    """Join the hosts of `place` and execute the leader's requests until it disconnects.

    chips: returns the monitor's rows of an engine's own chips.
    Raises `HandshakeRejected`.
    """
    from ..distributed.multihost.follower import Follower

    follower = Follower(place)
    follower.join()
    from .engine.engine import Engine  # once the environment is the leader's

    follower.serve_leader(Engine(hosts=follower), chips)


def check_packages() -> None:
    """Log once which packages are missing or untested. Does not import torch or JAX.

    Raises `RuntimeError` with the command that helps if no model can run with the installed packages.
    """
    try:
        from . import versions
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        command = f"{shlex.quote(sys.executable)} -m pip install {name}"
        raise RuntimeError(compose("packages.not_installed_run_command", name=name, command=command)) from error
    versions.warn_once()
    versions.check()


def compilation_summary() -> str:
    """Return how many XLA programs this process compiled or took from the persistent cache, as text."""
    from .cache.xla_cache import count_compilations

    return str(count_compilations())


def warm_up(model: ModelRef, settings: Settings, *, progress: Progress) -> int:
    """Compile every program of a generation without loading weights, and return how many were new.

    model: the reference.
    settings: of the generation.
    progress: of the application.
    """
    return run_stage("warmup", model, progress, settings=settings)


def free_memory(ids: Iterable[str] | None = None) -> None:
    """Unload weights and compiled programs from the devices; the next stage loads them again.

    ids: of residents (see `monitor.snapshot`), whose weights alone are unloaded; None for everything.
    Waits for a running stage. Does not open devices.
    """
    if engine := current_engine():
        engine.free(ids)


def resident_bytes() -> int:
    """Return the bytes of weights on one chip; 0 before the first run."""
    engine = current_engine()
    return engine.device_cache.size_bytes if engine else 0
