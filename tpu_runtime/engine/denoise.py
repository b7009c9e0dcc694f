"""The denoising loop: from noise to the last sample, one program a step."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from ..checkpoints import checkpoint, score_bound
from ..programs import denoise_step, solver_table, step_reuse
from ..programs.executables import Executable
from ..programs.program import Program
from ..programs.solver_table import SolverTable
from ..programs.step_reuse import CachedDenoiser
from ..progress import Preview
from ..spec import Settings
from .program_cache import Wanted
from .stage import Stage

Inputs = Mapping[str, np.ndarray]


def denoise(stage: Stage, settings: Settings, config: Mapping[str, Any], inputs: Inputs) -> torch.Tensor:
    """All denoising steps. Waits for each, so that progress is true and a cancel stops within one step.

    `config` is the denoiser's; `inputs` are texts and condition by name. Returns the solver's last sample on the host.
    """
    spec, progress = stage.spec, stage.progress
    scheduler, table = solver_of(stage, settings)
    experts = experts_of(stage, scheduler, table, settings)
    program = denoiser_program(stage, settings, config, table, experts, inputs)
    shapes = program.program.args
    assert isinstance(shapes, denoise_step.StepArgs)
    generator = torch.Generator().manual_seed(settings.seed)
    inputs = dict(spec.draw_inputs(inputs, generator))
    placed = jax.tree.map(lambda x, want: jax.device_put(x, want.sharding), inputs, shapes.inputs)

    def draw() -> np.ndarray:
        return spec.noise(spec, settings, generator).numpy()

    state = solver_table.initial_state(draw(), table.num_memory)
    noises = table.noises(draw)
    noise = next(noises)
    running = experts[0][0]
    weights = stage.weights(running, program)
    progress.text(f"Denoising, {table.num_steps} steps")
    progress.step(0, table.num_steps, "step")
    for index, (expert, scale) in enumerate(experts):
        progress.check_cancelled()
        if expert != running:
            running, weights = expert, stage.weights(expert, program)
        state = solver_table.with_noise(state, noise)
        times = table.timesteps[index], table.next_timesteps[index]
        args = denoise_step.StepArgs(state, table.table[index], *times, placed, np.float32(scale))
        *state, denoised, is_finite = program(weights, *args)
        state = tuple(state)
        noise = next(noises, None)  # drawn while the devices are at work
        if not is_finite:  # waits for the step
            raise stage.not_finite(f"from step {index + 1} of {table.num_steps} on, the latents")
        _stepped(stage, index + 1, table.num_steps, denoised)
    return torch.from_numpy(np.array(state[0]))


def _stepped(stage: Stage, done: int, total: int, denoised: jax.Array) -> None:
    def latents() -> torch.Tensor:
        return torch.from_numpy(np.array(denoised))

    stage.progress.step(done, total, "step", Preview(latent_format=stage.spec.latent_format, latents=latents))
    if seconds := stage.progress.activity.seconds_per_unit:
        stage.progress.text(f"Denoising, step {done} of {total}, {seconds:.2f} s a step")


def solver_of(stage: Stage, settings: Settings) -> tuple[Mapping[str, Any], SolverTable]:
    """The checkpoint's scheduler config; it, or the scheduler that was chosen in its place, as a table."""
    scheduler = checkpoint.read_json(stage.found.folder("scheduler", stage.progress) / "scheduler_config.json")
    return scheduler, solver_table.table_for(stage.spec, scheduler, settings)


def experts_of(
    stage: Stage, scheduler: Mapping[str, Any], table: SolverTable, settings: Settings
) -> list[tuple[str, float]]:
    """Which denoiser runs at each step, and its guidance: the first above the checkpoint's boundary, then another.

    As upstream: the boundary is a share of the scheduler's training timesteps.
    """
    first, scale = stage.spec.experts[0], settings.guidance_scale
    if len(stage.spec.experts) == 1:
        return [(first, stage.spec.guidance_at(settings, timestep)) for timestep in table.timesteps.tolist()]
    train_steps = scheduler.get("num_train_timesteps", 1000)
    boundary = stage.found.index(stage.progress)["boundary_ratio"] * train_steps
    second_scale = scale if settings.guidance_scale_2 is None else settings.guidance_scale_2
    second = (stage.spec.experts[1], second_scale)
    return [(first, scale) if timestep >= boundary else second for timestep in table.timesteps]


def denoiser_program(
    stage: Stage,
    settings: Settings,
    config: Mapping[str, Any],
    table: SolverTable,
    experts: Sequence[tuple[str, float]],
    inputs: Inputs,
) -> Executable | CachedDenoiser:
    """What is called for each step; `experts` as `experts_of` gives them.

    With a step cache it is two programs, both compiled before the first step.
    """
    programs = programs_wanted(stage, settings, config, table, experts, inputs)
    for later in programs[1:]:
        stage.program_cache.note(later)  # compiled beside the first
    full, *cached = (stage.program_cache.get(wanted, stage.progress) for wanted in programs)
    is_full = step_reuse.full_steps(settings.step_cache, [expert for expert, _ in experts])
    return CachedDenoiser(full=full, cached=cached[0], is_full=is_full) if cached else full


def programs_wanted(
    stage: Stage,
    settings: Settings,
    config: Mapping[str, Any],
    table: SolverTable,
    experts: Sequence[tuple[str, float]],
    inputs: Inputs,
) -> list[Wanted]:
    """The denoiser's program; with a step cache that of full steps, and that of the others."""
    spec, target = stage.spec, stage.target
    references = {name: x.shape for name, x in inputs.items() if spec.references and name.startswith("reference_")}
    bounded = all(
        score_bound.is_bounded(
            spec, component, stage.found.fetch_weights(component, stage.progress), stage.added_to_norms(component)
        )
        for component in map(spec.component, spec.experts)
    )
    shape = denoise_step.StepShape.of(table, references=references, bounded=bounded)

    def wanted(kind: str, build: Callable[..., Program]) -> Wanted:
        return Wanted(
            title=f"the denoiser for {settings.width}x{settings.height}, {settings.num_frames} frames",
            key=("denoise", spec.name, config, target, spec.geometry.latent_shape(settings), spec.branches(settings),
                 shape.num_memory, shape.timestep_dtype, kind, bounded, *references.items()),
            build=functools.partial(build, spec, config, target, settings, shape),
        )  # fmt: skip

    is_full = step_reuse.full_steps(settings.step_cache, [expert for expert, _ in experts])
    if spec.step_reuse is None or all(is_full):
        return [wanted("plain", denoise_step.denoise_program)]
    return [wanted("keep", denoise_step.keeping_program), wanted("reuse", denoise_step.reusing_program)]
