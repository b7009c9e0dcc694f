"""Inputs of the families' nodes by name: tooltips and order. Limits and defaults come from the model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from ..tpu_runtime import media
from ..tpu_runtime.model_spec import (
    BoolInput,
    EnumInput,
    FloatInput,
    InputType,
    IntInput,
    ModelSpec,
    SigmaList,
    describe_qualities,
    is_own,
)
from ..tpu_runtime.models import SPECS, published
from ..tpu_runtime.precision import CHOICES
from .declare import Input, Value


@dataclass(frozen=True, kw_only=True)
class InputDoc:
    """Documentation of one input of the families' nodes."""

    tooltip: str  # may hold {tiny} and {title}, of the model, and {choices}, of its family
    socket: str = ""  # type of the socket; "" for a widget
    optional: bool = False
    advanced: bool = False
    references: str = ""  # tooltip for families whose images are references; "": the same
    unguided: str = ""  # tooltip if the family's first model does not use a negative prompt; "": the same
    origin: str = ""  # added to the tooltip if the model has a default negative prompt

    def format_tooltip(self, spec: ModelSpec) -> str:
        """Return the tooltip for the nodes of a model's family."""
        unguided = self.unguided if spec.recipe.guidance != "cfg" else ""
        text = unguided or (self.references if spec.pictures.are_references else "") or self.tooltip
        text += self.origin if spec.texts.get("negative_prompt") else ""
        return text.format(tiny=spec.miniature.id, title=spec.title, choices=_choices(spec))


def _recipe(tooltip: str) -> InputDoc:
    """Return the entry of an optional widget among the advanced ones."""
    return InputDoc(tooltip=tooltip, optional=True, advanced=True)


_SHIFT = InputDoc(tooltip="Shift of the noise schedule: higher spends more steps on composition.", optional=True)

