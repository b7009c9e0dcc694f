"""The nodes of a model family, built from its spec: text encoder, sampler, decoder, pipeline.

A family's file gives its label and its nodes' inputs in the order its users know; limits and defaults come from the
spec, bodies from here. Every body checks, then makes one call into the runtime.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..tpu_runtime import media
from ..tpu_runtime import pipeline as runtime
from ..tpu_runtime.checkpoints.model_ref import ModelRef, choose_model
from ..tpu_runtime.engine import payloads
from ..tpu_runtime.limits import PART, Choice, IntLimit, Numbers, Switch, without_zero_sizes
from ..tpu_runtime.models import SPECS
from ..tpu_runtime.precision import CHOICES
from ..tpu_runtime.spec import ModelSpec
from .declare import Expansion, Folders, Host, Input, Link, Node, Output, Ref, Stage

# Text, sockets and the model inputs every family shares; numbers are read from the spec.
_TOOLTIPS = {
    "prompt": "What to generate.",
    "negative_prompt": "What to avoid. Used when guidance_scale is above 1.",
    "prompt_embeds": "The encoded prompt: the text encoder's first output.",
    "negative_prompt_embeds": "The encoded negative prompt: the text encoder's second output. "
    "Needed when guidance_scale is above 1.",
    "latents": "What the sampler gave. Height, width and frames are taken from it.",
    "image": "The picture that the video starts from. Only the first of several is used.",
    "last_image": "The picture that the video ends with. Wan 2.1 FLF2V needs it, Wan 2.2 I2V can do without, others "
    "take none. Only the first of several is used.",
    "resize": "How a picture of another shape is fitted: crop fills the frame and cuts what is over, fit shows the "
    "whole picture with bars beside it.",
    "condition": "The encoded picture: the image encoder's output.",
    "guidance_scale_2": "guidance_scale of the second expert, which refines what the first has composed. 0 is the same "
    "as guidance_scale. Models with one expert leave it aside.",
    "model_id": "A Hugging Face repository, a folder in diffusers layout, the name of a folder under models/diffusers, "
    "or {tiny} (a built-in miniature). A connected model takes its place.",
    "model": "A model from TPU Model Loader; it takes the place of model_id and precision.",
    "precision": "Number format of the weights and programs. auto is bfloat16 on a TPU; float32 is exact and slow.",
    "height": "Height of the result in pixels.",
    "width": "Width of the result in pixels.",
    "num_frames": "Number of video frames.",
    "num_inference_steps": "Denoising steps. More is slower and finer.",
    "guidance_scale": "How strongly the prompt is followed. At 1 or less the negative prompt is not used, "
    "and a step costs half.",
    "seed": "The same seed and settings give the same result.",
    "flow_shift": "Shift of the noise schedule: higher spends more steps on composition.",
    "shift": "Shift of the noise schedule: higher spends more steps on composition.",
    "fps": "Frames per second of the video.",
    "step_cache": "Reuses most of the denoiser's work at some steps: faster, and only nearly the same video.",
    "cache_start": "The first step that later ones reuse, counted from 0. All before it run whole. For step_cache.",
    "cache_end": "From this step on all run whole again. For step_cache.",
    "cache_interval": "Between the two, every how many steps one runs whole. For step_cache.",
    "scheduler": "The solver: what the checkpoint names, or another in its place.",
    "sigmas": "The noise levels that the scheduler starts from, one for each step, such as 1, 0.75, 0.5, 0.25, as the "
    "makers of distilled models publish them. The scheduler shifts them. They take the place of num_inference_steps; "
    "empty is the scheduler's own.",
    "high_noise_steps": "How many steps the first of two experts runs. 0 is as many as the checkpoint says. Models "
    "with one expert leave it aside.",
    "start_step": "The first step to run, counted from 0. Above 0 it goes on from latents.",
    "end_step": "The step to stop before, as if all were run; 0 is the end.",
    "add_noise": "Whether noise of the start step is added to latents. Turn it off to go on from latents that "
    "another sampler returned with leftover noise.",
    "return_with_leftover_noise": "Whether latents keep the noise that is left after end_step, for another sampler. A "
    "TPU sampler with the same numbers then goes on as if one had run all steps.",
    "use_dynamic_cfg": "Guidance changes from step to step, between 1 and guidance_scale + 1: recommended with "
    "CogVideoXDPMScheduler, not with CogVideoXDDIMScheduler.",
}
_LATENTS = "Latents of the sampler's size to go on from, as another sampler's. Without them it begins with noise."
# Where pictures are references, other words fit.
_REFERENCE_TOOLTIPS = {
    "image": "Pictures for the model to look at, each of its own: what they show may appear in the result.",
    "condition": "Encoded references: the image encoder's output. Optional.",
}
# Of a family whose first model has no use for a negative prompt.
_SIBLINGS_TOOLTIPS = {
    "negative_prompt": "What to avoid, for a model of this family that is guided by it; {title} is not. "
    "Used when guidance_scale is above 1.",
    "negative_prompt_embeds": "The encoded negative prompt: the text encoder's second output, for a model that is "
    "guided by it; {title} is not. Needed when guidance_scale is above 1.",
}
_SOCKETS = {
    "prompt_embeds": "CONDITIONING",
    "negative_prompt_embeds": "CONDITIONING",
    "latents": "LATENT",
    "image": "IMAGE",
    "last_image": "IMAGE",
    "condition": "TPU_CONDITION",
    "model": "TPU_MODEL",
}
# Recipes of distilled models, for flow models; and of those with two experts.
FEW_STEPS = ("scheduler", "sigmas")
EXPERTS = ("high_noise_steps",)
_ADVANCED = (
    *("step_cache", "cache_start", "cache_end", "cache_interval", "use_dynamic_cfg"), *FEW_STEPS, *EXPERTS, *PART
)  # fmt: skip
_OPTIONAL = frozenset(
    "negative_prompt_embeds model_id model precision flow_shift shift fps resize guidance_scale_2 last_image".split()
).union(_ADVANCED)


def _needs_picture(spec: ModelSpec) -> bool:
    """Whether no model of the family can do without a picture."""
    return all(one.needs_condition for one in SPECS if one.family == spec.family)


def _input(spec: ModelSpec, name: str) -> Input:
    is_text = name in ("prompt", "negative_prompt")
    optional = name in _OPTIONAL or (name == "condition" and not _needs_picture(spec))
    optional |= is_text and name not in spec.texts
    tooltips = _TOOLTIPS | (_REFERENCE_TOOLTIPS if spec.references else {})
    tooltips |= _SIBLINGS_TOOLTIPS if spec.guidance != "cfg" else {}
    tooltip = tooltips[name].format(tiny=spec.tiny_id, title=spec.title)
    shared = {"name": name, "tooltip": tooltip, "optional": optional}
    if name in _SOCKETS:
        return Input(type=_SOCKETS[name], **shared)
    if name == "model_id":
        return Input(type="STRING", default=spec.hub_id, **shared)
    if name == "resize":
        return Input(type="COMBO", default=media.RESIZE[0], options=media.RESIZE, **shared)
    if name == "precision":
        return Input(type="COMBO", default="auto", options=CHOICES, advanced=True, **shared)
    if is_text:
        return Input(type="STRING", default=spec.texts.get(name, ""), multiline=True, **shared)
    limit = spec.inputs[name]
    shared |= {"default": limit.default, "advanced": name in _ADVANCED, "check": partial(spec.check_input, name)}
    if isinstance(limit, Switch):
        return Input(type="BOOLEAN", **shared)
    if isinstance(limit, Numbers):
        return Input(type="STRING", **shared)
    if isinstance(limit, Choice):
        return Input(type="COMBO", options=limit.options, **shared)
    if name == "flow_shift" and limit.low == 0:
        shared["tooltip"] += " 0 is the checkpoint's own."
    is_int = isinstance(limit, IntLimit)
    return Input(
        type="INT" if is_int else "FLOAT",
        low=limit.low,
        high=limit.high,
        step=limit.multiple_of if is_int else limit.step,
        companion="control_after_generate" if name == "seed" else "",
        **shared,
    )


def _own_size(spec: ModelSpec, name: str) -> Input:
    """A number of the video's size, for a sampler that takes it from the encoded picture, if there is one."""
    declared = _input(spec, name)

    def check(value: Any) -> None:
        if value:
            spec.check_input(name, value)

    tooltip = f"{declared.tooltip} 0 is the encoded picture's; without a picture, the model's own."
    return replace(declared, default=0, low=0, step=1, optional=True, check=check, tooltip=tooltip)


