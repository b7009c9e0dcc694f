"""What a model is, as data: components, architecture numbers, geometry, limits, recipe. No torch, no devices here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..sharding.rules import Rule
from ..sharding.shape import MeshShape
from .limits import (
    CHECKPOINT,
    FLOW_SCHEDULERS,
    STEP_INPUTS,
    Choice,
    FloatLimit,
    IntLimit,
    Numbers,
    Settings,
    Switch,
    policy_of,
)
from .limits import StepCache as StepCache  # settings have one

if TYPE_CHECKING:
    import torch

STAGES = ("encode", "image", "denoise", "decode")


@dataclass(frozen=True)
class Need:
    """What a config must say of a key for the component to run here: one of `values`, or what `fits`, see `wording`.

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


Limit = IntLimit | FloatLimit | Switch | Choice | Numbers


def _freeze(record: Any) -> None:
    """Makes the mappings among a frozen dataclass's fields read-only."""
    for one in fields(record):
        value = getattr(record, one.name)
        if isinstance(value, Mapping):
            object.__setattr__(record, one.name, MappingProxyType(dict(value)))


@dataclass(frozen=True)
class Rows:
    """A module whose rows are `groups` of the makers' module's, in that order, which has `of` equal groups of rows.

    With `squares` the makers' module is only the first rows of this one: that many times as many as it has columns.
    """

    name: str
    groups: tuple[int, ...] = (0,)
    of: int = 1
    squares: int = 0


# What the makers call modules (or single parameters), to diffusers' names; in both `*` stands for a number.
Table = Mapping[str, str | tuple[Rows, ...]]


def split(*names: str) -> tuple[Rows, ...]:
    """Modules of equal size that the makers have as one."""
    return tuple(Rows(name, (index,), len(names)) for index, name in enumerate(names))


def swapped(name: str) -> tuple[Rows, ...]:
    """A module whose two halves the makers have in the other order: shift before scale."""
    return (Rows(name, (1, 0), 2),)


