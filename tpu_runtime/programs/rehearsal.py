"""Which programs a generation runs, found by running its host code on zeros."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from ...sharding.shape import MeshShape
from ..precision import Precision
from ..spec import STAGES, Call, ModelSpec, Settings
from .denoise_step import denoise_program
from .network_call import Partition, abstract_args, call_key, call_program, solver
from .program import Config, Program, Target


@dataclass
class Recorder:
    """A `spec.Call` that runs nothing: it notes the programs that a stage would run, and how often."""

    spec: ModelSpec
    target: Target
    programs: dict[tuple, Program] = field(default_factory=dict)
    runs: dict[tuple, int] = field(default_factory=dict)

    def __call__(
        self,
        component: str,
        function: Callable[..., tuple[Any, Any]],
        *args: Any,
        partition: Partition = "replicated",
        carries: bool = False,
    ) -> tuple[Any, Any]:
        key = call_key(component, function, args, partition)
        if key not in self.programs:
            config = self.spec.component(component).config
            self.programs[key] = call_program(
                self.spec,
                component,
                config,
                self.target,
                function,
                abstract_args(args),
                partition=partition,
                carries=carries,
            )
        self.runs[key] = self.runs.get(key, 0) + 1
        return self.programs[key].zeros


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
        image = torch.zeros(()).expand(1, settings.height, settings.width, 3)
        spec.encode_image(call, image, settings, vae_config)
    if "decode" in stages:
        latent_shape = spec.geometry.latent_shape(settings)
        samples = spec.denormalize_latents(torch.zeros(()).expand(latent_shape), settings, vae_config)
        for _ in spec.decode(call, samples, lambda done, total: None):
            pass


def for_spec(
    spec: ModelSpec,
    settings: Settings,
    devices: Sequence[jax.Device],
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
    rehearse(spec, settings, configs[spec.vae], recorder, stages)
    if "denoise" in stages:
        steps = solver(spec, spec.scheduler, settings)
        found.append(
            denoise_program(
                spec,
                configs[spec.experts[0]],
                target,
                settings,
                num_memory=steps.num_memory,
                timestep_dtype=steps.timesteps.dtype,
                mesh_shape=mesh_shape,
            )
        )
    recorded = [_with_runs(program, recorder.runs[key]) for key, program in recorder.programs.items()]
    return (
        *(p for p in recorded if p.weights != (spec.vae,)),
        *found,
        *(p for p in recorded if p.weights == (spec.vae,)),
    )


def _with_runs(program: Program, runs: int) -> Program:
    from dataclasses import replace

    return replace(program, runs=runs)
