"""The denoising loop, one program call per step: from noise, from latents, or resumed after another sampler.

A LATENT with leftover noise holds the same sample as ComfyUI's own, scaled so that its clean part has weight 1. That
value serves previews and other nodes and is not exact. The LATENT therefore also carries the solver's own numbers. The
next sampler resumes from these, bit for bit as if one sampler had run all steps, unless a node changed the latents.
"""

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch

from ...distributed.multihost.coordinator import HostGroup
from ...sharding import placement
from ..checkpoints import checkpoint, guider, score_bound
from ..messages import compose
from ..model_spec import Call, Settings
from ..model_spec.protocols import Decode
from ..programs import denoise_step, solver_table
from ..programs.denoising_plan import DenoisingPlan
from ..programs.executables import Executable
from ..programs.network_call import CallRequest, make_call
from ..programs.solver_table import SolverTable
from ..programs.step_cache import CachedDenoiser, Runnable
from ..progress import Preview
from . import conditioning
from .program_cache import ProgramRequest
from .stage_context import StageContext
from .stage_values import SOLVER_KEY, Latent, SolverCheckpoint

log = logging.getLogger(__name__)

Inputs = Mapping[str, np.ndarray]

# Dispatch the next step this long before the current one should finish: it hides host work, and a cancel wastes at most
# one extra step.
DISPATCH_LEAD_S = 0.5
_POLL_S = 0.002  # poll interval: an early end of a step is noticed within this time


@dataclass(frozen=True, kw_only=True)
class SolverState:
    """Solver state between two denoising steps."""

    table: SolverTable  # coefficients of the solver
    state: tuple[np.ndarray, ...]  # sample, then the solver's memory; float32 `[1, *latent]` each
    inputs: Inputs  # denoiser inputs that are constant over the steps, by name
    generator: torch.Generator  # draws the noise of stochastic solvers
    origin: torch.Tensor  # generator state before anything was drawn; drawn inputs start from it


@dataclass(frozen=True, kw_only=True)
class InFlightStep:
    """A dispatched step that has not been awaited."""

    index: int  # of the step, from 0
    denoised: jax.Array  # estimate of the end result, `[1, *latent]`
    is_finite: jax.Array  # scalar bool
    picture: jax.Array | None = None  # preview frame `[height, width, 3]`; None without a light decoder


def run_steps(
    stage: StageContext, plan: DenoisingPlan, standing: SolverState, programs: Mapping[str, Runnable] | None = None
) -> tuple[SolverState, np.ndarray]:
    """Run the steps of `plan` and return the final state and the last estimate of the end result, both on the host.

    stage: the context of the stage.
    Waits for every step with at most one more in flight, so that progress is accurate and a cancel stops within one
    step.
    standing: the state before the first step.
    programs: by expert; None for those of `get_denoiser_programs`.
    """
    spec, progress, table, steps = plan.spec, stage.progress, standing.table, plan.steps
    programs = dict(programs or get_denoiser_programs(stage, plan, standing.inputs))
    decode_preview = _preview_decoder(stage, plan)
    noises = table.draw_noises(lambda: spec.recipe.noise(plan.latent_shape, standing.generator).numpy(), steps)
    noise, state, launched, denoised = next(noises), standing.state, None, None
    for expert, indices in itertools.groupby(steps, lambda index: plan.experts[index][0]):
        group = tuple(indices)
        program = programs.pop(expert)
        state, placed = _place_args(program, state, standing.inputs)
        weights = stage.weights(expert, program)
        for index in group:
            if index == steps.start:
                progress.text(compose("sampling.denoising_steps", count=len(steps)))
                progress.step(0, len(steps), "step")
            stage.check(f"step {index + 1} of {expert}")
            with progress.activity.timed("running_s"):
                state = solver_table.insert_noise(state, noise)
                times, scale = (table.timesteps[index], table.next_timesteps[index]), np.float32(plan.experts[index][1])
                args = denoise_step.StepArgs(state, table.table[index], *times, placed, scale)
                first = None
                if index == group[0]:
                    first = stage.first_step(program, args, functools.partial(_step_request, plan, standing, expert))
                *state, denoised, is_finite = program(weights, *args)
                if first is not None and stage.overlap is not None:
                    stage.overlap.compare(first, weights, (*state, denoised, is_finite))
                state, before = tuple(state), launched
                # Dispatched right after its step, so that the preview is ready when the step is.
                launched = InFlightStep(
                    index=index, denoised=denoised, is_finite=is_finite, picture=decode_preview(denoised)
                )
                noise = next(noises, None)  # drawn while the devices compute
                if before is not None:
                    _await_step(stage, plan, before)
                if index < group[-1] and _can_dispatch_ahead(stage, program):
                    _sleep_until_near_end(stage, launched)
                else:
                    _await_step(stage, plan, launched)
                    launched = None
    assert denoised is not None, "a plan has at least one step"
    final_state = tuple(np.array(group) for group in state)
    return replace(standing, state=final_state), np.array(denoised)


