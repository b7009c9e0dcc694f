"""Which programs a generation runs, found by running its host code on zeros."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...sharding.mesh import Device
from ...sharding.shape import MeshShape
from ..precision import Precision
from ..spec import STAGES, Call, ModelSpec, Settings
from . import solver_table, step_reuse
from .denoise_step import StepShape, denoise_program, keeping_program, reusing_program
from .network_call import Request, caller
from .program import Config, Program, Target


@dataclass
class Recorder:
    """Notes the programs that a stage would run, and how often; runs nothing."""

    spec: ModelSpec
    target: Target
    programs: dict[tuple, Program] = field(default_factory=dict)
    runs: Counter[tuple] = field(default_factory=Counter)

    @property
    def call(self) -> Call:
        return caller(self._record, zeros)

    def _record(self, request: Request) -> Program:
        if request.key not in self.programs:
            config = self.spec.component(request.component).config
            self.programs[request.key] = request.program(self.spec, config, self.target)
        self.runs[request.key] += 1
        return self.programs[request.key]


def zeros(program: Program, request: Request) -> tuple[Any, Any]:
    """What a call returns where nothing is run."""
    return program.zeros


def rehearse(
    spec: ModelSpec, settings: Settings, vae_config: Config, call: Call, stages: Sequence[str] = STAGES
) -> None:
    """Runs the host code of the stages around the denoiser on zeros: `call` gets every program they would run."""
    if "encode" in stages:
        for text in spec.text_encoders:
            rows = 2 if spec.guidance == "cfg" else 1
            ids, mask = (np.zeros((rows, n), np.int32) for n in (text.prefix + text.max_length, text.max_length))
            call(text.component, text.encode, ids, mask)
    if "image" in stages and spec.encode_image is not None:
        image = torch.zeros(()).expand(spec.pictures[0], settings.height, settings.width, 3)
        spec.encode_image(call, image, settings, vae_config)
    if "decode" in stages:
        latent_shape = spec.geometry.latent_shape(settings)
        samples = spec.denormalize_latents(torch.zeros(()).expand(latent_shape), settings, vae_config)
        for _ in spec.decode(call, samples, lambda done, total: None):
            pass


def for_spec(
    spec: ModelSpec,
    settings: Settings,
    devices: Sequence[Device],
    *,
    precision: Precision = "bfloat16",
    mesh_shape: MeshShape | None = None,
    stages: Sequence[str] = STAGES,
) -> tuple[Program, ...]:
    """Every program of one generation with the real architecture: what `plan` compiles, without a checkpoint."""
    target = Target(devices=tuple(devices), precision=precision)
    recorder = Recorder(spec, target)
    configs = {component.name: component.config for component in spec.components}
    found: list[Program] = []
    rehearse(spec, settings, configs[spec.vae], recorder.call, stages)
    if "denoise" in stages:
        table = solver_table.table_for(spec, spec.scheduler, settings)
        shape = StepShape.of(table, mesh_shape=mesh_shape)
        config, boundary = configs[spec.experts[0]], spec.index.get("boundary_ratio", 0.0)
        experts = solver_table.experts_for(
            spec, table, settings, float(boundary * spec.scheduler.get("num_train_timesteps", 1000))
        )
        guided = [spec.for_expert(settings, experts[index][0]) for index in settings.steps]
        for branches, each in itertools.groupby(sorted(guided, key=spec.branches, reverse=True), spec.branches):
            same = [*each]
            steps = _steps(spec, config, target, same[0], shape, len(same))
            # Where only one expert is guided, the other has a program of its own.
            is_other = branches < max(map(spec.branches, guided))
            found += [replace(step, name=f"{step.name}.unguided") if is_other else step for step in steps]
    recorded = [replace(program, runs=recorder.runs[key]) for key, program in recorder.programs.items()]
    return (
        *(p for p in recorded if p.components != (spec.vae,)),
        *found,
        *(p for p in recorded if p.components == (spec.vae,)),
    )


def _steps(
    spec: ModelSpec, config: Config, target: Target, settings: Settings, shape: StepShape, runs: int
) -> tuple[Program, ...]:
    """The denoiser's programs with how often each runs: with a step cache, a full one and one from kept features."""
    is_full = step_reuse.full_steps(settings.step_cache, spec.experts[:1] * runs)
    if spec.step_reuse is None or all(is_full):
        return (replace(denoise_program(spec, config, target, settings, shape), runs=runs),)
    full = keeping_program(spec, config, target, settings, shape)
    cached = reusing_program(spec, config, target, settings, shape)
    return replace(full, runs=sum(is_full)), replace(cached, runs=is_full.count(False))
