"""The denoising loop, one program a step: from noise, from latents, or from where another sampler stopped.

A LATENT with leftover noise holds what ComfyUI's own would: the sample, scaled so that the clean part of it counts
whole. That is for previews and other nodes, and not exact. So it also carries the solver's own numbers: the next
sampler goes on from these, to the bit as if one had run all steps, while nobody changed the latents between.
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

from ...sharding import placement
from ..checkpoints import checkpoint, guider, score_bound
from ..hosts.together import Together
from ..model_spec import Call, Settings
from ..model_spec.functions import Decode
from ..programs import denoise_step, solver_table
from ..programs.executables import Executable
from ..programs.generation import Denoising
from ..programs.network_call import CallRequest, caller
from ..programs.solver_table import SolverTable
from ..programs.step_reuse import CachedDenoiser, Runnable
from ..progress import Preview
from . import conditioning
from .payloads import CARRIED, Carried, Latent
from .program_cache import Wanted
from .stage import Stage

log = logging.getLogger(__name__)

Inputs = Mapping[str, np.ndarray]

# The devices are given the next step while one runs, so that what the host does for a step costs them nothing; but not
# earlier than this before that one should end, for after a cancel they run to the end of both.
AHEAD_S = 0.5
_LOOK_AGAIN_S = 0.002  # a step that is over sooner must not wait for this


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a solver stands: its table, its state (float32 `[1, *latent]` each), and what draws its noise.

    `inputs` are the denoiser's, texts and condition by name; what of them is drawn was drawn from `origin`, the state
    that the generator began with.
    """

    table: SolverTable
    state: tuple[np.ndarray, ...]
    inputs: Inputs
    generator: torch.Generator
    origin: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that the devices were given, by its number: its estimate of the end result, whether that is finite, and
    perhaps a picture of it.
    """

    index: int
    denoised: jax.Array
    is_finite: jax.Array
    picture: jax.Array | None = None


def denoise(
    stage: Stage, plan: Denoising, standing: Standing, programs: Mapping[str, Runnable] | None = None
) -> tuple[Standing, np.ndarray]:
    """The steps that `plan` runs, with these `programs` or its own. Waits for each, at most one behind, so that
    progress is true and a cancel stops within one step.

    Returns where the solver stands then, and the last step's estimate of the end result, on the host.
    """
    spec, progress, table, steps = plan.spec, stage.progress, standing.table, plan.steps
    programs = dict(programs or denoiser_programs(stage, plan, standing.inputs))
    pictured = _pictures(stage, plan)
    noises = table.noises(lambda: spec.recipe.noise(plan.latent_shape, standing.generator).numpy(), steps)
    noise, state, launched = next(noises), standing.state, None
    for expert, indices in itertools.groupby(steps, lambda index: plan.experts[index][0]):
        part = tuple(indices)
        program = programs.pop(expert)
        state, placed = _placed(program, state, standing.inputs)
        weights = stage.weights(expert, program)
        for index in part:
            if index == steps.start:
                progress.text(f"Denoising, {len(steps)} steps")
                progress.step(0, len(steps), "step")
            stage.check(f"step {index + 1} of {expert}")
            with progress.activity.spends("running_s"):
                state = solver_table.with_noise(state, noise)
                times, scale = (table.timesteps[index], table.next_timesteps[index]), np.float32(plan.experts[index][1])
                args = denoise_step.StepArgs(state, table.table[index], *times, placed, scale)
                *state, denoised, is_finite = program(weights, *args)
                state, before = tuple(state), launched
                # Right behind its step: the picture is there when the step is.
                launched = Launched(index=index, denoised=denoised, is_finite=is_finite, picture=pictured(denoised))
                noise = next(noises, None)  # drawn while the devices are at work
                if before is not None:
                    _settle(stage, plan, before)
                if index < part[-1] and _goes_ahead(stage, program):
                    _near_end(stage, launched)
                else:
                    _settle(stage, plan, launched)
                    launched = None
    ended = tuple(np.array(part) for part in state)
    return replace(standing, state=ended), np.array(denoised)


def measured(stage: Stage, plan: Denoising, standing: Standing) -> tuple[tuple[float, ...], ...]:
    """The ratios of `Curve` for the steps that `plan` runs, where it measures. An expert's first step has 1."""
    programs = denoiser_programs(stage, plan, standing.inputs)
    denoise(stage, plan, standing, programs)
    found = []
    for program in programs.values():
        assert isinstance(program, CachedDenoiser)
        rows = [np.asarray(row).tolist() for row in program.ratios]
        found += [[1.0] * plan.guided.branches, *([*row, *row[-1:]][: plan.guided.branches] for row in rows)]
    return tuple(zip(*found, strict=True))