def _step_request(plan: DenoisingPlan, standing: SolverState, expert: str, stage: StageContext) -> ProgramRequest:
    """Return the request of an expert's plain step, or of its full step with a step cache."""
    return denoiser_requests(stage, plan, standing.inputs)[expert][0]


def measure_magcache(stage: StageContext, plan: DenoisingPlan, standing: SolverState) -> tuple[tuple[float, ...], ...]:
    """Return the ratios of `MagCacheCurve` for the steps that `plan` runs, one tuple per branch.

    An expert's first step has 1.

    stage, standing: the context of the stage, and the state before the first step.
    """
    programs = get_denoiser_programs(stage, plan, standing.inputs)
    run_steps(stage, plan, standing, programs)
    columns = []
    for program in programs.values():
        assert isinstance(program, CachedDenoiser)
        rows = [np.asarray(row).tolist() for row in program.ratios]
        columns += [
            [1.0] * plan.largest_group.branches,
            *([*row, *row[-1:]][: plan.largest_group.branches] for row in rows),
        ]
    return tuple(zip(*columns, strict=True))


def _can_dispatch_ahead(stage: StageContext, program: Runnable) -> bool:
    """Return whether the next step may be dispatched before this one has ended.

    That needs a known step time. A step cache forbids it: kept features of two steps would be in memory at once.
    """
    return stage.progress.activity.seconds_per_unit is not None and isinstance(program, Executable)


def _sleep_until_near_end(stage: StageContext, launched: InFlightStep) -> None:
    """Wait until a step that starts now should end within `DISPATCH_LEAD_S`, or has ended."""
    wait_until = time.monotonic() + (stage.progress.activity.seconds_per_unit or 0.0) - DISPATCH_LEAD_S
    while time.monotonic() < wait_until and not launched.is_finite.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(_POLL_S)


def _await_step(stage: StageContext, plan: DenoisingPlan, launched: InFlightStep) -> None:
    """Wait for a step and report it. Raises `NotFinite` if its values are not finite."""
    if not launched.is_finite:
        what = compose("sampling.latents_from_step", step=launched.index + 1, total=plan.table.num_steps)
        raise stage.not_finite_error(what, stage.model.loras)

    def fetch(array: jax.Array) -> torch.Tensor:
        return torch.from_numpy(np.array(array))

    preview = Preview(
        latent_format=stage.spec.vae.latent_format,
        sample=functools.partial(fetch, launched.denoised),
        picture=None if launched.picture is None else functools.partial(fetch, launched.picture),
    )
    done, total = plan.steps.index(launched.index) + 1, len(plan.steps)
    stage.progress.step(done, total, "step", preview)
    if pace := stage.progress.activity.pace():
        stage.progress.text(compose("sampling.denoising_step", done=done, total=total, pace=pace))


