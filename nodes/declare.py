"""Node declarations: what a node is called, takes, returns and does, as plain data.

Nothing here knows ComfyUI: `comfyui.adapter` makes ComfyUI classes of declarations, `headless.runner` runs them.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..tpu_runtime.pipeline import Progress

# What the page calls inputs and outputs for which ComfyUI's own nodes have another word; workflows keep the names.
WORDS = {
    "num_inference_steps": "steps",
    "guidance_scale": "cfg",
    "guidance_scale_2": "cfg, low noise",
    "num_frames": "length",
    "prompt_embeds": "positive",
    "negative_prompt_embeds": "negative",
    "start_step": "start_at_step",
    "end_step": "end_at_step",
}
# What someone may type who looks for a node that runs this stage; a pipeline runs them all.
ALIASES = {
    "encode": ("clip text encode", "prompt"),
    "image": ("vae encode", "image to video", "i2v", "reference"),
    "denoise": ("ksampler", "denoise"),
    "decode": ("vae decode",),
    "": ("text to video", "image to video", "generate"),
}

WIDGET_TYPES = frozenset({"INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"})


@dataclass(frozen=True, kw_only=True)
class Folders:
    """Where a host keeps files; of models and of LoRAs there may be several folders. `workflow` is where the running
    file is.

    Relative stage folders lie under `output`; where a host is `confined`, as one that strangers may reach, all do.
    """

    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    input: Path = Path(".")
    workflow: Path = Path(".")
    output: Path = Path(".")
    confined: bool = False


class Host(Progress, Protocol):
    """What a running node may ask of whoever runs it."""

    folders: Folders


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input: a widget when `type` is in WIDGET_TYPES, a socket otherwise.

    `check` raises ValueError with a full sentence; it speaks before the plain type and range checks. `companion` is a
    value that ComfyUI's page saves right after this widget's own: "control_after_generate" or "upload". A COMBO of
    `files` offers those in the host's folders of that name, behind the `options`; other values
    are left to the node's own check. A socket that is `listed_last` is required, and the page
    shows it among the optional ones (see `page_order`).
    """

    name: str
    type: str
    tooltip: str
    default: Any = None
    low: float | None = None
    high: float | None = None
    step: float | None = None
    options: tuple[str, ...] = ()
    files: str = ""
    optional: bool = False
    listed_last: bool = False
    advanced: bool = False
    multiline: bool = False
    companion: str = ""
    check: Callable[[Any], None] | None = None

    @property
    def label(self) -> str:
        return WORDS.get(self.name, self.name)

    @property
    def is_widget(self) -> bool:
        return self.type in WIDGET_TYPES

    @property
    def is_listed_optional(self) -> bool:
        """Whether the page takes it for optional."""
        return self.optional or self.listed_last

    @property
    def is_grid(self) -> bool:
        """Whether only every `step`-th integer is allowed, a rule that ComfyUI does not know."""
        return self.type == "INT" and self.step not in (None, 1)

    def parse(self, value: Any) -> Any:
        """A widget's value in its own type; ValueError when it has another type or breaks the input's rule."""
        value = _converted(self.type, value)
        if self.check is not None:
            self.check(value)
        if not isinstance(value, VALUE_TYPES[self.type]) or (isinstance(value, bool) and self.type != "BOOLEAN"):
            raise ValueError(f"{self.name} is {value!r}; it must be {_VALUE_NAMES[self.type]}.")
        if self.options and not self.files and value not in self.options:
            raise ValueError(f"{self.name} is {value!r}; it must be one of {', '.join(self.options)}.")
        if (self.low is not None and not value >= self.low) or (self.high is not None and not value <= self.high):
            raise ValueError(f"{self.name} is {value}; it must lie between {self.low} and {self.high}.")
        return value


def in_words(text: str) -> str:
    """A text for the page, with what it calls inputs in the place of their names."""
    return _NAMES.sub(lambda found: WORDS[found[0]], text)


_NAMES = re.compile(rf"\b({'|'.join(sorted(WORDS, key=len, reverse=True))})\b")

VALUE_TYPES = {"INT": int, "FLOAT": float, "STRING": str, "COMBO": str, "BOOLEAN": bool}
_VALUE_NAMES = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "STRING": "text",
    "COMBO": "text",
    "BOOLEAN": "true or false",
}


