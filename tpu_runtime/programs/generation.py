"""Which programs one generation runs, as far as that is known before a weight is read: what running, compiling ahead,
planning and timing all use.

The plan of the denoising is a record: the solver's steps, which denoiser and guidance each of them has, which programs
run them. The programs of the stages around it are found by running their host code on zeros.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from ...sharding.mesh import Device
from ...sharding.shape import MeshShape
from ..model_spec import STAGES, Call, MagCache, ModelSpec, Settings, StepCache
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
    """The steps, by index, that one denoiser runs with one program, of so many `branches` of guidance."""

    expert: str
    kind: Kind
    guidance_scale: float
    branches: int
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Denoising:
    """Of a model with the `configs` of its components, by name, and a checkpoint's `scheduler`."""

    spec: ModelSpec
    settings: Settings
    configs: Mapping[str, Config]
    scheduler: Config
    config: Config  # the denoiser's
    latent_shape: tuple[int, ...]
    steps: range  # those that run, counted from 0
    table: SolverTable
    experts: list[tuple[str, float]]  # which denoiser is for each of all steps, and its guidance scale
    is_full: list[bool]  # for each of all steps, whether it starts from no features of another
    passages: tuple[Passage, ...]  # those that run, by denoiser; with a step cache the full steps, then the others
    guided: Passage  # the one with the most branches
    shape: StepShape  # what its programs are compiled for

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        settings: Settings,
        configs: Mapping[str, Config],
        scheduler: Config,
        boundary_ratio: float = 0.0,
    ) -> "Denoising":
        """`boundary_ratio` is the share of the scheduler's training timesteps from which on the first of two experts
        denoises. Raises `ValueError` where the solver does not do what is asked.
        """
        config, steps = configs[spec.denoiser.experts[0]], settings.steps
        latent_shape = spec.geometry.latent_shape(settings)
        table = solver_table.table_for(spec, scheduler, settings, latent_shape, steps.start)
        guidance = solver_table.guidance_of(spec, settings)
        boundary = float(boundary_ratio * scheduler.get("num_train_timesteps", 1000))
        experts = solver_table.experts_for(spec, table, settings, guidance, boundary)
        policy = settings.step_cache
        full = step_reuse.full_steps(policy, [expert for expert, _ in experts])
        is_full = [is_full or index == steps.start for index, is_full in enumerate(full)]
        passages = tuple(
            Passage(
                expert=expert, kind=kind, steps=each,
                guidance_scale=guidance[expert], branches=spec.branches(guidance[expert]),
            )
            for (expert, kind), each in _passages(policy, steps, [expert for expert, _ in experts], is_full).items()
        )  # fmt: skip
        guided = max(passages, key=lambda passage: passage.branches)
        return cls(
            spec=spec, settings=settings, configs=configs, scheduler=scheduler, config=config,
            latent_shape=latent_shape, steps=steps, table=table, experts=experts, is_full=is_full, passages=passages,
            guided=guided,
            shape=StepShape(
                latent_shape=latent_shape, branches=guided.branches, quality=settings.quality,
                reuse=step_reuse.of_policy(spec.denoiser, policy),
                num_memory=table.num_memory, timestep_dtype=table.timesteps.dtype,
            ),
        )  # fmt: skip

    @classmethod
    def published(cls, spec: ModelSpec, settings: Settings) -> "Denoising":
        """That of the real architecture, without a checkpoint."""
        configs = {part.name: part.config for part in spec.components}
        return cls.of(spec, settings, configs, spec.recipe.scheduler, spec.published.index.get("boundary_ratio", 0.0))

    @property
    def vae_config(self) -> Config:
        return self.configs[self.spec.vae.component]

    def program(self, passage: Passage, target: Target, shape: StepShape) -> Program:
        """`shape` is this one's, or with more known of it."""
        return _BUILD[passage.kind](self.spec, self.config, target, replace(shape, branches=passage.branches))

    def finish(self, sample: torch.Tensor) -> torch.Tensor:
        """The solver's last sample in the scale and layout of LATENT."""
        padding = self.spec.geometry.padding_frames(self.settings.num_frames)
        return self.spec.vae.denormalize(sample[:, :, padding:], self.vae_config)


def _passages(
    policy: StepCache | MagCache | None, steps: range, experts: Sequence[str], is_full: Sequence[bool]
) -> dict[tuple[str, Kind], tuple[int, ...]]:
    """The steps that run, by denoiser and kind. Where a curve is measured (see `MagCache`) all keep their residual."""
    measures = isinstance(policy, MagCache) and policy.curve is None
    is_plain = all(is_full[index] for index in steps)
    kinds: tuple[Kind, ...] = ("keep",) if measures else ("plain",) if is_plain else ("keep", "reuse")
    running = dict.fromkeys(experts[index] for index in steps)
    found: dict[tuple[str, Kind], list[int]] = {(expert, kind): [] for expert in running for kind in kinds}
    for index in steps:
        found[experts[index], kinds[0] if is_full[index] else "reuse"].append(index)
    return {key: tuple(each) for key, each in found.items()}


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
    return program.zeros()


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
    shape = replace(plan.shape, mesh_shape=mesh_shape, references=plan.spec.pictures.usual)
    same = defaultdict[tuple[int, str], list[Passage]](list)
    for passage in sorted(plan.passages, key=lambda passage: passage.branches, reverse=True):
        same[passage.branches, passage.kind].append(passage)
    found = []
    for (branches, _), passages in same.items():
        program = plan.program(passages[0], target, shape)
        name = program.name + ".unguided" * (branches < plan.guided.branches)
        found.append(replace(program, name=name, runs=sum(len(passage.steps) for passage in passages)))
    return found
