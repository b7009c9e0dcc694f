"""The inputs of a family's nodes by name: what each says, and where it stands. Limits and defaults are the model's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..tpu_runtime import pipeline as runtime
from ..tpu_runtime.pipeline import (
    CHOICES,
    SPECS,
    Choice,
    FloatLimit,
    IntLimit,
    Limit,
    ModelSpec,
    Numbers,
    Switch,
    media,
)
from .declare import Input


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One input of every family's nodes. With a `socket`, its type, it is no widget. `references` is its tooltip where
    pictures are references, `unguided` where the family's first model has no use for a negative prompt; `origin` is
    added where a negative prompt stands there from the start; `{tiny}` and `{title}` stand for the model's, `{choices}`
    for the family's.
    """

    tooltip: str
    socket: str = ""
    optional: bool = False
    advanced: bool = False
    references: str = ""
    unguided: str = ""
    origin: str = ""

    def said_of(self, spec: ModelSpec) -> str:
        unguided = self.unguided if spec.recipe.guidance != "cfg" else ""
        text = unguided or (self.references if spec.pictures.are_references else "") or self.tooltip
        text += self.origin if spec.texts.get("negative_prompt") else ""
        return text.format(tiny=spec.miniature.id, title=spec.title, choices=_choices(spec))


def _recipe(tooltip: str) -> Entry:
    """A widget of the advanced options."""
    return Entry(tooltip=tooltip, optional=True, advanced=True)


_SHIFT = Entry(tooltip="Shift of the noise schedule: higher spends more steps on composition.", optional=True)

