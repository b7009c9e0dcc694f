"""A model, as data: sixteen fields, and what follows from them and a user's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .component import Component, freeze
from .groups import Denoiser, LatentGeometry, Miniature, Parallelism, Pictures, Published, Recipe, TextEncoding, Vae
from .limits import CHECKPOINT, DENSE_QUALITY, STEP_INPUTS, Choice, IntLimit, Limit, Numbers, Settings
from .step_cache import MagCache, StepCache, policy_of

STAGES = ("encode", "image", "denoise", "decode")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model, complete before a weight is there; checkpoints are checked against it.

    `inputs` are the limits of its nodes' widgets, by widget name, and `texts` the defaults of those that hold text;
    `settings` is what widgets ask for. Every model also has the input `scheduler`, a choice of the recipe's schedulers,
    and those of `STEP_INPUTS`, with fewer qualities where no blocks are left out. `family` is the set of models that
    share nodes, `category` these nodes' menu.
    """

    name: str
    family: str
    title: str
    category: str
    published: Published
    miniature: Miniature
    components: tuple[Component, ...]
    geometry: LatentGeometry
    text_encoders: tuple[TextEncoding, ...]
    inputs: Mapping[str, Limit]
    texts: Mapping[str, str]
    recipe: Recipe
    denoiser: Denoiser
    parallelism: Parallelism = Parallelism()
    vae: Vae
    pictures: Pictures = Pictures()

    def __post_init__(self) -> None:
        choice = Choice(options=(CHECKPOINT, *self.recipe.schedulers))
        dense = {"quality": DENSE_QUALITY} if self.denoiser.tile is None else {}
        object.__setattr__(self, "inputs", {**self.inputs, "scheduler": choice, **STEP_INPUTS, **dense})
        freeze(self)

    def with_light_vae(self) -> "ModelSpec":
        """The model with its light decoder in place of the VAE's."""
        light = self.vae.light
        assert light is not None
        components = [part for part in self.components if part.name != self.vae.component]
        return replace(
            self,
            components=(*components, light.component),
            vae=replace(self.vae, component=light.component.name, decode=light.decode),
        )

    def parts_of(self, folder: str) -> list[Component]:
        """The networks that a folder of the checkpoint holds."""
        return [component for component in self.components if component.folder == folder]

    @property
    def is_image(self) -> bool:
        """Whether it makes a picture, not a video."""
        return "num_frames" not in self.inputs

    @property
    def needs_condition(self) -> bool:
        """Whether the denoiser cannot run without an encoded image."""
        shapes = self.pictures.condition_shapes(self.geometry.latent_shape(self.settings()))
        return bool(shapes) and self.pictures.put_given is None

    def settings(self, **widgets: Any) -> Settings:
        """What widgets of these values ask for: of nodes, of a workflow file, or the command's options.

        What is missing or None is the model's default. Names of other widgets are ignored: several models share a node
        or a command. Raises `ValueError` with a sentence for the user where a value is not allowed.
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
        settings.check(self.title)
        return settings

    def conditions(self, config: Mapping[str, Any], latent_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of an encoded picture's arrays, with sizes for the dimensions that name a key of `config`."""
        shapes = self.pictures.condition_shapes(latent_shape)
        return {
            name: tuple(int(config[dim]) if isinstance(dim, str) else dim for dim in shape)
            for name, shape in shapes.items()
        }

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders of a checkpoint that are read."""
        folders = [component.folder for component in self.components]
        tokenizers = [text.tokenizer_folder for text in self.text_encoders]
        others = [name for name, value in self.published.index.items() if isinstance(value, tuple)]
        return tuple(dict.fromkeys([*folders, *tokenizers, "scheduler", *others]))

    def component(self, name: str) -> Component:
        return next(component for component in self.components if component.name == name)

    @property
    def picture_encoders(self) -> frozenset[str]:
        """The names of the components that encode pictures as conditions."""
        others = {self.vae.component, *self.denoiser.experts, *(text.component for text in self.text_encoders)}
        return frozenset(component.name for component in self.components) - others

    def branches(self, guidance_scale: float) -> int:
        """How many rows a step with this scale has: 2 with classifier-free guidance."""
        return 2 if self.recipe.guidance == "cfg" and guidance_scale > 1 else 1

    def whole_numbers(self, name: str) -> IntLimit:
        """The limit of widget `name`, which holds integers as sizes do."""
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
            if not isinstance(settings.step_cache, StepCache | MagCache):
                raise ValueError(f"{self.title}: step_cache is none that is known. Turn it off.")
            given = settings.step_cache.widgets
            if lacking := ", ".join(name for name in given if name not in self.inputs):
                raise ValueError(f"{self.title}: step_cache is on, but this model has no {lacking}. Turn it off.")
            values |= given
        for name, value in values.items():
            if value is not None:
                self.check_input(name, value)
        settings.check(self.title)
