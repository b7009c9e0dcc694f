"""Node declarations as plain data: names, inputs, outputs and bodies.

Nothing here knows ComfyUI: `comfyui.adapter` turns declarations into ComfyUI classes, `headless.runner` runs them.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from ..tpu_runtime.messages import compose, compose_term
from ..tpu_runtime.progress import Progress

# A widget's value in a workflow, or an object that nodes pass to each other.
Value: TypeAlias = Any
# Parsed JSON, from anyone: nothing is known of its shape.
Json: TypeAlias = Any
# Values of one node's inputs, by name.
Values: TypeAlias = Mapping[str, Value]

# Names on the page for inputs and outputs that ComfyUI's own nodes call differently; workflows keep our names.
DISPLAY_NAMES = {
    "num_inference_steps": "steps",
    "guidance_scale": "cfg",
    "guidance_scale_2": "cfg, low noise",
    "num_frames": "length",
    "prompt_embeds": "positive",
    "negative_prompt_embeds": "negative",
    "start_step": "start_at_step",
    "end_step": "end_at_step",
}
# Search words for a node, by the stage that it runs; "" is a pipeline, which runs all stages.
SEARCH_ALIASES = {
    "encode": ("clip text encode", "prompt"),
    "image": ("vae encode", "image to video", "i2v", "reference"),
    "denoise": ("ksampler", "denoise"),
    "decode": ("vae decode",),
    "": ("text to video", "image to video", "generate"),
}

WIDGET_TYPES = frozenset({"INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"})


@dataclass(frozen=True, kw_only=True)
class Folders:
    """A host's folders of files; there may be several for models and LoRAs."""

    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    input: Path = Path(".")
    workflow: Path = Path(".")  # of the running workflow's file
    output: Path = Path(".")  # relative stage folders are below it
    confined: bool = False  # stage folders must be below `output`: untrusted users may reach the host


class NodeContext(Progress, Protocol):
    """The interface through which a running node reports progress and finds files."""

    folders: Folders


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a node: a widget or a socket."""

    name: str
    type: str  # one of WIDGET_TYPES for a widget, else the type of a socket
    tooltip: str
    default: Value = None
    low: float | None = None  # smallest allowed number; None: no limit
    high: float | None = None  # largest allowed number; None: no limit
    step: float | None = None
    options: tuple[str, ...] = ()  # of a COMBO
    files: str = ""  # of a COMBO: the host's folder whose files are offered after `options`; the node checks values
    optional: bool = False
    listed_last: bool = False  # a required socket that the page shows among the optional ones (see `page_order`)
    advanced: bool = False
    multiline: bool = False
    companion: str = ""  # value that the page saves right after this one: "control_after_generate" or "upload"
    check: Callable[[Value], None] | None = None  # raises ValueError; runs before the type and range checks

    @property
    def label(self) -> str:
        return DISPLAY_NAMES.get(self.name, self.name)

    @property
    def is_widget(self) -> bool:
        return self.type in WIDGET_TYPES

    @property
    def is_listed_optional(self) -> bool:
        """Return whether the page shows it among the optional inputs."""
        return self.optional or self.listed_last

    @property
    def is_grid(self) -> bool:
        """Return whether only every `step`-th integer is allowed, a rule that ComfyUI does not have."""
        return self.type == "INT" and self.step not in (None, 1)

    def parse(self, value: Value) -> Value:
        """Return a widget's value in the input's own type.

        Raises ValueError if it has another type or breaks the input's rule.
        """
        value = _convert_number(self.type, value)
        if self.check is not None:
            self.check(value)
        if not isinstance(value, VALUE_TYPES[self.type]) or (isinstance(value, bool) and self.type != "BOOLEAN"):
            raise ValueError(compose(
                "node.value_type_wrong", name=compose_term("input", self.name), value=repr(value),
                value_names=_VALUE_NAMES[self.type],
            ))  # fmt: skip
        if self.options and not self.files and value not in self.options:
            raise ValueError(compose(
                "settings.choice_unknown", variable=compose_term("input", self.name), choice=repr(value),
                choices=", ".join(self.options),
            ))  # fmt: skip
        if (self.low is not None and not value >= self.low) or (self.high is not None and not value <= self.high):
            raise ValueError(compose(
                "node.value_outside", name=compose_term("input", self.name), value=value, low=self.low, high=self.high,
            ))  # fmt: skip
        return value


def with_display_names(text: str) -> str:
    """Replace the names of inputs in a text by their names on the page."""
    return _NAMES.sub(lambda match: DISPLAY_NAMES[match[0]], text)


_NAMES = re.compile(rf"\b({'|'.join(sorted(DISPLAY_NAMES, key=len, reverse=True))})\b")

VALUE_TYPES = {"INT": int, "FLOAT": float, "STRING": str, "COMBO": str, "BOOLEAN": bool}
_VALUE_NAMES = {
    "INT": compose("settings.a_whole_number"),
    "FLOAT": compose("settings.a_number"),
    "STRING": "text",
    "COMBO": "text",
    "BOOLEAN": compose("settings.true_or_false"),
}


def _convert_number(widget_type: str, value: Value) -> Value:
    """Convert JSON's one kind of number: 16 for a FLOAT becomes 16.0, 81.0 for an INT becomes 81."""
    if widget_type == "FLOAT" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if widget_type == "INT" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Output:
    """An output of a node."""

    name: str
    type: str
    tooltip: str = ""

    @property
    def label(self) -> str:
        """Return the name on the page. TPU_MODEL keeps its type's name, as MODEL does on core's loaders."""
        return self.type if self.type == "TPU_MODEL" else DISPLAY_NAMES.get(self.name, self.name)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A node without its behaviour, which subclasses add."""

    id: str
    title: str
    category: str = "TPU"
    description: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...] = ()
    family: str = ""  # of the models that it runs; "" for nodes of all families
    stage: str = ""  # of `model_spec.STAGES`; "" for a pipeline, and for nodes without a family
    check: Callable[..., object] | None = None  # check(folders, **values) raises ValueError before anything runs
    checks: tuple[str, ...] = ()  # inputs that `check` needs; it is called once all of them are known
    also_validated_inputs: tuple[str, ...] = ()  # inputs that `check` also gets if they are known
    validated_links: tuple[str, ...] = ()  # sockets of which `check` gets whether they are linked, if the host can tell

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return search words in addition to the title."""
        return ("TPU", self.category.removeprefix("TPU/"), *SEARCH_ALIASES[self.stage]) if self.family else ("TPU",)

    def input(self, name: str) -> Input:
        """Return the input called `name`; KeyError if it does not exist."""
        return {declared.name: declared for declared in self.inputs}[name]

    def page_order(self) -> tuple[Input, ...]:
        """Return the inputs in the page's order: sockets, then widgets, the required ones of each kind first.

        The page bypasses a node in this order: an output passes on the input of the same number if types agree.
        """
        return tuple(sorted(self.inputs, key=lambda declared: (declared.is_widget, declared.is_listed_optional)))

    def validate_constants(self, folders: Folders, constants: Values, linked: Collection[str] | None = None) -> None:
        """Raise ValueError for a constant that is not allowed.

        folders: of the host.
        constants: values by input name; inputs that are links are absent.
        linked: names of inputs that are links; None if the host does not know them.
        """
        for declared in self.inputs:
            if declared.is_widget and declared.name in constants:
                declared.parse(constants[declared.name])
        if self.check is not None and all(name in constants for name in self.checks):
            links = {} if linked is None else {name: name in linked for name in self.validated_links}
            known = (name for name in (*self.checks, *self.also_validated_inputs) if name in constants)
            self.check(folders, **{name: constants[name] for name in known}, **links)

    def values(self, given: Values) -> dict[str, Value]:
        """Return the value of every input: from `given`, in its own type, else the default.

        Raises ValueError for a required input that is missing, and for a value that is not allowed.
        """
        values = {}
        for declared in self.inputs:
            value = given.get(declared.name)
            if value is None and not declared.optional:
                raise ValueError(
                    compose("node.input_missing", title=self.title, name=compose_term("input", declared.name))
                )
            if value is None:
                value = declared.default
            elif declared.is_widget:
                value = declared.parse(value)
            values[declared.name] = value
        return values


