"""Recipes of distilled models: the sigmas and timesteps that their makers publish, with their sources."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import OPERATION
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tpu_runtime.model_spec import FLOW_SCHEDULERS, ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from comfyui_tpu.tpu_runtime.programs.solver_table import SolverTable
from diffusers.pipelines.flux2 import pipeline_flux2, pipeline_flux2_klein
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5

WAN, FLUX, HUNYUAN = (spec_for_family(name) for name in ("Wan22I2V", "Flux2", "HunyuanVideo15"))
EULER, UNIPC, DPM, LCM = FLOW_SCHEDULERS
# LightX2V's 4 steps, configs/distill/wan22/wan_moe_i2v_distill_model.json in its repository:
# denoising_step_list [1000, 750, 500, 250], sample_shift 5, boundary_step_index 2. Its schedulers/wan/step_distill
# takes Euler steps, for Wan 2.1 since November 2025; before, it added new noise at every step there.
LIGHTX2V = "1, 0.75, 0.5, 0.25"
LIGHTX2V_SIGMAS = [1.0, 0.9375, 0.83333, 0.625]
FASTWAN = "1, 0.757, 0.522"
# The card of fal/FLUX.2-dev-Turbo: "pre-shifted custom sigmas for 8-step turbo inference", guidance_scale 2.5, given
# to Flux2Pipeline, which shifts them by the picture's size.
TURBO = (1.0, 0.6509, 0.4374, 0.2932, 0.1893, 0.1108, 0.0495, 0.00031)


def table_of(spec: ModelSpec, **widgets: Any) -> SolverTable:
    return DenoisingPlan.published(spec, spec.settings(**widgets)).table


def sigmas_of(table: SolverTable) -> np.ndarray:
    return table.levels[:, 1]


@pytest.mark.parametrize("scheduler", [EULER, LCM])
@pytest.mark.parametrize("spec", [WAN, spec_for_family("Wan21"), HUNYUAN], ids=lambda spec: spec.name)
def test_lightx2v_four_steps_match_published_sigmas(spec: ModelSpec, scheduler: str, compare: Callable):
    shift = "shift" if spec is WAN else "flow_shift"
    table = table_of(spec, sigmas=LIGHTX2V, scheduler=scheduler, **{shift: 5.0})
    compare("sigmas", sigmas_of(table), LIGHTX2V_SIGMAS, error=1e-5)  # of five decimals
    compare("timesteps", table.timesteps, np.array(LIGHTX2V_SIGMAS) * 1000, error=1e-5)
    compare("levels", table.levels.sum(1), np.ones(4), error=OPERATION)


def test_few_steps_docs_list_the_tested_recipes():
    """`docs/few_steps.md`, as people copy it."""
    lines = (Path(__file__).parents[2] / "docs" / "few_steps.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    recipes = {model: (steps, said) for model, steps, said in rows}

    def found(model: str) -> tuple[int, str, list[str], str]:
        """Steps, scheduler, sigmas and what follows them."""
        (steps, said), words = recipes[model], r"`scheduler` (.+?), `sigmas` `(.+?)`, (.+)"
        scheduler, sigmas, rest = re.fullmatch(words, said).groups()
        return int(steps), scheduler, sigmas.split(", "), rest

    lightx2v = LIGHTX2V.split(", ")
    assert found("Wan 2.2 with LightX2V's LoRAs or checkpoint") == (4, EULER, lightx2v, "shift 5, both guidances 1")
    hunyuan = "HunyuanVideo 1.5 T2V 480p with LightX2V's"
    assert found(hunyuan) == (4, EULER, lightx2v, "`flow_shift` 5, guidance 1")
    steps, said = recipes["Wan 2.1 with LightX2V's"]
    same, _, before = said.partition(";")
    assert (steps, same) == ("4", "the same, with guidance 1") and LCM in before and "older card" in before
    fastwan = "Wan 2.1 or 2.2 5B as FastWan (FastVideo's `WanDMDPipeline`)"
    assert found(fastwan) == (3, LCM, FASTWAN.split(", "), "shift 1, guidance 1")


def test_fastwan_three_steps_match_published_sampler(compare: Callable):
    """FastVideo's `DmdDenoisingStage`: of what the network takes for the clean video and new noise the next sample, at
    [1000, 757, 522] of 1000 timesteps that are shifted by 8 already: those nearest to them.
    """
    spec, published = spec_for_family("Wan21"), np.array([1000, 757, 522])
    settings = spec.settings(sigmas=FASTWAN, flow_shift=1.0, guidance_scale=1.0, scheduler=LCM)
    table = DenoisingPlan.published(spec, settings).table
    equal = np.linspace(1, 1e-3, 1000)
    shifted = 8 * equal / (1 + 7 * equal)
    theirs = shifted[np.abs(shifted * 1000 - published[:, None]).argmin(1)]
    compare("sigmas", sigmas_of(table), theirs, error=5e-4)  # the nearest of a list
    compare("timesteps", table.timesteps, published, error=OPERATION)
    generator = torch.Generator().manual_seed(0)
    sample, *noises = (torch.randn(5, generator=generator).numpy() for _ in range(4))
    steps = iter(noises)
    drawn = list(table.draw_noises(lambda: next(steps), range(3)))
    state = solver_table.initial_state(sample, table.num_memory)
    for index, (sigma, after) in enumerate(itertools.pairwise([*sigmas_of(table), 0.0])):
        flow = torch.randn(5, generator=generator).numpy()
        sample = (1 - after) * (sample - sigma * flow) + after * noises[index]
        *state, _ = solver_table.advance(
            solver_table.insert_noise(tuple(state), drawn[index]), flow, table.table[index]
        )
        compare(f"step {index + 1}", np.asarray(state[0]), sample, error=OPERATION)


@pytest.mark.parametrize("boundary", [0.9, 0.875], ids=["Wan 2.2 I2V", "Wan 2.2 T2V"])
def test_experts_of_four_steps_split_in_half(boundary: float):
    settings = WAN.settings(sigmas=LIGHTX2V, scheduler=EULER, guidance_scale=1.0, guidance_scale_2=3.0)

    def experts(settings: Settings) -> list:
        configs = {part.name: part.config for part in WAN.components}
        return DenoisingPlan.create(WAN, settings, configs, WAN.recipe.scheduler, boundary).experts

    first, second = ("transformer", 1.0), ("transformer_2", 3.0)
    assert experts(settings) == [first, first, second, second]
    assert experts(replace(settings, high_noise_steps=3)) == [first, first, first, second]
    assert experts(replace(settings, high_noise_steps=4)) == [first] * 4


def test_assign_experts_uses_guidance_per_step_and_boundary():
    alone = table_of(HUNYUAN, num_inference_steps=3)
    recipe = replace(HUNYUAN.recipe, guidance_at=lambda scale, timestep, num_steps: scale * timestep / num_steps)
    halving = replace(HUNYUAN, recipe=recipe)
    steady = HUNYUAN.settings(num_inference_steps=3, guidance_scale=6.0)
    (name,) = HUNYUAN.denoiser.experts
    expected = [(name, 6.0 * timestep / 3) for timestep in alone.timesteps.tolist()]
    settings = replace(steady, use_dynamic_cfg=True)
    assert solver_table.assign_experts(halving, alone, settings, {name: 6.0}, boundary=900.0) == expected
    for unchanged in ((halving, steady), (HUNYUAN, settings)):
        found = solver_table.assign_experts(unchanged[0], alone, unchanged[1], {name: 6.0}, boundary=900.0)
        assert found == [(name, 6.0)] * 3
    table = table_of(WAN, num_inference_steps=3)
    assert table_of(WAN, num_inference_steps=3, start_step=2).begin == 2
    for second in (None, 3.0):
        own = replace(WAN.settings(guidance_scale=5.0), guidance_scale_2=second)
        guidance = solver_table.guidance_scales(WAN, own)
        found = solver_table.assign_experts(WAN, table, own, guidance, boundary=float(table.timesteps[1]))
        assert found == [("transformer", 5.0)] * 2 + [("transformer_2", second or 5.0)]


def test_four_euler_steps_differ_from_lightx2v_sigmas(compare: Callable):
    """The trap: upstream's Euler spreads its steps between shifted ends, and shifts them again."""
    alone = sigmas_of(table_of(WAN, num_inference_steps=4, shift=5.0, scheduler=EULER))
    compare("sigmas", alone, [1.0, 0.9097, 0.7173, 0.0244], error=1e-4)  # of four decimals
    for scheduler in (UNIPC, DPM, "checkpoint"):
        table = table_of(WAN, num_inference_steps=4, shift=5.0, scheduler=scheduler)
        # Of 1000 training steps they take the nearest.
        compare("sigmas", sigmas_of(table), LIGHTX2V_SIGMAS, error=1e-3, slope=5e-3)
        compare("timesteps", table.timesteps, [999, 937, 833, 625], error=1.5e-3, slope=5e-3)