def _place_args(program: Runnable, state: tuple[Any, ...], inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return solver state and inputs with the shardings of `program`.

    Text inputs keep as many rows as the program has branches.
    """
    shapes = program.program.args
    assert isinstance(shapes, denoise_step.StepArgs)
    rows = {name: x[: shapes.inputs[name].shape[0]] for name, x in inputs.items()}
    put = functools.partial(jax.tree.map, lambda x, want: placement.put(x, want.sharding))
    return put(state, shapes.state), put(rows, shapes.inputs)


def _preview_decoder(stage: StageContext, plan: DenoisingPlan) -> Callable[[jax.Array], jax.Array | None]:
    """Return a function from an estimate `[1, *latent]` to its middle frame `[height, width, 3]`, which it dispatches.

    It returns None for models whose decoder is not the light one, with several hosts, and if memory is short.
    """
    decode, light = stage.spec.vae.decode, stage.spec.vae.light
    if light is None or decode is not light.decode or type(stage.hosts) is not HostGroup:
        return lambda denoised: None
    middle, shape = plan.latent_shape[2] // 2, (*plan.latent_shape[:2], 1, *plan.latent_shape[3:])
    # A scale and an offset for each value.
    offset, scale = (plan.finish(torch.full(shape, value)).numpy() for value in (0.0, 1.0))
    executables: dict[tuple[Any, ...], Executable] = {}

    def load(request: CallRequest) -> Executable:
        executables[request.key] = stage.program(request)
        return executables[request.key]

    _first_chunk(decode, make_call(load, lambda executable, request: executable.program.zeros()), torch.zeros(shape))
    *_, last = executables.values()
    weights = stage.weights(light.component.name, last)

    def run(executable: Executable, request: CallRequest) -> tuple[Any, Any]:
        return executable(weights, *request.args)[:2]

    def decode_frame(denoised: jax.Array) -> jax.Array | None:
        is_unloaded = any(weight.is_deleted() for weight in weights.values())
        if is_unloaded or not stage.device_cache.has_room(last, runs=True):
            return None
        frame = denoised[:, :, middle : middle + 1] * (scale - offset) + offset
        return _first_chunk(decode, make_call(lambda request: executables[request.key], run), frame)[0]

    return decode_frame


def _first_chunk(decode: Decode, call: Call, latents: Any) -> Any:
    """Return the first chunk of frames of `decode`; `latents` are `[1, channels, frames, height, width]`."""
    return next(iter(decode(call, latents, lambda done, total: None)))


def make_plan(stage: StageContext, settings: Settings) -> DenoisingPlan:
    """Return the denoising plan of a generation with these settings and the checkpoint's scheduler."""
    spec, source, progress = stage.spec, stage.found, stage.progress
    scale = guider.resolve_guidance_scale(source, settings.guidance_scale, progress)
    return DenoisingPlan.create(
        spec,
        replace(settings, guidance_scale=scale),
        stage.resolved.configs,
        checkpoint.read_json(source.folder("scheduler", progress) / "scheduler_config.json"),
        source.index(progress)["boundary_ratio"] if len(spec.denoiser.experts) > 1 else 0.0,
    )


def get_denoiser_programs(stage: StageContext, plan: DenoisingPlan, inputs: Inputs) -> dict[str, Runnable]:
    """Return the callable of every expert by name. All programs are compiled before the first step.

    stage, plan: the context of the stage, and the generation's plan.
    inputs: denoiser inputs by name.
    """
    requests = denoiser_requests(stage, plan, inputs)
    for later in [request for own_requests in requests.values() for request in own_requests][1:]:
        stage.program_cache.note(later)  # compiled in parallel with the first
    programs: dict[str, Runnable] = {}
    for expert, own_requests in requests.items():
        full, *cached = map(stage.executable, own_requests)
        is_full = [plan.is_full[index] for index in plan.steps if plan.experts[index][0] == expert]
        num_tokens = plan.spec.geometry.num_tokens(plan.latent_shape)
        programs[expert] = (
            full
            if plan.largest_group.kind == "plain"
            else CachedDenoiser(full=full, cached=next(iter(cached), None), is_full=is_full, num_tokens=num_tokens)
        )
    return programs


def denoiser_requests(stage: StageContext, plan: DenoisingPlan, inputs: Inputs) -> dict[str, list[ProgramRequest]]:
    """Return the program requests of every expert by name: one, or with a step cache that of full and of cached steps.

    stage, plan: the context of the stage, and the generation's plan.
    Experts share a program, unless only one of them is guided.
    inputs: denoiser inputs by name; the shapes of reference images count.
    """
    spec, target, settings = plan.spec, stage.target, plan.settings
    references = {
        name: x.shape for name, x in inputs.items() if spec.pictures.are_references and name.startswith("reference_")
    }
    bounded = all(
        score_bound.is_bounded(spec, component, stage.fetch_weights(component), stage.norm_deltas(component))
        for component in map(spec.component, spec.denoiser.experts)
    )
    shape = replace(plan.shape, references=references, bounded=bounded)
    requests: dict[str, list[ProgramRequest]] = {}
    for passage in plan.step_groups:
        requests.setdefault(passage.expert, []).append(
            ProgramRequest(
                title=f"the denoiser for {settings.width}x{settings.height}, {settings.num_frames} frames",
                key=("denoise", spec.name, plan.config, target, plan.latent_shape,
                     passage.branches, shape.num_memory, shape.timestep_dtype, passage.kind, bounded, settings.quality,
                     *([] if passage.kind == "plain" else [type(settings.step_cache).__name__]), *references.items()),
                build=functools.partial(plan.program, passage, target, shape),
                model=spec.name,
            )
        )  # fmt: skip
    return requests


# --- first and last state ---------------------------------------------------------------------------------------------


def initial_state(
    plan: DenoisingPlan, inputs: Inputs, latents: Mapping[str, Any] | None, say: Callable[[str], None]
) -> SolverState:
    """Return the state before the first step. Raises `ValueError` for latents that are missing or do not fit.

    plan: of the generation.
    inputs: constant denoiser inputs by name.
    latents: a LATENT to start from; None for noise.
    say: tells the user why the solver state in the latents is not used.
    """
    spec, settings = plan.spec, plan.settings
    start, generator = plan.steps.start, torch.Generator().manual_seed(settings.seed)
    if latents is None and (start or not settings.add_noise):
        why = compose("sampling.start_step", start=start) if start else compose("sampling.add_noise_off")
        raise ValueError(compose("sampling.latents_missing", title=spec.title, why=why))
    unscaled = None if latents is None else _to_solver_scale(plan, latents)
    carried = None if latents is None or settings.add_noise else latents.get(SOLVER_KEY)
    if latents is not None and carried is not None:
        problem, standing = _resume(plan, inputs, latents["samples"], carried)
        if standing is not None:
            return standing
        log.warning("%s: the latents are used without the state of the solver: %s.", spec.title, problem)
        say(f"Continuing without the state of the solver: {problem}")
    table, origin = plan.table, generator.get_state()
    inputs = dict(spec.recipe.draw_inputs(inputs, generator))  # before the noise, as upstream
    noise = spec.recipe.noise(plan.latent_shape, generator) if settings.add_noise else torch.zeros(())
    if unscaled is None:
        sample = noise
    else:
        clean, noisy = map(float, table.levels[start])
        sample = clean * unscaled + noisy * noise
    return SolverState(
        table=table, state=solver_table.initial_state(sample.numpy(), table.num_memory), inputs=inputs,
        generator=generator, origin=origin,
    )  # fmt: skip


def to_latent(plan: DenoisingPlan, standing: SolverState, denoised: np.ndarray) -> Latent:
    """Return the LATENT after the last step that ran.

    plan, standing: of the generation, and its state after that step.
    denoised: that step's estimate of the end result, `[1, *latent]` float32.
    """
    settings, finish = plan.settings, plan.finish
    step, table = plan.steps.stop, standing.table
    sample = torch.from_numpy(standing.state[0])
    if step == table.num_steps:
        return {"samples": finish(sample)}
    if not settings.return_with_leftover_noise:
        return {"samples": finish(torch.from_numpy(denoised))}
    samples = finish(sample / float(table.levels[step, 0]))
    carried: SolverCheckpoint = {
        "solver": table.digest,
        "samples": hash_latents(samples),
        "begin": table.begin,
        "step": step,
        "state": torch.from_numpy(np.concatenate(standing.state)),
        "generator": standing.generator.get_state(),
        "origin": standing.origin,
    }
    return {"samples": samples, SOLVER_KEY: carried}


def hash_latents(samples: torch.Tensor) -> str:
    """Return a digest of latents `[batch, channels, ...]`, which shows whether a node changed them."""
    return hashlib.sha256(
        repr(tuple(samples.shape)).encode() + samples.float().cpu().contiguous().numpy().tobytes()
    ).hexdigest()


def _resume(
    plan: DenoisingPlan, inputs: Inputs, samples: torch.Tensor, carried: SolverCheckpoint
) -> tuple[str, SolverState | None]:
    """Return "" and the state where another sampler stopped, or the reason why it cannot be resumed and None.

    samples: of the LATENT, `[1, channels, ...]`.
    """
    start, shape = plan.steps.start, plan.latent_shape
    if carried["samples"] != hash_latents(samples):
        return "another node changed the latents", None
    if carried["step"] != start:
        return f"they were left before step {carried['step']}, and start_step is {start}", None
    begun = min(max(carried["begin"], 0), start)
    table = solver_table.build_table(plan.spec, plan.scheduler, plan.settings, shape, begun)
    if carried["solver"] != table.digest:
        return "they were left by another solver, or for other sigmas, shift or number of steps", None
    state = carried["state"]
    if tuple(state.shape) != (1 + table.num_memory, *shape[1:]) or not state.isfinite().all():
        return "their solver state is damaged", None
    first, generator = torch.Generator(), torch.Generator()
    try:
        first.set_state(carried["origin"])
        generator.set_state(carried["generator"])
    except (RuntimeError, TypeError):  # of another length, or of another type
        return "their solver state is damaged", None
    standing = SolverState(
        table=table,
        # Copied: the state of a step is donated to it, and the latents stay in ComfyUI's cache.
        state=tuple(state.float().numpy()[:, None].copy()),
        inputs=dict(plan.spec.recipe.draw_inputs(inputs, first)),
        generator=generator,
        origin=carried["origin"],
    )
    return "", standing


def _to_solver_scale(plan: DenoisingPlan, latents: Mapping[str, Any]) -> torch.Tensor:
    """Return the latents `[1, *latent]` in the solver's scale and layout: the inverse of `plan.finish`.

    `finish` is one factor and one offset per value, and may drop first frames that only fill up patches. The first
    frame that is there is repeated for those, as upstream does with images.
    """
    spec, shape = plan.spec, plan.latent_shape
    samples = conditioning.get_latent_samples(spec, latents)
    offset, scale = (plan.finish(torch.full(shape, value, dtype=torch.float64)) for value in (0.0, 1.0))
    if len(samples) > 1 and samples.shape[1:] == offset.shape[1:]:
        raise ValueError(compose("sampling.latents_batch", title=spec.title, count=len(samples)))
    if samples.shape != offset.shape:
        raise ValueError(compose(
            "sampling.latents_shape_wrong", title=spec.title, shape=tuple(samples.shape),
            expected_shape=tuple(offset.shape),
        ))  # fmt: skip
    if latents.get("noise_mask") is not None:
        raise ValueError(compose("sampling.noise_mask_unsupported", title=spec.title))
    unscaled = ((samples.double() - offset) / (scale - offset)).float()
    if spec.is_image:
        return unscaled
    missing = shape[2] - unscaled.shape[2]
    return torch.cat([unscaled[:, :, :1].repeat_interleave(missing, dim=2), unscaled], dim=2)