INPUT_DOCS = {
    "prompt": InputDoc(tooltip="Description of the result."),
    "negative_prompt": InputDoc(
        tooltip="Content to avoid; used when guidance_scale is above 1.",
        unguided="Content to avoid; used when guidance_scale is above 1. {title} does not support it; other models of "
        "this family do.",
        origin=" Default: the model authors' published negative prompt; any language works.",
    ),
    "prompt_embeds": InputDoc(tooltip="The encoded prompt: the text encoder's first output.", socket="CONDITIONING"),
    "negative_prompt_embeds": InputDoc(
        tooltip="The encoded negative prompt: the text encoder's second output. Needed when guidance_scale is above 1.",
        socket="CONDITIONING",
        optional=True,
        unguided="The encoded negative prompt: the text encoder's second output; needed when guidance_scale is above "
        "1. {title} does not support it; other models of this family do.",
    ),
    "latents": InputDoc(tooltip="The sampler's output. Sets height, width and number of frames.", socket="LATENT"),
    "image": InputDoc(
        tooltip="The image that the video starts from. Only the first image of a batch is used.",
        socket="IMAGE",
        references="Reference images. Their content may appear in the result.",
    ),
    "last_image": InputDoc(
        tooltip="The image that the video ends with; only the first image of a batch is used. Required by Wan 2.1 "
        "FLF2V, optional for Wan 2.2 I2V, not supported by other models.",
        socket="IMAGE",
        optional=True,
    ),
    "resize": InputDoc(
        tooltip="How to fit an image with another aspect ratio: crop fills the frame and trims the edges; fit adds "
        "black bars.",
        optional=True,
    ),
    "condition": InputDoc(
        tooltip="The encoded image: the image encoder's output.",
        socket="TPU_CONDITION",
        references="Encoded reference images: the image encoder's output. Optional.",
    ),
    "model_id": InputDoc(
        tooltip="A Hugging Face repository, a folder in diffusers layout, the name of a folder under "
        "models/diffusers, or {tiny} (a built-in tiny model); a connected model overrides it. Models of this "
        "family: {choices}.",
        optional=True,
    ),
    "model": InputDoc(
        tooltip="A model from TPU Model Loader. Overrides model_id and precision.", socket="TPU_MODEL", optional=True
    ),
    "precision": _recipe(
        "Number format of weights and programs. auto is bfloat16 on a TPU; float32 is exact and slow; mixed is "
        "bfloat16 with image encoders in float32."
    ),
    "height": InputDoc(tooltip="Height of the result in pixels."),
    "width": InputDoc(tooltip="Width of the result in pixels."),
    "num_frames": InputDoc(tooltip="Number of video frames."),
    "num_inference_steps": InputDoc(tooltip="Denoising steps. More is slower and finer."),
    "guidance_scale": InputDoc(
        tooltip="How strongly the prompt is followed. At 1 or less the negative prompt is not used, "
        "and a step costs half."
    ),
    "guidance_scale_2": InputDoc(
        tooltip="guidance_scale of the second expert, which refines the first one's composition. 0 is the same as "
        "guidance_scale; ignored by models with one expert.",
        optional=True,
    ),
    "seed": InputDoc(tooltip="The same seed and settings give the same result."),
    "flow_shift": _SHIFT,
    "shift": _SHIFT,
    "fps": InputDoc(tooltip="Frames per second of the video.", optional=True),
    "quality": InputDoc(
        tooltip=f"Exactness of the denoiser, see docs/quality.md: {describe_qualities()}.", optional=True
    ),
    "step_cache": _recipe(
        "Reuse most of the denoiser's work at some steps: faster, with nearly the same video. For 20 steps or more."
    ),
    "cache_threshold": _recipe(
        "MagCache error limit for step_cache; higher skips more steps (0.06: nearly half of 50). 0 selects DeepCache, "
        "with cache_start, cache_end and cache_interval, on models that support it."
    ),
    "cache_start": _recipe(
        "First step whose work later steps reuse, counted from 0; earlier steps run in full. For step_cache."
    ),
    "cache_end": _recipe("First step from which all steps run in full again. For step_cache."),
    "cache_interval": _recipe(
        "Number of steps from one full step to the next, between cache_start and cache_end. For step_cache."
    ),
    "scheduler": _recipe(
        "Solver that removes the noise step by step. The default, checkpoint, is the model's own; change it for "
        "distilled models and LoRAs that name another (docs/few_steps.md)."
    ),
    "sigmas": _recipe(
        "Noise levels, one for each step, such as 1, 0.75, 0.5, 0.25, as published for distilled models; the scheduler "
        "shifts them. They override num_inference_steps; empty is the scheduler's own."
    ),
    "high_noise_steps": _recipe(
        "Number of steps of the first of two experts. 0 is the checkpoint's own; ignored by models with one expert."
    ),
    "start_step": _recipe("First step to run, counted from 0. Above 0, sampling continues from latents."),
    "end_step": _recipe(
        "Stop before this step, so that another sampler can continue: 12 of 20 leaves 8 steps. 0, the default, runs to "
        "the end; docs/few_steps.md shows two samplers in a row."
    ),
    "add_noise": _recipe(
        "Add the start step's noise to latents. Turn it off to continue from latents that another sampler returned "
        "with leftover noise."
    ),
    "return_with_leftover_noise": _recipe(
        "Keep the noise that is left after end_step in the latents, for another sampler. A TPU sampler with the same "
        "settings then continues as if one sampler had run all steps."
    ),
    "use_dynamic_cfg": _recipe(
        "Vary guidance from step to step, between 1 and guidance_scale + 1. Recommended with CogVideoXDPMScheduler, "
        "not with CogVideoXDDIMScheduler."
    ),
}
# Input of every sampler: latents to continue from.
LATENTS_INPUT = Input(
    name="latents",
    type=INPUT_DOCS["latents"].socket,
    tooltip="Latents of the same size to continue from, for example another sampler's output. If not connected, "
    "sampling starts from noise.",
    optional=True,
)
# Inputs for distilled flow models; and for models with two experts.
FEW_STEPS = ("scheduler", "sigmas")
# Newest inputs of samplers and pipelines.
_NEWEST = ("quality", "step_cache", "cache_threshold")
TWO_EXPERTS = ("high_noise_steps",)


def list_unused_widgets(spec: ModelSpec) -> tuple[str, ...]:
    """Return the widgets of a family's nodes that have no effect for this model; the page hides them."""
    family = [other for other in SPECS if other.family == spec.family]
    names = [name for other in family for name in other.inputs if name not in spec.inputs]
    if len(spec.denoiser.experts) == 1:
        names += ["guidance_scale_2", *TWO_EXPERTS]
    if spec.recipe.guidance != "cfg":
        names.append("negative_prompt")
        if not spec.component(spec.denoiser.experts[0]).config.get("guidance_embeds"):
            names.append("guidance_scale")
    return tuple(dict.fromkeys(names))


