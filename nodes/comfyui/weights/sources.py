"""Core's access to a network whose weights are in files: what core's nodes read apart from results."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import comfy.lora
import comfy.model_management
import comfy.utils
import torch

from ....tpu_runtime.files import TensorFile
from ....tpu_runtime.messages import compose
from . import writer
from .lazy_tensor import LazyTensor, from_file

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

# One of core's patches of a weight: strength, value, strength of the model, offset and function.
Patch: TypeAlias = tuple[Any, ...]


class CoreWeights:
    """The tensors of one of core's networks, by core's names."""

    def __init__(self, tensors: Mapping[str, TensorFile], flags: Iterable[str] = ()) -> None:
        self.tensors = tensors
        # Names of empty tensors that mark a kind of network and are not parameters.
        self.flags = tuple(flags)

    def stored(self, name: str) -> LazyTensor | None:
        """Return the tensor with this name, or None."""
        tensor = self.tensors.get(name)
        return None if tensor is None else from_file(tensor)


_NONE = CoreWeights({})


class FileWeightsMixin:
    """The methods of core's handle of a network that read its weights. Those in `model.tpu_source` are in files."""

    model: "BaseModel"
    patches: dict[str, list[Patch]]

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, torch.Tensor | LazyTensor]:
        known: CoreWeights = getattr(self.model, "tpu_source", _NONE)
        tensors = {name: x for name, x in self.model.state_dict().items() if name.startswith(filter_prefix or "")}
        stored = {name: known.stored(name) for name, x in tensors.items() if x.device.type == "meta"}
        return tensors | {name: x for name, x in stored.items() if x is not None}

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, list[tuple]]:
        """Return weights and their patches, for nodes that merge models."""
        return {
            name: [(value, _keep), *self.patches.get(name, ())]
            for name, value in self.model_state_dict(filter_prefix).items()
        }

    def patch_weight_to_device(
        self,
        key: str,
        device_to: object = None,
        inplace_update: bool = False,
        return_weight: bool = False,
        force_cast: bool = False,
    ) -> torch.Tensor | None:
        """Return a weight with its patches, for nodes such as LoraSave; the model keeps its own, which run on chips."""
        weight = self.model_state_dict(key).get(key)
        patches = select_applied_patches(self.model, key, self.patches.get(key, ()))
        return apply_patches(key, patches, weight) if patches and weight is not None else weight

    def model_state_dict_for_saving(self, model: object = None, prefix: str = "") -> dict[str, torch.Tensor]:
        """Return the weights with the patches applied."""
        tensors = {}
        for name, value in self.model_state_dict(prefix).items():
            patches = select_applied_patches(self.model, name, self.patches.get(name, ()))
            tensors[name.removeprefix(prefix)] = apply_patches(name, patches, value) if patches else value
        for name in getattr(self.model, "tpu_source", _NONE).flags:
            tensors[name.removeprefix(prefix)] = torch.empty(0)
        return tensors


def _keep(weight: torch.Tensor, **options: object) -> torch.Tensor:
    return weight


def select_applied_patches(model: torch.nn.Module, name: str, patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches of a weight without merges that core ignores.

    model, name: core's model, and the weight's name in it.
    Core ignores merges of parameters next to modules, such as Wan's `modulation`.
    """
    try:
        module = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return list(patches)  # our own replacement, whose weights all belong to modules
    has_modules = len(list(module.parameters(recurse=False))) < len(list(module.parameters()))
    return [patch for patch in patches if not (has_modules and isinstance(patch[1], list))]


def apply_patches(name: str, patches: list[Patch], weight: torch.Tensor) -> LazyTensor:
    """Return a weight `[...]` with patches applied as core does, in float32, then in the weight's own format.

    name: of the weight in core's model.
    """
    check_merge(name, patches, weight)
    return LazyTensor.from_reader(weight.shape, weight.dtype, lambda: _apply(name, patches, weight))


def patch_difference(name: str, patches: list[Patch], weight: torch.Tensor) -> LazyTensor:
    """Return the change of a weight `[...]` by patches in float32, computed when it is read.

    name: of the weight in core's model.
    """
    check_merge(name, patches, weight)

    def read() -> torch.Tensor:
        base = weight.float()
        return _apply(name, patches, base) - base

    return LazyTensor.from_reader(weight.shape, torch.float32, read)


def _apply(name: str, patches: list[Patch], weight: torch.Tensor) -> torch.Tensor:
    return comfy.lora.calculate_weight(patches, weight.float().clone(), name, intermediate_dtype=torch.float32)


def check_merge(name: str, patches: list[Patch], weight: torch.Tensor) -> None:
    """Raise ValueError for a merge with a weight of another shape `[...]`, which core would leave out.

    name, patches: the weight in core's model, and core's patches of it.
    """
    for _, value, *_ in patches:
        other = value[0][0] if isinstance(value, list) else None
        if other is not None and other.shape != weight.shape:
            raise ValueError(compose(
                "comfyui.merged_shapes_differ", name=name, first_shape=tuple(weight.shape),
                second_shape=tuple(other.shape),
            ))  # fmt: skip


def match_names(core: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Return core's names of a network's tensors, by our names `own`; core may have another number of layers."""
    known = {_pattern(name) for name in core}
    variants = {name: (name, f"model.{name}", name.replace("language_model.", "")) for name in own}
    pairs = {name: next((x for x in names if _pattern(x) in known), None) for name, names in variants.items()}
    return {name: match for name, match in pairs.items() if match is not None}


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def install_saving() -> None:
    """Make core's saving nodes write weights that are in files tensor by tensor, and refuse files without weights."""
    original = comfy.utils.save_torch_file
    if getattr(original, "is_tpu", False):
        return

    def save_torch_file(sd: dict[str, torch.Tensor], ckpt: str, metadata: dict[str, str] | None = None) -> None:
        if any(isinstance(tensor, LazyTensor) or tensor.device.type == "meta" for tensor in sd.values()):
            writer.save(sd, ckpt, metadata, comfy.model_management.throw_exception_if_processing_interrupted)
        else:
            original(sd, ckpt, metadata=metadata)

    save_torch_file.is_tpu = True  # pyright: ignore[reportFunctionMemberAccess]
    comfy.utils.save_torch_file = save_torch_file
