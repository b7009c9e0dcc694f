"""Which programs one generation runs, as far as that is known before a weight is read: what running, compiling ahead,
planning and timing all use.

The plan of the denoising is a record: the solver's steps, which denoiser and guidance each of them has, which programs
run them. The programs of the stages around it are found by running their host code on zeros.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from ...sharding.mesh import Device
from ...sharding.shape import MeshShape
from ..model_spec import STAGES, Call, MagCache, ModelSpec, Settings
from ..precision import Precision
from . import solver_table, step_reuse
from .denoise_step import StepShape, denoise_program, keeping_program, reusing_program
from .network_call import CallRequest, caller
from .program import Config, Program, Target
from .solver_table import SolverTable

# A step's program: of one that stands alone, of one that keeps features for others, of one that starts from these.
Kind = Literal["plain", "keep", "reuse"]
_BUILD = {"plain": denoise_program, "keep": keeping_program, "reuse": reusing_program}


@dataclass(frozen=True, kw_only=True)
class Passage:
    """The steps, by index, that one denoiser runs with one program, of so many `branches` of guidance. `settings` have
    its own guidance.
    """

    expert: str
    kind: Kind
    settings: Settings
    branches: int
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Of a model with the `configs` of its first denoiser and its VAE, by component, and a checkpoint's `scheduler`.

    `boundary_ratio` is the share of the scheduler's training timesteps from which on the first of two experts denoises.
    """

    spec: ModelSpec
    settings: Settings
    configs: Mapping[str, Config]
    scheduler: Config
    boundary_ratio: float = 0.0

    @classmethod
    def published(cls, spec: ModelSpec, settings: Settings) -> "Denoising":
        """That of the real architecture, without a checkpoint."""
        return cls(
            spec=spec, settings=settings, configs={part.name: part.config for part in spec.components},
            scheduler=spec.recipe.scheduler, boundary_ratio=spec.published.index.get("boundary_ratio", 0.0),
        )  # fmt: skip

    @functools.cached_property
    def config(self) -> Config:
        """The denoiser's."""
        return self.configs[self.spec.denoiser.experts[0]]

    @functools.cached_property
    def steps(self) -> range:
        """Those that run, counted from 0."""
        return self.settings.steps

    @functools.cached_property
    def latent_shape(self) -> tuple[int, ...]:
        return self.spec.geometry.latent_shape(self.settings)

    @property
    def vae_config(self) -> Config:
        return self.configs[self.spec.vae.component]

    @functools.cached_property
    def tabulate(self) -> Callable[[int], SolverTable]:
        """The solver for a generation that begins at a step; `ValueError` where it does not do what is asked."""
        return functools.cache(functools.partial(solver_table.table_for, self.spec, self.scheduler, self.settings))

    @functools.cached_property
    def table(self) -> SolverTable:
        return self.tabulate(self.steps.start)

    @functools.cached_property
    def experts(self) -> list[tuple[str, float]]:
        """Which denoiser is for each of all steps, and its guidance scale (see `experts_for`)."""
        boundary = float(self.boundary_ratio * self.scheduler.get("num_train_timesteps", 1000))
        return solver_table.experts_for(self.spec, self.table, self.settings, boundary)

    @functools.cached_property
    def is_full(self) -> list[bool]:
        """For each of all steps, whether it starts from no features of another; the first that runs does not."""
        full = step_reuse.full_steps(self.settings.step_cache, [expert for expert, _ in self.experts])
        return [is_full or index == self.steps.start for index, is_full in enumerate(full)]

    @property
    def measures(self) -> bool:
        """Whether a curve is measured (see `MagCache`): every step is full, and keeps its residual."""
        return isinstance(self.settings.step_cache, MagCache) and self.settings.step_cache.curve is None

    @functools.cached_property
    def parts(self) -> tuple[Passage, ...]:
        """The steps that run, by denoiser; with a step cache the full ones, then the others."""
        full = all(self.is_full[index] for index in self.steps)
        kinds: tuple[Kind, ...] = ("keep",) if self.measures else ("plain",) if full else ("keep", "reuse")
        experts = dict.fromkeys(self.experts[index][0] for index in self.steps)
        steps: dict[tuple[str, Kind], list[int]] = {(expert, kind): [] for expert in experts for kind in kinds}
        for index in self.steps:
            kind = kinds[0] if self.is_full[index] else "reuse"
            steps[self.experts[index][0], kind].append(index)
        return tuple(
            Passage(
                expert=expert, kind=kind, settings=settings, branches=self.spec.branches(settings), steps=tuple(each)
            )
            for (expert, kind), each in steps.items()
            for settings in (self.spec.for_expert(self.settings, expert),)
        )

    @functools.cached_property
    def guided(self) -> Passage:
        """The part with the most branches."""
        return max(self.parts, key=lambda part: part.branches)

    def shape(self, **more: object) -> StepShape:
        """What every step's program is compiled for; `more` are fields of `StepShape`."""
        return StepShape.of(self.table, **more)

    def program(self, part: Passage, target: Target, shape: StepShape) -> Program:
        return _BUILD[part.kind](self.spec, self.config, target, part.settings, shape)

    def finish(self, sample: torch.Tensor) -> torch.Tensor:
        """The solver's last sample in the scale and layout of LATENT."""
        return self.spec.vae.denormalize(sample, self.settings, self.vae_config)


