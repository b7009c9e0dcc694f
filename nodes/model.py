"""The nodes that name a model for others: one that runs here, or on another machine."""

from collections.abc import Collection, Mapping
from typing import Any

from ..tpu_runtime import pipeline as runtime
from ..tpu_runtime.pipeline import CHOICES, QUALITIES, SPECS, ModelRef, choose_model, spec_for_family
from . import inputs
from .declare import Folders, Host, Input, Node, Output

_FAMILY = Input(
    name="family",
    type="COMBO",
    default=SPECS[0].family,
    options=tuple(dict.fromkeys(spec.family for spec in SPECS)),
    tooltip="The model's family: the nodes it is for.",
)
_PRECISION = Input(
    name="precision",
    type="COMBO",
    default="auto",
    options=CHOICES,
    optional=True,
    advanced=True,
    tooltip="Number format of weights and programs. auto is bfloat16 on a TPU; float32 is exact and slow; mixed is "
    "bfloat16 with the encoders of pictures in float32.",
)
_QUALITY = Input(
    name="quality",
    type="COMBO",
    default=QUALITIES[0],
    options=QUALITIES,
    optional=True,
    advanced=True,
    tooltip="Of samplers that ask for none of their own, and of ComfyUI's own: exact, or faster and nearly the same: "
    "int8, and for Wan and HunyuanVideo int8+sparse, whose videos are others. The samplers' own says what each costs.",
)
# A part that is not chosen: it comes with the others, or from ComfyUI's folders.
AUTO = "auto"
# Parts of a model in files of their own, with ComfyUI's folder for each, in the order in which a model id has them.
PARTS = {
    "low_noise_model": ("diffusion_models", "Of a model of two denoisers, the file of the one for low noise."),
    "text_encoder": ("text_encoders", "The file of the text encoder."),
    "text_encoder_2": ("text_encoders", "Of a model with two, the file of the second text encoder."),
    "vae": ("vae", "The file of the VAE, or of a light decoder such as taew2_1: faster, and not exact."),
    "image_encoder": ("clip_vision", "The file of the image encoder, for models that see a picture."),
}


# Families by the type that ComfyUI's own loaders of text encoders are told.
CLIP_TYPES: Mapping[str, tuple[str, ...]] = {
    "wan": ("Wan21", "Wan22I2V"),
    "flux2": ("Flux2",),
    "lumina2": ("ZImage",),
    "qwen_image": ("QwenImage",),
    "cogvideox": ("CogVideoX",),
    "hunyuan_video_15": ("HunyuanVideo15",),
}


def quality_of(weight_dtype: Any) -> str:
    """The quality that a loader of ComfyUI's kind asks for by its `weight_dtype`."""
    return weight_dtype if weight_dtype in QUALITIES else QUALITIES[0]


def chosen_id(values: Mapping[str, Any]) -> str:
    """The model id of these widgets: that of `model_id`, with the files that are chosen for its parts."""
    parts = [str(values[name]) for name in PARTS if values.get(name) not in (None, "", AUTO)]
    return runtime.SEPARATOR.join([str(values["model_id"]).strip(), *parts])


