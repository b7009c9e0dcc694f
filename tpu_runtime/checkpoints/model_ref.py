"""References to models: descriptions without weights, and the checks that need no weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import models
from ..messages import compose
from ..model_spec import Json, ModelSpec, PlainEnum, Quality, Settings
from ..precision import check_choice
from ..progress import Progress
from . import checkpoint, compatibility, file_resolution

if TYPE_CHECKING:
    import torch


class Expert(PlainEnum):
    """The denoisers that a LoRA changes, of a model whose two denoisers share the steps."""

    BOTH = "both"
    HIGH_NOISE = "high"  # the first, which composes
    LOW_NOISE = "low"  # the second, which refines

    @classmethod
    def from_index(cls, index: int) -> "Expert":
        """Return the single expert at `index` of `DenoiserSpec.experts`."""
        return (cls.HIGH_NOISE, cls.LOW_NOISE)[index]


LORA_EXPERTS = tuple(expert.value for expert in Expert)  # options of widgets and commands


@dataclass(frozen=True, kw_only=True, eq=False)
class InMemoryLora:
    """The tensors of a LoRA that another program has read."""

    title: str  # of the LoRA, for messages
    digest: str  # differs between LoRAs
    tensors: "Mapping[str, torch.Tensor]"  # by name, of any shape


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A file of changes to a network's weights."""

    path: str  # of the file, or the title of `held`
    strength: float
    expert: str = Expert.BOTH  # one of `LORA_EXPERTS`
    held: InMemoryLora | None = None  # changes in memory instead of a file
    component: str = ""  # the network that is changed, if it is not a denoiser; "" for denoisers

    @property
    def source(self) -> "str | InMemoryLora":
        return self.held or self.path


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A reference to a model, without weights."""

    spec_name: str
    model_id: str  # see `checkpoint.locate`
    precision: str = "auto"  # one of `precision.CHOICES`
    quality: str = Quality.EXACT  # of samplers that set none (see `Settings`)
    folders: tuple[str, ...] = ()  # searched for `model_id`
    loras: tuple[Lora, ...] = ()
    controls: tuple[str, ...] = ()  # paths of files with control networks, see `ControlSpec`
    address: str = ""  # of the machine that runs the stages (see `remote`); "" for this one
    is_partial: bool = False  # whether only some networks are there, for stages that need no others
    only: str = ""  # class of the networks that count of a partial model's files; "" for all

    def __str__(self) -> str:
        quality = "" if self.quality == Quality.EXACT else f", {self.quality}"
        return f"{self.model_id} ({self.precision}{quality})" + (f" at {self.address}" if self.address else "")

    @property
    def spec(self) -> ModelSpec:
        return models.lookup_spec(self.spec_name)

    def without_choices(self) -> "ModelRef":
        """Return the model without LoRAs and control networks, and with the default quality.

        Later nodes may add these, and samplers override the quality.
        """
        return replace(self, loras=(), controls=(), quality=Quality.EXACT)

    def locate(self) -> checkpoint.Checkpoint:
        """Return the model's checkpoint."""
        return checkpoint.locate(self.spec, self.model_id, self.folders, is_partial=self.is_partial, only=self.only)

    def resolve(self, progress: Progress) -> "ResolvedModel":
        """Return description, checkpoint and configs, downloaded if need be.

        Raises `CheckpointError` if it cannot run.
        """
        located = self.locate()
        return ResolvedModel(spec=located.spec, checkpoint=located, configs=located.configs(progress))

    def check(self) -> None:
        """Raise `ValueError` with a sentence for the user if it cannot work. Reads no weights and makes no request."""
        check_choice(self.precision)
        self.spec.check_input("quality", self.quality)
        self.locate().check()

    def select_loras(self, component: str) -> tuple[Lora, ...]:
        """Return the LoRAs that change a component, without those of strength 0."""
        experts = self.spec.denoiser.experts
        if component not in experts:
            return tuple(lora for lora in self.loras if lora.strength and lora.component == component)
        chosen = Expert.BOTH, Expert.from_index(experts.index(component))
        return tuple(lora for lora in self.loras if lora.strength and not lora.component and lora.expert in chosen)


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model that can run: description, checkpoint, and the config of each component by name."""

    spec: ModelSpec
    checkpoint: checkpoint.Checkpoint
    configs: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class PlannedGeneration:
    """A generation to come."""

    model: ModelRef
    stages: tuple[str, ...]  # of `model_spec.STAGES`, after the text encoder's
    settings: Settings | None = None  # None if they are not known before it denoises


def choose_model(
    spec: ModelSpec,
    model_id: str,
    *,
    precision: str = "auto",
    quality: str = Quality.EXACT,
    folders: tuple[str, ...] = (),
    loras: tuple[Lora, ...] = (),
    progress: Progress | None = None,
) -> ModelRef:
    """Return the checked model of `model_id`.

    spec: a model of the family.
    precision, quality, folders, loras: of the `ModelRef`.
    progress: see `variant`.
    Raises `ValueError` as `ModelRef.check`.
    """
    spec = resolve_variant(spec, model_id, folders, progress)
    model = ModelRef(
        spec_name=spec.name, model_id=model_id, precision=precision, quality=quality, folders=folders, loras=loras
    )
    model.check()
    return model


def describe_ambiguity(spec: ModelSpec, model_id: str, folders: tuple[str, ...] = ()) -> str:
    """Return a note for the user if single files could be another model of the family of `spec` as well; else "".

    folders: searched for `model_id`.
    """
    if not file_resolution.names_single_files(model_id):
        return ""
    return file_resolution.resolve(
        model_id, [other for other in models.SPECS if other.family == spec.family], folders
    ).assumed


def choose_partial_model(
    specs: Sequence[ModelSpec],
    model_id: str,
    *,
    precision: str = "auto",
    quality: str = Quality.EXACT,
    folders: tuple[str, ...] = (),
    only: str = "",
) -> ModelRef:
    """Return a reference to the networks in single files, as part of one of the models `specs`.

    model_id: the files, joined by `SEPARATOR`.
    precision, quality, folders, only: of the `ModelRef`.
    Raises `CheckpointError` if the files belong to none of them.
    """
    check_choice(precision)
    spec = file_resolution.resolve(model_id, specs, folders, needs_all=False, only=only).spec
    spec.check_input("quality", quality)
    return ModelRef(
        spec_name=spec.name, model_id=model_id, precision=precision, quality=quality, folders=folders,
        is_partial=True, only=only,
    )  # fmt: skip


def resolve_variant(
    spec: ModelSpec | None, model_id: str, folders: tuple[str, ...] = (), progress: Progress | None = None
) -> ModelSpec:
    """Return the model of the family of `spec` that `model_id` is, by its id, or by its index and configs; else `spec`.

    If several fit, the one whose published configs are most similar counts, then the first.
    spec: a model of the family; None for any family.
    folders: searched for the id.
    progress: for downloading the index, and configs if need be; None to look only at local files.
    Raises `ValueError` without `spec` if no family fits.
    """
    if file_resolution.names_single_files(model_id):
        family = [member for member in models.SPECS if spec is None or member.family == spec.family]
        return file_resolution.resolve(model_id, family, folders).spec
    if spec is None:
        spec = _choose_of_any_family(model_id, checkpoint.find_index(model_id, folders, progress=progress) or {})
    family = [spec, *(other for other in models.SPECS if other.family == spec.family and other.name != spec.name)]
    matches = [member for member in family if model_id.strip() in (member.published.hub_id, *member.miniature.ids)]
    if matches or len(family) == 1:
        return (matches or family)[0]
    index = checkpoint.find_index(model_id, folders, progress=progress)
    if index is None:
        return spec
    same_class = [member for member in family if compatibility.is_pipeline(member, index)]
    fitting = [member for member in same_class if compatibility.index_problem(member, model_id, index) is None]
    if len(fitting) > 1:
        if progress is not None:
            checkpoint.locate(fitting[0], model_id, folders).home(progress)
        names = {component.folder for member in fitting for component in member.components}
        configs = checkpoint.read_local_configs(model_id, names, folders)
        fitting = [member for member in fitting if compatibility.can_run_configs(member, model_id, configs)] or fitting
        fitting = [max(fitting, key=lambda one: compatibility.count_published_values(one, configs))]
    return (fitting or same_class or family)[0]


def _choose_of_any_family(model_id: str, index: Json) -> ModelSpec:
    alike = [spec for spec in models.SPECS if compatibility.is_pipeline(spec, index)]
    fitting = [spec for spec in alike if compatibility.index_problem(spec, model_id, index) is None]
    if not alike:
        known = ", ".join(dict.fromkeys(name for spec in models.SPECS for name in spec.published.pipeline_classes))
        raise ValueError(
            compose("checkpoint.pipeline_unknown", model_id=model_id, class_name=index.get("_class_name"), known=known)
        )
    return (fitting or alike)[0]