@dataclass(frozen=True, kw_only=True)
class Component:
    """One neural network of a model: the folder of its checkpoint called `name`, unless `folder` says another.

    `config` holds the real architecture (the published `config.json`), `tiny` that of the built-in checkpoint, of which
    only what differs need be given. `needs` says which numbers of a checkpoint's own config this code relies on, by key
    (`a.b` for a nested one). `blocks` are the attribute paths of lists of equal blocks, each traced once and scanned;
    `layers` says which of each list are used, where not all are. `only` keeps the parameters whose names start so (a
    decoder of a whole VAE). `aliases` maps names in checkpoints to the module's: those of tied weights, and those that
    other versions of the libraries wrote, which upstream translates while loading. One that ends in a dot stands for
    all names that start so; the longest counts, and whole names are looked up after it. `class_aliases` are names of
    the class that checkpoints have and upstream translates. `trim(module)` may drop what is not needed and put parts
    of a weight in its place (see `modules.Cut`). `makers_names` is what the makers call its modules (see `names`).
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
    trim: Callable[[Any], None] | None = None
    makers_names: Table = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiny", {**self.config, **self.tiny})
        object.__setattr__(self, "folder", self.folder or self.name)
        _freeze(self)

    def extended(self, *, rules: tuple[Rule, ...] = (), **tables: Mapping[str, Any]) -> "Component":
        """A variant of this network: entries more or others in its `tables` (`config`, `tiny`, `needs`,
        `makers_names`), and `rules` that come before its own.
        """
        merged: dict[str, Any] = {name: {**getattr(self, name), **entries} for name, entries in tables.items()}
        return replace(self, rules=(*rules, *self.rules), **merged)


@dataclass(frozen=True, kw_only=True)
class LatentGeometry:
    """How pixels become latents and tokens. An image model has `stride_t` 0 and latents without a frame dimension."""

    channels: int
    stride_t: int
    stride_hw: int
    patch_thw: tuple[int, int, int]

    def latent_frames(self, num_frames: int) -> int:
        """Latent frames of a video whose first frame is a latent frame of its own, padded to whole patches."""
        frames = (num_frames - 1) // self.stride_t + 1
        return -(-frames // self.patch_thw[0]) * self.patch_thw[0]

    def latent_shape(self, settings: "Settings") -> tuple[int, ...]:
        """`[1, channels, latent_frames, latent_height, latent_width]`, for an image without the frames."""
        frames = (self.latent_frames(settings.num_frames),) if self.stride_t else ()
        return (1, self.channels, *frames, settings.height // self.stride_hw, settings.width // self.stride_hw)

    def num_tokens(self, latent_shape: tuple[int, ...]) -> int:
        patch = self.patch_thw if self.stride_t else self.patch_thw[1:]
        return math.prod(size // part for size, part in zip(latent_shape[2:], patch, strict=True))


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """One text encoder's part in the conditioning.

    `tokenize(tokenizer, prompts)` gives ids and mask, `[rows, max_length]` int32 each, or of another `length`, which
    tells how much of a prompt is cut off; `encode(module, ids, mask)` gives states `[rows, max_length, dim]`. With a
    `prefix`, ids start with that many tokens more, which are always there and whose states are dropped. `width_key` is
    where the denoiser's config names `dim`.
    `write_tokenizer(folder)` makes the tiny checkpoint's tokenizer, of class `tokenizer_class`.
    """

    name: str = "text"
    component: str = "text_encoder"
    tokenizer_folder: str = "tokenizer"
    tokenizer_class: str
    max_length: int
    width_key: str
    tokenize: Callable[..., tuple[Any, Any]]
    encode: Callable[..., Any]
    write_tokenizer: Callable[[Path], None]
    prefix: int = 0


class Call(Protocol):
    """How a stage's host code runs a network: `function(module, *args) -> (result, carried)`, compiled once per shape.

    `result` comes back on the host; `carried` stays on the devices, to be passed to the next call (and is donated by
    it when it is the last argument). With `partition="spatial"` the last two dimensions of every argument are an
    image's height and width (or multiples of the smallest one's) and are split over the chips; with `"replicated"`
    every chip gets everything.
    """

    def __call__(
        self,
        component: str,
        function: Callable[..., tuple[Any, Any]],
        *args: Any,
        partition: Literal["replicated", "spatial"] = "replicated",
        carries: bool = False,
    ) -> tuple[Any, Any]: ...


# (done, total) -> None: moves the bar and lets the host cancel.
Report = Callable[[int, int], None]


def plain_noise(spec: "ModelSpec", settings: Settings, generator: "torch.Generator") -> "torch.Tensor":
    """Standard normal noise in the layout of the latents."""
    import torch

    return torch.randn(spec.geometry.latent_shape(settings), generator=generator, dtype=torch.float32)


def steady_guidance(settings: Settings, timestep: float) -> float:
    """`guidance_scale` at every step."""
    return settings.guidance_scale


def guidance_first(num_devices: int, branches: int) -> MeshShape:
    """Guidance's two branches side by side where the count is even; all other chips share the sequence."""
    dp = 2 if branches == 2 and num_devices % 2 == 0 else 1
    return MeshShape(dp=dp, sp=num_devices // dp)


@dataclass(frozen=True, kw_only=True)
class StepReuse:
    """How a denoiser starts a step from the inner features of an earlier one; its arguments are those of `forward`.

    - `keep(denoiser, run, sample, timestep, inputs)` returns the prediction of a full step, and features by name.
    - `reuse(denoiser, run, features, sample, timestep, inputs)` returns a prediction from them.

    Features have a row for each branch first. Those named in `tokens` are `[rows, tokens, dim]` as `run.tokens` places
    them; those in `whole` every chip has.
    """

    keep: Callable[..., tuple[Any, dict[str, Any]]]
    reuse: Callable[..., Any]
    tokens: tuple[str, ...]
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """The norms of queries and keys, head by head, of one stack of blocks, by name; `*` stands for a layer.

    Every query of a layer may meet every key of it: those of a text have norms of their own.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model. `inputs` are the limits of its nodes' widgets, by widget name; `settings` is what they ask for.

    The functions, all pure, see upstream's torch modules as their first argument inside a traced program:

    - `forward(denoiser, run, sample, timestep, inputs)` is one denoiser call, written out: `denoiser` holds upstream's
      modules, `run` is what the mesh adds (see `programs.denoiser_run.DenoiserRun`). `sample` is `[branches, *latent]`,
      `timestep` `[1]`; `inputs` holds `[branches, length, dim]` and `<name>_length` `[branches]` of every text
      encoding, the arrays of `condition_shapes`, `guidance` `[1]` and the `next_timestep` `[1]`, after the last step 0.
    - `prepare_denoiser(network, sequence)`, where there is one, puts our attention and token placement into upstream's
      forward; then `forward`, and the functions of a `step_reuse`, take no `run`.
    - `decode(call, latents, report)` turns LATENT samples of one video (torch, CPU float32, `[1, channels, ...]`) into
      frames `[frames, height, width, 3]` in 0..1 (numpy or torch, float32).
    - `denormalize_latents(sample, settings, vae_config)` brings the solver's last sample into LATENT's scale and
      layout.
    - `noise(spec, settings, generator)` draws the first sample as upstream does.
    - `draw_inputs(inputs, generator)` gives the denoiser's inputs with those in them that upstream draws before that.
    - `solver_arguments(scheduler_config, latent_shape, settings)` are the arguments of upstream's `set_timesteps`.
    - `guidance_at(settings, timestep)` is the guidance scale of a step.
    - `advice(settings)` is what to tell the user of settings that are allowed, but not what the model's makers publish.
    - `encode_image(call, image, settings, vae_config)` gives the arrays of `condition_shapes`, where the model takes
      images `[number, height, width, 3]` in 0..1: a first frame, or a first and a last one, as `pictures` allows.
      With `references` images are optional and of any number and size: it gets `[number, height, width, 3]` and gives
      an array for each, named `reference_<index>`; there is no `condition_shapes` then.
    - `put_given(sample, inputs)` puts the latents that a picture gives into a sample, before a step and after it. Such
      a model runs without a picture too: the arrays of `condition_shapes` are zeros then.
    - `mesh(num_devices, branches)` says how the denoiser's chips are arranged. Where `tp` does not divide the heads,
      which the denoiser's config names `heads_key`, the rest of it goes to `sp`.

    `head_norms` are the norms that bound attention's scores, of every stack of blocks; empty where none do.

    `latent_format` is ComfyUI's name for the layout and scale of the denoiser's sample, for previews.

    With a `step_reuse` the model's `inputs` have `step_cache` (on or off), `cache_start`, `cache_end` and
    `cache_interval` too (see `StepCache`).

    `schedulers` are what may run in place of the checkpoint's own: what is to change in its config, by name. The input
    `scheduler` is a choice of them, and every model has the inputs `STEP_INPUTS`.

    `tiny_inputs` are the inputs that fit the built-in checkpoint, `tiny_texts` those that fit a trained one. `index`
    and `files` (JSON, by path) are what else it holds.

    `guidance` is "cfg" (two branches while `guidance_scale` is above 1: row 0 the prompt, row 1 the negative prompt) or
    "embedded" (one branch, the network is told the scale if it takes one).
    """

    name: str
    family: str
    title: str
    category: str
    hub_id: str
    tiny_id: str
    latent_format: str
    pipeline_classes: tuple[str, ...]
    components: tuple[Component, ...]
    geometry: LatentGeometry
    text_encoders: tuple[TextEncoding, ...]
    inputs: Mapping[str, Limit]
    texts: Mapping[str, str]
    tiny_inputs: Mapping[str, int]
    scheduler: Mapping[str, Any]
    guidance: Literal["cfg", "embedded"] = "cfg"
    tiny_texts: Mapping[str, str] = field(default_factory=dict)
    schedulers: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: FLOW_SCHEDULERS)
    shift_key: str | None = None
    experts: tuple[str, ...] = ("transformer",)
    vae: str = "vae_decoder"
    index: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prepare_denoiser: Callable[..., None] | None = None
    forward: Callable[..., Any]
    decode: Callable[[Call, Any, Report], Any]
    denormalize_latents: Callable[..., Any]
    noise: Callable[..., Any] = plain_noise
    draw_inputs: Callable[..., Mapping[str, Any]] = lambda inputs, generator: inputs
    solver_arguments: Callable[..., dict[str, Any]] = lambda config, latent_shape, settings: {}
    guidance_at: Callable[[Settings, float], float] = steady_guidance
    advice: Callable[[Settings], str | None] = lambda settings: None
    condition_shapes: Callable[[tuple[int, ...]], dict[str, tuple[int | str, ...]]] = lambda latent_shape: {}
    encode_image: Callable[..., dict[str, Any]] | None = None
    pictures: tuple[int, ...] = (1,)
    step_reuse: StepReuse | None = None
    references: bool = False
    put_given: Callable[..., Any] | None = None
    mesh: Callable[[int, int], MeshShape] = guidance_first
    heads_key: str = "num_attention_heads"
    head_norms: tuple[HeadNorms, ...] = ()

    def __post_init__(self) -> None:
        choice = Choice(options=(CHECKPOINT, *self.schedulers))
        object.__setattr__(self, "inputs", {**self.inputs, "scheduler": choice, **STEP_INPUTS})
        _freeze(self)

    @property
    def is_image(self) -> bool:
        """Whether it makes a picture, not a video."""
        return self.geometry.stride_t == 0

    @property
    def needs_condition(self) -> bool:
        """Whether the denoiser cannot run without an encoded image."""
        shapes = self.condition_shapes(self.geometry.latent_shape(self.settings()))
        return bool(shapes) and self.put_given is None

    def settings(self, **widgets: Any) -> Settings:
        """What widgets of these values ask for: of nodes, of a workflow file, or the command's options.

        What is missing or None is the model's default. Names of other widgets are left aside: several models share a
        node or a command. Raises `ValueError` with a sentence for the user where a value is not allowed.
        """
        given = {name: value for name, value in widgets.items() if value is not None and name in self.inputs}
        values: dict[str, Any] = {name: limit.default for name, limit in self.inputs.items()} | given
        for name, value in values.items():
            self.check_input(name, value)
        values["step_cache"] = policy_of(values)
        values["guidance_scale_2"] = values.get("guidance_scale_2") or None
        values["sigmas"] = Numbers.numbers(values["sigmas"])
        if values["sigmas"]:
            values["num_inference_steps"] = len(values["sigmas"])
        if "flow_shift" in values:
            values["shift"] = values["flow_shift"]
        settings = Settings(**{field: values[field] for field in Settings.__dataclass_fields__ if field in values})
        self._check(settings)
        return settings

    def conditions(self, config: Mapping[str, Any], latent_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """`condition_shapes`, where a dimension may be named: as the denoiser's `config` names it."""
        shapes = self.condition_shapes(latent_shape)
        return {
            name: tuple(int(config[dim]) if isinstance(dim, str) else dim for dim in shape)
            for name, shape in shapes.items()
        }

    @property
    def random_id(self) -> str:
        """The id of the built-in checkpoint with random weights; `tiny_id` is a trained one where there is one."""
        return self.tiny_id.replace("tiny/", "tiny/random-")

    @property
    def tiny_ids(self) -> tuple[str, str]:
        return self.tiny_id, self.random_id

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders of a checkpoint that are read."""
        folders = [component.folder for component in self.components]
        tokenizers = [text.tokenizer_folder for text in self.text_encoders]
        others = [name for name, value in self.index.items() if isinstance(value, tuple)]
        return tuple(dict.fromkeys([*folders, *tokenizers, "scheduler", *others]))

    def component(self, name: str) -> Component:
        return next(component for component in self.components if component.name == name)

    def for_expert(self, settings: Settings, expert: str) -> Settings:
        """The settings with the guidance of that expert as `guidance_scale`."""
        scale = None if expert == self.experts[0] else settings.guidance_scale_2
        return settings if scale is None else replace(settings, guidance_scale=scale)

    def branches(self, settings: Settings) -> int:
        """How many rows a step of the first expert has: 2 with classifier-free guidance."""
        return 2 if self.guidance == "cfg" and settings.guidance_scale > 1 else 1

    def whole_numbers(self, name: str) -> IntLimit:
        """What widget `name` may hold, where it holds whole numbers as sizes do."""
        limit = self.inputs[name]
        assert isinstance(limit, IntLimit), name
        return limit

    def check_input(self, name: str, value: Any) -> None:
        """Raises `ValueError` with a sentence for the user if widget `name` may not hold `value`."""
        limit = self.inputs.get(name)
        if limit is not None and (problem := limit.problem(value)):
            raise ValueError(f"{self.title}: {name} {problem}")

    def check_settings(self, settings: Settings) -> None:
        """Checks every field of `settings`, which need not come from widgets, by the widget that it belongs to."""
        values = {**vars(settings), "flow_shift": settings.shift, "step_cache": None}
        if settings.step_cache is not None:
            if self.step_reuse is None:
                raise ValueError(f"{self.title}: step_cache is on, but this model runs every step whole. Turn it off.")
            values |= {f"cache_{name}": value for name, value in vars(settings.step_cache).items()}
        for name, value in values.items():
            if value is not None:
                self.check_input(name, value)
        self._check(settings)

    def _check(self, settings: Settings) -> None:
        """Raises `ValueError` where values do not go together."""
        if problem := settings.problem():
            raise ValueError(f"{self.title}: {problem}")
