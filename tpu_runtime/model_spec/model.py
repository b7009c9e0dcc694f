"""The complete description of a model as data, and values that follow from it and a user's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..messages import compose, compose_term
from .component import Component, Json, freeze_mappings
from .core_inputs import CoreInputs
from .inputs import CHECKPOINT, STEP_INPUTS, EnumInput, InputType, IntInput, Settings, SigmaList, is_own, quality_input
from .spec_parts import (
    DenoiserSpec,
    HubCheckpoint,
    ImageConditioning,
    LatentGeometry,
    Parallelism,
    SamplingConfig,
    TextEncoding,
    TinyModel,
    VaeSpec,
)
from .step_cache import MagCache, StepCache, make_step_cache

STAGES = ("encode", "image", "denoise", "decode")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model; complete before any weight is loaded. Checkpoints are checked against it.

    Every model also has the input `scheduler`, with the recipe's schedulers as options, and those of `STEP_INPUTS`.
    Its qualities are those that its denoiser supports.
    """

    name: str  # on the command line
    family: str  # the models that share nodes
    title: str  # for messages and node titles
    category: str  # of the nodes in ComfyUI's menu
    published: HubCheckpoint
    miniature: TinyModel
    components: tuple[Component, ...]
    geometry: LatentGeometry
    text_encoders: tuple[TextEncoding, ...]
    inputs: Mapping[str, InputType]  # limits of node inputs by name
    texts: Mapping[str, str]  # defaults of text inputs by name
    recipe: SamplingConfig
    denoiser: DenoiserSpec
    parallelism: Parallelism = Parallelism()
    vae: VaeSpec
    pictures: ImageConditioning = ImageConditioning()
    core: CoreInputs = CoreInputs()

    def __post_init__(self) -> None:
        choice = EnumInput(options=(CHECKPOINT, *self.recipe.schedulers))
        steps = {**STEP_INPUTS, "quality": quality_input(self.denoiser)}
        object.__setattr__(self, "inputs", {**self.inputs, "scheduler": choice, **steps})
        freeze_mappings(self)

    def with_light_vae(self) -> "ModelSpec":
        """Return the model with its light decoder instead of the VAE's."""
        light = self.vae.light
        assert light is not None
        others = [part for part in self.components if part.name != self.vae.component]
        return replace(
            self,
            components=(*others, light.component),
            vae=replace(self.vae, component=light.component.name, decode=light.decode),
        )

    def list_components(self, folder: str) -> list[Component]:
        """Return the networks in a folder of the checkpoint."""
        return [component for component in self.components if component.folder == folder]

    @property
    def own_inputs(self) -> tuple[str, ...]:
        """Return the inputs that only this family has, whose values the denoiser takes."""
        return tuple(name for name, limit in self.inputs.items() if is_own(limit))

    def own_values(self, settings: Settings) -> dict[str, float]:
        """Return the value of every own input."""
        given = dict(settings.own)
        return {name: given.get(name, limit.default) for name, limit in self.inputs.items() if is_own(limit)}

    @property
    def is_image(self) -> bool:
        """True if the result is an image, not a video."""
        return "num_frames" not in self.inputs

    @property
    def needs_condition(self) -> bool:
        """True if the denoiser cannot run without an encoded image."""
        shapes = self.pictures.condition_shapes(self.geometry.latent_shape(self.settings()))
        return bool(shapes) and self.pictures.put_given is None

    def settings(self, **widgets: Any) -> Settings:
        """Return the settings for widget values of nodes, a workflow file, or command options.

        widgets: by name. Missing ones and None stand for the model's defaults; unknown names are ignored, because
            several models share a node or a command.
        Raises `ValueError` with a sentence for the user if a value is not allowed.
        """
        chosen = {name: value for name, value in widgets.items() if value is not None and name in self.inputs}
        values: dict[str, Any] = {name: limit.default for name, limit in self.inputs.items()} | chosen
        for name, value in values.items():
            self.check_input(name, value)
        values["step_cache"] = make_step_cache(values)
        values["guidance_scale_2"] = values.get("guidance_scale_2") or None
        values["sigmas"] = SigmaList.numbers(values["sigmas"])
        if values["sigmas"]:
            values["num_inference_steps"] = len(values["sigmas"])
        if "flow_shift" in values:
            values["shift"] = values["flow_shift"]
        values["own"] = tuple((name, values[name]) for name in self.own_inputs)
        settings = Settings(**{field: values[field] for field in Settings.__dataclass_fields__ if field in values})
        settings.check(self.title)
        return settings

    def condition_shapes(self, config: Json, latent_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an encoded image's arrays by name.

        Named dimensions are looked up in `config`, the denoiser's.
        """
        shapes = self.pictures.condition_shapes(latent_shape)
        return {
            name: tuple(int(config[dim]) if isinstance(dim, str) else dim for dim in shape)
            for name, shape in shapes.items()
        }

    @property
    def parts(self) -> tuple[str, ...]:
        """Folders of a checkpoint that are read."""
        folders = [component.folder for component in self.components]
        tokenizers = [text.tokenizer_folder for text in self.text_encoders]
        others = [name for name, value in self.published.index.items() if isinstance(value, tuple)]
        return tuple(dict.fromkeys([*folders, *tokenizers, "scheduler", *others]))

    def component(self, name: str) -> Component:
        return next(component for component in self.components if component.name == name)

    @property
    def image_encoders(self) -> frozenset[str]:
        """Names of the components that encode images as conditions."""
        others = {self.vae.component, *self.denoiser.experts, *(text.component for text in self.text_encoders)}
        return frozenset(component.name for component in self.components) - others

    def branches(self, guidance_scale: float) -> int:
        """Return the rows of a step with this scale: 2 with classifier-free guidance, else 1."""
        return 2 if self.recipe.guidance == "cfg" and guidance_scale > 1 else 1

    def whole_numbers(self, name: str) -> IntInput:
        """Return the limit of the integer input `name`."""
        limit = self.inputs[name]
        assert isinstance(limit, IntInput), name
        return limit

    def check_input(self, name: str, value: Any) -> None:
        """Raise `ValueError` with a sentence for the user if input `name` may not be `value`."""
        limit = self.inputs.get(name)
        if limit is not None and (problem := limit.problem(value)):
            raise ValueError(
                compose("settings.input", title=self.title, name=compose_term("input", name), problem=problem)
            )

    def check_settings(self, settings: Settings) -> None:
        """Check every field of `settings` that need not come from widgets. Raises `ValueError`."""
        values = {**dict(settings.own), **vars(settings), "flow_shift": settings.shift, "step_cache": None}
        if settings.step_cache is not None:
            if not isinstance(settings.step_cache, StepCache | MagCache):
                raise ValueError(compose(
                    "settings.step_cache_type_wrong", title=self.title, step_cache=f"{settings.step_cache!r:.60}",
                ))  # fmt: skip
            widgets = settings.step_cache.widgets
            if lacking := ", ".join(name for name in widgets if name not in self.inputs):
                raise ValueError(compose("settings.step_cache_unsupported", title=self.title, lacking=lacking))
            values |= widgets
        for name, value in values.items():
            if value is not None:
                self.check_input(name, value)
        settings.check(self.title)
