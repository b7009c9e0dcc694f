"""The programs of one generation, as far as they are known before weights are read.

Execution, background compiles, planning and timing share this module.

The plan of the denoising is a record: the solver's steps, the denoiser and guidance of each, and the programs that run
them. Programs of the surrounding stages are found by running their host code on zeros.
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
from . import solver_table, step_cache
from .denoise_step import StepShape, build_denoise_program, build_reusing_program, build_saving_program
from .network_call import CallRequest, make_call
from .program import CompileTarget, Config, Program
from .solver_table import SolverTable

# A step's program: without a step cache, keeping features for later steps, or reusing these.
Kind = Literal["plain", "keep", "reuse"]
_BUILD = {"plain": build_denoise_program, "keep": build_saving_program, "reuse": build_reusing_program}


@dataclass(frozen=True, kw_only=True)
class StepGroup:
    """Group of steps that one denoiser runs with one program."""

    expert: str  # component of the denoiser
    kind: Kind
    guidance_scale: float
    branches: int  # of guidance
    steps: tuple[int, ...]  # by index


@dataclass(frozen=True, kw_only=True)
class DenoisingPlan:
    """Plan of the denoising steps of one generation."""

    spec: ModelSpec
    settings: Settings
    configs: Mapping[str, Config]  # of the model's components, by name
    scheduler: Config  # of the checkpoint
    config: Config  # of the denoiser
    latent_shape: tuple[int, ...]
    steps: range  # steps that run, counted from 0
    table: SolverTable
    experts: list[tuple[str, float]]  # denoiser and guidance scale of each of all steps
    is_full: list[bool]  # for each of all steps, whether it does not start from features of another
    step_groups: tuple[StepGroup, ...]  # groups that run, by denoiser; with a step cache full steps first
    largest_group: StepGroup  # the group with the most branches
    shape: StepShape  # shapes that its programs are compiled for

    @classmethod
    def create(
        cls,
        spec: ModelSpec,
        settings: Settings,
        configs: Mapping[str, Config],
        scheduler: Config,
        boundary_ratio: float = 0.0,
    ) -> "DenoisingPlan":
        """Return the plan of a generation. Raises `ValueError` if the solver does not support the settings.

        spec, settings: of the generation. configs: of the components, by name. scheduler: the checkpoint's scheduler
          config.
        boundary_ratio: share of the training timesteps from which on the first of two experts denoises.
        """
        config, steps = configs[spec.denoiser.experts[0]], settings.steps
        latent_shape = spec.geometry.latent_shape(settings)
        table = solver_table.build_table(spec, scheduler, settings, latent_shape, steps.start)
        guidance = solver_table.guidance_scales(spec, settings)
        boundary = float(boundary_ratio * scheduler.get("num_train_timesteps", 1000))
        experts = solver_table.assign_experts(spec, table, settings, guidance, boundary)
        policy = settings.step_cache
        full = step_cache.full_steps(policy, [expert for expert, _ in experts])
        is_full = [is_full or index == steps.start for index, is_full in enumerate(full)]
        passages = tuple(
            StepGroup(
                expert=expert, kind=kind, steps=indices,
                guidance_scale=guidance[expert], branches=spec.branches(guidance[expert]),
            )
            for (expert, kind), indices in _passages(policy, steps, [expert for expert, _ in experts], is_full).items()
        )  # fmt: skip
        guided = max(passages, key=lambda passage: passage.branches)
        return cls(
            spec=spec, settings=settings, configs=configs, scheduler=scheduler, config=config,
            latent_shape=latent_shape, steps=steps, table=table, experts=experts, is_full=is_full, step_groups=passages,
            largest_group=guided,
            shape=StepShape(
                latent_shape=latent_shape, branches=guided.branches, quality=settings.quality,
                reuse=step_cache.choose_reuse(spec.denoiser, policy),
                num_memory=table.num_memory, timestep_dtype=table.timesteps.dtype,
            ),
        )  # fmt: skip

    @classmethod
    def published(cls, spec: ModelSpec, settings: Settings) -> "DenoisingPlan":
        """Return the plan with the published architecture, without a checkpoint."""
        configs = {part.name: part.config for part in spec.components}
        return cls.create(
            spec, settings, configs, spec.recipe.scheduler, spec.published.index.get("boundary_ratio", 0.0)
        )

    @property
    def vae_config(self) -> Config:
        return self.configs[self.spec.vae.component]

    def program(self, passage: StepGroup, target: CompileTarget, shape: StepShape) -> Program:
        """Return the program of the steps `passage` for `target`. shape: of this plan, or with more fields known."""
        return _BUILD[passage.kind](self.spec, self.config, target, replace(shape, branches=passage.branches))

    def finish(self, sample: torch.Tensor) -> torch.Tensor:
        """Return the solver's last sample in the scale and layout of LATENT.

        sample: `[batch, channels, frames, height, width]`.
        """
        padding = self.spec.geometry.padding_frames(self.settings.num_frames)
        return self.spec.vae.denormalize(sample[:, :, padding:], self.vae_config)


def _passages(
    policy: StepCache | MagCache | None, steps: range, experts: Sequence[str], is_full: Sequence[bool]
) -> dict[tuple[str, Kind], tuple[int, ...]]:
    """Return the steps that run, by denoiser and kind.

    While a curve is measured (see `MagCache`), all keep their residual.
    """
    measures = isinstance(policy, MagCache) and policy.curve is None
    is_plain = all(is_full[index] for index in steps)
    kinds: tuple[Kind, ...] = ("keep",) if measures else ("plain",) if is_plain else ("keep", "reuse")
    running = dict.fromkeys(experts[index] for index in steps)
    groups: dict[tuple[str, Kind], list[int]] = {(expert, kind): [] for expert in running for kind in kinds}
    for index in steps:
        groups[experts[index], kinds[0] if is_full[index] else "reuse"].append(index)
    return {key: tuple(indices) for key, indices in groups.items()}


@dataclass
class ProgramRecorder:
    """Recorder of the programs that a stage would run, and how often. It runs nothing."""

    plan: DenoisingPlan
    target: CompileTarget
    programs: dict[tuple, Program] = field(default_factory=dict)
    runs: Counter[tuple] = field(default_factory=Counter)

    @property
    def call(self) -> Call:
        return make_call(self._record, zero_results)

    def _record(self, request: CallRequest) -> Program:
        if request.key not in self.programs:
            config = self.plan.configs[request.component]
            self.programs[request.key] = request.program(self.plan.spec, config, self.target)
        self.runs[request.key] += 1
        return self.programs[request.key]


def zero_results(program: Program, request: CallRequest) -> tuple[Any, Any]:
    """Return zeros instead of a call's result, without running its program."""
    return program.zeros()


