"""The description of one network: class, sizes, requirements on a checkpoint, weight names and sharding rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from ...sharding.rules import Rule

# A JSON object, such as a parsed `config.json`.
Json = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigRequirement:
    """A requirement on a config's value.

    If the key is missing, upstream's default is assumed to be allowed, unless `required`.
    """

    values: tuple[Any, ...] = ()  # allowed ones
    _: KW_ONLY
    fits: Callable[[Any], bool] | None = None  # returns whether a value that is not among `values` is allowed
    wording: str = ""  # of such values, for messages
    required: bool = False


def require_length(length: int) -> Callable[[Any], bool]:
    """Return a predicate for `ConfigRequirement.fits`: the value is a tuple of this length."""
    return lambda value: isinstance(value, tuple) and len(value) == length


@dataclass(frozen=True)
class EqualsConfig:
    """A requirement that a config's value equals `times` that of `key` in another component's config."""

    component: str
    key: str
    times: int = 1


def freeze_mappings(record: Any) -> None:
    """Make the mappings among a frozen dataclass's fields read-only."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, Mapping):
            object.__setattr__(record, entry.name, MappingProxyType(dict(value)))


@dataclass(frozen=True)
class RowSlice:
    """The rows of an original module that are this module: `groups`, in that order, of `of` equal groups."""

    name: str  # of this module, in diffusers' naming
    groups: tuple[int, ...] = (0,)
    of: int = 1
    squares: int = 0  # if not 0, the original is only the first `squares * columns` rows of this module


# Original names of modules (or single parameters) to diffusers' names. In both `*` stands for a number.
KeyTable = Mapping[str, str | tuple[RowSlice, ...]]


def split_rows(*names: str) -> tuple[RowSlice, ...]:
    """Return the targets of one original module that is split into modules `names` of equal size."""
    return tuple(RowSlice(name, (index,), len(names)) for index, name in enumerate(names))


def swap_halves(name: str) -> tuple[RowSlice, ...]:
    """Return the target of a module whose two halves have the other order in the original: shift before scale."""
    return (RowSlice(name, (1, 0), 2),)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One neural network of a model."""

    name: str  # unique in the model
    folder: str = ""  # of the checkpoint; defaults to `name`
    library: str  # "diffusers" or "transformers"
    class_name: str  # upstream's
    config: Json  # published `config.json`
    tiny: Json  # config of the built-in checkpoint; only differences need be given
    rules: tuple[Rule, ...]  # sharding of the weights
    # requirements on a checkpoint's config by key (`a.b` for a nested one)
    needs: Mapping[str, ConfigRequirement | EqualsConfig] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()  # attribute paths of lists of equal blocks; each is traced once and scanned
    layers: slice | None = None  # the layers of each list that are used; None for all
    only: tuple[str, ...] = ()  # prefixes of the parameters that are kept, such as a VAE's decoder; () for all
    # names in checkpoints to the module's, for tied weights and names of older library versions; a name that ends in a
    # dot is a prefix, the longest counts, and the full result is looked up after it
    aliases: Mapping[str, str] = field(default_factory=dict)
    class_aliases: tuple[str, ...] = ()  # other class names in checkpoints that upstream maps to this one
    config_part: str = ""  # key of this network's config in that of the whole model, if an alias is such a model
    # drops unused modules and may replace weights by slices (see `upstream_network.WeightSlice`)
    trim: Callable[[Any], None] | None = None
    original_keys: KeyTable = field(default_factory=dict)  # original names (see `formats.names`)
    lora_prefixes: tuple[str, ...] = ()  # prefixes of diffusers' names in LoRA files that ComfyUI accepts, in its order
    # returns the class, if no library has it under its name in every version
    own_class: Callable[[], type] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiny", {**self.config, **self.tiny})
        object.__setattr__(self, "folder", self.folder or self.name)
        freeze_mappings(self)

    def whole(self, others: "Sequence[Component]") -> str:
        """Return the class of a folder that holds this network and `others`.

        It is the upstream model of which they are parts.
        """
        classes = {component.class_name for component in (self, *others)}
        if len(classes) == 1:
            return self.class_name
        (parent,) = frozenset(self.class_aliases).intersection(*(other.class_aliases for other in others))
        return parent

    def derive(self, *, rules: tuple[Rule, ...] = (), **tables: Json) -> "Component":
        """Return a variant of this network.

        tables: entries to add to `config`, `tiny`, `needs` or `original_keys`, or to replace there.
        rules: tried before the network's own.
        """
        merged: dict[str, Any] = {name: {**getattr(self, name), **entries} for name, entries in tables.items()}
        return replace(self, rules=(*rules, *self.rules), **merged)
