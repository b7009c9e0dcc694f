"""What lies between the stages, as files of a folder, so that each stage may run in another process or machine.

`stage1_embeddings.safetensors`, `stage2_latents.safetensors`, and `generation_config.json` with the settings and the
model that made them.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import conditioning

if TYPE_CHECKING:
    import torch

    from .stages import Condition, Conditioning, ModelRef

EMBEDDINGS = "stage1_embeddings.safetensors"
LATENTS = "stage2_latents.safetensors"
CONFIG = "generation_config.json"
_CONDITION = "condition."


class StageFileError(ValueError):
    """Stage files that are missing, damaged or another model's, in a sentence for the user."""


def save_embeddings(
    folder: Path,
    prompt_embeds: "Conditioning",
    negative_prompt_embeds: "Conditioning | None",
    model: "ModelRef",
    condition: "Condition | None" = None,
) -> None:
    """Writes the encoded prompts, and an encoded picture if there is one, to `folder`, which is made if need be.

    Tensor names are `prompt_embeds`, `negative_prompt_embeds`, and with a dot and their name after it what further text
    encoders gave; those of a picture are `condition.<name>`. Whole numbers (lengths, the size that a picture was
    encoded for) are the file's metadata under the same kind of name.
    """
    for name, given in {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}.items():
        if given is not None:
            conditioning.entry(model.spec, name, given)
    tensors, numbers = pack_embeddings(prompt_embeds, negative_prompt_embeds)
    if condition is not None:
        tensors |= {f"{_CONDITION}{key}": value for key, value in condition["tensors"].items()}
        numbers |= {f"{_CONDITION}{key}": str(value) for key, value in condition.items() if isinstance(value, int)}
    _save(folder / EMBEDDINGS, tensors, numbers)
    update_config(folder, {"model_name": model.spec_name, "model_id": model.model_id})


def pack_embeddings(
    prompt_embeds: "Conditioning", negative_prompt_embeds: "Conditioning | None"
) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    """Tensors and metadata of a safetensors file, named as `save_embeddings` says."""
    tensors, numbers = {}, {}
    named = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}
    for name, given in named.items():
        if given is not None:
            tensors[name], info = given[0]
            tensors |= {f"{name}.{key}": value for key, value in info.items() if hasattr(value, "shape")}
            numbers |= {f"{name}.{key}": str(value) for key, value in info.items() if isinstance(value, int)}
    return tensors, numbers


def unpack_embeddings(
    tensors: "Mapping[str, torch.Tensor]", numbers: Mapping[str, str], family: str
) -> "tuple[Conditioning | None, Conditioning | None]":
    """What `pack_embeddings` packed; None for what is not there."""
    values = {**tensors, **{key: int(value) for key, value in numbers.items()}}

    def unpacked(name: str) -> "Conditioning | None":
        if name not in tensors:
            return None
        info = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        return [[tensors[name], {"tpu_family": family, **info}]]

    return unpacked("prompt_embeds"), unpacked("negative_prompt_embeds")


def load_embeddings(folder: Path, model: "ModelRef") -> "tuple[Conditioning, Conditioning | None]":
    """The encoded prompts of `folder`; raises `StageFileError` where another model made them."""
    prompt, negative = unpack_embeddings(*_load(folder, EMBEDDINGS, "encode", model), model.spec.family)
    if prompt is None:
        raise StageFileError(f"{folder / EMBEDDINGS} holds no prompt_embeds; run `comfyui-tpu encode` again.")
    return prompt, negative


def metadata(content: bytes) -> dict[str, str]:
    """The metadata in a safetensors file's bytes: its header is JSON after its length in eight bytes."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]).get("__metadata__", {})


def load_condition(folder: Path, model: "ModelRef") -> "Condition | None":
    """The encoded picture of `folder`, None where there is none; raises `StageFileError` for another model's."""
    tensors, numbers = _load(folder, EMBEDDINGS, "encode", model)
    found = {key.removeprefix(_CONDITION): x for key, x in tensors.items() if key.startswith(_CONDITION)}
    size = {key.removeprefix(_CONDITION): int(x) for key, x in numbers.items() if key.startswith(_CONDITION)}
    return {"tpu_family": model.spec.family, **size, "tensors": found} if found else None


def save_latents(folder: Path, latents: Mapping[str, Any], model: "ModelRef") -> None:
    """Writes a LATENT to `folder`."""
    _save(folder / LATENTS, {"latents": latents["samples"]}, {})
    update_config(folder, {"model_name": model.spec_name, "model_id": model.model_id})


def load_latents(folder: Path, model: "ModelRef") -> dict[str, Any]:
    """The LATENT of `folder`; raises `StageFileError` where another model made it."""
    tensors, _ = _load(folder, LATENTS, "denoise", model)
    return {"samples": tensors["latents"]}


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in `folder`; empty where there are none."""
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise StageFileError(f"{path} is not valid JSON ({error}). Mend or delete it.") from error


def update_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Adds `values` to the folder's settings."""
    merged = {**read_config(folder), **values}
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / CONFIG, json.dumps(merged, indent=2, ensure_ascii=False).encode())


def _save(path: Path, tensors: "Mapping[str, torch.Tensor]", metadata: dict[str, str]) -> None:
    from safetensors.torch import save

    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=metadata))


def _replace(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(content)
    os.replace(scratch, path)


def _load(folder: Path, name: str, stage: str, model: "ModelRef") -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    from safetensors import SafetensorError, safe_open

    maker = read_config(folder).get("model_name", model.spec_name)
    if maker != model.spec_name:
        raise StageFileError(f"{folder} was made by {maker}; it cannot be continued with {model.spec_name}.")
    path = folder / name
    if not path.is_file():
        raise StageFileError(f"{path} is missing; run `comfyui-tpu {stage} --folder {folder}` first.")
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            return tensors, file.metadata() or {}
    except SafetensorError as error:
        raise StageFileError(f"{path} is damaged ({error}); run `comfyui-tpu {stage}` again.") from error