ENTRIES = {
    "prompt": Entry(tooltip="What to generate."),
    "negative_prompt": Entry(
        tooltip="What to avoid. Used when guidance_scale is above 1.",
        unguided="What to avoid, for a model of this family that is guided by it; {title} is not. "
        "Used when guidance_scale is above 1.",
        origin=" What stands here from the start is the makers' own, as they publish it; any language will do.",
    ),
    "prompt_embeds": Entry(tooltip="The encoded prompt: the text encoder's first output.", socket="CONDITIONING"),
    "negative_prompt_embeds": Entry(
        tooltip="The encoded negative prompt: the text encoder's second output. Needed when guidance_scale is above 1.",
        socket="CONDITIONING",
        optional=True,
        unguided="The encoded negative prompt: the text encoder's second output, for a model that is guided by it; "
        "{title} is not. Needed when guidance_scale is above 1.",
    ),
    "latents": Entry(tooltip="What the sampler gave. Height, width and frames are taken from it.", socket="LATENT"),
    "image": Entry(
        tooltip="The picture that the video starts from. Only the first of several is used.",
        socket="IMAGE",
        references="Pictures for the model to look at, each of its own: what they show may appear in the result.",
    ),
    "last_image": Entry(
        tooltip="The picture that the video ends with. Wan 2.1 FLF2V needs it, Wan 2.2 I2V can do without, others "
        "take none. Only the first of several is used.",
        socket="IMAGE",
        optional=True,
    ),
    "resize": Entry(
        tooltip="How a picture of another shape is fitted: crop fills the frame and cuts what is over, fit shows the "
        "whole picture with bars beside it.",
        optional=True,
    ),
    "condition": Entry(
        tooltip="The encoded picture: the image encoder's output.",
        socket="TPU_CONDITION",
        references="Encoded references: the image encoder's output. Optional.",
    ),
    "model_id": Entry(
        tooltip="A Hugging Face repository, a folder in diffusers layout, the name of a folder under "
        "models/diffusers, or {tiny} (a built-in miniature). A connected model takes its place. This "
        "family's: {choices}.",
        optional=True,
    ),
    "model": Entry(
        tooltip="A model from TPU Model Loader; it takes the place of model_id and precision.",
        socket="TPU_MODEL",
        optional=True,
    ),
    "precision": _recipe(
        "Number format of the weights and programs. auto is bfloat16 on a TPU; float32 is exact and slow; mixed is "
        "bfloat16 with the encoders of pictures in float32."
    ),
    "height": Entry(tooltip="Height of the result in pixels."),
    "width": Entry(tooltip="Width of the result in pixels."),
    "num_frames": Entry(tooltip="Number of video frames."),
    "num_inference_steps": Entry(tooltip="Denoising steps. More is slower and finer."),
    "guidance_scale": Entry(
        tooltip="How strongly the prompt is followed. At 1 or less the negative prompt is not used, "
        "and a step costs half."
    ),
    "guidance_scale_2": Entry(
        tooltip="guidance_scale of the second expert, which refines what the first has composed. 0 is the same "
        "as guidance_scale. Models with one expert leave it aside.",
        optional=True,
    ),
    "seed": Entry(tooltip="The same seed and settings give the same result."),
    "flow_shift": _SHIFT,
    "shift": _SHIFT,
    "fps": Entry(tooltip="Frames per second of the video.", optional=True),
    "quality": Entry(
        tooltip="How exactly the denoiser computes. Leave it at exact, which is what the makers' own code does. int8 "
        "is faster, with half the memory for weights, and its result is close. int8+sparse, of Wan and "
        "HunyuanVideo, is faster again, and its video is another. docs/quality.md says how far each is off.",
        optional=True,
    ),
    "step_cache": _recipe(
        "Reuses most of the denoiser's work at some steps: faster, and only nearly the same video. For 20 steps or "
        "more: with few there is nothing to reuse."
    ),
    "cache_threshold": _recipe(
        "How much error may add up before a step runs whole (MagCache): 0.06 leaves out nearly half of 50 steps. Where "
        "it may be 0, that is DeepCache instead, by cache_start, cache_end and cache_interval. For step_cache."
    ),
    "cache_start": _recipe(
        "The first step that later ones reuse, counted from 0. All before it run whole. For step_cache."
    ),
    "cache_end": _recipe("From this step on all run whole again. For step_cache."),
    "cache_interval": _recipe("Between the two, every how many steps one runs whole. For step_cache."),
    "scheduler": _recipe(
        "The solver, which takes the noise away step by step. Leave it at checkpoint, what the model names; another is "
        "for distilled models and LoRAs whose makers name it; docs/few_steps.md has these."
    ),
    "sigmas": _recipe(
        "The noise levels that the scheduler starts from, one for each step, such as 1, 0.75, 0.5, 0.25, as the "
        "makers of distilled models publish them. The scheduler shifts them. They take the place of "
        "num_inference_steps; empty is the scheduler's own."
    ),
    "high_noise_steps": _recipe(
        "How many steps the first of two experts runs. 0 is as many as the checkpoint says. Models "
        "with one expert leave it aside."
    ),
    "start_step": _recipe("The first step to run, counted from 0. Above 0 it goes on from latents."),
    "end_step": _recipe(
        "The step to stop before, for another sampler to go on from there: 12 of 20 leaves it eight. Leave it at 0, "
        "which runs to the end. docs/few_steps.md has two samplers in a row."
    ),
    "add_noise": _recipe(
        "Whether noise of the start step is added to latents. Turn it off to go on from latents that "
        "another sampler returned with leftover noise."
    ),
    "return_with_leftover_noise": _recipe(
        "Whether latents keep the noise that is left after end_step, for another sampler. A "
        "TPU sampler with the same numbers then goes on as if one had run all steps."
    ),
    "use_dynamic_cfg": _recipe(
        "Guidance changes from step to step, between 1 and guidance_scale + 1: recommended with "
        "CogVideoXDPMScheduler, not with CogVideoXDDIMScheduler."
    ),
}
# Of samplers: what they may go on from.
LATENTS = Input(
    name="latents",
    type=ENTRIES["latents"].socket,
    tooltip="Latents of the sampler's size to go on from, as another sampler's. Without them it begins with noise.",
    optional=True,
)
# Recipes of distilled models, for flow models; and of those with two experts.
FEW_STEPS = ("scheduler", "sigmas")
# Of samplers and pipelines, the newest.
_NEWEST = ("quality", "step_cache", "cache_threshold")
TWO_EXPERTS = ("high_noise_steps",)


