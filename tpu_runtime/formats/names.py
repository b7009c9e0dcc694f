"""Names of a network's modules in files of other projects, looked up in the table of its original code."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..files import CheckpointError, TensorFile
from ..model_spec import Rows, Table
from . import stored

# Trainers put these before a module's name, also several. Kohya and LyCORIS turn dots into underscores as well.
SECOND_EXPERT = "transformer_2."
_DOTTED = (
    *("base_model.", "model.", "diffusion_model.", "transformer.", SECOND_EXPERT, "module."),
    *("unet.", "dit.", "pipe.", "lora_unet."),
)
_KOHYA, _COMFYUI = "lora_unet_", "diffusion_model."
_UNDERSCORED = re.compile(r"(?:lora_unet|lora_transformer|lycoris)_+")


class Names:
    """The modules that names in a file stand for, by the names of a network's `weights` and its makers' `table`."""

    def __init__(self, weights: Iterable[str], table: Table) -> None:
        self.weights = frozenset(weights)
        own = {*self.weights, *(name.rpartition(".")[0] for name in self.weights)}
        self._dotted = {name: name for name in own}
        self._underscored = {name.replace(".", "_"): name for name in own}
        self._table = table

    def find(self, name: str) -> tuple[Rows, ...]:
        """What a name of a module or parameter, with a trainer's prefix or without, is here; empty for one that is not.

        Diffusers' own names go first.
        """
        if match := _UNDERSCORED.match(name):
            found = self._look_up(name[match.end() :], self._underscored, "_")
        else:
            # A network's own names may begin as trainers' prefixes do: `model.layers` of a language model.
            found = self._look_up(name if name in self._dotted else bare(name), self._dotted, ".")
        return found if all(rows.name in self._dotted for rows in found) else ()

    def _look_up(self, name: str, own: Mapping[str, str], dot: str) -> tuple[Rows, ...]:
        return (Rows(own[name]),) if name in own else looked_up(name, self._table, dot)

    def comfyui_order(self, name: str, prefixes: Sequence[str]) -> int | None:
        """The place of a name among those that ComfyUI takes for one module of a LoRA file, of which the last one
        counts; None for a name that it does not take.

        `prefixes` are those before diffusers' names (see `Component.lora_prefixes`).
        """
        if name.startswith(_KOHYA):
            return 0 if name.removeprefix(_KOHYA) in self._theirs["_"] else None
        if name.startswith(_COMFYUI) and name.removeprefix(_COMFYUI) in self._theirs["."]:
            return 1
        for place, prefix in enumerate(prefixes, 2):
            own = self._underscored if prefix.endswith("_") else self._dotted
            if name.startswith(prefix) and name.removeprefix(prefix) in own:
                return place
        return None

    @functools.cached_property
    def _theirs(self) -> Mapping[str, frozenset[str]]:
        """ComfyUI's own names of all modules, with dots and with underscores."""
        found = (_original(name, self._table) for name in self._dotted.values())
        named = {one[0] for one in found if one} | {name for name in self._dotted if not _original(name, self._table)}
        # A part of a module that ComfyUI's map has under a name of its own.
        parts = {
            _filled(pattern, match.groups())
            for pattern, rows in self._table.items()
            if not isinstance(rows, str) and any(one.squares for one in rows)
            for name in self._dotted
            if (match := _regex(rows[0].name).fullmatch(name))
        }
        return {".": frozenset(named | parts), "_": frozenset(name.replace(".", "_") for name in named)}


def looked_up(name: str, table: Table, dot: str = ".") -> tuple[Rows, ...]:
    """What a makers' name of a module or parameter is here; empty for one that the table does not have."""
    for pattern, target in table.items():
        if match := _regex(pattern.replace(".", dot)).fullmatch(name):
            rows = (Rows(target),) if isinstance(target, str) else target
            return tuple(replace(one, name=_filled(one.name, match.groups())) for one in rows)
    return ()


def translated(tensors: Mapping[str, TensorFile], table: Table) -> dict[str, TensorFile]:
    """Tensors by the names of diffusers and transformers; those that the table does not have keep theirs.

    Of several tensors that would get one name `CheckpointError` names two.
    """
    found: dict[str, TensorFile] = {}
    for name, tensor in tensors.items():
        module, _, own = name.rpartition(".")
        rows = looked_up(module, table) if table else ()
        # The makers of Flux call the weight of a norm its scale.
        ending = f".{'weight' if own == 'scale' else own}" if rows else ""
        for one in rows or looked_up(name, table) or (Rows(name),):
            if one.name + ending in found:
                raise CheckpointError(
                    f"{tensor.path}: {found[one.name + ending].name} and {tensor.name} are both {one.name + ending}; "
                    "the file holds a weight twice. Use one as its makers published it."
                )
            if not tensor.shape or tensor.shape[0] % one.of:
                if one.of > 1:
                    raise CheckpointError(
                        f"{tensor.path}: {tensor.name} has shape {tensor.shape}, whose rows are no {one.of} equal "
                        "groups. The file is damaged, or of another model."
                    )
            found[one.name + ending] = stored.of_rows(tensor, one.groups, one.of)
    return found


def originals(tensors: Mapping[str, TensorFile], table: Table) -> dict[str, TensorFile]:
    """`translated` backwards: tensors of diffusers and transformers by their makers' names, rows in their order.

    Where makers have several names for a module, the table's last one counts: ComfyUI's, where it has one of its own.
    """
    found: dict[str, TensorFile] = {}
    groups: dict[str, dict[int, TensorFile]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        theirs = _original(module, table)
        end = f".{leaf}" if theirs else ""
        pattern, rows = theirs or _original(name, table) or (name, Rows(name))
        if (rows.groups, rows.of) == ((0,), 1):
            found[pattern + end] = tensor
            continue
        own = groups.setdefault(pattern + end, {})
        for place, group in enumerate(rows.groups):
            own[group] = stored.of_rows(tensor, (place,), len(rows.groups))
    for name, parts in groups.items():
        joined = stored.Joined(tuple(parts[group] for group in sorted(parts)))
        found[name] = stored.made_of(joined.sources[0], joined.shape, joined)
    return found


def _original(name: str, table: Table) -> tuple[str, Rows] | None:
    """The makers' name of what is here a module or parameter, and which of its rows that is."""
    for pattern, target in reversed(tuple(table.items())):
        for rows in (Rows(target),) if isinstance(target, str) else target:
            if match := _regex(rows.name).fullmatch(name):
                return _filled(pattern, match.groups()), rows
    return None


def bare(name: str) -> str:
    while prefix := next((prefix for prefix in _DOTTED if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(map(re.escape, pattern.split("*"))))


def _filled(pattern: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
