"""Rules of ComfyUI's loaders, conditionings, guiders, samplers and decoders, which note calls that they will make."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .image_rules import decode_size, encode_size, to_pixels, video_latent
from .interpreter import Rule, RunningNode, Steps, check_side, get_loaded
from .known import UNKNOWN, Conditioning, Guider, ImageSize, Known, LatentSize, LoaderOutput, NotKnown, Outputs
from .loader_swap import LOADERS

# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplerCall:
    """The calls of one sampler to its network."""

    node_id: str
    model: LoaderOutput
    latent: LatentSize
    conditionings: tuple[Conditioning, ...]  # those that are evaluated in each step


@dataclass(frozen=True, kw_only=True)
class DecoderCall:
    """The decoding of a latent."""

    node_id: str
    vae: LoaderOutput
    latent: LatentSize


@dataclass(frozen=True, kw_only=True)
class EncoderCall:
    """The encoding of a prompt without images."""

    node_id: str
    clip: LoaderOutput


@dataclass(frozen=True, kw_only=True)
class ImageCall:
    """The encoding of images by a VAE."""

    node_id: str
    vae: LoaderOutput
    images: ImageSize  # a video's frames for a video model


Call = SamplerCall | DecoderCall | EncoderCall | ImageCall

# --- loaders and models -----------------------------------------------------------------------------------------------


def _load(node: RunningNode) -> Steps[Outputs]:
    """Return a loader's outputs. Its inputs must be known: they name the files."""
    values = {}
    for name in node.inputs:
        value = yield name
        if not isinstance(value, bool | int | float | str | None):
            raise NotKnown
        values[name] = value
    source = LoaderOutput(node_id=node.node_id, kind=node.kind, values=values, output=0)
    return tuple(replace(source, output=index) for index in range(5))


def _pass_on(*names: str) -> Rule:
    """Return the rule of a node that passes on these inputs, each as an output, without changing shapes."""

    def rule(node: RunningNode) -> Steps[Outputs]:
        outputs: list[Known] = []
        for name in names:
            outputs.append((yield name))
        return tuple(outputs)

    return rule


def _windows(node: RunningNode) -> Steps[Outputs]:
    model, length = (yield from get_loaded(node, "model")), (yield from node.side("context_length"))
    return (replace(model, window=min(length, model.window or length)),)


# --- conditionings ----------------------------------------------------------------------------------------------------


def _text(node: RunningNode) -> Steps[Outputs]:
    clip = yield "clip"
    if isinstance(clip, LoaderOutput):
        node.note(EncoderCall(node_id=node.node_id, clip=clip))
    return (Conditioning(),)


def _encode(node: RunningNode) -> Steps[Outputs]:
    images, vae = (yield from node.get("pixels", ImageSize)), (yield from get_loaded(node, "vae"))
    return (_note_encoding(node, vae, images),)


def _note_encoding(node: RunningNode, vae: LoaderOutput, images: ImageSize) -> LatentSize:
    """Note the encoding of images, and return their latent."""
    latent = encode_size(images, node.facts.stride(vae) or 0)
    pixels = ImageSize(height=latent.height, width=latent.width, batch=images.batch)
    node.note(ImageCall(node_id=node.node_id, vae=vae, images=pixels))
    return latent


def _text_of_edit(node: RunningNode) -> Steps[Outputs]:
    """Encode a prompt with up to three images, which are also references if there is a VAE."""
    names = [name for name in ("image1", "image2", "image3") if node.inputs.get(name) is not None]
    if not names:
        return (yield from _text(node))
    references = []
    if node.inputs.get("vae") is not None:
        vae = yield from get_loaded(node, "vae")
        for name in names:
            image = to_pixels((yield from node.get(name, ImageSize)), 1024 * 1024, 8.0)
            references.append(_note_encoding(node, vae, image))
    return (Conditioning(references=tuple(references)),)


def _conditioning(node: RunningNode) -> Steps[Outputs]:
    return ((yield from node.get("conditioning", Conditioning)),)


def _reference(node: RunningNode) -> Steps[Outputs]:
    conditioning = yield from node.get("conditioning", Conditioning)
    if node.inputs.get("latent") is None:
        return (conditioning,)
    latent = yield from node.get("latent", LatentSize)
    if len(conditioning.references) >= _MAX_REFERENCES:
        raise NotKnown  # no model takes as many
    return (replace(conditioning, references=(*conditioning.references, latent)),)


def _video_of_images(stride: int, images: Mapping[str, str], pads: bool = True) -> Rule:
    """Return the rule of a node that adds images to two conditionings and makes an empty latent.

    stride: pixels of a side per latent; 0 for those of the node's VAE.
    images: by the names of inputs, the names under which the network gets them.
    pads: whether the node encodes a whole video, with grey frames after the given ones.
    """

    def rule(node: RunningNode) -> Steps[Outputs]:
        pictures = [images[name] for name in images if node.inputs.get(name) is not None]
        if pictures.count("clip_vision_output") > 1:
            pictures.append("second_clip_vision_output")
        outputs: list[Known] = []
        for name in ("positive", "negative"):
            value = yield name
            is_known = isinstance(value, Conditioning)
            outputs.append(replace(value, pictures=value.pictures.union(pictures)) if is_known else UNKNOWN)
        vae = yield "vae"
        own = (node.facts.stride(vae) or 0) if isinstance(vae, LoaderOutput) else 0
        latent = yield from video_latent(node, stride or own)
        if {"start_image", "end_image"} & set(pictures) or not stride:
            yield from _first_frames(node, latent, latent.num_frames if pads else 0)
        return (*outputs, latent)

    return rule