@dataclass
class Recorder:
    """Notes the programs that a stage would run, and how often; runs nothing."""

    plan: Denoising
    target: Target
    programs: dict[tuple, Program] = field(default_factory=dict)
    runs: Counter[tuple] = field(default_factory=Counter)

    @property
    def call(self) -> Call:
        return caller(self._record, zeros)

    def _record(self, request: CallRequest) -> Program:
        if request.key not in self.programs:
            config = self.plan.configs[request.component]
            self.programs[request.key] = request.program(self.plan.spec, config, self.target)
        self.runs[request.key] += 1
        return self.programs[request.key]


def zeros(program: Program, request: CallRequest) -> tuple[Any, Any]:
    """What a call returns where nothing is run."""
    return program.zeros


def rehearse(plan: Denoising, call: Call, stages: Sequence[str] = STAGES) -> None:
    """Runs the host code of the stages around the denoiser on zeros: `call` gets every program they would run."""
    spec, settings = plan.spec, plan.settings
    if "encode" in stages:
        for text in spec.text_encoders:
            rows = 2 if spec.recipe.guidance == "cfg" else 1
            ids, mask = (np.zeros((rows, n), np.int32) for n in (text.prefix + text.max_length, text.max_length))
            call(text.component, text.encode, ids, mask)
    if "image" in stages and spec.pictures.encode is not None:
        image = torch.zeros(()).expand(spec.pictures.numbers[0], settings.height, settings.width, 3)
        spec.pictures.encode(call, image, settings, plan.vae_config)
    if "decode" in stages:
        samples = plan.finish(torch.zeros(()).expand(plan.latent_shape))
        for _ in spec.vae.decode(call, samples, lambda done, total: None):
            pass


def for_spec(
    spec: ModelSpec,
    settings: Settings,
    devices: Sequence[Device],
    *,
    precision: Precision = "bfloat16",
    pictures: Precision | None = None,
    mesh_shape: MeshShape | None = None,
    stages: Sequence[str] = STAGES,
) -> tuple[Program, ...]:
    """Every program of one generation with the real architecture: what `plan` compiles, without a checkpoint. See
    `Target` for `precision` and `pictures`.
    """
    plan = Denoising.published(spec, settings)
    target = Target(devices=tuple(devices), precision=precision, pictures=pictures)
    recorder = Recorder(plan, target)
    rehearse(plan, recorder.call, stages)
    found = _steps(plan, target, mesh_shape) if "denoise" in stages else []
    recorded = [replace(program, runs=recorder.runs[key]) for key, program in recorder.programs.items()]
    return (
        *(p for p in recorded if p.components != (spec.vae.component,)),
        *found,
        *(p for p in recorded if p.components == (spec.vae.component,)),
    )


def _steps(plan: Denoising, target: Target, mesh_shape: MeshShape | None) -> list[Program]:
    """The denoiser's programs with how often each runs: experts share them, unless only one of these is guided."""
    shape = plan.shape(mesh_shape=mesh_shape, references=plan.spec.pictures.usual)
    same = defaultdict[tuple[int, str], list[Passage]](list)
    for part in sorted(plan.parts, key=lambda part: part.branches, reverse=True):
        same[part.branches, part.kind].append(part)
    found = []
    for (branches, _), parts in same.items():
        program = plan.program(parts[0], target, shape)
        name = program.name + ".unguided" * (branches < plan.guided.branches)
        found.append(replace(program, name=name, runs=sum(len(part.steps) for part in parts)))
    return found