def _converted(widget_type: str, value: Any) -> Any:
    """JSON has one kind of number: 16 for a FLOAT and 81.0 for an INT are the user's 16.0 and 81."""
    if widget_type == "FLOAT" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if widget_type == "INT" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Output:
    name: str
    type: str
    tooltip: str = ""

    @property
    def label(self) -> str:
        """A model has its type's name, as from core's loaders, beside whose MODEL it stands."""
        return self.type if self.type == "TPU_MODEL" else WORDS.get(self.name, self.name)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a node looks like. Subclasses say what it does.

    A node of a `family` runs one `stage` of its models, of `model_spec.STAGES`. `check(folders, **values)` gets the
    inputs named in `checks`, once all of them are known, and those in `checked_too` that are, before anything runs, and
    raises ValueError. Of the sockets among `checked_links` it gets whether they are linked, where the host knows.
    """

    id: str
    title: str
    category: str = "TPU"
    description: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...] = ()
    family: str = ""
    stage: str = ""
    check: Callable[..., object] | None = None
    checks: tuple[str, ...] = ()
    checked_too: tuple[str, ...] = ()
    checked_links: tuple[str, ...] = ()

    @property
    def aliases(self) -> tuple[str, ...]:
        """Words to find it by, beside its title."""
        return ("TPU", self.category.removeprefix("TPU/"), *ALIASES[self.stage]) if self.family else ("TPU",)

    def input(self, name: str) -> Input:
        """Raises KeyError when there is no such input."""
        return {declared.name: declared for declared in self.inputs}[name]

    def page_order(self) -> tuple[Input, ...]:
        """The inputs in the order of the page: sockets, then widgets, of each kind the required ones first.

        By it the page bypasses a node: an output passes on the input of the same number, if types agree.
        """
        return tuple(sorted(self.inputs, key=lambda declared: (declared.is_widget, declared.is_listed_optional)))

    def check_constants(
        self, folders: Folders, constants: Mapping[str, Any], linked: Collection[str] | None = None
    ) -> None:
        """Raises ValueError for a constant that is not allowed; inputs that are links are simply absent, and `linked`
        names them.
        """
        for declared in self.inputs:
            if declared.is_widget and declared.name in constants:
                declared.parse(constants[declared.name])
        if self.check is not None and all(name in constants for name in self.checks):
            links = {} if linked is None else {name: name in linked for name in self.checked_links}
            known = (name for name in (*self.checks, *self.checked_too) if name in constants)
            self.check(folders, **{name: constants[name] for name in known}, **links)

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every input's value: what was given, in its own type, else the default. ValueError names what is missing."""
        values = {}
        for declared in self.inputs:
            value = given.get(declared.name)
            if value is None and not declared.optional:
                raise ValueError(f"{self.title}: {declared.name} is missing.")
            if value is None:
                value = declared.default
            elif declared.is_widget:
                value = declared.parse(value)
            values[declared.name] = value
        return values


@dataclass(frozen=True, kw_only=True)
class Node(Declaration):
    """A node with a body: `run(host, **values)` returns one value per output.

    One that `gives_core` has four outputs more, which ComfyUI makes: its own MODEL, CLIP, VAE and MODEL of the second
    denoiser, of the model that is the first.

    `fingerprint(folders, **values)` changes when the result may differ although the inputs do not (files on disk).
    """

    run: Callable[..., tuple[Any, ...]]
    is_output: bool = False
    gives_core: bool = False
    fingerprint: Callable[..., Hashable] | None = None


@dataclass(frozen=True)
class Ref:
    """The value of an input of the expanding node; left out where that input is absent."""

    input: str


@dataclass(frozen=True)
class Link:
    """Output number `output` of the stage called `stage`."""

    stage: str
    output: int


@dataclass(frozen=True, kw_only=True)
class StageNode:
    """One node of an expansion. It is left out where the expanding node's input `needs` is absent."""

    name: str
    node_id: str
    inputs: Mapping[str, Ref | Link | Any]
    needs: str = ""


@dataclass(frozen=True, kw_only=True)
class Expansion(Declaration):
    """A node that stands for a small graph of other nodes and has no body of its own."""

    stages: tuple[StageNode, ...] = field(default=())
    results: tuple[Link, ...] = field(default=())

    def stages_for(self, given: Mapping[str, Any]) -> tuple[StageNode, ...]:
        """The stages that run for these inputs; a link to one that does not is left out as well."""
        present = [stage for stage in self.stages if not stage.needs or given.get(stage.needs) is not None]
        names = {stage.name for stage in present}

        def runs(value: Any) -> bool:
            return not isinstance(value, Link) or value.stage in names

        return tuple(
            replace(stage, inputs={name: value for name, value in stage.inputs.items() if runs(value)})
            for stage in present
        )


Declared = TypeVar("Declared", bound=Declaration)


def by_id(declarations: Iterable[Declared]) -> dict[str, Declared]:
    """Declarations keyed by node id; ValueError on a duplicate."""
    table: dict[str, Declared] = {}
    for declaration in declarations:
        if declaration.id in table:
            raise ValueError(f"Two nodes are called {declaration.id}.")
        table[declaration.id] = declaration
    return table
