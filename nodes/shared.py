"""Nodes for every model family: stage files, memory, compiling in advance, plans and comparisons."""

import math
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..tpu_runtime import api as runtime
from ..tpu_runtime import media
from ..tpu_runtime.checkpoints.model_ref import ModelRef
from ..tpu_runtime.engine import stage_files
from ..tpu_runtime.messages import compose, compose_list
from ..tpu_runtime.model_spec import Settings
from ..tpu_runtime.models import SPECS, lookup_spec
from ..tpu_runtime.plan import process
from . import lora, model
from .declare import Folders, Input, Node, NodeContext, Output, Value

_FOLDER = Input(
    name="folder",
    type="STRING",
    default="tpu_stages",
    tooltip="Folder of the stage files, inside ComfyUI's output folder.",
)
_MODEL = Input(name="model", type="TPU_MODEL", tooltip="The model the stages belong to, from TPU Model Loader.")
_OF_ALL = "Model to compile for the sizes below. If not connected, compiles for all samplers of this workflow."
_STAGES = (
    ("prompt_embeds", "CONDITIONING", "The encoded prompt."),
    ("negative_prompt_embeds", "CONDITIONING", "The encoded negative prompt."),
    ("latents", "LATENT", "The sampler's output."),
    ("condition", "TPU_CONDITION", "The encoded image. It is saved with the prompt, in one file."),
)
_STAGE_OUTPUTS = tuple(Output(name=name, type=kind, tooltip=text) for name, kind, text in _STAGES)


def _stage_folder(folders: Folders, folder: str) -> Path:
    """Return the folder of the stage files.

    Raises ValueError for an invalid name, and for a folder outside the output folder of a confined host.
    """
    if not folder.strip():
        raise ValueError(compose("node.folder_empty"))
    try:
        path = folders.output / (folder if folders.confined else Path(folder).expanduser())
        # Follow links: a link in the output folder may lead out of it.
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(compose("node.folder_impossible", folder=repr(folder), error=error)) from error
    if folders.confined and (folder.startswith("~") or not target.is_relative_to(folders.output.resolve())):
        raise ValueError(compose("node.folder_outside_output", folder=repr(folder)))
    return path


def _check_target(folders: Folders, *, folder: str) -> None:
    """Raise ValueError if stage files could not be saved there, before anything is computed."""
    stage_files.check_ownership(_stage_folder(folders, folder))


def _save(
    host: NodeContext,
    *,
    folder: str,
    model: ModelRef,
    prompt_embeds: Value,
    negative_prompt_embeds: Value,
    latents: Value,
    condition: Value = None,
) -> tuple:
    target = _stage_folder(host.folders, folder)
    if prompt_embeds is None and latents is None:
        raise ValueError(compose("node.save_nothing"))
    if condition is not None and prompt_embeds is None:
        raise ValueError(compose("node.save_condition_alone"))
    if prompt_embeds is not None:
        stage_files.save_embeddings(target, prompt_embeds, negative_prompt_embeds, model, condition)
    if latents is not None:
        stage_files.save_latents(target, latents, model)
    return prompt_embeds, negative_prompt_embeds, latents, condition


def _load(host: NodeContext, *, folder: str, model: ModelRef) -> tuple:
    source = _stage_folder(host.folders, folder)
    files = stage_files.list_stage_files(source)
    has_embeddings, has_latents = stage_files.EMBEDDINGS in files, stage_files.LATENTS in files
    if not files:
        raise ValueError(compose(
            "node.no_stage_files", source=source, embeddings=stage_files.EMBEDDINGS, latents=stage_files.LATENTS,
        ))  # fmt: skip
    embeds = stage_files.load_embeddings(source, model) if has_embeddings else (None, None)
    latents = stage_files.load_latents(source, model) if has_latents else None
    return *embeds, latents, stage_files.load_condition(source, model) if has_embeddings else None


def _fingerprint(folders: Folders, *, folder: str) -> Hashable:
    """Return when each stage file was last written."""
    return tuple(stage_files.list_stage_files(_stage_folder(folders, folder)).items())


def _free(host: NodeContext, *, anything: Value) -> tuple:
    host.text(compose("node.freeing_memory"))
    runtime.free_memory()
    return (anything,)


