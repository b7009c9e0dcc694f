"""Few steps: schedulers and given sigmas against diffusers' pipeline, two samplers in a row, latents to go on from.

On Wan 2.1's miniature: a whole generation of each solver is run once, and every test looks at it.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import OPERATION
from comfyui_tpu.tests.support.host import Host
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.engine import denoise as denoising
from comfyui_tpu.tpu_runtime.engine import stage_files
from comfyui_tpu.tpu_runtime.engine.stage_values import SOLVER_KEY
from comfyui_tpu.tpu_runtime.model_spec import FLOW_SCHEDULERS, Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.models.common import wan_vae
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

SPEC = spec_for_family("Wan21")
MODEL = parity.tiny_model(SPEC)
EULER, UNIPC, DPM, LCM = FLOW_SCHEDULERS
CHIPS = 3
# 24 tokens on 3 chips; one branch, as distilled models have.
SETTINGS = Settings(height=64, width=48, num_frames=5, num_inference_steps=4, guidance_scale=1.0, seed=7, shift=5.0)
CASES = {
    "Euler, given sigmas": replace(SETTINGS, scheduler=EULER, sigmas=(1.0, 0.75, 0.5, 0.25)),
    "UniPC": replace(SETTINGS, scheduler=UNIPC),
    "UniPC, given sigmas": replace(SETTINGS, scheduler=UNIPC, sigmas=(0.99, 0.8, 0.6, 0.2)),
    "DPM-Solver++": replace(SETTINGS, scheduler=DPM),
    "LCM": replace(SETTINGS, scheduler=LCM),
}
each_case = pytest.mark.parametrize("case", CASES)


@functools.cache
def pipeline() -> Any:
    folder = tiny.ensure_random(SPEC)
    return parity.upstream("WanPipeline", folder, tokenizer=umt5_tokenizer(folder))


@functools.cache
def oracle(case: str) -> np.ndarray:
    """The last latents of diffusers' pipeline with another scheduler, as its documentation says to put it in."""
    settings, pipe = CASES[case], pipeline()
    upstream = getattr(diffusers, settings.scheduler)
    shift = {"flow_shift" if settings.scheduler in (UNIPC, DPM) else "shift": settings.shift}
    scheduler = pipe.scheduler = upstream.from_config(
        {**SPEC.recipe.scheduler, "_class_name": settings.scheduler}, **shift
    )
    if settings.sigmas:  # which this pipeline does not hand on
        scheduler.set_timesteps = functools.partial(scheduler.set_timesteps, sigmas=np.array(settings.sigmas))
    if settings.scheduler == LCM:  # upstream draws from the global generator: here, where the first noise ended
        generator = torch.Generator().manual_seed(settings.seed)
        SPEC.recipe.noise(SPEC.geometry.latent_shape(settings), generator)
        scheduler.step = functools.partial(scheduler.step, generator=generator)
    return parity.generate(pipe, settings, prompt="cat", negative_prompt="", num_frames=settings.num_frames).latents


@functools.cache
def embeds() -> tuple:
    return engine(CHIPS).encode(MODEL, "cat", "", SilentProgress())


def run(settings: Settings, latents: Any = None, progress: Any = None) -> Any:
    return engine(CHIPS).denoise(MODEL, settings, *embeds(), progress or SilentProgress(), latents=latents)


@functools.cache
def full_run(case: str) -> torch.Tensor:
    return run(CASES[case])["samples"]


def normalise_latents(samples: torch.Tensor) -> torch.Tensor:
    mean, std = wan_vae.latent_stats(SPEC.component(SPEC.vae.component).config)
    return (samples - mean) / std


def split_settings(case: str) -> tuple[Settings, Settings]:
    """Two samplers of 2 + 2 steps; the seed of the second does not matter."""
    first = replace(CASES[case], end_step=2, return_with_leftover_noise=True)
    return first, replace(CASES[case], start_step=2, add_noise=False, seed=99)


@each_case
def test_denoise_schedulers_match_diffusers(case: str, compare: Callable):
    compare(f"latents, {case}", normalise_latents(full_run(case)).numpy(), oracle(case))