def _inputs(spec: ModelSpec, names: tuple[str, ...]) -> tuple[Input, ...]:
    """ComfyUI shows required widgets first: what stands before a required one is required, so that the order holds."""
    found = [_input(spec, name) for name in names]
    last = max((index for index, i in enumerate(found) if i.is_widget and not i.optional), default=-1)
    return tuple(replace(i, optional=False) if i.is_widget and n < last else i for n, i in enumerate(found))


def _chosen(
    spec: ModelSpec,
    folders: Folders,
    host: Host | None = None,
    *,
    model_id: str,
    model: ModelRef | None,
    precision: str,
) -> ModelRef:
    """The connected model, or the one that the widgets name, checked; a `host` lets it ask the Hub."""
    if model is None:
        return choose_model(spec, model_id, precision=precision, folders=folders.models, progress=host)
    if model.spec.family != spec.family:
        raise ValueError(
            f"{spec.title}: the connected model is a {model.spec_name}; this node runs {spec.name}. "
            f"Choose {spec.family} in the TPU Model Loader, or use the nodes of the other family."
        )
    if model.address:
        return model  # the other machine has looked at it
    return choose_model(
        spec, model.model_id, precision=model.precision, folders=model.folders, loras=model.loras, progress=host
    )


def _check_takes_picture(spec: ModelSpec, found: ModelSpec, name: str) -> None:
    """Raises ValueError where input `name` is there and the model is one of the family that takes no picture."""
    if found.encode_image is None:
        raise ValueError(
            f"{spec.title}: {'an' if name[0] in 'aeiou' else 'a'} {name} is connected, but the model is a "
            f"{found.title}. Set model_id to one that takes a picture, such as {spec.hub_id}, or disconnect {name}."
        )


