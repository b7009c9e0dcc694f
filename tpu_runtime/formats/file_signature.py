"""Signatures of networks in single files: identifying tensors, original names, and derivation of the config."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import CheckpointError, TensorFile
from ..messages import compose
from ..model_spec import KeyTable

Config = dict[str, Any]
DOWNLOAD_AGAIN = compose("file.download_again")


class TensorShapes(Mapping[str, tuple[int, ...]]):
    """Shapes of a network's tensors by its own names. Missing tensors and other dimensions raise `CheckpointError`."""

    def __init__(self, tensors: Mapping[str, TensorFile]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise CheckpointError(
                compose("file.weight_missing", path=self.path, name=name, download_again=DOWNLOAD_AGAIN)
            )
        return self._tensors[name].shape

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def require(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a tensor of this number of dimensions, none of them empty.

        Raises `CheckpointError` otherwise.
        """
        shape = self[name]
        if len(shape) != dimensions or 0 in shape:
            raise CheckpointError(compose(
                "file.weight_dimensions_wrong", path=self.path, name=name, shape=shape, dimensions=dimensions,
            ))  # fmt: skip
        return shape

    def dtype(self, name: str) -> str:
        """Return the format of a tensor, as safetensors names it."""
        return self._tensors[name].dtype

    def count(self, path: str) -> int:
        """Return the number of layers in the list at `path`."""
        return count_layers(self._tensors, path)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return next((tensor.path for tensor in self._tensors.values()), Path("the file"))


def count_layers(names: Iterable[str], path: str) -> int:
    """Return the number of layers in the list at `path`, from the names of tensors."""
    matches = (re.match(rf"{re.escape(path)}\.(\d{{1,6}})\.", name) for name in names)
    return max((int(match.group(1)) for match in matches if match), default=-1) + 1


def prefix_keys(theirs: str, own: str, pairs: Mapping[str, str]) -> dict[str, str]:
    """Return entries of a key map: pairs of original and own names within a module.

    `theirs` and `own` are the module's names.
    """
    return {f"{theirs}.{old}": f"{own}.{new}" for old, new in pairs.items()}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A boolean config key that no weight's shape determines."""

    mark: str  # empty tensor whose presence means true
    true: str  # pattern of file names that mean true, without a mark
    false: str  # pattern of file names that mean false
    meaning: str  # of both values, in a question to the user
    answers: str  # additions to `model_id` for each value


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """The form of a network of `class_name` in single files."""

    class_name: str
    marks: tuple[tuple[str, ...], ...]  # alternatives of tensors that must all exist, or with `!` must not
    # from shapes by own names and the published config: the config's values that tensors determine
    config: Callable[[TensorShapes, Mapping[str, Any]], Config]
    # from names: original names of its modules, if its component does not have them
    table: Callable[[Iterable[str]], KeyTable] | None = None
    # prefixes of names that only another network has, with its description; `*` is a number
    refused: Mapping[str, str] = field(default_factory=dict)
    # patterns of file names (lower case, `-` between words) of other networks with the same tensors
    relatives: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # prefixes of tensors that no network uses
    flags: Mapping[str, Flag] = field(default_factory=dict)  # config keys that weights do not determine
    chat_template: str | None = None  # of a tokenizer in the file

    def matches(self, names: Iterable[str]) -> bool:
        """Return whether tensor names match one of `marks`."""
        known = names if isinstance(names, set | frozenset | dict) else set(names)
        return any(all(_has(mark, known) for mark in marks) for marks in self.marks)


def _has(mark: str, names: Container[str]) -> bool:
    return mark.removeprefix("!") not in names if mark.startswith("!") else mark in names