@each_case
def test_denoise_in_two_parts_equals_one_run(case: str, tmp_path: Path):
    """Also over a file."""
    expected, (first, second) = full_run(case), split_settings(case)
    left = run(first)
    assert not torch.equal(left["samples"], expected)
    assert torch.equal(run(second, left)["samples"], expected)
    stage_files.save_latents(tmp_path, left, MODEL)
    assert torch.equal(run(second, stage_files.load_latents(tmp_path, MODEL))["samples"], expected)


def test_denoise_other_step_settings_compile_nothing():
    """Other steps, sigmas, parts and a single step run one program for each solver."""
    for case in CASES:
        full_run(case)
    runner = engine(CHIPS)
    before = [*runner.device_cache.programs()], runner.counts["compile"]
    for name in (EULER, UNIPC, LCM):
        settings = replace(SETTINGS, scheduler=name)
        for few in (
            replace(settings, num_inference_steps=1),
            replace(settings, num_inference_steps=3, sigmas=(0.9, 0.5, 0.1)),
            replace(settings, end_step=1),
            replace(settings, num_inference_steps=2, shift=3.0),
        ):
            run(few)
    run(replace(SETTINGS, scheduler=UNIPC, start_step=3), {"samples": full_run("UniPC")})
    assert {*map(id, before[0])} == {*map(id, runner.device_cache.programs())}
    assert runner.counts["compile"] == before[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shift": 3.0}, "they were left by another solver, or for other sigmas, shift or number of steps"),
        ({"num_inference_steps": 5}, "they were left by another solver, or for other sigmas, shift or number of steps"),
        ({"scheduler": DPM}, "they were left by another solver, or for other sigmas, shift or number of steps"),
        ({"start_step": 3}, "they were left before step 2, and start_step is 3"),
    ],
)
def test_denoise_mismatched_solver_state_is_ignored_with_warning(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
):
    """Otherwise they are latents as any, and the user is told."""
    first, second = split_settings("UniPC")
    left, progress = run(first), Host()
    other = replace(second, **change)
    with caplog.at_level(logging.WARNING):
        found = run(other, left, progress)["samples"]
    assert f"Continuing without the state of the solver: {reason}" in progress.said and reason in caplog.text
    assert torch.equal(found, run(other, {"samples": left["samples"]})["samples"])


def test_denoise_modified_latents_drop_solver_state_with_message():
    first, second = split_settings("UniPC")
    left, progress = run(first), Host()
    changed = {**left, "samples": left["samples"] * 1.01}
    found = run(second, changed, progress)["samples"]
    assert "Continuing without the state of the solver: another node changed the latents" in progress.said
    assert not torch.equal(found, full_run("UniPC"))
    for generator in (torch.zeros(3, dtype=torch.uint8), left[SOLVER_KEY]["generator"].float()):
        damaged, progress = {**left, SOLVER_KEY: {**left[SOLVER_KEY], "generator": generator}}, Host()
        run(second, damaged, progress)
        assert "Continuing without the state of the solver: their solver state is damaged" in progress.said


@pytest.mark.parametrize("shape", [(1, 16, 0, 8, 6), (0, 16, 2, 8, 6), (1, 16, 2, 0, 6)])
def test_decode_empty_latent_raises_value_error(shape: tuple[int, ...]):
    with raises_message(ValueError, "condition.latent_empty"):
        engine(CHIPS).decode(MODEL, {"samples": torch.zeros(shape)}, SilentProgress())


def test_denoise_leftover_latents_use_comfyui_scale(compare: Callable):
    """As its flow models' samplers leave them, over 1 - sigma: so a solver without memory nearly goes on from these."""
    first, second = split_settings("Euler, given sigmas")
    left = run(first)
    sigma = 5 * 0.5 / (1 + 4 * 0.5)
    state = left[SOLVER_KEY]["state"][:1]
    compare("leftover", normalise_latents(left["samples"]).numpy(), (state / (1 - sigma)).numpy(), error=OPERATION)
    found = run(second, {"samples": left["samples"]})["samples"]
    compare("going on from it", found.numpy(), full_run("Euler, given sigmas").numpy())