def _check_model(spec: ModelSpec, folders: Folders, *, model_id: str, model: bool = False, **pictures: bool) -> None:
    """`model` and `pictures` say whether these sockets are linked."""
    found = choose_model(spec, model_id, folders=folders.models).spec
    has_last = pictures.pop("last_image", False)
    for name, is_linked in pictures.items():
        if found.needs_condition and not (is_linked or model):
            alike = (one for one in SPECS if one.family == spec.family and not one.needs_condition)
            other = next((f", or set model_id to one that can do without, such as {one.hub_id}" for one in alike), "")
            raise ValueError(
                f"{found.title}: it starts from a picture, and {name} is not connected. Connect it{other}."
            )
        if has_last and not is_linked:
            raise ValueError(
                f"{found.title}: last_image is connected, and {name} is not. Connect it, or disconnect last_image."
            )


def _encode(spec: ModelSpec, host: Host, *, prompt: str, negative_prompt: str = "", **choice: Any) -> tuple:
    model = _chosen(spec, host.folders, host, **choice)
    if negative_prompt.strip() and model.spec.guidance != "cfg":
        guided = [one.name for one in SPECS if one.family == spec.family and one.guidance == "cfg"]
        raise ValueError(
            f"{model.spec.title}: negative_prompt is {negative_prompt!r}, but this model runs without one. Leave it "
            f"empty, or choose a model that is guided by one: {', '.join(guided)}."
        )
    return runtime.encode_prompt(model, prompt, negative_prompt, progress=host)


def _encode_image(
    spec: ModelSpec,
    host: Host,
    *,
    image: Any,
    height: int,
    width: int,
    num_frames: int,
    resize: str,
    last_image: Any = None,
    **choice: Any,
) -> tuple:
    model = _chosen(spec, host.folders, host, **choice)
    _check_takes_picture(spec, model.spec, "image")
    size = {"height": height, "width": width, "num_frames": num_frames}
    given = [one[:1] for one in (image, last_image) if one is not None]
    images = media.joined([media.resize(one, height, width, resize) for one in given])
    return (runtime.encode_image(model, images, size, progress=host),)


