"""Map of a network's module names in other projects' files, by the table of its original code."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..files import CheckpointError, TensorFile
from ..messages import compose
from ..model_spec import KeyTable, RowSlice
from . import tensor_views

# Prefixes that trainers add to a module's name, also several. Kohya and LyCORIS also replace dots by underscores.
SECOND_EXPERT = "transformer_2."
_DOTTED = (
    *("base_model.", "model.", "diffusion_model.", "transformer.", SECOND_EXPERT, "module."),
    *("unet.", "dit.", "pipe.", "lora_unet."),
)
_KOHYA, _COMFYUI = "lora_unet_", "diffusion_model."
_UNDERSCORED = re.compile(r"(?:lora_unet|lora_transformer|lycoris)_+")


class KeyMap:
    """A map of names in a file to a network's modules.

    It is made from the names of the network's `weights` and the `table` of original names.
    """

    def __init__(self, weights: Iterable[str], table: KeyTable) -> None:
        self.weights = frozenset(weights)
        own_names = {*self.weights, *(name.rpartition(".")[0] for name in self.weights)}
        self._dotted = {name: name for name in own_names}
        self._underscored = {name.replace(".", "_"): name for name in own_names}
        self._table = table

    def find(self, name: str) -> tuple[RowSlice, ...]:
        """Return the rows that a name of a module or parameter represents; () if unknown.

        The name may have a trainer's prefix.

        Diffusers' own names have precedence.
        """
        if match := _UNDERSCORED.match(name):
            targets = self._look_up(name[match.end() :], self._underscored, "_")
        else:
            # A network's own names may begin as trainers' prefixes do: `model.layers` of a language model.
            targets = self._look_up(name if name in self._dotted else strip_prefixes(name), self._dotted, ".")
        return targets if all(rows.name in self._dotted for rows in targets) else ()

    def _look_up(self, name: str, own: Mapping[str, str], dot: str) -> tuple[RowSlice, ...]:
        return (RowSlice(own[name]),) if name in own else lookup(name, self._table, dot)

    def comfyui_order(self, name: str, prefixes: Sequence[str]) -> int | None:
        """Return the rank of a name among those that ComfyUI accepts for one module of a LoRA; None for other names.

        The name with the highest rank counts.
        prefixes: of diffusers' names (see `Component.lora_prefixes`).
        """
        if name.startswith(_KOHYA):
            return 0 if name.removeprefix(_KOHYA) in self._comfyui_names["_"] else None
        if name.startswith(_COMFYUI) and name.removeprefix(_COMFYUI) in self._comfyui_names["."]:
            return 1
        for place, prefix in enumerate(prefixes, 2):
            known = self._underscored if prefix.endswith("_") else self._dotted
            if name.startswith(prefix) and name.removeprefix(prefix) in known:
                return place
        return None

    @functools.cached_property
    def _comfyui_names(self) -> Mapping[str, frozenset[str]]:
        """ComfyUI's own names of all modules, with dots and with underscores."""
        originals_ = (_find_original(name, self._table) for name in self._dotted.values())
        named = {original[0] for original in originals_ if original} | {
            name for name in self._dotted if not _find_original(name, self._table)
        }
        # Parts of a module that have names of their own in ComfyUI's map.
        parts = {
            _fill(pattern, match.groups())
            for pattern, rows in self._table.items()
            if not isinstance(rows, str) and any(target.squares for target in rows)
            for name in self._dotted
            if (match := _regex(rows[0].name).fullmatch(name))
        }
        return {".": frozenset(named | parts), "_": frozenset(name.replace(".", "_") for name in named)}


def lookup(name: str, table: KeyTable, dot: str = ".") -> tuple[RowSlice, ...]:
    """Return the rows that an original name of a module or parameter stands for; () if the table does not have it.

    dot: separator in `name`.
    """
    for pattern, target in table.items():
        if match := _regex(pattern.replace(".", dot)).fullmatch(name):
            rows = (RowSlice(target),) if isinstance(target, str) else target
            return tuple(replace(target, name=_fill(target.name, match.groups())) for target in rows)
    return ()


def to_diffusers(tensors: Mapping[str, TensorFile], table: KeyTable) -> dict[str, TensorFile]:
    """Return tensors by the names of diffusers and transformers. Names that the table does not have stay.

    Raises `CheckpointError` if two tensors get one name.
    """
    views: dict[str, TensorFile] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        rows = lookup(module, table) if table else ()
        # The authors of Flux call the weight of a norm its scale.
        ending = f".{'weight' if leaf == 'scale' else leaf}" if rows else ""
        for target in rows or lookup(name, table) or (RowSlice(name),):
            if target.name + ending in views:
                raise CheckpointError(compose(
                    "file.weight_twice", path=tensor.path, first_name=views[target.name + ending].name,
                    second_name=tensor.name, weight_name=target.name + ending,
                ))  # fmt: skip
            if not tensor.shape or tensor.shape[0] % target.of:
                if target.of > 1:
                    raise CheckpointError(compose(
                        "file.rows_not_in_groups", path=tensor.path, name=tensor.name, shape=tensor.shape, of=target.of,
                    ))  # fmt: skip
            views[target.name + ending] = tensor_views.row_view(tensor, target.groups, target.of)
    return views


def to_original(tensors: Mapping[str, TensorFile], table: KeyTable) -> dict[str, TensorFile]:
    """Return tensors of diffusers and transformers by their original names, with rows in the original order.

    The inverse of `translated`. If a module has several original names, the table's last one counts, which is
    ComfyUI's.
    """
    views: dict[str, TensorFile] = {}
    groups: dict[str, dict[int, TensorFile]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        theirs = _find_original(module, table)
        end = f".{leaf}" if theirs else ""
        pattern, rows = theirs or _find_original(name, table) or (name, RowSlice(name))
        if (rows.groups, rows.of) == ((0,), 1):
            views[pattern + end] = tensor
            continue
        group_views = groups.setdefault(pattern + end, {})
        for place, group in enumerate(rows.groups):
            group_views[group] = tensor_views.row_view(tensor, (place,), len(rows.groups))
    for name, parts in groups.items():
        joined = tensor_views.ConcatenatedView(tuple(parts[group] for group in sorted(parts)))
        views[name] = tensor_views.view(joined.sources[0], joined.shape, joined)
    return views


def _find_original(name: str, table: KeyTable) -> tuple[str, RowSlice] | None:
    """Return the original name of a module or parameter, and its rows there; None if unknown."""
    for pattern, target in reversed(tuple(table.items())):
        for rows in (RowSlice(target),) if isinstance(target, str) else target:
            if match := _regex(rows.name).fullmatch(name):
                return _fill(pattern, match.groups()), rows
    return None


def strip_prefixes(name: str) -> str:
    """Return a module's name without trainers' prefixes."""
    while prefix := next((prefix for prefix in _DOTTED if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(map(re.escape, pattern.split("*"))))


def _fill(pattern: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