class WorkflowContext(NodeContext, Protocol):
    """A host that knows the workflow it runs."""

    def generations(self) -> list[tuple[ModelRef, Settings]]:
        """Return models and settings of the running workflow's samplers.

        Raises ValueError if it has no sampler, or one has values that are not allowed.
        """
        ...


def _warmup(host: WorkflowContext, *, model: ModelRef | None, **wanted: float) -> tuple[str]:
    """Compile the programs of a model at these sizes, or of the workflow if there is no model.

    wanted: sizes by name; 0 means the model's own value.
    """
    if model is None:
        return (compose_list((_compile(host, *generation) for generation in host.generations()), "line"),)
    wanted["guidance_scale_2"] = wanted["guidance_scale"]
    settings = model.spec.settings(**{name: value or None for name, value in wanted.items()})
    return (_compile(host, model, settings.with_default_quality(model.quality)),)


def _never_the_same(folders: Folders, **sizes: float) -> Hashable:
    """Return NaN: the inputs do not hold the workflow that the node compiles for."""
    return math.nan


def _compile(host: NodeContext, model: ModelRef, settings: Settings) -> str:
    """Compile the programs of a generation; return a sentence about them."""
    spec, compiled = model.spec, runtime.warm_up(model, settings, progress=host)
    size = f"{settings.width}x{settings.height}"
    if not spec.is_image:
        size = compose_list([size, compose("node.num_frames", num_frames=settings.num_frames)])
    key = "node.program_compiled" if compiled == 1 else "node.programs_compiled"
    return compose(key, title=spec.title, size=size, compiled=compiled)


def _plan(host: NodeContext, *, model_name: str, topology: str, **wanted: float) -> tuple[str]:
    """Return the report of a plan.

    wanted: sizes by name; 0 means the model's own value.
    """
    spec = lookup_spec(model_name)
    sizes = {name: value for name, value in wanted.items() if value}
    spec.settings(**sizes)  # raises before anything is started
    host.text(compose("node.planning", title=spec.title, topology=topology))
    return (process.make_report({"model": model_name, "topology": topology, "inputs": sizes}, host),)


_BESIDE, _SHEET = "side by side", "contact sheet"
_RESULTS = ("frames", "frames_2", "frames_3", "frames_4")
MAX_LABEL_LENGTH = 64
# Pixels that can be joined: four videos of 720p, which need 6.4 GB of memory.
MAX_PIXELS = 2**29


def _compare(host: NodeContext, *, layout: str, labels: str, pictures: int, columns: int, **results: Value) -> tuple:
    linked = [results[name] for name in _RESULTS if results[name] is not None]
    names = [name.strip()[:MAX_LABEL_LENGTH] for name in labels.split(",")] if labels.strip() else []
    if len(names) > len(linked):
        raise ValueError(compose("node.compare_too_many_labels", label_count=len(names), result_count=len(linked)))
    names += [str(number + 1) if len(linked) > 1 else "" for number in range(len(names), len(linked))]
    shown = sum(map(len, linked)) if layout == _SHEET else len(linked) * max(map(len, linked))
    height, width = linked[0].shape[1:3] if linked[0].ndim == 4 else (0, 0)
    if (pixels := shown * height * width) > MAX_PIXELS:
        raise ValueError(compose(
            "node.compare_too_large", shown=shown, width=width, height=height,
            pixels=f"{pixels / 1e6:.0f}", max_pixels=f"{MAX_PIXELS / 1e6:.0f}",
        ))  # fmt: skip
    # "fit", so that compared images are shown in full.
    frames = [media.to_rgb(linked[0]), *(media.resize(other, height, width, "fit") for other in linked[1:])]
    if layout == _BESIDE:
        return (media.side_by_side(frames, names),)
    return (media.contact_sheet(frames, names, pictures, columns),)


def _plan_number(name: str, type: str, high: float) -> Input:
    return Input(
        name=name, type=type, default=0, low=0, high=high, optional=True, tooltip=f"{name}; 0 is the model's own."
    )


_SIZES = (
    _plan_number("height", "INT", 4096),
    _plan_number("width", "INT", 4096),
    _plan_number("num_frames", "INT", 1024),
    _plan_number("num_inference_steps", "INT", 1000),
    _plan_number("guidance_scale", "FLOAT", 20.0),
)