@dataclass(frozen=True, kw_only=True)
class Node(Declaration):
    """A node with a body."""

    run: Callable[..., tuple[Value, ...]]  # run(host, **values) returns one value per output
    is_output: bool = False
    gives_core: bool = False  # ComfyUI adds four outputs for the first one's model: MODEL, CLIP, VAE, second MODEL
    fingerprint: Callable[..., Hashable] | None = None  # fingerprint(folders, **values) changes with files on disk


@dataclass(frozen=True)
class Ref:
    """The value of an input of the expanding node. Left out if that input is absent."""

    input: str


@dataclass(frozen=True)
class Link:
    """An output of a stage, by the stage's name and the output's index."""

    stage: str
    output: int


@dataclass(frozen=True, kw_only=True)
class StageNode:
    """One node of an expansion."""

    name: str
    node_id: str
    inputs: Mapping[str, Ref | Link | Value]
    needs: str = ""  # an input of the expanding node; without it the stage is left out


@dataclass(frozen=True, kw_only=True)
class Expansion(Declaration):
    """A node that is replaced by a small graph of other nodes and has no body of its own."""

    stages: tuple[StageNode, ...] = field(default=())
    results: tuple[Link, ...] = field(default=())

    def active_stages(self, given: Values) -> tuple[StageNode, ...]:
        """Return the stages that run for the inputs `given`, without links to stages that do not run."""
        present = [stage for stage in self.stages if not stage.needs or given.get(stage.needs) is not None]
        names = {stage.name for stage in present}

        def runs(value: Value) -> bool:
            return not isinstance(value, Link) or value.stage in names

        return tuple(
            replace(stage, inputs={name: value for name, value in stage.inputs.items() if runs(value)})
            for stage in present
        )


Declared = TypeVar("Declared", bound=Declaration)


def by_id(declarations: Iterable[Declared]) -> dict[str, Declared]:
    """Return declarations by node id. Raises ValueError for a duplicate."""
    table: dict[str, Declared] = {}
    for declaration in declarations:
        if declaration.id in table:
            raise ValueError(compose("node.id_twice", id=declaration.id))
        table[declaration.id] = declaration
    return table
