"""Names of a component's weight files and of the tensors in them, before any file is opened."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ..files import CheckpointError, read_json
from ..messages import compose
from ..model_spec import Component

Value = TypeVar("Value")
# Names of weight indices, the variant's before the last dot.
_INDICES = re.compile(r".+\.safetensors\.index(\.[\w-]+)?\.json")
# How the libraries name the weights of one file.
WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}


def list_weight_names(folder: Path, component: Component) -> list[str]:
    """Return names of a component's weight files: those of its index that hold a used tensor, or the single one.

    Looks for an index and for a single file with an unusual name; the files need not be there. A folder may have the
    same weights in several formats. Without the usual names a `variant` counts, in the sense of diffusers and
    transformers.
    """
    usual = WEIGHTS[component.library]
    singles = sorted(path.name for path in folder.glob("*.safetensors"))
    indices = [path for path in sorted(folder.glob("*.json")) if _INDICES.fullmatch(path.name)]
    index = min(indices, key=lambda path: _usualness(path.name, f"{usual}.index.json"), default=None)
    if index is None or (usual in singles and not index.name.endswith(".index.json")):
        if len(singles) == 1 or usual in singles:
            return singles if len(singles) == 1 else [usual]
        variants = (name for name in singles if re.fullmatch(rf"{usual.partition('.')[0]}\.\w+\.safetensors", name))
        return [next(variants, usual)]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(compose("checkpoint.index_without_weight_map", index=index))
    names = sorted(_select_used_files(component, weight_map))
    if strange := [name for name in names if not re.fullmatch(r"[\w.-]+\.safetensors", name)]:
        raise CheckpointError(compose("checkpoint.index_names_foreign_file", index=index, strange=repr(strange[0])))
    return names


def _usualness(name: str, usual: str) -> tuple[bool, bool, str]:
    """Return a sort key: the usual name first, then one of the usual form, then variants."""
    return name != usual, not name.endswith(".index.json"), name


def _select_used_files(component: Component, weight_map: Mapping[str, str]) -> set[str]:
    """Return the files of a weight index that hold a tensor which `only` and `layers` of a component keep."""
    files = key_by_module_name(weight_map, component.aliases)
    used: dict[str, range] = {}
    for path in component.blocks:
        numbers = [number for name in files if (number := layer_index(name, path)) is not None]
        used[path] = range(max(numbers, default=-1) + 1)[component.layers or slice(None)]

    def is_loaded(name: str) -> bool:
        layers = [(number, used[path]) for path in used if (number := layer_index(name, path)) is not None]
        return name.startswith(component.only or "") and all(number in used_layers for number, used_layers in layers)

    return {file for name, file in files.items() if is_loaded(name)}


def layer_index(name: str, path: str) -> int | None:
    """Return the index of the layer that a weight belongs to, in the list at `path`; None outside of it."""
    number = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
    return int(number) if number.isdecimal() else None


def to_module_name(name: str, aliases: Mapping[str, str]) -> str:
    """Return a checkpoint's name as the module has it.

    The longest prefix in `aliases` is replaced, then the full name.
    """
    prefix = max((part for part in aliases if part.endswith(".") and name.startswith(part)), key=len, default="")
    name = aliases.get(prefix, "") + name.removeprefix(prefix)
    return aliases.get(name, name)


def key_by_module_name(tensors: Mapping[str, Value], aliases: Mapping[str, str]) -> dict[str, Value]:
    """Return values by the module's names of tensors. If two names are one weight, the module's own has precedence."""
    pairs = [(to_module_name(name, aliases), name) for name in tensors]
    return {module_name: tensors[name] for module_name, name in sorted(pairs, key=lambda pair: pair[0] == pair[1])}
