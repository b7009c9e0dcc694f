"""How a file shows which network it holds: tensors that tell it, the makers' names, and what its config must be."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import CheckpointError, TensorFile
from ..model_spec import Table

Config = dict[str, Any]
AGAIN = "Download it again, or choose another."


class Shapes(Mapping[str, tuple[int, ...]]):
    """Shapes of a network's tensors by its own names. One that is missing, or of other dimensions, is an error."""

    def __init__(self, tensors: Mapping[str, TensorFile]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: the weight {name} is missing; the file is incomplete. {AGAIN}")
        return self._tensors[name].shape

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def of(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of a tensor of so many dimensions, none of them empty."""
        shape = self[name]
        if len(shape) != dimensions or 0 in shape:
            raise CheckpointError(
                f"{self.path}: the weight {name} has shape {shape}, and {dimensions} dimensions are expected. The "
                "file is damaged, or of another model."
            )
        return shape

    def dtype(self, name: str) -> str:
        """The format of a tensor that is there, as safetensors calls it."""
        return self._tensors[name].dtype

    def count(self, path: str) -> int:
        """How many layers the list at `path` has."""
        return count(self._tensors, path)

    @property
    def path(self) -> Path:
        """Of the file."""
        return next((tensor.path for tensor in self._tensors.values()), Path("the file"))


def count(names: Iterable[str], path: str) -> int:
    """How many layers the list at `path` has, by the names of tensors."""
    found = (re.match(rf"{re.escape(path)}\.(\d{{1,6}})\.", name) for name in names)
    return max((int(match.group(1)) for match in found if match), default=-1) + 1


def under(theirs: str, own: str, pairs: Mapping[str, str]) -> dict[str, str]:
    """Entries of a table: the makers' names in a module and ours, both with the module's before them."""
    return {f"{theirs}.{old}": f"{own}.{new}" for old, new in pairs.items()}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A key of a config that is true or false and that no weight's shape tells.

    The empty tensor `mark` says that it is true. Without it a name decides in which one of the patterns `true` or
    `false` is found. For the user who is asked, `meaning` says what the two are, and `answers` what to add for each.
    """

    mark: str
    true: str
    false: str
    meaning: str
    answers: str


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """How files hold a network of `class_name`.

    A file holds it if it has all tensors of one of `marks`; one that begins with `!` must not be there. `refused` are
    beginnings of names that only another network has, with what that is; `*` in one stands for a number. `relatives`
    are networks of the same tensors that compute something else, by a pattern that is found in their files' names, in
    small letters with `-` between words.
    `table(names)` is what the makers call its modules, where its component does not say it (see `Component`), for names
    of theirs or of diffusers;
    `config(shapes, base)` what tensors, by its own names, say of its config, over the published config `base`. Tensors
    whose names start with one of `ignored` belong to no network that is used; `flags` are keys of the config that
    weights do not tell. A tokenizer that is in the file has this `chat_template`.
    """

    class_name: str
    marks: tuple[tuple[str, ...], ...]
    config: Callable[[Shapes, Mapping[str, Any]], Config]
    table: Callable[[Iterable[str]], Table] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    relatives: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    flags: Mapping[str, Flag] = field(default_factory=dict)
    chat_template: str | None = None

    def is_in(self, names: Iterable[str]) -> bool:
        known = names if isinstance(names, set | frozenset | dict) else set(names)
        return any(all(_has(mark, known) for mark in marks) for marks in self.marks)


def _has(mark: str, names: Any) -> bool:
    return mark.removeprefix("!") not in names if mark.startswith("!") else mark in names