@pytest.mark.parametrize("scheduler", FLOW_SCHEDULERS)
def test_build_table_unset_shift_uses_checkpoint_shift(scheduler: str):
    """The checkpoint's where none is given, whatever the class calls it."""
    for spec, key, own in ((WAN, "flow_shift", 3.0), (HUNYUAN, "shift", 9.0)):
        config = {**spec.recipe.scheduler, key: own}
        given = replace(spec.settings(scheduler=scheduler, num_inference_steps=4), shift=None)
        unset, same, other = (
            solver_table.build_table(spec, config, replace(given, shift=shift), spec.geometry.latent_shape(given))
            for shift in (None, own, own + 2)
        )
        assert unset.digest == same.digest != other.digest


def upstream_sigmas(module: Any, steps: int, sigmas: Any, shift: dict[str, Any], **mu: Any) -> Any:
    """As diffusers' pipelines set their scheduler."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**shift)
    timesteps, _ = module.retrieve_timesteps(scheduler, steps, "cpu", sigmas=sigmas, **mu)
    return timesteps.numpy(), scheduler.sigmas[:-1].numpy()


def test_flux2_turbo_eight_steps_match_diffusers(compare: Callable):
    """At 1024 x 1024 what the pipeline makes of the card's sigmas is eight equal steps with a shift of 3."""
    table = table_of(FLUX, sigmas=", ".join(map(str, TURBO)), guidance_scale=2.5)
    mu = pipeline_flux2.compute_empirical_mu(image_seq_len=4096, num_steps=8)
    timesteps, sigmas = upstream_sigmas(pipeline_flux2, 8, list(TURBO), {"use_dynamic_shifting": True}, mu=mu)
    compare("sigmas", sigmas_of(table), sigmas, error=OPERATION)
    compare("timesteps", table.timesteps, timesteps, error=OPERATION)
    equal = np.linspace(1, 0.001, 8)
    compare("equal steps", sigmas_of(table), 3 * equal / (1 + 2 * equal), error=5e-4)  # the card's have four decimals


