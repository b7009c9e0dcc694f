"""A network of a model, as data: its class and sizes, what a checkpoint must say of it, names and rules of weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from ...sharding.rules import Rule


@dataclass(frozen=True)
class Need:
    """What a config must have at a key for the component to run here: one of `values`, or what `fits`, see `wording`.

    Where the key is missing, upstream's default counts: it is among these, unless the key is `required`.
    """

    values: tuple[Any, ...] = ()
    _: KW_ONLY
    fits: Callable[[Any], bool] | None = None
    wording: str = ""
    required: bool = False


def has_length(length: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) == length


@dataclass(frozen=True)
class Same:
    """A config's value must be `times` that of `key` in another component's config."""

    component: str
    key: str
    times: int = 1


def freeze(record: Any) -> None:
    """Makes the mappings among a frozen dataclass's fields read-only."""
    for one in fields(record):
        value = getattr(record, one.name)
        if isinstance(value, Mapping):
            object.__setattr__(record, one.name, MappingProxyType(dict(value)))


@dataclass(frozen=True)
class Rows:
    """Row groups `groups`, in that order, of the original module, which is divided into `of` equal groups.

    With `squares` the original module is only the first rows of this one: that many times as many as it has columns.
    """

    name: str
    groups: tuple[int, ...] = (0,)
    of: int = 1
    squares: int = 0


# Original names of modules (or single parameters), to diffusers' names; in both `*` stands for a number.
Table = Mapping[str, str | tuple[Rows, ...]]


def split(*names: str) -> tuple[Rows, ...]:
    """Modules of equal size that the original has as one."""
    return tuple(Rows(name, (index,), len(names)) for index, name in enumerate(names))


def swapped(name: str) -> tuple[Rows, ...]:
    """A module whose two halves are in the other order in the original: shift before scale."""
    return (Rows(name, (1, 0), 2),)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One neural network of a model: the folder of its checkpoint called `name`, unless `folder` says another.

    `config` holds the real architecture (the published `config.json`), `tiny` that of the built-in checkpoint, of which
    only what differs need be given. `needs` says which numbers of a checkpoint's own config this code relies on, by key
    (`a.b` for a nested one). `blocks` are the attribute paths of lists of equal blocks, each traced once and scanned;
    `layers` says which of each list are used, where not all are. `only` keeps the parameters whose names start so (a
    decoder of a VAE). `aliases` maps names in checkpoints to the module's: those of tied weights, and those that
    other versions of the libraries wrote, which upstream translates while loading. One that ends in a dot stands for
    all names that start so; the longest counts, and full names are looked up after it. `class_aliases` are names of
    the class that checkpoints have and upstream translates; where that is of a whole model, of which this network is a
    part, `config_part` is the key of its own config in that model's. `trim(module)` may drop what is not needed and put
    parts of a weight in its place (see `modules.Cut`). `makers_names` are the original names (see `formats.names`).
    `lora_prefixes` stand before diffusers' names in the LoRA files that ComfyUI takes, in the order of its map.
    `own_class()` is the class where no library has it, or not each of its versions under its name.
    """

    name: str
    folder: str = ""
    library: str
    class_name: str
    config: Mapping[str, Any]
    tiny: Mapping[str, Any]
    rules: tuple[Rule, ...]
    needs: Mapping[str, Need | Same] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    layers: slice | None = None
    only: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    class_aliases: tuple[str, ...] = ()
    config_part: str = ""
    trim: Callable[[Any], None] | None = None
    makers_names: Table = field(default_factory=dict)
    lora_prefixes: tuple[str, ...] = ()
    own_class: Callable[[], type] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiny", {**self.config, **self.tiny})
        object.__setattr__(self, "folder", self.folder or self.name)
        freeze(self)

    def whole(self, others: "Sequence[Component]") -> str:
        """The class that a folder is of that holds this network and `others`: the one of which they are parts."""
        classes = {component.class_name for component in (self, *others)}
        if len(classes) == 1:
            return self.class_name
        (found,) = frozenset(self.class_aliases).intersection(*(other.class_aliases for other in others))
        return found

    def extended(self, *, rules: tuple[Rule, ...] = (), **tables: Mapping[str, Any]) -> "Component":
        """A variant of this network: entries more or others in its `tables` (`config`, `tiny`, `needs`,
        `makers_names`), and `rules` that come before its own.
        """
        merged: dict[str, Any] = {name: {**getattr(self, name), **entries} for name, entries in tables.items()}
        return replace(self, rules=(*rules, *self.rules), **merged)