def _choices(spec: ModelSpec) -> str:
    """List the family's models by id, with their download sizes."""
    family = [other for other in SPECS if other.family == spec.family]
    sizes = {other.published.hub_id: published.describe_sizes(other.name) for other in family}
    return "; ".join(f"{hub_id} (as files {size})" if size else hub_id for hub_id, size in sizes.items())


def needs_image(spec: ModelSpec) -> bool:
    """Return whether every model of the family needs an image."""
    return all(other.needs_condition for other in SPECS if other.family == spec.family)


def inputs_for_names(spec: ModelSpec, names: tuple[str, ...]) -> tuple[Input, ...]:
    """Return the inputs with these names.

    ComfyUI shows required widgets first, so a widget before a required one is made required to keep the order.
    """
    declared = [make_input(spec, name) for name in names]
    last = max((index for index, i in enumerate(declared) if i.is_widget and not i.optional), default=-1)
    return tuple(replace(i, optional=False) if i.is_widget and n < last else i for n, i in enumerate(declared))


def list_newest_inputs(spec: ModelSpec, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the inputs that samplers and pipelines of the family have after those in `before`."""
    return tuple(name for name in (*_NEWEST, *spec.own_inputs) if name in spec.inputs and name not in before)


def find_doc(name: str, specs: Iterable[ModelSpec] = SPECS) -> InputDoc:
    """Return the documentation of an input: of these models' own inputs, or of the shared ones."""
    own = (limit for spec in specs if is_own(limit := spec.inputs.get(name)))
    return next((_recipe(limit.tooltip) for limit in own), None) or INPUT_DOCS[name]


def make_input(spec: ModelSpec, name: str) -> Input:
    """Return the input `name` of the nodes of `spec`'s family."""
    entry = find_doc(name, [spec])
    optional = entry.optional or (name == "condition" and not needs_image(spec))
    shared = {"name": name, "tooltip": entry.format_tooltip(spec), "optional": optional, "advanced": entry.advanced}
    if entry.socket:
        return Input(type=entry.socket, **shared)
    if name in ("prompt", "negative_prompt"):
        shared["optional"] = name not in spec.texts
        return Input(type="STRING", default=spec.texts.get(name, ""), multiline=True, **shared)
    plain = {
        "model_id": {"type": "STRING", "default": spec.published.hub_id},
        "resize": {"type": "COMBO", "default": media.RESIZE_MODES[0], "options": media.RESIZE_MODES},
        "precision": {"type": "COMBO", "default": "auto", "options": CHOICES},
    }
    if name in plain:
        return Input(**plain[name], **shared)
    limit = spec.inputs[name]
    if name == "flow_shift" and isinstance(limit, FloatInput) and limit.low == 0:
        shared["tooltip"] += " 0 is the checkpoint's own."
    companion = "control_after_generate" if name == "seed" else ""
    return Input(**_widget(limit), check=partial(spec.check_input, name), companion=companion, **shared)


def _widget(limit: InputType) -> dict[str, Value]:
    """Return the keywords of the widget that holds the values a limit allows."""
    if isinstance(limit, BoolInput):
        return {"type": "BOOLEAN", "default": limit.default}
    if isinstance(limit, SigmaList):
        return {"type": "STRING", "default": limit.default}
    if isinstance(limit, EnumInput):
        return {"type": "COMBO", "default": limit.default, "options": limit.options}
    kind, step = ("INT", limit.multiple_of) if isinstance(limit, IntInput) else ("FLOAT", limit.step)
    return {"type": kind, "default": limit.default, "low": limit.low, "high": limit.high, "step": step}


def make_size_input(spec: ModelSpec, name: str) -> Input:
    """Return an input for one dimension of the video, of a sampler that prefers an encoded image's size."""
    declared = make_input(spec, name)
    check: Callable[[Value], None] = partial(spec.check_input, name)
    tooltip = f"{declared.tooltip} 0 is the encoded image's, or the model's own without an image."
    return replace(
        declared, default=0, low=0, step=1, optional=True, tooltip=tooltip,
        check=lambda value: check(value) if value else None,
    )  # fmt: skip