def catalogue(here: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """What the page knows of a model, by each id that is known beforehand: of the Hub, of the miniatures, and names of
    published files. `download` is about how much that is as files, by format, empty for what is `here`; `unused` are
    widgets that do nothing.
    """
    found = {}
    for spec in SPECS:
        entry = {"name": spec.name, "title": spec.title, "family": spec.family, "unused": inputs.unused(spec)}
        entry |= {"download": "", "is_miniature": False}
        files = runtime.published.denoisers(spec.name)
        found |= dict.fromkeys(files, entry)
        found |= {name: {**entry, "is_miniature": True} for name in spec.miniature.ids}
        hub_id = spec.published.hub_id
        found[hub_id] = {**entry, "download": "" if hub_id in here else runtime.published.sizes(spec.name)}
    return found


_MODEL = Output(name="model", type="TPU_MODEL", tooltip="For the `model` input of the family's nodes.")

_ON_TPU = "which runs on the TPU, and is made when it is used."
_CORE = (
    Output(name="MODEL", type="MODEL", tooltip=f"For KSampler and alike: ComfyUI's own, {_ON_TPU}"),
    Output(name="CLIP", type="CLIP", tooltip=f"For CLIPTextEncode and alike: ComfyUI's own, {_ON_TPU}"),
    Output(name="VAE", type="VAE", tooltip=f"For VAEDecode, VAEEncode and alike: ComfyUI's own, {_ON_TPU}"),
    Output(name="MODEL, low noise", type="MODEL", tooltip="Of a model with two denoisers, that for low noise."),
)


def _check_choice(folders: Folders, *, family: str, **parts: str) -> None:
    choose_model(spec_for_family(family), chosen_id(parts), folders=folders.models)


def _choose(host: Host, *, family: str, precision: str, quality: str, **parts: str) -> tuple[ModelRef]:
    spec, folders, model_id = spec_for_family(family), host.folders.models, chosen_id(parts)
    found = choose_model(spec, model_id, precision=precision, quality=quality, folders=folders, progress=host)
    if runtime.is_of_files(model_id):
        more = runtime.assumed(spec, model_id, folders)
        host.text(f"{model_id} is taken for {found.spec.title}" + (f"; {more}" if more else ""))
    return (found,)


def _check_address(folders: Folders, *, address: str) -> None:
    runtime.check_address(address)


def _choose_remote(
    host: Host, *, address: str, model_id: str, family: str, precision: str, quality: str
) -> tuple[ModelRef]:
    spec = spec_for_family(family)
    return (runtime.remote_model(address, spec, model_id, precision=precision, quality=quality, progress=host),)


LOADER = Node(
    id="TPUModelLoader",
    title="TPU Model Loader",
    description="Names one model for several nodes, this pack's or ComfyUI's own. Weights are read where and when "
    "they are used.",
    inputs=(
        Input(
            name="model_id",
            type="COMBO",
            default=SPECS[0].published.hub_id,
            options=tuple(spec.published.hub_id for spec in SPECS),
            files="models",
            tooltip="A Hugging Face repository, a folder under models/diffusers, a file under models/diffusion_models "
            "or models/checkpoints, or a built-in miniature. Another id, or a path, can be typed; files are joined "
            f"with{runtime.SEPARATOR}. Miniatures: {', '.join(spec.miniature.id for spec in SPECS)}.",
        ),
        _FAMILY,
        _PRECISION,
        *(
            Input(
                name=name,
                type="COMBO",
                default=AUTO,
                options=(AUTO,),
                files=folder,
                optional=True,
                advanced=True,
                tooltip=f"{text} {AUTO}: what model_id has, or the file in models/{folder} that fits.",
            )
            for name, (folder, text) in PARTS.items()
        ),
        _QUALITY,
    ),
    outputs=(_MODEL, *_CORE),
    gives_core=True,
    check=_check_choice,
    checks=("model_id", "family"),
    checked_too=tuple(PARTS),
    run=_choose,
)

REMOTE = Node(
    id="TPURemote",
    title="TPU Remote",
    description="Names one model, as TPU Model Loader does, whose stages another machine runs: one with "
    "`comfyui-tpu serve`. Previews, progress and errors come back, and Cancel ends the work there.",
    inputs=(
        Input(
            name="address",
            type="STRING",
            default="127.0.0.1:8190",
            tooltip="HOST:PORT where `comfyui-tpu serve` listens; of several, with commas between, each stage goes "
            "to one that is free. The owner of this machine must have listed them, in "
            "~/.config/comfyui-tpu/remotes or the environment variable COMFYUI_TPU_REMOTES.",
        ),
        Input(
            name="model_id",
            type="STRING",
            default=SPECS[0].published.hub_id,
            tooltip="As the other machine knows it: a Hugging Face repository, a folder there, a built-in miniature.",
        ),
        _FAMILY,
        _PRECISION,
        _QUALITY,
    ),
    outputs=(_MODEL,),
    check=_check_address,
    checks=("address",),
    run=_choose_remote,
)