def dry_run(plan: DenoisingPlan, call: Call, stages: Sequence[str] = STAGES) -> None:
    """Run the host code of the stages around the denoiser on zeros, so that `call` gets every program they would run.

    plan: of the denoising. stages: names of the stages to run.
    """
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


def list_programs(
    spec: ModelSpec,
    settings: Settings,
    devices: Sequence[Device],
    *,
    precision: Precision = "bfloat16",
    pictures: Precision | None = None,
    mesh_shape: MeshShape | None = None,
    stages: Sequence[str] = STAGES,
) -> tuple[Program, ...]:
    """Return every program of one generation with the published architecture; `plan` compiles these.

    The decoder's programs come last. spec, settings: of the generation. devices, precision, pictures: see
    `CompileTarget`. mesh_shape: of the denoiser; None: the spec's choice. stages: names of the stages.
    """
    plan = DenoisingPlan.published(spec, settings)
    target = CompileTarget(devices=tuple(devices), precision=precision, pictures=pictures)
    recorder = ProgramRecorder(plan, target)
    dry_run(plan, recorder.call, stages)
    step_programs = _steps(plan, target, mesh_shape) if "denoise" in stages else []
    recorded = [replace(program, runs=recorder.runs[key]) for key, program in recorder.programs.items()]
    return (
        *(p for p in recorded if p.components != (spec.vae.component,)),
        *step_programs,
        *(p for p in recorded if p.components == (spec.vae.component,)),
    )


def _steps(plan: DenoisingPlan, target: CompileTarget, mesh_shape: MeshShape | None) -> list[Program]:
    """Return the denoiser's programs with how often each runs.

    Experts share them, unless only one of them is guided.
    """
    shape = replace(plan.shape, mesh_shape=mesh_shape, references=plan.spec.pictures.planned_shapes)
    same = defaultdict[tuple[int, str], list[StepGroup]](list)
    for passage in sorted(plan.step_groups, key=lambda passage: passage.branches, reverse=True):
        same[passage.branches, passage.kind].append(passage)
    programs = []
    for (branches, _), passages in same.items():
        program = plan.program(passages[0], target, shape)
        name = program.name + ".unguided" * (branches < plan.largest_group.branches)
        programs.append(replace(program, name=name, runs=sum(len(passage.steps) for passage in passages)))
    return programs