def unused(spec: ModelSpec) -> tuple[str, ...]:
    """Widgets of its family's nodes that do nothing for this model, which the page therefore hides."""
    family = [one for one in SPECS if one.family == spec.family]
    found = [name for one in family for name in one.inputs if name not in spec.inputs]
    if len(spec.denoiser.experts) == 1:
        found += ["guidance_scale_2", *TWO_EXPERTS]
    if spec.recipe.guidance != "cfg":
        found.append("negative_prompt")
        if not spec.component(spec.denoiser.experts[0]).config.get("guidance_embeds"):
            found.append("guidance_scale")
    return tuple(dict.fromkeys(found))


def _choices(spec: ModelSpec) -> str:
    """The family's models by id, and how much there is to download of each."""
    family = [one for one in SPECS if one.family == spec.family]
    sizes = {one.published.hub_id: runtime.published.sizes(one.name) for one in family}
    return "; ".join(f"{hub_id} (as files {size})" if size else hub_id for hub_id, size in sizes.items())


def needs_picture(spec: ModelSpec) -> bool:
    """Whether no model of the family can do without a picture."""
    return all(one.needs_condition for one in SPECS if one.family == spec.family)


def of_names(spec: ModelSpec, names: tuple[str, ...]) -> tuple[Input, ...]:
    """ComfyUI shows required widgets first: what stands before a required one is required, so that the order holds."""
    found = [of_name(spec, name) for name in names]
    last = max((index for index, i in enumerate(found) if i.is_widget and not i.optional), default=-1)
    return tuple(replace(i, optional=False) if i.is_widget and n < last else i for n, i in enumerate(found))


def newest(spec: ModelSpec, before: tuple[str, ...]) -> tuple[str, ...]:
    """What samplers and pipelines of the family have behind what stands `before`."""
    return tuple(name for name in _NEWEST if name in spec.inputs and name not in before)


def of_name(spec: ModelSpec, name: str) -> Input:
    """The input `name` of the nodes of `spec`'s family."""
    entry = ENTRIES[name]
    optional = entry.optional or (name == "condition" and not needs_picture(spec))
    shared = {"name": name, "tooltip": entry.said_of(spec), "optional": optional, "advanced": entry.advanced}
    if entry.socket:
        return Input(type=entry.socket, **shared)
    if name in ("prompt", "negative_prompt"):
        shared["optional"] = name not in spec.texts
        return Input(type="STRING", default=spec.texts.get(name, ""), multiline=True, **shared)
    plain = {
        "model_id": {"type": "STRING", "default": spec.published.hub_id},
        "resize": {"type": "COMBO", "default": media.RESIZE[0], "options": media.RESIZE},
        "precision": {"type": "COMBO", "default": "auto", "options": CHOICES},
    }
    if name in plain:
        return Input(**plain[name], **shared)
    limit = spec.inputs[name]
    if name == "flow_shift" and isinstance(limit, FloatLimit) and limit.low == 0:
        shared["tooltip"] += " 0 is the checkpoint's own."
    companion = "control_after_generate" if name == "seed" else ""
    return Input(**_widget(limit), check=partial(spec.check_input, name), companion=companion, **shared)


def _widget(limit: Limit) -> dict[str, Any]:
    """The kind of widget that holds what a limit allows."""
    if isinstance(limit, Switch):
        return {"type": "BOOLEAN", "default": limit.default}
    if isinstance(limit, Numbers):
        return {"type": "STRING", "default": limit.default}
    if isinstance(limit, Choice):
        return {"type": "COMBO", "default": limit.default, "options": limit.options}
    kind, step = ("INT", limit.multiple_of) if isinstance(limit, IntLimit) else ("FLOAT", limit.step)
    return {"type": kind, "default": limit.default, "low": limit.low, "high": limit.high, "step": step}


def own_size(spec: ModelSpec, name: str) -> Input:
    """A number of the video's size, for a sampler that takes it from the encoded picture, if there is one."""
    declared = of_name(spec, name)
    check: Callable[[Any], None] = partial(spec.check_input, name)
    tooltip = f"{declared.tooltip} 0 is the encoded picture's; without a picture, the model's own."
    return replace(
        declared, default=0, low=0, step=1, optional=True, tooltip=tooltip,
        check=lambda value: check(value) if value else None,
    )  # fmt: skip