def test_denoise_early_end_without_leftover_noise_is_final_estimate(compare: Callable):
    """What an Euler step to 0 gives."""
    settings = replace(CASES["Euler, given sigmas"], end_step=3)
    shorter = replace(settings, num_inference_steps=3, sigmas=(1.0, 0.75, 0.5), end_step=0)
    compare("early end", run(settings)["samples"].numpy(), run(shorter)["samples"].numpy(), error=OPERATION)


@pytest.mark.parametrize("name", FLOW_SCHEDULERS)
def test_initial_state_adds_noise_as_diffusers(name: str, compare: Callable):
    """And the solver begins there as new, as in upstream's image to image."""
    settings = replace(SETTINGS, scheduler=name, start_step=2)
    plan = DenoisingPlan.published(SPEC, settings)
    samples = torch.randn(SPEC.geometry.latent_shape(settings), generator=torch.Generator().manual_seed(3))
    latents = {"samples": plan.finish(samples)}
    found = denoising.initial_state(plan, {}, latents, lambda text: None)
    changes = {**SPEC.recipe.scheduler, **FLOW_SCHEDULERS[name], "flow_shift": 5.0, "shift": 5.0}
    upstream = solver_table.build_scheduler(changes)
    upstream.set_timesteps(4)
    upstream.set_begin_index(2)
    noise = SPEC.recipe.noise(plan.latent_shape, torch.Generator().manual_seed(settings.seed))
    at = upstream.timesteps[2:3]
    mix = getattr(upstream, "scale_noise", None)
    expected = mix(samples, at, noise) if mix else upstream.add_noise(samples, noise, at)
    compare(f"{name}, noise added", found.state[0], expected.numpy(), error=OPERATION)
    state, sample = found.state, expected
    outputs = torch.randn(2, *samples.shape, generator=torch.Generator().manual_seed(4))
    ours, theirs = (torch.Generator().manual_seed(5) for _ in range(2))
    drawn = found.table.draw_noises(lambda: torch.randn(samples.shape, generator=ours).numpy(), range(2, 4))
    for index, noise, output in zip((2, 3), drawn, outputs, strict=True):
        state = solver_table.insert_noise(tuple(state), noise)
        *state, _ = solver_table.advance(state, output.numpy(), found.table.table[index])
        more = {"generator": theirs} if name == LCM else {}
        sample = upstream.step(output, upstream.timesteps[index], sample, return_dict=False, **more)[0]
    compare(f"{name}, begun in the middle", np.asarray(state[0]), sample.numpy(), error=OPERATION)


@pytest.mark.parametrize(
    ("change", "latents", "expected"),
    [
        ({"start_step": 2}, None, Expected("sampling.latents_missing", why=Expected("sampling.start_step", start=2))),
        ({"add_noise": False}, None, Expected("sampling.latents_missing", why="sampling.add_noise_off")),
        ({}, torch.zeros(1, 16, 2, 4, 4), Expected("sampling.latents_shape_wrong", shape=(1, 16, 2, 4, 4))),
        ({}, torch.zeros(2, 16, 2, 8, 6), Expected("sampling.latents_batch", count=2)),
        ({}, torch.zeros(2, 16, 2, 4, 4), Expected("sampling.latents_shape_wrong", shape=(2, 16, 2, 4, 4))),
        (
            {},
            torch.zeros(1, 4, 8, 6),
            Expected("condition.latent_shape_wrong", shape=(1, 4, 8, 6), names="batch, 16, frames"),
        ),
        ({}, torch.full((1, 16, 2, 8, 6), torch.nan), Expected("program.input_not_finite", name="the LATENT")),
        (
            {"scheduler": DPM, "sigmas": (1.0, 0.5)},
            None,
            Expected("program.scheduler_without_sigmas", type="DPMSolverMultistepScheduler"),
        ),
    ],
)
def test_denoise_invalid_start_raises_before_loading_weights(
    change: dict[str, Any], latents: torch.Tensor | None, expected: Expected
):
    embeds()
    loads = engine(CHIPS).counts["load"]
    with raises_message(ValueError, expected):
        run(replace(SETTINGS, **change), None if latents is None else {"samples": latents})
    with raises_message(ValueError, "sampling.noise_mask_unsupported"):
        run(SETTINGS, {"samples": torch.zeros(1, 16, 2, 8, 6), "noise_mask": torch.ones(1, 1, 8, 6)})
    assert engine(CHIPS).counts["load"] == loads
