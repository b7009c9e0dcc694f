"""The node that lets another machine run a model's stages."""

from ..tpu_runtime import pipeline as runtime
from ..tpu_runtime.checkpoints.model_ref import ModelRef
from ..tpu_runtime.models import SPECS, spec_for_family
from ..tpu_runtime.precision import CHOICES
from .declare import Folders, Host, Input, Node, Output


def _check(folders: Folders, *, address: str) -> None:
    runtime.check_address(address)


def _choose(host: Host, *, address: str, model_id: str, family: str, precision: str) -> tuple[ModelRef]:
    spec = spec_for_family(family)
    return (runtime.remote_model(address, spec, model_id, precision=precision, progress=host),)


NODE = Node(
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
            "to one that is free. Their token, if they have one, is this process's environment variable "
            "COMFYUI_TPU_TOKEN.",
        ),
        Input(
            name="model_id",
            type="STRING",
            default=SPECS[0].hub_id,
            tooltip="As the other machine knows it: a Hugging Face repository, a folder there, a built-in miniature.",
        ),
        Input(
            name="family",
            type="COMBO",
            default=SPECS[0].family,
            options=tuple(dict.fromkeys(spec.family for spec in SPECS)),
            tooltip="The model's family: the nodes it is for.",
        ),
        Input(
            name="precision",
            type="COMBO",
            default="auto",
            options=CHOICES,
            optional=True,
            advanced=True,
            tooltip="Number format of weights and programs. auto is bfloat16 on a TPU; float32 is exact and slow.",
        ),
    ),
    outputs=(Output(name="model", type="TPU_MODEL", tooltip="For the `model` input of the family's nodes."),),
    check=_check,
    checks=("address",),
    run=_choose,
)
