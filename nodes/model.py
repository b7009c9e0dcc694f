"""The nodes that name a model for others: one that runs here, or on another machine."""

from ..tpu_runtime import pipeline as runtime
from ..tpu_runtime.pipeline import CHOICES, SPECS, ModelRef, choose_model, spec_for_family
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
    tooltip="Number format of weights and programs. auto is bfloat16 on a TPU; float32 is exact and slow.",
)
_MODEL = Output(name="model", type="TPU_MODEL", tooltip="For the `model` input of the family's nodes.")


def _check_choice(folders: Folders, *, model_id: str, family: str) -> None:
    choose_model(spec_for_family(family), model_id, folders=folders.models)


def _choose(host: Host, *, model_id: str, family: str, precision: str) -> tuple[ModelRef]:
    spec, folders = spec_for_family(family), host.folders.models
    return (choose_model(spec, model_id, precision=precision, folders=folders, progress=host),)


def _check_address(folders: Folders, *, address: str) -> None:
    runtime.check_address(address)


def _choose_remote(host: Host, *, address: str, model_id: str, family: str, precision: str) -> tuple[ModelRef]:
    spec = spec_for_family(family)
    return (runtime.remote_model(address, spec, model_id, precision=precision, progress=host),)


LOADER = Node(
    id="TPUModelLoader",
    title="TPU Model Loader",
    description="Names one model for several nodes. Weights are read where and when they are used.",
    inputs=(
        Input(
            name="model_id",
            type="STRING",
            default=SPECS[0].published.hub_id,
            tooltip="A Hugging Face repository, a folder in diffusers layout, the name of a folder under "
            f"models/diffusers, or a built-in miniature: {', '.join(spec.miniature.id for spec in SPECS)}.",
        ),
        _FAMILY,
        _PRECISION,
    ),
    outputs=(_MODEL,),
    check=_check_choice,
    checks=("model_id", "family"),
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
    ),
    outputs=(_MODEL,),
    check=_check_address,
    checks=("address",),
    run=_choose_remote,
)