def test_flux2_klein_four_steps_match_diffusers(compare: Callable):
    """`Flux2KleinPipeline` at 1024 x 1024: the same shift as dev's, for four steps."""
    table = table_of(FLUX, num_inference_steps=4)
    mu = pipeline_flux2_klein.compute_empirical_mu(image_seq_len=4096, num_steps=4)
    timesteps, sigmas = upstream_sigmas(
        pipeline_flux2_klein, 4, np.linspace(1, 0.25, 4), {"use_dynamic_shifting": True}, mu=mu
    )
    compare("sigmas", sigmas_of(table), sigmas, error=OPERATION)
    compare("timesteps", table.timesteps, timesteps, error=OPERATION)


@pytest.mark.parametrize("steps", [8, 12])
def test_hunyuan15_step_distilled_sigmas_match_diffusers(steps: int, compare: Callable):
    """Its makers' README: 8 or 12 steps; the card of 480p_i2v_step_distilled: shift 7, guidance 1."""
    table = table_of(lookup_spec("hunyuanvideo1.5-i2v-720p"), num_inference_steps=steps, flow_shift=7.0)
    equal = np.linspace(1, 0, steps + 1)[:-1]
    timesteps, sigmas = upstream_sigmas(pipeline_hunyuan_video1_5, steps, equal, {"shift": 7.0})
    compare("sigmas", sigmas_of(table), sigmas, error=OPERATION)
    compare("equal steps", sigmas, 7 * equal / (1 + 6 * equal), error=OPERATION)
    compare("timesteps", table.timesteps, timesteps, error=OPERATION)


