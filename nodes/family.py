"""The nodes of a model family, built from its spec: text encoder, image encoder, sampler, decoder and pipeline.

A family's file has its label and its nodes' inputs in order; limits and defaults come from the spec, bodies from here.
Every body checks its inputs, then makes one call into the runtime.
"""

from dataclasses import replace
from functools import partial

from ..tpu_runtime import api as runtime
from ..tpu_runtime import media
from ..tpu_runtime.checkpoints.model_ref import ModelRef, choose_model
from ..tpu_runtime.engine import stage_values
from ..tpu_runtime.messages import compose, compose_term
from ..tpu_runtime.model_spec import SIZE_INPUTS, STEP_RANGE_INPUTS, ModelSpec
from ..tpu_runtime.models import SPECS
from . import inputs as named
from .declare import Expansion, Folders, Input, Link, Node, NodeContext, Output, Ref, StageNode, Value, Values


def _chosen(spec: ModelSpec, host: NodeContext, *, model_id: str, model: ModelRef | None, precision: str) -> ModelRef:
    """Return the connected model, which its loader has resolved, or the one that the widgets name, checked."""
    if model is None:
        return choose_model(spec, model_id, precision=precision, folders=host.folders.models, progress=host)
    if model.spec.family != spec.family:
        raise ValueError(compose(
            "node.model_of_another_family", title=spec.title, spec_name=model.spec_name, name=spec.name,
            family=spec.family,
        ))  # fmt: skip
    return model


def _check_takes_image(spec: ModelSpec, chosen: ModelSpec, name: str) -> None:
    """Raise ValueError if the model `chosen` takes no image although input `name` is connected."""
    if chosen.pictures.encode is None:
        raise ValueError(compose(
            "node.image_unused", title=spec.title, name=compose_term("input", name), model_title=chosen.title,
            hub_id=spec.published.hub_id,
        ))  # fmt: skip


def _check_model(spec: ModelSpec, folders: Folders, *, model_id: str, model: bool = False, **pictures: bool) -> None:
    """Raise ValueError if the model does not match the linked sockets.

    model, pictures: whether these sockets are linked.
    """
    chosen = choose_model(spec, model_id, folders=folders.models).spec
    has_last = pictures.pop("last_image", False)
    for name, is_linked in pictures.items():
        if chosen.needs_condition and not (is_linked or model):
            alternatives = (other for other in SPECS if other.family == spec.family and not other.needs_condition)
            ids = (compose("node.or_use_model", hub_id=other.published.hub_id) for other in alternatives)
            raise ValueError(compose(
                "node.image_missing", title=chosen.title, name=compose_term("input", name), ids=next(ids, ""),
            ))  # fmt: skip
        if has_last and not is_linked:
            raise ValueError(compose("node.last_image_alone", title=chosen.title, name=compose_term("input", name)))


def _encode(
    spec: ModelSpec,
    host: NodeContext,
    *,
    prompt: str,
    negative_prompt: str = "",
    condition: stage_values.ImageCondition | None = None,
    **choice: Value,
) -> tuple:
    model = _chosen(spec, host, **choice)
    if condition is not None:
        _check_takes_image(spec, model.spec, "condition")
    if negative_prompt.strip() and model.spec.recipe.guidance != "cfg":
        guided = [s.name for s in SPECS if s.family == spec.family and s.recipe.guidance == "cfg"]
        raise ValueError(compose(
            "node.negative_prompt_unused", title=model.spec.title, negative_prompt=repr(negative_prompt),
            guided=", ".join(guided),
        ))  # fmt: skip
    return runtime.encode_prompt(model, prompt, negative_prompt, progress=host, condition=condition)


def _encode_image(
    spec: ModelSpec,
    host: NodeContext,
    *,
    image: Value,
    height: int,
    width: int,
    num_frames: int,
    resize: str,
    last_image: Value = None,
    **choice: Value,
) -> tuple:
    model = _chosen(spec, host, **choice)
    _check_takes_image(spec, model.spec, "image")
    size = {"height": height, "width": width, "num_frames": num_frames}
    frames = [image_batch[:1] for image_batch in (image, last_image) if image_batch is not None]
    images = media.join_images([media.resize(image_batch, height, width, resize) for image_batch in frames])
    return (runtime.encode_image(model, images, size, progress=host),)


def _encode_references(
    spec: ModelSpec, host: NodeContext, *, image: Value, condition: Value = None, **choice: Value
) -> tuple:
    """Encode references in the order given, after those of a connected condition."""
    model = _chosen(spec, host, **choice)
    encoded = runtime.encode_image(model, image, {}, progress=host)
    return (runtime.join_references([encoded] if condition is None else [condition, encoded]),)


