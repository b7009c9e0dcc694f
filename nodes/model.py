"""Nodes that select a model for other nodes: one that runs here, or on another machine."""

from collections.abc import Collection

from ..tpu_runtime import api as runtime
from ..tpu_runtime.checkpoints.file_resolution import SEPARATOR, names_single_files
from ..tpu_runtime.checkpoints.model_ref import ModelRef, choose_model, describe_ambiguity
from ..tpu_runtime.messages import compose
from ..tpu_runtime.model_spec import QUALITIES, ModelSpec, Quality, describe_qualities
from ..tpu_runtime.models import SPECS, published, spec_for_family
from ..tpu_runtime.precision import CHOICES
from . import inputs
from .declare import Folders, Input, Node, NodeContext, Output, Value, Values

_FAMILY = Input(
    name="family",
    type="COMBO",
    default=SPECS[0].family,
    options=tuple(dict.fromkeys(spec.family for spec in SPECS)),
    tooltip="Family of the model. Must be that of the nodes it is connected to.",
)
_PRECISION = Input(
    name="precision",
    type="COMBO",
    default="auto",
    options=CHOICES,
    optional=True,
    advanced=True,
    tooltip=inputs.INPUT_DOCS["precision"].tooltip,
)
_QUALITY = Input(
    name="quality",
    type="COMBO",
    default=Quality.EXACT.value,
    options=QUALITIES,
    optional=True,
    advanced=True,
    tooltip=f"Default quality for samplers that do not set one, including ComfyUI's own: {describe_qualities()}.",
)
# Choice for a part that comes with the model, or from ComfyUI's folders.
AUTO = "auto"
# Parts of a model in separate files: ComfyUI's folder and the tooltip of each, in the order of a model id.
PART_WIDGETS = {
    "low_noise_model": ("diffusion_models", "File of the low-noise denoiser, for models with two."),
    "text_encoder": ("text_encoders", "File of the text encoder."),
    "text_encoder_2": ("text_encoders", "File of the second text encoder, for models with two."),
    "vae": ("vae", "File of the VAE, or of a light decoder such as taew2_1 (faster, not exact)."),
    "image_encoder": ("clip_vision", "File of the image encoder, for models that take an image."),
}


# Values of the `type` widget of ComfyUI's own loaders of text encoders.
CLIP_TYPES = tuple(dict.fromkeys(spec.core.clip_type for spec in SPECS if spec.core.clip_type))


def specs_of_clip_type(kind: str) -> tuple[ModelSpec, ...]:
    """Return the models whose text encoders have this `type`. Raises ValueError for an unsupported type."""
    if kind not in CLIP_TYPES:
        raise ValueError(compose("comfyui.clip_type_unsupported", kind=kind, clip_types=", ".join(CLIP_TYPES)))
    return tuple(spec for spec in SPECS if spec.core.clip_type == kind)


def parse_quality(weight_dtype: Value) -> str:
    """Return the quality that a ComfyUI loader's `weight_dtype` stands for; exact for any other value."""
    return weight_dtype if weight_dtype in QUALITIES else Quality.EXACT.value


def join_model_id(values: Values) -> str:
    """Return the model id of a loader's widgets: `model_id`, joined with the files chosen for its parts."""
    parts = [str(values[name]) for name in PART_WIDGETS if values.get(name) not in (None, "", AUTO)]
    return SEPARATOR.join([str(values["model_id"]).strip(), *parts])


def build_catalogue(here: Collection[str] = ()) -> dict[str, dict[str, Value]]:
    """Return the page's table of models, by every id that is known in advance: Hub ids, tiny models, published files.

    here: Hub ids that need no download.
    Each entry has `download`, the sizes of its files by format, "" if nothing has to be downloaded, and `unused`, the
    widgets without effect.
    """
    table = {}
    for spec in SPECS:
        entry = {
            "name": spec.name,
            "title": spec.title,
            "family": spec.family,
            "unused": inputs.list_unused_widgets(spec),
        }
        entry |= {"download": "", "is_miniature": False}
        files = published.list_denoisers(spec.name)
        table |= dict.fromkeys(files, entry)
        table |= {name: {**entry, "is_miniature": True} for name in spec.miniature.ids}
        hub_id = spec.published.hub_id
        table[hub_id] = {**entry, "download": "" if hub_id in here else published.describe_sizes(spec.name)}
    return table