SAVE_STAGE = Node(
    id="TPUSaveStage",
    title="TPU Save Stage",
    description="Writes encoded prompts and latents to a folder, so that another run or machine can continue from "
    "there. Passes its inputs through.",
    # In the order of the outputs, and `model` after them: so the page bypasses the node without mixing the prompts up.
    inputs=(
        _FOLDER,
        *(Input(name=name, type=kind, tooltip=text, optional=True) for name, kind, text in _STAGES),
        replace(_MODEL, listed_last=True),
    ),
    outputs=_STAGE_OUTPUTS,
    check=_check_target,
    checks=("folder",),
    run=_save,
    is_output=True,
)

LOAD_STAGE = Node(
    id="TPULoadStage",
    title="TPU Load Stage",
    description="Reads encoded prompts and latents from a folder, as TPU Save Stage or `comfyui-tpu encode` and "
    "`denoise` wrote them.",
    inputs=(_FOLDER, _MODEL),
    outputs=_STAGE_OUTPUTS,
    check=_stage_folder,
    checks=("folder",),
    run=_load,
    fingerprint=_fingerprint,
)

FREE_MEMORY = Node(
    id="TPUFreeMemory",
    title="TPU Free Memory",
    description="Unloads all TPU models when it runs and passes its input through. Not needed to switch models: the "
    "least recently used one is unloaded automatically.",
    inputs=(Input(name="anything", type="*", tooltip="Any value. Memory is freed when it arrives."),),
    outputs=(Output(name="anything", type="*", tooltip="The input, unchanged."),),
    run=_free,
)

WARMUP = Node(
    id="TPUWarmup",
    title="TPU Warmup",
    description="Compiles the programs of this workflow's samplers, or of one model and size, without loading weights "
    "or generating. Later runs then start at once, even after a restart.",
    inputs=(replace(_MODEL, optional=True, tooltip=_OF_ALL), *_SIZES),
    outputs=(Output(name="report", type="STRING", tooltip="The compiled programs, as text."),),
    run=_warmup,
    is_output=True,
    fingerprint=_never_the_same,
)

PLAN = Node(
    id="TPUPlan",
    title="TPU Plan",
    description="Compiles a model's real programs for a described TPU and reports whether they fit in memory, and the "
    "predicted time of a generation. Takes minutes, but no TPU and no weights.",
    inputs=(
        Input(
            name="model_name",
            type="COMBO",
            default=SPECS[0].name,
            options=tuple(spec.name for spec in SPECS),
            tooltip="The model.",
        ),
        Input(
            name="topology",
            type="STRING",
            default="v6e:2x4",
            tooltip="TPU generation and chips, such as v6e:2x4 (or v6e-8), v5p:2x2x1, v5e:2x2, v4:2x2x1.",
        ),
        *_SIZES,
    ),
    outputs=(Output(name="report", type="STRING", tooltip="The report, for a node that shows text."),),
    run=_plan,
)

COMPARE = Node(
    id="TPUCompare",
    title="TPU Compare",
    description="Shows up to four results side by side under labels, or frames of each on one contact sheet. Connect "
    "Save Video, Save Animated WEBP or Save Image.",
    inputs=(
        *(
            Input(name=name, type="IMAGE", tooltip="Frames of a result, or an image.", optional=index > 0)
            for index, name in enumerate(_RESULTS)
        ),
        Input(
            name="layout",
            type="COMBO",
            default=_BESIDE,
            options=(_BESIDE, _SHEET),
            tooltip="side by side gives as many frames as the longest result; contact sheet gives one image.",
        ),
        Input(
            name="labels",
            type="STRING",
            default="",
            optional=True,
            tooltip="Comma-separated labels, in order: exact, int8. Defaults to numbers.",
        ),
        Input(
            name="pictures",
            type="INT",
            default=12,
            low=1,
            high=256,
            optional=True,
            tooltip="Contact sheet: maximum number of frames of each result, evenly from first to last.",
        ),
        Input(
            name="columns",
            type="INT",
            default=4,
            low=1,
            high=16,
            optional=True,
            tooltip="Contact sheet: number of frames in a row.",
        ),
    ),
    outputs=(Output(name="frames", type="IMAGE", tooltip="The frames side by side, or the contact sheet."),),
    run=_compare,
)

NODES = (model.LOADER, model.REMOTE, lora.LOADER, SAVE_STAGE, LOAD_STAGE, FREE_MEMORY, WARMUP, PLAN, COMPARE)