def _goes_ahead(stage: Stage, program: Runnable) -> bool:
    """Whether the next step is given to the devices before this one is known to have ended: once it is known how long
    one takes, and not with a step cache, for kept features of two steps would be there at a time.
    """
    return stage.progress.activity.seconds_per_unit is not None and isinstance(program, Executable)


def _near_end(stage: Stage, launched: Launched) -> None:
    """Waits until a step that begins now should end in `AHEAD_S`, or has ended."""
    wait_until = time.monotonic() + (stage.progress.activity.seconds_per_unit or 0.0) - AHEAD_S
    while time.monotonic() < wait_until and not launched.is_finite.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(_LOOK_AGAIN_S)


def _settle(stage: Stage, plan: Denoising, launched: Launched) -> None:
    """Waits for a step, and says that it is done."""
    if not launched.is_finite:
        what = f"from step {launched.index + 1} of {plan.table.num_steps} on, the latents"
        raise stage.not_finite(what, stage.model.loras)

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
        stage.progress.text(f"Denoising, step {done} of {total}, {pace}")


def _placed(program: Runnable, state: tuple[Any, ...], inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """State and inputs where this program wants them; of a text's rows, one for each branch that it has."""
    shapes = program.program.args
    assert isinstance(shapes, denoise_step.StepArgs)
    rows = {name: x[: shapes.inputs[name].shape[0]] for name, x in inputs.items()}
    put = functools.partial(jax.tree.map, lambda x, want: placement.put(x, want.sharding))
    return put(state, shapes.state), put(rows, shapes.inputs)


def _pictures(stage: Stage, plan: Denoising) -> Callable[[jax.Array], jax.Array | None]:
    """What gives the devices a step's estimate to decode: its middle frame, by the light decoder of a model that has
    one in its VAE's place. None is given for other models, with several hosts, and where memory is short.
    """
    decode, light = stage.spec.vae.decode, stage.spec.vae.light
    if light is None or decode is not light.decode or type(stage.hosts) is not Together:
        return lambda denoised: None
    middle, shape = plan.latent_shape[2] // 2, (*plan.latent_shape[:2], 1, *plan.latent_shape[3:])
    # A scale and an offset for each value.
    offset, one = (plan.finish(torch.full(shape, value)).numpy() for value in (0.0, 1.0))
    found: dict[tuple[Any, ...], Executable] = {}

    def loaded(request: CallRequest) -> Executable:
        found[request.key] = stage.program(request)
        return found[request.key]

    _first(decode, caller(loaded, lambda executable, request: executable.program.zeros()), torch.zeros(shape))
    *_, last = found.values()
    weights = stage.weights(light.component.name, last)

    def run(executable: Executable, request: CallRequest) -> tuple[Any, Any]:
        return executable(weights, *request.args)[:2]

    def pictured(denoised: jax.Array) -> jax.Array | None:
        is_gone = any(weight.is_deleted() for weight in weights.values())
        if is_gone or not stage.device_cache.has_room(last, runs=True):
            return None
        frame = denoised[:, :, middle : middle + 1] * (one - offset) + offset
        return _first(decode, caller(lambda request: found[request.key], run), frame)[0]

    return pictured


def _first(decode: Decode, call: Call, latents: Any) -> Any:
    """The first chunk of frames that `decode` gives."""
    return next(iter(decode(call, latents, lambda done, total: None)))


def plan_of(stage: Stage, settings: Settings) -> Denoising:
    """What a generation with these settings denoises, as the checkpoint has it."""
    spec, found, progress = stage.spec, stage.found, stage.progress
    scale = guider.scale_for(found, settings.guidance_scale, progress)
    return Denoising.of(
        spec,
        replace(settings, guidance_scale=scale),
        stage.resolved.configs,
        checkpoint.read_json(found.folder("scheduler", progress) / "scheduler_config.json"),
        found.index(progress)["boundary_ratio"] if len(spec.denoiser.experts) > 1 else 0.0,
    )


def denoiser_programs(stage: Stage, plan: Denoising, inputs: Inputs) -> dict[str, Runnable]:
    """What is called for each step, by the expert that runs it. All are compiled before the first step."""
    wanted = programs_wanted(stage, plan, inputs)
    for later in [one for each in wanted.values() for one in each][1:]:
        stage.program_cache.note(later)  # compiled beside the first
    programs: dict[str, Runnable] = {}
    for expert, each in wanted.items():
        full, *cached = map(stage.executable, each)
        own = [plan.is_full[index] for index in plan.steps if plan.experts[index][0] == expert]
        number = plan.spec.geometry.num_tokens(plan.latent_shape)
        programs[expert] = (
            full
            if plan.guided.kind == "plain"
            else CachedDenoiser(full=full, cached=next(iter(cached), None), is_full=own, num_tokens=number)
        )
    return programs


def programs_wanted(stage: Stage, plan: Denoising, inputs: Inputs) -> dict[str, list[Wanted]]:
    """For each expert that runs its program; with a step cache that of full steps, and that of the others.

    Experts share one, unless only one of them is guided.
    """
    spec, target, settings = plan.spec, stage.target, plan.settings
    references = {
        name: x.shape for name, x in inputs.items() if spec.pictures.are_references and name.startswith("reference_")
    }
    bounded = all(
        score_bound.is_bounded(spec, component, stage.fetched(component), stage.added_to_norms(component))
        for component in map(spec.component, spec.denoiser.experts)
    )
    shape = replace(plan.shape, references=references, bounded=bounded)
    wanted: dict[str, list[Wanted]] = {}
    for passage in plan.passages:
        wanted.setdefault(passage.expert, []).append(
            Wanted(
                title=f"the denoiser for {settings.width}x{settings.height}, {settings.num_frames} frames",
                key=("denoise", spec.name, plan.config, target, plan.latent_shape,
                     passage.branches, shape.num_memory, shape.timestep_dtype, passage.kind, bounded, settings.quality,
                     *([] if passage.kind == "plain" else [type(settings.step_cache).__name__]), *references.items()),
                build=functools.partial(plan.program, passage, target, shape),
            )
        )  # fmt: skip
    return wanted


# --- where it begins and ends -----------------------------------------------------------------------------------------


def begin(plan: Denoising, inputs: Inputs, latents: Mapping[str, Any] | None, say: Callable[[str], None]) -> Standing:
    """Before the first step; raises `ValueError` for latents that are missing or do not fit.

    `say` tells the user why what the latents carry is not used.
    """
    spec, settings = plan.spec, plan.settings
    start, generator = plan.steps.start, torch.Generator().manual_seed(settings.seed)
    if latents is None and (start or not settings.add_noise):
        why = f"start_step is {start}" if start else "add_noise is off"
        raise ValueError(
            f"{spec.title}: {why}, but no latents are connected to go on from. Connect latents, or begin with noise: "
            "start_step 0 and add_noise on."
        )
    unscaled = None if latents is None else _unscaled(plan, latents)
    carried = None if latents is None or settings.add_noise else latents.get(CARRIED)
    if latents is not None and carried is not None:
        problem, standing = _continued(plan, inputs, latents["samples"], carried)
        if standing is not None:
            return standing
        log.warning("%s: the latents are taken as they are, without what the solver knew: %s.", spec.title, problem)
        say(f"Going on from the latents alone: {problem}")
    table, origin = plan.table, generator.get_state()
    inputs = dict(spec.recipe.draw_inputs(inputs, generator))  # as upstream, before the noise
    noise = spec.recipe.noise(plan.latent_shape, generator) if settings.add_noise else torch.zeros(())
    if unscaled is None:
        sample = noise
    else:
        clean, noisy = map(float, table.levels[start])
        sample = clean * unscaled + noisy * noise
    return Standing(
        table=table, state=solver_table.initial_state(sample.numpy(), table.num_memory), inputs=inputs,
        generator=generator, origin=origin,
    )  # fmt: skip


def end(plan: Denoising, standing: Standing, denoised: np.ndarray) -> Latent:
    """The LATENT after the last step that ran; `denoised` is that step's estimate of the end result."""
    settings, finish = plan.settings, plan.finish
    step, table = plan.steps.stop, standing.table
    sample = torch.from_numpy(standing.state[0])
    if step == table.num_steps:
        return {"samples": finish(sample)}
    if not settings.return_with_leftover_noise:
        return {"samples": finish(torch.from_numpy(denoised))}
    samples = finish(sample / float(table.levels[step, 0]))
    carried: Carried = {
        "solver": table.digest,
        "samples": digest(samples),
        "begin": table.begin,
        "step": step,
        "state": torch.from_numpy(np.concatenate(standing.state)),
        "generator": standing.generator.get_state(),
        "origin": standing.origin,
    }
    return {"samples": samples, CARRIED: carried}


def digest(samples: torch.Tensor) -> str:
    """Of latents, to see whether a node changed them."""
    return hashlib.sha256(
        repr(tuple(samples.shape)).encode() + samples.float().cpu().contiguous().numpy().tobytes()
    ).hexdigest()


def _continued(plan: Denoising, inputs: Inputs, samples: torch.Tensor, carried: Carried) -> tuple[str, Standing | None]:
    """Where another sampler stopped, or in words why that cannot be gone on from."""
    start, shape = plan.steps.start, plan.latent_shape
    if carried["samples"] != digest(samples):
        return "another node changed them", None
    if carried["step"] != start:
        return f"they were left before step {carried['step']}, and start_step is {start}", None
    begun = min(max(carried["begin"], 0), start)
    table = solver_table.table_for(plan.spec, plan.scheduler, plan.settings, shape, begun)
    if carried["solver"] != table.digest:
        return "they were left by another solver, or for other sigmas, shift or number of steps", None
    state = carried["state"]
    if tuple(state.shape) != (1 + table.num_memory, *shape[1:]) or not state.isfinite().all():
        return "what they carry is damaged", None
    first, generator = torch.Generator(), torch.Generator()
    try:
        first.set_state(carried["origin"])
        generator.set_state(carried["generator"])
    except (RuntimeError, TypeError):  # of another length, or of another type
        return "what they carry is damaged", None
    standing = Standing(
        table=table,
        # Copied: the state of a step is donated to it, and the latents stay in ComfyUI's cache.
        state=tuple(state.float().numpy()[:, None].copy()),
        inputs=dict(plan.spec.recipe.draw_inputs(inputs, first)),
        generator=generator,
        origin=carried["origin"],
    )
    return "", standing


def _unscaled(plan: Denoising, latents: Mapping[str, Any]) -> torch.Tensor:
    """The latents in the solver's scale and layout: what `plan.finish` would bring to their samples.

    That is one factor and one offset for each value, and maybe the first frames left out, which only fill up patches:
    for those the first that is there is repeated, as upstream does with pictures.
    """
    spec, shape = plan.spec, plan.latent_shape
    samples = conditioning.latent_samples(spec, latents)
    offset, one = (plan.finish(torch.full(shape, value, dtype=torch.float64)) for value in (0.0, 1.0))
    if len(samples) > 1 and samples.shape[1:] == offset.shape[1:]:
        raise ValueError(
            f"{spec.title}: the latents are a batch of {len(samples)}, and a TPU sampler goes on from one at a time. "
            "Choose one with LatentFromBatch, one sampler for each, or sample the batch with ComfyUI's KSampler on the "
            "MODEL of this model."
        )
    if samples.shape != offset.shape:
        raise ValueError(
            f"{spec.title}: the latents have shape {tuple(samples.shape)}; with the sampler's size it must be "
            f"{tuple(offset.shape)}. Set height, width and num_frames to those of the latents."
        )
    if latents.get("noise_mask") is not None:
        raise ValueError(
            f"{spec.title}: the latents have a noise mask, and masks are not supported. Connect them without it."
        )
    unscaled = ((samples.double() - offset) / (one - offset)).float()
    if spec.is_image:
        return unscaled
    missing = shape[2] - unscaled.shape[2]
    return torch.cat([unscaled[:, :, :1].repeat_interleave(missing, dim=2), unscaled], dim=2)