def _sample(
    spec: ModelSpec,
    image_spec: ModelSpec,
    host: NodeContext,
    *,
    prompt_embeds: Value,
    negative_prompt_embeds: Value = None,
    condition: stage_values.ImageCondition | None = None,
    latents: stage_values.Latent | None = None,
    model_id: str,
    model: ModelRef | None,
    precision: str,
    **numbers: Value,
) -> tuple:
    spec = spec if condition is None else image_spec
    for name, entry in {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}.items():
        if entry is not None:
            stage_values.unpack_conditioning(spec, name, entry)
    chosen = _chosen(spec, host, model_id=model_id, model=model, precision=precision)
    if condition is not None:
        _check_takes_image(spec, chosen.spec, "condition")
    settings = chosen.spec.settings(**_with_encoded_size(spec, condition, numbers)).with_default_quality(chosen.quality)
    embeds = (prompt_embeds, negative_prompt_embeds)
    denoised = runtime.denoise(chosen, settings, *embeds, condition=condition, latents=latents, progress=host)
    return (denoised,) if spec.is_image else (denoised, settings.num_frames)


def _with_encoded_size(spec: ModelSpec, condition: Values | None, numbers: Values) -> dict[str, Value]:
    """Return the sampler's numbers, with the encoded image's size where they have none.

    A number that neither has is None, which means the model's own. Raises ValueError for contradicting sizes.
    """
    size = {name: condition[name] for name in SIZE_INPUTS if name in condition} if condition else {}
    for name, value in size.items():
        if (numbers.get(name) or value) != value:
            raise ValueError(compose(
                "node.size_contradicts_image", title=spec.title, name=compose_term("input", name),
                numbers=numbers[name], value=value,
            ))  # fmt: skip
    return {**numbers, **{name: size.get(name) or numbers.get(name) or None for name in SIZE_INPUTS}}


def _decode(
    spec: ModelSpec, host: NodeContext, *, latents: stage_values.Latent, fps: float = 0, **choice: Value
) -> tuple:
    model = _chosen(spec, host, **choice)
    frames = runtime.decode(model, latents, progress=host)
    return (frames,) if spec.is_image else (frames, float(fps))


def _stage_node(
    spec: ModelSpec,
    stage: str,
    suffix: str,
    title: str,
    inputs: tuple[str, ...],
    more: tuple[Input, ...] = (),
    **fields: Value,
) -> Node:
    return Node(
        id=f"{spec.family}{suffix}",
        title=title,
        category=f"TPU/{spec.category}",
        inputs=(*named.inputs_for_names(spec, inputs), *more),
        family=spec.family,
        stage=stage,
        check=partial(_check_model, spec),
        checks=("model_id",),
        validated_links=("model", "condition") if "condition" in inputs and not spec.pictures.are_references else (),
        **fields,
    )


def text_encoder(spec: ModelSpec, label: str, *inputs: str) -> Node:
    """Return the text encoder's node, with the inputs of these names."""
    outputs = (
        Output(name="prompt_embeds", type="CONDITIONING", tooltip="The encoded prompt."),
        Output(
            name="negative_prompt_embeds",
            type="CONDITIONING",
            tooltip="The encoded negative prompt; empty if the model does not use one.",
        ),
    )
    return _stage_node(
        spec,
        "encode",
        "TextEncoder",
        f"{label} TPU Text Encoder",
        inputs,
        description=f"Encodes the prompts for {spec.title} on the TPU.",
        outputs=outputs,
        run=partial(_encode, spec),
    )


def image_encoder(spec: ModelSpec, label: str, *inputs: str) -> Node:
    """Return the image encoder's node for `spec`, a model that takes an image or references."""
    images = "reference images" if spec.pictures.are_references else "the start image"
    return _stage_node(
        spec,
        "image",
        "ImageEncoder",
        f"{label} TPU Image Encoder",
        inputs,
        description=f"Encodes {images} for {spec.title} on the TPU.",
        outputs=(
            Output(name="condition", type="TPU_CONDITION", tooltip="The encoded image. Connect it to the sampler."),
        ),
        run=partial(_encode_references if spec.pictures.are_references else _encode_image, spec),
    )