_MODEL = Output(name="model", type="TPU_MODEL", tooltip="For the `model` input of the family's nodes.")

_ON_TPU = "runs on the TPU, created on first use."
_CORE = (
    Output(name="MODEL", type="MODEL", tooltip=f"For KSampler and other ComfyUI samplers; {_ON_TPU}"),
    Output(name="CLIP", type="CLIP", tooltip=f"For CLIPTextEncode and similar nodes; {_ON_TPU}"),
    Output(name="VAE", type="VAE", tooltip=f"For VAEDecode, VAEEncode and similar nodes; {_ON_TPU}"),
    Output(name="MODEL, low noise", type="MODEL", tooltip="The low-noise denoiser, for models with two."),
)


def _check_choice(folders: Folders, *, family: str, **parts: str) -> None:
    choose_model(spec_for_family(family), join_model_id(parts), folders=folders.models)


def _choose(host: NodeContext, *, family: str, precision: str, quality: str, **parts: str) -> tuple[ModelRef]:
    spec, folders, model_id = spec_for_family(family), host.folders.models, join_model_id(parts)
    chosen = choose_model(spec, model_id, precision=precision, quality=quality, folders=folders, progress=host)
    if names_single_files(model_id):
        more = describe_ambiguity(spec, model_id, folders)
        host.text(f"{model_id} is treated as {chosen.spec.title}" + (f"; {more}" if more else ""))
    return (chosen,)


def _check_address(folders: Folders, *, address: str) -> None:
    runtime.check_address(address)


def _choose_remote(
    host: NodeContext, *, address: str, model_id: str, family: str, precision: str, quality: str
) -> tuple[ModelRef]:
    spec = spec_for_family(family)
    return (runtime.choose_remote_model(address, spec, model_id, precision=precision, quality=quality, progress=host),)


LOADER = Node(
    id="TPUModelLoader",
    title="TPU Model Loader",
    description="Selects one model for several nodes, this pack's or ComfyUI's own. Weights are loaded when they are "
    "first used.",
    inputs=(
        Input(
            name="model_id",
            type="COMBO",
            default=SPECS[0].published.hub_id,
            options=tuple(spec.published.hub_id for spec in SPECS),
            files="models",
            tooltip="A Hugging Face repository, a folder under models/diffusers, a file under models/diffusion_models "
            f"or models/checkpoints, or a built-in tiny model ({', '.join(spec.miniature.id for spec in SPECS)}). "
            f"Other ids and paths can be typed; join files with '{SEPARATOR}'.",
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
                tooltip=f"{text} {AUTO}: the file of model_id, or one in models/{folder} that matches.",
            )
            for name, (folder, text) in PART_WIDGETS.items()
        ),
        _QUALITY,
    ),
    outputs=(_MODEL, *_CORE),
    gives_core=True,
    check=_check_choice,
    checks=("model_id", "family"),
    also_validated_inputs=tuple(PART_WIDGETS),
    run=_choose,
)

REMOTE = Node(
    id="TPURemote",
    title="TPU Remote",
    description="Selects one model, as TPU Model Loader does, and runs its stages on another machine with "
    "`comfyui-tpu serve`. Previews, progress and errors are sent back; Cancel stops the work there.",
    inputs=(
        Input(
            name="address",
            type="STRING",
            default="127.0.0.1:8190",
            tooltip="HOST:PORT of `comfyui-tpu serve`; with several, separated by commas, each stage goes to a free "
            "one. The owner of this machine must list them in ~/.config/comfyui-tpu/remotes or the environment "
            "variable COMFYUI_TPU_REMOTES.",
        ),
        Input(
            name="model_id",
            type="STRING",
            default=SPECS[0].published.hub_id,
            tooltip="A Hugging Face repository, a folder on the other machine, or a built-in tiny model.",
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