def _encode_references(spec: ModelSpec, host: Host, *, image: Any, condition: Any = None, **choice: Any) -> tuple:
    """References in the order they were given: those of a connected condition first."""
    model = _chosen(spec, host.folders, host, **choice)
    found = runtime.encode_image(model, image, {}, progress=host)
    return (runtime.join_references([found] if condition is None else [condition, found]),)


def _sample(
    spec: ModelSpec,
    image_spec: ModelSpec,
    host: Host,
    *,
    prompt_embeds: Any,
    negative_prompt_embeds: Any = None,
    condition: payloads.ImageCondition | None = None,
    latents: payloads.Latent | None = None,
    model_id: str,
    model: ModelRef | None,
    precision: str,
    **numbers: Any,
) -> tuple:
    spec = spec if condition is None else image_spec
    numbers = without_zero_sizes(numbers)
    for name, given in {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}.items():
        if given is not None:
            payloads.conditioning_entry(spec, name, given)
    chosen = _chosen(spec, host.folders, host, model_id=model_id, model=model, precision=precision)
    if condition is not None:
        _check_takes_picture(spec, chosen.spec, "condition")
    settings = chosen.spec.settings(**numbers, **_encoded_size(spec, condition, numbers))
    embeds = (prompt_embeds, negative_prompt_embeds)
    denoised = runtime.denoise(chosen, settings, *embeds, condition=condition, latents=latents, progress=host)
    return (denoised,) if spec.is_image else (denoised, settings.num_frames)