def sampler(
    spec: ModelSpec, label: str, *inputs: str, image_spec: ModelSpec | None = None, sizes: tuple[str, ...] = ()
) -> Node:
    """Return the sampler's node. Every sampler can run a part of the steps and start from latents.

    spec: the family's default model.
    label: the family's name in the title.
    inputs: names of its inputs, in order.
    image_spec: the model that runs instead while a `condition` is connected; None: the same.
    sizes: further inputs, the last ones; where they are 0, the encoded image's size counts.
    """
    newest = (named.make_input(spec, name) for name in named.list_newest_inputs(spec, inputs))
    outputs = (
        Output(name="latents", type="LATENT", tooltip="The denoised latents, in ComfyUI's own layout."),
        Output(name="num_frames", type="INT", tooltip="Number of video frames in the latents."),
    )
    return _stage_node(
        spec,
        "denoise",
        "TPUSampler",
        f"{label} TPU Sampler",
        (*inputs, *STEP_RANGE_INPUTS),
        more=(named.LATENTS_INPUT, *(named.make_size_input(spec, name) for name in sizes), *newest),
        description=f"Denoises latents with {spec.title} on the TPU, starting from random noise.",
        outputs=outputs[:1] if spec.is_image else outputs,
        run=partial(_sample, spec, image_spec or spec),
    )


def _frames_outputs(spec: ModelSpec) -> tuple[Output, ...]:
    if spec.is_image:
        return (Output(name="image", type="IMAGE", tooltip="The image."),)
    return (
        Output(name="frames", type="IMAGE", tooltip="The video's frames."),
        # Create Video takes a FLOAT, and ComfyUI does not link an INT to it.
        Output(name="fps", type="FLOAT", tooltip="Frames per second, for Create Video."),
    )


def decoder(spec: ModelSpec, label: str, *inputs: str) -> Node:
    """Return the VAE decoder's node, with the inputs of these names."""
    return _stage_node(
        spec,
        "decode",
        "TPUVAEDecoder",
        f"{label} TPU VAE Decoder",
        inputs,
        description=f"Decodes latents of {spec.title} to {'an image' if spec.is_image else 'video frames'} on the TPU.",
        outputs=_frames_outputs(spec),
        run=partial(_decode, spec),
    )


# For each input of a later stage, the output of an earlier one that it is linked to.
_LINKS = {
    "prompt_embeds": Link("encode", 0),
    "negative_prompt_embeds": Link("encode", 1),
    "condition": Link("image", 0),
    "latents": Link("denoise", 0),
}


def pipeline(spec: ModelSpec, label: str, stage_nodes: tuple[Node, ...], *inputs: str) -> Expansion:
    """Return a node that is expanded to all stages and Create Video.

    It is a graph over the other nodes, not a second implementation.

    spec: the family's default model.
    label: the family's name in the title.
    stage_nodes: the family's nodes, in order.
    inputs: names of its inputs, in order.
    """
    links = {name: link for name, link in _LINKS.items() if link.stage in {node.stage for node in stage_nodes}}
    stages = [
        StageNode(
            name=node.stage,
            node_id=node.id,
            inputs={
                i.name: links.get(i.name) or Ref(i.name)
                for i in node.inputs
                if i.name not in STEP_RANGE_INPUTS and links.get(i.name) != Link(node.stage, 0)
            },
            # Without an image, a model for which it is optional skips this stage.
            needs="image" if node.stage == "image" else "",
        )
        for node in stage_nodes
    ]
    results = [Link("decode", index) for index in range(len(_frames_outputs(spec)))]
    outputs = _frames_outputs(spec)
    if not spec.is_image:
        frames = {"images": Link("decode", 0), "fps": Link("decode", 1)}
        stages.append(StageNode(name="video", node_id="CreateVideo", inputs=frames))
        results.append(Link("video", 0))
        outputs = (*outputs, Output(name="video", type="VIDEO", tooltip="The video, for Save Video."))
    needs_link = "image" in inputs and not spec.pictures.are_references
    return Expansion(
        id=f"{spec.family}TPUPipeline",
        title=f"{label} TPU Full Pipeline",
        category=f"TPU/{spec.category}",
        description=f"{spec.title} from prompt to {'image' if spec.is_image else 'video'}: all stages in one node.",
        inputs=tuple(
            replace(i, optional=True) if i.name == "image" and not named.needs_image(spec) else i
            for i in named.inputs_for_names(spec, (*inputs, *named.list_newest_inputs(spec, inputs)))
        ),
        outputs=outputs,
        family=spec.family,
        check=partial(_check_model, spec),
        checks=("model_id",),
        validated_links=("model", "image", "last_image") if needs_link else (),
        stages=tuple(stages),
        results=tuple(results),
    )
