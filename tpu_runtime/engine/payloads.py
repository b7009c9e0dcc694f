"""What travels between the stages."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .memory_advice import OutOfMemory as OutOfMemory

if TYPE_CHECKING:
    import torch

    from .payloads import Conditioning, ImageCondition


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
    tensors: "Mapping[str, torch.Tensor]", numbers: Mapping[str, int], family: str
) -> "tuple[Conditioning | None, Conditioning | None]":
    """What `pack_embeddings` packed; None for what is not there."""
    values = {**tensors, **numbers}

    def unpacked(name: str) -> "Conditioning | None":
        if name not in tensors:
            return None
        info = {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}
        return [[tensors[name], {"tpu_family": family, **info}]]

    return unpacked("prompt_embeds"), unpacked("negative_prompt_embeds")


if TYPE_CHECKING:
    import torch


# ComfyUI's CONDITIONING: one tensor `[1, length, dim]` with a dict that says where it comes from.
Conditioning = list


# An encoded image: a dict of CPU tensors with the family and the size it was encoded for.
ImageCondition = dict
