"""Which model a node is to use: a description without weights, and the checks that need none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import models
from ..model_spec import QUALITIES, ModelSpec, Settings
from ..precision import check_choice
from ..progress import Progress
from . import checkpoint, compatibility, parts

if TYPE_CHECKING:
    import torch

# Of two denoisers that share the steps: both, the first, the second.
LORA_EXPERTS = ("both", "high", "low")


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldTensors:
    """The tensors of a LoRA that another program read: by name, with a `digest` that tells them from others."""

    title: str
    digest: str
    tensors: "Mapping[str, torch.Tensor]"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A file of changes to a denoiser's weights, their strength, and to which expert: the first has the high noise.

    With `held` the changes are these, and `path` is their title. With a `component` they are that network's, which is
    no denoiser.
    """

    path: str
    strength: float
    expert: str = LORA_EXPERTS[0]
    held: HeldTensors | None = None
    component: str = ""

    @property
    def source(self) -> "str | HeldTensors":
        return self.held or self.path


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """Which model to use: a description, no weights. `folders` are searched for `model_id`. `quality` is that of
    samplers which ask for none of their own (see `Settings`).

    With an `address` it is a model of the machine there, which runs its stages (see `remote`). One that `is_partial` is
    some of a model's networks, in single files, for stages that need no others.
    """

    spec_name: str
    model_id: str
    precision: str = "auto"
    quality: str = QUALITIES[0]
    folders: tuple[str, ...] = ()
    loras: tuple[Lora, ...] = ()
    address: str = ""
    is_partial: bool = False

    def __str__(self) -> str:
        quality = "" if self.quality == QUALITIES[0] else f", {self.quality}"
        return f"{self.model_id} ({self.precision}{quality})" + (f" at {self.address}" if self.address else "")

    @property
    def spec(self) -> ModelSpec:
        return models.spec_by_name(self.spec_name)

    def locate(self) -> checkpoint.Checkpoint:
        return checkpoint.locate(self.spec, self.model_id, self.folders, is_partial=self.is_partial)

    def resolve(self, progress: Progress) -> "Resolved":
        """What a run needs to know of it, fetched where need be; raises `CheckpointError` where it cannot run."""
        found = self.locate()
        return Resolved(spec=found.spec, checkpoint=found, configs=found.configs(progress))

    def check(self) -> None:
        """Raises `ValueError` with a sentence for the user where it cannot work. Reads no weights, asks no network."""
        check_choice(self.precision)
        self.spec.check_input("quality", self.quality)
        self.locate().check()

    def loras_of(self, component: str) -> tuple[Lora, ...]:
        """Those that change a component, with a strength other than 0."""
        experts = self.spec.denoiser.experts
        if component not in experts:
            return tuple(lora for lora in self.loras if lora.strength and lora.component == component)
        own = LORA_EXPERTS[0], LORA_EXPERTS[1 + experts.index(component)]
        return tuple(lora for lora in self.loras if lora.strength and not lora.component and lora.expert in own)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A model that can run: what it is, where its files are, and the config of each component, by name."""

    spec: ModelSpec
    checkpoint: checkpoint.Checkpoint
    configs: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A generation to come: which of `model_spec.STAGES` it has behind the text encoder, and its settings, if they are
    known before it denoises.
    """

    model: ModelRef
    stages: tuple[str, ...]
    settings: Settings | None = None


def choose_model(
    spec: ModelSpec,
    model_id: str,
    *,
    precision: str = "auto",
    quality: str = QUALITIES[0],
    folders: tuple[str, ...] = (),
    loras: tuple[Lora, ...] = (),
    progress: Progress | None = None,
) -> ModelRef:
    """The checked model that `model_id` is: see `variant`, for `progress` too, and `ModelRef.check`."""
    spec = variant(spec, model_id, folders, progress)
    model = ModelRef(
        spec_name=spec.name, model_id=model_id, precision=precision, quality=quality, folders=folders, loras=loras
    )
    model.check()
    return model


def assumed(spec: ModelSpec, model_id: str, folders: tuple[str, ...] = ()) -> str:
    """What to tell the user where files could be another model of the family of `spec` as well; empty where not."""
    if not parts.is_of_files(model_id):
        return ""
    return parts.resolve(model_id, [one for one in models.SPECS if one.family == spec.family], folders).assumed


def choose_part(
    specs: Sequence[ModelSpec],
    model_id: str,
    *,
    precision: str = "auto",
    quality: str = QUALITIES[0],
    folders: tuple[str, ...] = (),
) -> ModelRef:
    """The networks that files hold, as part of one of the models `specs`; `CheckpointError` where they are of none."""
    check_choice(precision)
    spec = parts.resolve(model_id, specs, folders, needs_all=False).spec
    spec.check_input("quality", quality)
    return ModelRef(
        spec_name=spec.name, model_id=model_id, precision=precision, quality=quality, folders=folders, is_partial=True
    )


def variant(
    spec: ModelSpec | None, model_id: str, folders: tuple[str, ...] = (), progress: Progress | None = None
) -> ModelSpec:
    """The model of the family of `spec` that `model_id` is, by its id or by what its index and configs say; else `spec`
    itself. Of several that fit, the one whose published configs are most like its own, or the first of these.

    A family's models share its nodes. With `progress` the index of a model on the Hub is fetched, and configs where the
    index does not decide; without it, what is not on this machine decides nothing. Without `spec` it may be of any
    family; `ValueError` if it is of none.
    """
    if parts.is_of_files(model_id):
        family = [one for one in models.SPECS if spec is None or one.family == spec.family]
        return parts.resolve(model_id, family, folders).spec
    if spec is None:
        spec = _of_any_family(model_id, checkpoint.find_index(model_id, folders, progress=progress) or {})
    family = [spec, *(other for other in models.SPECS if other.family == spec.family and other.name != spec.name)]
    named = [one for one in family if model_id.strip() in (one.published.hub_id, *one.miniature.ids)]
    if named or len(family) == 1:
        return (named or family)[0]
    index = checkpoint.find_index(model_id, folders, progress=progress)
    if index is None:
        return spec
    alike = [one for one in family if compatibility.is_pipeline(one, index)]
    fitting = [one for one in alike if compatibility.index_problem(one, model_id, index) is None]
    if len(fitting) > 1:
        if progress is not None:
            checkpoint.locate(fitting[0], model_id, folders).home(progress)
        names = {component.folder for one in fitting for component in one.components}
        configs = checkpoint.local_configs(model_id, names, folders)
        fitting = [one for one in fitting if compatibility.configs_fit(one, model_id, configs)] or fitting
        fitting = [max(fitting, key=lambda one: compatibility.likeness(one, configs))]
    return (fitting or alike or family)[0]


def _of_any_family(model_id: str, index: Mapping[str, Any]) -> ModelSpec:
    alike = [spec for spec in models.SPECS if compatibility.is_pipeline(spec, index)]
    fitting = [spec for spec in alike if compatibility.index_problem(spec, model_id, index) is None]
    if not alike:
        known = ", ".join(dict.fromkeys(name for spec in models.SPECS for name in spec.published.pipeline_classes))
        raise ValueError(f"{model_id} is a {index.get('_class_name')}; what can be run is {known}.")
    return (fitting or alike)[0]