def _encoded_size(spec: ModelSpec, condition: Mapping[str, Any] | None, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The size that the picture was encoded for, where the sampler has none; ValueError where it asks for another."""
    if condition is None:
        return {}
    size = {name: condition[name] for name in ("height", "width", "num_frames") if name in condition}
    for name, value in size.items():
        if numbers.get(name, value) != value:
            raise ValueError(
                f"{spec.title}: {name} is {numbers[name]}, but the picture was encoded for {value}. Use the same "
                "height, width and num_frames in the image encoder and the sampler."
            )
    return {name: value for name, value in size.items() if name not in numbers}


def _decode(spec: ModelSpec, host: Host, *, latents: payloads.Latent, fps: float = 0, **choice: Any) -> tuple:
    model = _chosen(spec, host.folders, host, **choice)
    frames = runtime.decode(model, latents, progress=host)
    return (frames,) if spec.is_image else (frames, float(fps))


def _stage_node(
    spec: ModelSpec, suffix: str, title: str, inputs: tuple[str, ...], more: tuple[Input, ...] = (), **fields: Any
) -> Node:
    return Node(
        id=f"{spec.family}{suffix}",
        title=title,
        category=f"TPU/{spec.category}",
        inputs=(*_inputs(spec, inputs), *more),
        family=spec.family,
        check=partial(_check_model, spec),
        checks=("model_id",),
        checked_links=("model", "condition") if "condition" in inputs and not spec.references else (),
        **fields,
    )


def text_encoder(spec: ModelSpec, label: str, *inputs: str) -> Node:
    outputs = (
        Output(name="prompt_embeds", type="CONDITIONING", tooltip="The encoded prompt."),
        Output(
            name="negative_prompt_embeds",
            type="CONDITIONING",
            tooltip="The encoded negative prompt; nothing where the model has no use for it.",
        ),
    )
    return _stage_node(
        spec,
        "TextEncoder",
        f"{label} Text Encoder (TPU)",
        inputs,
        description=f"Encodes the prompts for {spec.title} on the TPU.",
        outputs=outputs,
        run=partial(_encode, spec),
    )


def image_encoder(spec: ModelSpec, label: str, *inputs: str) -> Node:
    """The node for `spec`, a model that takes an image, or references."""
    return _stage_node(
        spec,
        "ImageEncoder",
        f"{label} Image Encoder (TPU)",
        inputs,
        description=f"Encodes what {spec.title} is to {'look at' if spec.references else 'start from'}, on the TPU.",
        outputs=(Output(name="condition", type="TPU_CONDITION", tooltip="The encoded picture, for the sampler."),),
        run=partial(_encode_references if spec.references else _encode_image, spec),
    )


def sampler(
    spec: ModelSpec, label: str, *inputs: str, image_spec: ModelSpec | None = None, sizes: tuple[str, ...] = ()
) -> Node:
    """`image_spec` is the model that runs instead while a `condition` is connected. `sizes` are inputs too, the last;
    an encoded picture's counts where they are 0.

    Every sampler may also run a part of the steps, and begin with latents.
    """
    outputs = (
        Output(name="latents", type="LATENT", tooltip="For the VAE decoder; in ComfyUI's own layout."),
        Output(name="num_frames", type="INT", tooltip="Number of video frames the latents hold."),
    )
    latents = Input(name="latents", type=_SOCKETS["latents"], tooltip=_LATENTS, optional=True)
    return _stage_node(
        spec,
        "TPUSampler",
        f"{label} TPU Sampler",
        (*inputs, *PART),
        more=(latents, *(_own_size(spec, name) for name in sizes)),
        description=f"Denoises with {spec.title} on the TPU, from random noise to latents.",
        outputs=outputs[:1] if spec.is_image else outputs,
        run=partial(_sample, spec, image_spec or spec),
    )


def _frames_outputs(spec: ModelSpec) -> tuple[Output, ...]:
    if spec.is_image:
        return (Output(name="image", type="IMAGE", tooltip="The picture."),)
    return (
        Output(name="frames", type="IMAGE", tooltip="The video's frames."),
        # Create Video takes a FLOAT, and ComfyUI does not link an INT to it.
        Output(name="fps", type="FLOAT", tooltip="Frames per second, for Create Video."),
    )


def decoder(spec: ModelSpec, label: str, *inputs: str) -> Node:
    return _stage_node(
        spec,
        "TPUVAEDecoder",
        f"{label} TPU VAE Decoder",
        inputs,
        description=f"Turns latents of {spec.title} into {'a picture' if spec.is_image else 'frames'} on the TPU.",
        outputs=_frames_outputs(spec),
        run=partial(_decode, spec),
    )


_STAGE_NAMES = {"TextEncoder": "encode", "ImageEncoder": "image", "TPUSampler": "sample", "TPUVAEDecoder": "decode"}
_LINKS = {
    "prompt_embeds": Link("encode", 0),
    "negative_prompt_embeds": Link("encode", 1),
    "condition": Link("image", 0),
    "latents": Link("sample", 0),
}


def pipeline(spec: ModelSpec, label: str, stage_nodes: tuple[Node, ...], *inputs: str) -> Expansion:
    """The stages (and Create Video) as one node: a graph over the others, not a second implementation."""
    names = [_STAGE_NAMES[node.id.removeprefix(spec.family)] for node in stage_nodes]
    links = {name: link for name, link in _LINKS.items() if link.stage in names}
    stages = [
        Stage(
            name=name,
            node_id=node.id,
            inputs={
                i.name: links.get(i.name) or Ref(i.name)
                for i in node.inputs
                if i.name not in PART and links.get(i.name) != Link(name, 0)
            },
            # Where the model can do without a picture, the stage that encodes it is left out without one.
            needs="image" if name == "image" else "",
        )
        for name, node in zip(names, stage_nodes, strict=True)
    ]
    results = [Link("decode", index) for index in range(len(_frames_outputs(spec)))]
    outputs = _frames_outputs(spec)
    if not spec.is_image:
        frames = {"images": Link("decode", 0), "fps": Link("decode", 1)}
        stages.append(Stage(name="video", node_id="CreateVideo", inputs=frames))
        results.append(Link("video", 0))
        outputs = (*outputs, Output(name="video", type="VIDEO", tooltip="The video, for Save Video."))
    return Expansion(
        id=f"{spec.family}TPUPipeline",
        title=f"{label} TPU Full Pipeline",
        category=f"TPU/{spec.category}",
        description=f"{spec.title} from prompt to {'picture' if spec.is_image else 'video'}: all stages in one node.",
        inputs=tuple(
            replace(i, optional=True) if i.name == "image" and not _needs_picture(spec) else i
            for i in _inputs(spec, inputs)
        ),
        outputs=outputs,
        family=spec.family,
        check=partial(_check_model, spec),
        checks=("model_id",),
        checked_links=("model", "image", "last_image") if "image" in inputs and not spec.references else (),
        stages=tuple(stages),
        results=tuple(results),
    )