@pytest.mark.parametrize("spec", [FLUX, HUNYUAN], ids=lambda spec: spec.family)
@pytest.mark.parametrize("scheduler", FLOW_SCHEDULERS)
def test_solver_table_of_every_family_and_scheduler_has_falling_sigmas(spec: ModelSpec, scheduler: str):
    table = table_of(spec, scheduler=scheduler, num_inference_steps=4)
    sigmas = sigmas_of(table)
    assert sigmas[0] > 0.99 and (np.diff(sigmas) < 0).all() and table.num_steps == 4


@pytest.mark.parametrize(
    ("sigmas", "key", "parameters"),
    [
        ("1, x", "settings.not_numbers", {"value": "'1, x'"}),
        ("1, 0.5,", "settings.not_numbers", {"value": "'1, 0.5,'"}),
        ("1, 0.5, 0.5", "settings.not_decreasing", {"value": "'1, 0.5, 0.5'"}),
        ("1, 0.5, 0", "settings.number_outside", {"value": "'1, 0.5, 0'"}),
        ("1000, 750", "settings.number_outside", {"value": "'1000, 750'"}),
        ("1, nan", "settings.number_outside", {"value": "'1, nan'"}),
        (", ".join(str(1 - i / 200) for i in range(101)), "settings.too_many_numbers", {"count": 101, "most": 100}),
    ],
)
def test_settings_invalid_sigmas_raise_value_error(sigmas: str, key: str, parameters: dict[str, object]):
    with raises_message(ValueError, refused_input("sigmas", key, title="Wan 2.2 I2V A14B", **parameters)):
        WAN.settings(sigmas=sigmas)


UNKNOWN_SCHEDULER = Expected(
    "settings.not_an_option", value="'euler'", options=re.compile("^checkpoint, FlowMatchEulerDiscreteScheduler")
)


@pytest.mark.parametrize(
    ("widgets", "key", "parameters"),
    [
        (
            {"start_step": 2, "end_step": 2, "num_inference_steps": 4},
            "settings.no_step_left",
            {"start_step": 2, "end_step": 2, "total": 4},
        ),
        ({"start_step": 4, "sigmas": LIGHTX2V}, "settings.no_step_left", {"start_step": 4, "end_step": 0, "total": 4}),
        (
            {"high_noise_steps": 5, "sigmas": LIGHTX2V},
            "settings.too_many_high_noise_steps",
            {"high_noise_steps": 5, "total": 4},
        ),
        ({"scheduler": "euler"}, "settings.input", {"name": "input.scheduler", "problem": UNKNOWN_SCHEDULER}),
    ],
)
def test_settings_invalid_step_range_raises_value_error(
    widgets: dict[str, Any], key: str, parameters: dict[str, object]
):
    with raises_message(ValueError, key, title="Wan 2.2 I2V A14B", **parameters):
        WAN.settings(**widgets)


def test_settings_sigmas_override_number_of_steps():
    settings = WAN.settings(sigmas=LIGHTX2V, num_inference_steps=40, end_step=90)
    assert settings.num_inference_steps == 4 and settings.steps == range(4)