def _first_frames(node: RunningNode, latent: LatentSize, number: int) -> Steps[None]:
    """Note that a node encodes frames of a video, if its VAE is known: a whole one, or the given ones.

    number: of frames of a whole one; 0 for the given ones.
    """
    vae, image = (yield "vae"), (yield "start_image")
    number = number or (min(image.batch, latent.num_frames) if isinstance(image, ImageSize) else 0)
    if number and isinstance(vae, LoaderOutput):
        _note_encoding(node, vae, ImageSize(height=latent.height, width=latent.width, batch=number))


def _video_of_first_frame(node: RunningNode) -> Steps[Outputs]:
    latent = yield from video_latent(node, 16)
    if node.inputs.get("start_image") is None:
        return (replace(latent, batch=1),)  # without an image ComfyUI makes one
    yield from _first_frames(node, latent, 0)
    return (latent,)


_MAX_REFERENCES = 64
_IMAGES = {name: name for name in ("start_image", "end_image", "clip_vision_output")}
_CLIP_IMAGES = dict.fromkeys(("clip_vision_start_image", "clip_vision_end_image"), "clip_vision_output")

# --- guiders and samplers ---------------------------------------------------------------------------------------------


def _conditionings(node: RunningNode, *names: str) -> Steps[tuple[Conditioning, ...]]:
    values = []
    for name in names:
        values.append((yield from node.get(name, Conditioning)))
    return tuple(values)


def _read_guidance(node: RunningNode) -> Steps[Guider]:
    """Return the guidance by two prompts. At scale 1 only the first is evaluated."""
    model, scale = (yield from get_loaded(node, "model")), (yield from node.number("cfg"))
    names = ("positive",) if scale == 1.0 else ("positive", "negative")
    return Guider(model=model, conditionings=(yield from _conditionings(node, *names)))


def _guider(node: RunningNode) -> Steps[Outputs]:
    return ((yield from _read_guidance(node)),)


def _basic_guider(node: RunningNode) -> Steps[Outputs]:
    model = yield from get_loaded(node, "model")
    return (Guider(model=model, conditionings=(yield from _conditionings(node, "conditioning"))),)


def _dual_guider(node: RunningNode) -> Steps[Outputs]:
    for name in ("cfg_conds", "cfg_cond2_negative"):
        if (yield from node.number(name)) == 1.0:
            raise NotKnown  # the guider's style decides which of three are left out
    model = yield from get_loaded(node, "model")
    return (Guider(model=model, conditionings=(yield from _conditionings(node, "cond1", "cond2", "negative"))),)


def _sample(node: RunningNode) -> Steps[Outputs]:
    is_guided = node.kind == "SamplerCustomAdvanced"
    latent = yield from node.get("latent_image", LatentSize)
    try:
        guider = (yield from node.get("guider", Guider)) if is_guided else (yield from _read_guidance(node))
    except NotKnown:
        return (latent, latent)
    node.note(SamplerCall(node_id=node.node_id, model=guider.model, latent=latent, conditionings=guider.conditionings))
    sampled = _resize_sampled(latent, node.facts.stride(guider.model))
    return (sampled, sampled)


def _resize_sampled(latent: LatentSize, stride: int | None) -> LatentSize:
    """Return a sampler's result: it is not empty, so that a further sampler does not scale it.

    stride: pixels of a side per latent of the model; None if it is not known.
    """
    if stride is None:
        return latent
    height, width = latent.size(stride)
    return replace(
        latent, height=check_side(height * stride), width=check_side(width * stride), stride=stride, is_rescaled=False
    )


def _decode(node: RunningNode) -> Steps[Outputs]:
    latent = yield from node.get("samples", LatentSize)
    vae = yield from get_loaded(node, "vae")
    node.note(DecoderCall(node_id=node.node_id, vae=vae, latent=latent))
    return (decode_size(latent, node.facts.stride(vae)),)


_GUIDED = "RescaleCFG CFGZeroStar CFGNorm APG TCFG EasyCache LazyCache DifferentialDiffusion"
_SAMPLING = "ModelSamplingSD3 ModelSamplingAuraFlow ModelSamplingFlux"
_SAMPLERS = "KSampler KSamplerAdvanced SamplerCustom SamplerCustomAdvanced"
_LOADERS = (*LOADERS, *(ours for ours, _ in LOADERS.values()), "TPUModelLoader")
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_LOADERS, _load),
    **dict.fromkeys(f"{_GUIDED} {_SAMPLING} LoraLoaderModelOnly".split(), _pass_on("model")),
    "LoraLoader": _pass_on("model", "clip"),
    "WanContextWindowsManual": _windows,
    **dict.fromkeys(("VAEEncode", "VAEEncodeTiled", "VAEEncodeForInpaint"), _encode),
    "CLIPTextEncode": _text,
    "TextEncodeQwenImageEditPlus": _text_of_edit,
    **dict.fromkeys("FluxGuidance ConditioningZeroOut FluxKontextMultiReferenceLatentMethod".split(), _conditioning),
    "ReferenceLatent": _reference,
    "WanImageToVideo": _video_of_images(8, _IMAGES),
    "WanFirstLastFrameToVideo": _video_of_images(0, _IMAGES | _CLIP_IMAGES),
    "HunyuanVideo15ImageToVideo": _video_of_images(16, _IMAGES, pads=False),
    "Wan22ImageToVideoLatent": _video_of_first_frame,
    "CFGGuider": _guider,
    "BasicGuider": _basic_guider,
    "DualCFGGuider": _dual_guider,
    **dict.fromkeys(_SAMPLERS.split(), _sample),
    **dict.fromkeys(("VAEDecode", "VAEDecodeTiled"), _decode),
}
# Nodes that run a text encoder, a denoiser or a decoder. Those that encode images run before these.
CALLERS = frozenset(name for name, rule in RULES.items() if rule in (_text, _text_of_edit, _sample, _decode))
