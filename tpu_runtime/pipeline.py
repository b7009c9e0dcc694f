"""The runtime's door: the stages as nodes call them, and all else of the runtime that nodes, commands and batches use.

Cheap to import: torch and JAX come in when a stage runs, or with the names of `_LATER`.
"""

import functools
import importlib
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

from . import device_memory, files, media
from .cache import curves, store
from .cache.store import cache_folder, trim
from .checkpoints import checkpoint, content, hub, tiny
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.model_ref import (
    LORA_EXPERTS,
    Expected,
    HeldTensors,
    Lora,
    ModelRef,
    assumed,
    choose_model,
    choose_part,
    variant,
)
from .checkpoints.parts import SEPARATOR, choices, files_in, is_of_files, read_tensor, spec_of
from .checkpoints.weight_files import WeightFile
from .device_memory import DeviceMemory
from .engine import payloads, stage_files
from .engine.current import current, engine, leave, leave_at_exit, listen, when_stuck
from .engine.memory_advice import VARIABLE as HBM_VARIABLE
from .engine.memory_advice import OutOfMemory
from .engine.payloads import Conditioning, ImageCondition, Latent
from .files import TensorFile, parse_json, written_file
from .hosts import place as places
from .hosts import supervisor
from .hosts.place import Place
from .hosts.together import RESTART
from .line import records, trust, wire
from .machine import bus, device_access, fallbacks
from .machine import record as machine_record
from .model_spec import (
    PART,
    QUALITIES,
    SIZE,
    SPARSE,
    STAGES,
    Choice,
    Curve,
    FloatLimit,
    IntLimit,
    Limit,
    ModelSpec,
    Numbers,
    Settings,
    Switch,
    guidance_first,
    without_zero_sizes,
)
from .models import FLAGSHIPS, NAME_HELP, SPECS, spec_by_name, spec_for_family
from .models.layouts import published
from .monitor import metrics_service, readings, snapshot
from .monitor.feed import Feed
from .monitor.readings import Sampler, Stats, in_daemon
from .plan import process as plan_process
from .precision import CHOICES
from .precision import of_pictures as resolve_pictures
from .precision import resolve as resolve_precision
from .precision import title as precision_title
from .progress import TOLD, TOOK, Preview, Progress, Silent
from .redact import for_page, hide_tokens, printable, redact
from .units import GB, GIB, MIB, loaded, readable

if TYPE_CHECKING:
    import torch

    from . import versions
    from .anchor import TPUModels
    from .cost_model import chips
    from .cost_model.chips import Topology
    from .engine.engine import Engine
    from .engine.run import Prediction
    from .line.link import Door, Refused
    from .plan import compile as compiling
    from .plan import plan
    from .plan import report as plan_report
    from .plan.compile import Compiled
    from .programs import executables, generation
    from .programs.denoise_step import StepArgs
    from .programs.program import Program, Target
    from .remote.client import Client

