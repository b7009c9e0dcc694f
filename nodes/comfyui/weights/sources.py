"""Core's handle of a network whose weights are in files: what core's nodes ask it for beside a result."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.utils
import torch

from ....tpu_runtime.pipeline import TensorFile
from . import writer
from .stored import Stored, of_file


class CoreWeights:
    """The tensors of a network of core's, by core's names."""

    def __init__(self, tensors: Mapping[str, TensorFile], flags: Iterable[str] = ()) -> None:
        self.tensors = tensors
        # Empty ones, which say something of the network and are none of its parameters.
        self.flags = tuple(flags)

    def stored(self, name: str) -> Stored | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else of_file(tensor)


_NONE = CoreWeights({})


class Reading:
    """What of core's handle of a network looks at its weights. Those of `model.tpu_source` are in files."""

    model: Any
    patches: dict[str, list[Any]]

    def model_state_dict(self, filter_prefix: str | None = None) -> dict[str, torch.Tensor | Stored]:
        known: CoreWeights = getattr(self.model, "tpu_source", _NONE)
        found = {name: x for name, x in self.model.state_dict().items() if name.startswith(filter_prefix or "")}
        stored = {name: known.stored(name) for name, x in found.items() if x.device.type == "meta"}
        return found | {name: x for name, x in stored.items() if x is not None}

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, list[Any]]:
        """For nodes that merge models."""
        return {
            name: [(value, _as_it_is), *self.patches.get(name, ())]
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
        """A weight with its patches, for nodes such as LoraSave; none is put in its place, for those run on chips."""
        weight = self.model_state_dict(key).get(key)
        patches = merged_by_core(self.model, key, self.patches.get(key, ()))
        return patched(key, patches, weight) if patches and weight is not None else weight

    def model_state_dict_for_saving(self, model: Any = None, prefix: str = "") -> dict[str, torch.Tensor]:
        """With the patches in the weights."""
        found = {}
        for name, value in self.model_state_dict(prefix).items():
            patches = merged_by_core(self.model, name, self.patches.get(name, ()))
            found[name.removeprefix(prefix)] = patched(name, patches, value) if patches else value
        for name in getattr(self.model, "tpu_source", _NONE).flags:
            found[name.removeprefix(prefix)] = torch.empty(0)
        return found


def _as_it_is(weight: torch.Tensor, **options: Any) -> torch.Tensor:
    return weight


def merged_by_core(model: Any, name: str, patches: Iterable[Any]) -> list[Any]:
    """The patches of a weight without merges that core leaves out: of a parameter beside modules, such as Wan's
    `modulation`.
    """
    try:
        module = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return list(patches)  # of a network in core's place, whose weights are all of modules
    is_beside = len(list(module.parameters(recurse=False))) < len(list(module.parameters()))
    return [patch for patch in patches if not (is_beside and isinstance(patch[1], list))]


def patched(name: str, patches: list[Any], weight: torch.Tensor) -> Stored:
    """A weight with patches as core computes them, in float32, and in the weight's own format."""
    check_merge(name, patches, weight)
    return Stored.of(weight.shape, weight.dtype, lambda: _with(name, patches, weight))


def difference(name: str, patches: list[Any], weight: torch.Tensor) -> Stored:
    """What patches add to a weight, in float32; it is computed when it is read."""
    check_merge(name, patches, weight)

    def read() -> torch.Tensor:
        base = weight.float()
        return _with(name, patches, base) - base

    return Stored.of(weight.shape, torch.float32, read)


def _with(name: str, patches: list[Any], weight: torch.Tensor) -> torch.Tensor:
    return comfy.lora.calculate_weight(patches, weight.float().clone(), name, intermediate_dtype=torch.float32)


def check_merge(name: str, patches: list[Any], weight: torch.Tensor) -> None:
    """Raises ValueError for a weight of another model whose shape is another; core would leave it out."""
    for _, value, *_ in patches:
        other = value[0][0] if isinstance(value, list) else None
        if other is not None and other.shape != weight.shape:
            raise ValueError(
                f"A node merges two models whose {name} differ: {tuple(weight.shape)} and {tuple(other.shape)}. "
                "Weights of one shape can be merged. Connect two of the same model to the merging node, such as "
                "ModelMergeSimple or CLIPMergeSimple."
            )


def names_like(core: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Core's names of a network's tensors, by our `own`: core's network may have another number of layers."""
    known = {_pattern(name) for name in core}
    found = {name: (name, f"model.{name}", name.replace("language_model.", "")) for name in own}
    pairs = {name: next((one for one in each if _pattern(one) in known), None) for name, each in found.items()}
    return {name: one for name, one in pairs.items() if one is not None}


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def install() -> None:
    """Lets core's saving nodes write weights that are in files tensor by tensor, and no file without weights."""
    own = comfy.utils.save_torch_file
    if getattr(own, "is_tpu", False):
        return

    def save_torch_file(sd: dict[str, torch.Tensor], ckpt: str, metadata: Any = None) -> None:
        if any(isinstance(one, Stored) or one.device.type == "meta" for one in sd.values()):
            writer.save(sd, ckpt, metadata, comfy.model_management.throw_exception_if_processing_interrupted)
        else:
            own(sd, ckpt, metadata=metadata)

    save_torch_file.is_tpu = True
    comfy.utils.save_torch_file = save_torch_file
