"""The node that adds a LoRA to a model."""

from collections.abc import Hashable
from pathlib import Path

from ..tpu_runtime import api as runtime
from ..tpu_runtime.checkpoints.model_ref import LORA_EXPERTS, Expert, Lora, ModelRef
from ..tpu_runtime.messages import compose
from .declare import Folders, Input, Node, NodeContext, Output

# Largest strength, as in ComfyUI's own loader.
_HIGH = 100.0


def find_lora(folders: Folders, *, lora_name: str) -> Path:
    """Return the path of a LoRA's file. A host that is not confined also accepts a path.

    Raises ValueError if the file does not exist, or is not a .safetensors file.
    """
    name = lora_name.strip()
    if not name:
        raise ValueError(compose("lora.name_empty", loras=_join(folders.loras)))
    if folders.confined and (Path(name).is_absolute() or ".." in Path(name).parts):
        raise ValueError(compose("lora.name_outside_folder", name=name, loras=_join(folders.loras)))
    local = () if folders.confined else (Path(name).expanduser(), folders.workflow / name)
    candidates = (*local, *(Path(folder) / name for folder in folders.loras))
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        raise ValueError(compose("lora.name_not_found", name=name, loras=_join(folders.loras)))
    if file.suffix != ".safetensors":
        raise ValueError(compose("lora.name_not_safetensors", name=name))
    return file


def _join(folders: tuple[str, ...]) -> str:
    return " or ".join(folders) or "models/loras"


def _add(host: NodeContext, *, model: ModelRef, lora_name: str, strength: float, expert: str) -> tuple[ModelRef, str]:
    path = find_lora(host.folders, lora_name=lora_name)
    return runtime.add_lora(model, Lora(path=str(path), strength=strength, expert=expert), progress=host)


def _fingerprint(folders: Folders, *, lora_name: str, **_: object) -> Hashable:
    """Return the file's path, size and time of the last write."""
    path = find_lora(folders, lora_name=lora_name)
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns


LOADER = Node(
    id="TPULoraLoader",
    title="TPU LoRA Loader",
    description="Adds a LoRA to a model; chain nodes to add several. LoRAs are merged into the weights on the TPU, "
    "exactly, at the next run; a change of strength recompiles and reloads nothing else.",
    inputs=(
        Input(name="model", type="TPU_MODEL", tooltip="From TPU Model Loader, or another TPU LoRA Loader."),
        Input(
            name="lora_name",
            type="COMBO",
            default="",
            files="loras",
            tooltip="A .safetensors file in models/loras: LoRA, LoHa, LoKr, DoRA or full weight differences. Key names "
            "may be those of diffusers, PEFT, kohya or the model authors.",
        ),
        Input(
            name="strength",
            type="FLOAT",
            default=1.0,
            low=-_HIGH,
            high=_HIGH,
            step=0.01,
            tooltip="LoRA strength. 0 disables it; negative values invert it.",
        ),
        Input(
            name="expert",
            type="COMBO",
            default=Expert.BOTH.value,
            options=LORA_EXPERTS,
            optional=True,
            tooltip="Which denoiser gets the LoRA, for models with two (Wan 2.2): high noise, which runs first, low "
            "noise, or both.",
        ),
    ),
    outputs=(
        Output(name="model", type="TPU_MODEL", tooltip="The model with the LoRA, for the family's nodes."),
        Output(name="report", type="STRING", tooltip="Which parts of the file apply, and which do not."),
    ),
    check=find_lora,
    checks=("lora_name",),
    run=_add,
    fingerprint=_fingerprint,
)