# What imports torch or JAX: the module, and what of it if not all.
_LATER = {
    "versions": ("versions", ""),
    "TPUModels": ("anchor", "TPUModels"),
    "Door": ("line.link", "Door"),
    "Refused": ("line.link", "Refused"),
    "Prediction": ("engine.run", "Prediction"),
    "chips": ("cost_model.chips", ""),
    "Topology": ("cost_model.chips", "Topology"),
    "compiling": ("plan.compile", ""),
    "plan": ("plan.plan", ""),
    "plan_report": ("plan.report", ""),
    "Compiled": ("plan.compile", "Compiled"),
    "executables": ("programs.executables", ""),
    "generation": ("programs.generation", ""),
    "StepArgs": ("programs.denoise_step", "StepArgs"),
    "Program": ("programs.program", "Program"),
    "Target": ("programs.program", "Target"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, part = _LATER[name]
    found = importlib.import_module(f".{module}", __package__)
    return getattr(found, part) if part else found


log = logging.getLogger(__name__)

# What the running prompt is to run on other machines, by `str(ModelRef)`, in which LoRAs do not count: each stage is
# asked for by a client of its own, and says it.
_elsewhere: dict[str, Expected] = {}


# What ran since `noted` was entered, where it was.
_notes: ContextVar[list[dict[str, Any]] | None] = ContextVar("notes", default=None)


@contextmanager
def noted() -> Iterator[list[dict[str, Any]]]:
    """A list that gets a note of every stage that ends inside: `stage`, `model`, `quality`, `precision`, `chips`, and
    `seconds`. Nothing in it is of the user's: no prompt, no path, no address.
    """
    notes: list[dict[str, Any]] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _note(stage: str, model: ModelRef, quality: str, began: float) -> dict[str, Any]:
    here = None if model.address else current()
    platform = here.devices[0].platform if here else ""
    return {
        "stage": stage,
        "model": model.model_id if model.model_id in model.spec.miniature.ids else model.spec.title,
        "quality": quality,
        "precision": resolve_precision(model.precision, platform) if here else model.precision,
        "chips": snapshot.chips_of(here) if here else "another machine",
        "seconds": round(time.monotonic() - began, 3),
    }


def _runner(model: ModelRef, progress: Progress) -> "Engine | Client":
    """Who runs a model's stages: this process's engine, or the machine that the model is on."""
    if not model.address:
        return engine(progress)
    from .remote.client import Client

    return Client(model.address, _elsewhere.get(str(model)))


def check_address(address: str) -> None:
    """Raises ValueError for what are no addresses of other machines; connects to none."""
    from .remote.client import parse_all

    parse_all(address)


def remote_model(
    address: str,
    spec: ModelSpec,
    model_id: str,
    *,
    precision: str = "auto",
    quality: str = QUALITIES[0],
    progress: Progress,
) -> ModelRef:
    """The model of a family that `model_id` is on another machine, whose stages then run there. Of several addresses,
    with commas between them, each stage is run by one.
    """
    from .remote.client import Client

    name = Client(address).choose(spec.family, model_id, precision, progress)
    model = ModelRef(spec_name=name, model_id=model_id, precision=precision, quality=quality, address=address)
    model.spec.check_input("quality", quality)
    return model


def run(stage: str, model: ModelRef, progress: Progress, **arguments: Any) -> Any:
    """One of `engine.run.WORK`, where the model is; see below for the arguments. Settings among them are of widgets, or
    were checked; what the model's makers would not advise is logged once.
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
    """Prompt and negative prompt as CONDITIONING, CPU float32; no negative one where the model has no use for it. They
    are about the pictures of a `condition`, where the text encoder looks at these.
    """
    return run("encode", model, progress, prompt=prompt, negative_prompt=negative_prompt, condition=condition)


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
    """From noise to LATENT `{"samples": [1, channels, frames, h, w]}`, CPU float32, in the scale of the VAE.

    With `latents`, another LATENT, from that one, see `Settings`. With leftover noise it holds more (see `denoise`).
    """
    return run(
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
) -> "tuple[Curve, Path]":
    """MagCache's curve of a model, measured in a generation with these settings and kept for later ones; and where."""
    curve = run(
        "calibrate", model, progress, settings=replace(settings, step_cache=None), prompt_embeds=prompt_embeds,
        negative_prompt_embeds=negative_prompt_embeds, condition=condition,
    )  # fmt: skip
    return curve, curves.keep(model.spec, model.model_id, curve)


def _with_curve(model: ModelRef, settings: Settings) -> Settings:
    """As they run; `ValueError` where MagCache's curve of the model is not known."""
    return replace(settings, step_cache=curves.with_curve(model.spec, model.model_id, settings.step_cache))


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def encode_image(
    model: ModelRef, image: "torch.Tensor", size: Mapping[str, int], *, progress: Progress
) -> ImageCondition:
    """An IMAGE in 0..1 as the condition of a video of `size` (height, width, num_frames): its first frame, and the last
    where there are two.
    """
    return run("image", model, progress, image=image, settings=model.spec.settings(**size))


def join_references(conditions: Sequence[ImageCondition]) -> ImageCondition:
    """Encoded references of several calls as one condition, in that order."""
    joined: dict[str, torch.Tensor] = {}
    for condition in conditions:
        before = sum(name.startswith("reference_") for name in joined)
        for name, array in condition["tensors"].items():
            kind, _, index = name.rpartition("_")
            joined[f"{kind}_{before + int(index)}"] = array
    return {**conditions[0], "tensors": joined}


def add_lora(model: ModelRef, lora: Lora, *, progress: Progress) -> tuple[ModelRef, str]:
    """The model with one more LoRA, and what of its file applies, in words. ValueError where nothing does."""
    if model.address:
        from .remote.client import Client

        return Client(model.address).add_lora(model, lora, progress)
    from .loras import apply

    return apply.add(model, lora, progress)


def decode(model: ModelRef, latents: Latent, *, progress: Progress) -> "torch.Tensor":
    """LATENT to IMAGE `[frames, height, width, 3]`, CPU float32 in 0..1."""
    return run("decode", model, progress, latents={"samples": latents["samples"]})


def expect(generations: Iterable[Expected], *, progress: Progress) -> None:
    """Says which generations are about to run: while one stage runs, programs of the next are compiled behind it, on
    the machine that the model is on.
    """
    found = list(generations)
    _elsewhere.clear()
    _elsewhere.update({str(one.model): one for one in found if one.model.address})
    expect_here([one for one in found if not one.model.address], progress=progress)


def expect_here(generations: Sequence[Expected], *, progress: Progress) -> None:
    """`expect`, of models of this machine alone."""
    if generations or current():
        engine(progress).expect(map(_as_it_runs, generations))


def _as_it_runs(expected: Expected) -> Expected:
    """With the settings as they will run; without any where they will be refused."""
    try:
        settings = expected.settings and _with_curve(expected.model, expected.settings)
    except ValueError:
        settings = None
    return replace(expected, settings=settings)


def prepare(calls: Iterable[tuple[ModelRef, dict[str, Any]]], *, progress: Progress) -> None:
    """Lets the programs that nodes of others will ask for, see `run.note_call`, be compiled behind what runs; another
    thread takes the calls.
    """
    engine(progress).prepare(calls)


def follow(place: Place, chips: Callable[[Any], list[dict[str, Any]]]) -> None:
    """Does this host's part of what the leader of `place` runs, until the process ends with that one.

    `chips` says what the monitor shows of an engine's own. Raises `Refused`.
    """
    from .hosts.follower import Follower

    follower = Follower(place)
    follower.join()
    from .engine.engine import Engine  # once the environment is the leader's

    follower.obey(Engine(hosts=follower), chips)


def check_packages() -> None:
    """Says in the log, once, which packages are missing or were not run. Raises RuntimeError where no model runs with
    what is installed, with the command that helps. Imports neither torch nor JAX.
    """
    try:
        from . import versions
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        command = f"{shlex.quote(sys.executable)} -m pip install {name}"
        raise RuntimeError(
            f"{name} is not installed: no TPU node runs without it. Run this command, then start again: {command}"
        ) from error
    versions.warn_once()
    versions.check()


def compilation_summary() -> str:
    """How many XLA programs this process compiled, and how many came from the persistent cache."""
    from .cache.xla_cache import compilations

    return str(compilations())


def warmup(model: ModelRef, settings: Settings, *, progress: Progress) -> int:
    """Compiles every program of a generation with these settings, loading no weights; how many were not there yet."""
    return run("warmup", model, progress, settings=settings)


def free(ids: Iterable[str] | None = None) -> None:
    """Drops weights and compiled programs from the devices; the next stage loads what it needs.

    With `ids` (see `monitor.snapshot`), the weights of those residents alone. Waits for a running stage; starts no
    device.
    """
    if engine := current():
        engine.free(ids)


def resident_bytes() -> int:
    """Bytes of weights on one chip; 0 before the first run."""
    engine = current()
    return engine.device_cache.size_bytes if engine else 0
