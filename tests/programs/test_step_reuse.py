"""DeepCache for HunyuanVideo 1.5: which steps are reused, and that they give what upstream's last block gives alone."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes import hunyuan15 as nodes
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import raises_message, refused_input
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import Settings, StepCache
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs import denoising_plan, solver_table, step_cache
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("HunyuanVideo15")
I2V = lookup_spec("hunyuanvideo1.5-i2v-720p")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
PROMPT, NEGATIVE = 'a cat with a sign that says "Hi"', "blurred details"
SCALE = 1.03682
# Full steps: 0, 1, 3, 5. Tokens: 3 * 5 * 7 = 105, which 4 chips do not divide.
POLICY = StepCache(start=1, end=5, interval=2)
ODD = Settings(
    height=80, width=112, num_frames=9, num_inference_steps=6, guidance_scale=6.0, seed=7, shift=0.0, step_cache=POLICY
)
FLAT = replace(ODD, height=64, num_frames=5, guidance_scale=1.0, num_inference_steps=4)


@functools.cache
def engine(chips: int) -> Runner:
    return Runner(jax.devices()[:chips])


@functools.cache
def embeds() -> tuple:
    """Of one engine for all: what they are is not asked here."""
    return engine(1).encode(MODEL, PROMPT, NEGATIVE, SilentProgress())


def denoise(runner: Runner, settings: Settings, model: ModelRef = MODEL, progress: Any = None) -> np.ndarray:
    return runner.denoise(model, settings, *embeds(), progress or SilentProgress())["samples"].numpy()


@functools.cache
def oracle(settings: Settings) -> np.ndarray:
    """Upstream's pipeline, whose last block gets at some steps what it got at an earlier one, each branch its own."""
    import diffusers

    pipe = diffusers.HunyuanVideo15Pipeline.from_pretrained(tiny.ensure_random(SPEC))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = solver_table.build_scheduler(SPEC.recipe.scheduler)
    pipe.guider.guidance_scale = settings.guidance_scale
    branches, calls, kept = SPEC.branches(settings.guidance_scale), 0, {}

    def reuse(block: Any, args: tuple) -> tuple:
        nonlocal calls
        (index, branch), calls = divmod(calls, branches), calls + 1
        if settings.step_cache.is_full(index):
            kept[branch] = args[:2]
        return (*kept[branch], *args[2:])

    pipe.transformer.transformer_blocks[-1].register_forward_pre_hook(reuse)
    with torch.no_grad():
        latents = pipe(
            prompt=PROMPT, negative_prompt=NEGATIVE, height=settings.height, width=settings.width,
            num_frames=settings.num_frames, num_inference_steps=settings.num_inference_steps, output_type="latent",
            generator=torch.Generator().manual_seed(settings.seed),
        ).frames  # fmt: skip
    assert calls == branches * settings.num_inference_steps
    return latents.numpy()


def full_step_indices(policy: StepCache, num_steps: int) -> list[int]:
    return [index for index, full in enumerate(step_cache.full_steps(policy, ["one"] * num_steps)) if full]


@pytest.mark.parametrize(
    ("policy", "num_steps", "expected"),
    [
        ((11, 45, 4), 50, [*range(11), 11, 15, 19, 23, 27, 31, 35, 39, 43, *range(45, 50)]),
        ((11, 45, 4), 12, range(12)),
        ((11, 45, 4), 14, range(12)),
        ((0, 9, 4), 9, [0, 4, 8]),
        ((2, 6, 2), 8, [0, 1, 2, 4, 6, 7]),
        ((2, 100, 100), 8, [0, 1, 2]),
        ((3, 3, 4), 6, range(6)),
        ((5, 2, 4), 6, range(6)),
        ((1, 6, 1), 6, range(6)),
    ],
)
def test_full_steps_follow_start_end_and_interval(policy: tuple, num_steps: int, expected: Any):
    start, end, interval = policy
    assert full_step_indices(StepCache(start=start, end=end, interval=interval), num_steps) == list(expected)


def test_full_steps_without_policy_or_at_expert_change_are_full():
    experts = ["high"] * 3 + ["low"] * 3
    assert step_cache.full_steps(None, experts) == (True,) * 6
    found = step_cache.full_steps(StepCache(start=1, end=6, interval=9), experts)
    assert found == (True, True, False, True, False, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "chips"), [pytest.param(FLAT, 8, marks=pytest.mark.recorded), (ODD, 3)], ids=["flat 8", "odd 3"]
)
def test_denoise_with_step_reuse_matches_upstream_last_block(settings: Settings, chips: int, compare: Callable):
    latents = denoise(engine(chips), settings)
    compare(f"latents with a step cache, {chips} chips", latents * SCALE, oracle(settings))


@pytest.mark.slow
def test_denoise_with_step_reuse_compiles_both_programs_first():
    # Of a size of its own: XLA's cache holds the programs of all tests before.
    runner, seen, own = Runner(jax.devices()[:1]), [], replace(FLAT, height=48, width=80)

    class Watch(SilentProgress):
        def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
            if unit == "step":
                seen.append((done, runner.counts["compile"]))

    denoise(runner, own, progress=Watch())
    assert seen == [(done, 2) for done in range(5)]
    denoise(runner, replace(own, step_cache=StepCache(start=1, end=8, interval=3), num_inference_steps=5))
    assert runner.counts["compile"] == 2


@pytest.mark.recorded
def test_denoise_without_reused_steps_equals_plain_denoise():
    """To the bit, and by the very same program."""
    # Of two chips, as above: their programs with features are in the cache.
    runner, short = engine(2), replace(FLAT, num_inference_steps=3)
    plain = denoise(runner, replace(short, step_cache=None))
    before = runner.counts["compile"]
    for policy in (StepCache(start=0, end=3, interval=1), StepCache(start=3, end=2, interval=4)):
        assert np.array_equal(denoise(runner, replace(short, step_cache=policy)), plain)
    assert runner.counts["compile"] == before
    assert difference(denoise(runner, short), plain) > 1e-3


# The same programs as above; bfloat16 through a whole generation is Wan 2.2's in every run.
@pytest.mark.recorded
def test_denoise_with_step_reuse_bfloat16_stays_within_bound(compare: Callable):
    latents = denoise(engine(1), FLAT, replace(MODEL, precision="bfloat16"))
    compare("latents with a step cache, bfloat16", latents * SCALE, oracle(FLAT), error=1.2e-2, slope=3e-3)


@pytest.mark.recorded
def test_denoise_i2v_with_step_reuse_is_finite():
    model = ModelRef(spec_name=I2V.name, model_id=I2V.miniature.random_id, precision="float32")
    arrays = {"condition": torch.rand(1, 33, 2, 4, 7), "image_embeds": torch.rand(1, 729, 28)}
    condition = {"tpu_family": I2V.family, "height": 64, "width": 112, "num_frames": 5, "tensors": arrays}
    one, two = (
        engine(2).denoise(
            model, replace(FLAT, step_cache=StepCache(start=1, end=4, interval=interval)), *embeds(), SilentProgress(),
            condition,
        )["samples"]
        for interval in (2, 3)
    )  # fmt: skip
    assert torch.isfinite(one).all() and 1e-3 < difference(one, two) < 1


def test_check_settings_invalid_step_cache_raises_value_error():
    for change, name, value in (({"interval": 0}, "cache_interval", 0), ({"start": -1}, "cache_start", -1)):
        expected = refused_input(name, "settings.breaks_rule", title="HunyuanVideo 1.5 T2V", value=value)
        with raises_message(ValueError, expected):
            SPEC.check_settings(replace(ODD, step_cache=replace(POLICY, **change)))
    other = spec_for_family("Wan21")
    with raises_message(ValueError, "settings.step_cache_unsupported", lacking=re.compile("^cache_start, ")):
        other.check_settings(replace(other.settings(), step_cache=POLICY))


def test_hunyuan15_nodes_have_step_cache_off_by_default():
    for node in (nodes.SAMPLER, nodes.PIPELINE):
        first = [i.name for i in node.inputs].index("step_cache")
        last = node.inputs[first : first + 4]
        found = {i.name: i.default for i in last}
        assert found == {"step_cache": False, "cache_start": 11, "cache_end": 45, "cache_interval": 4}
        assert all(i.optional and i.advanced for i in last)
    assert {spec.family for spec in SPECS if spec.denoiser.step_reuse is not None} == {SPEC.family}


def test_cli_denoise_cache_option_of_other_model_prints_error(tmp_path, capsys: pytest.CaptureFixture):
    assert cli.main(["denoise", "--folder", str(tmp_path), "--model", "tiny/wan21", "--cache-start", "1"]) == 2
    assert "Wan 2.1 T2V 14B: this model has no cache_start. Leave --cache-start out." in capsys.readouterr().err


def test_list_programs_step_cache_counts_runs_of_both_programs():
    tiny_spec = replace(SPEC, components=tuple(replace(each, config=each.tiny) for each in SPEC.components))
    for settings, wanted in (
        (ODD, {"denoise_step": 4, "denoise_step.from_features": 2}),
        (replace(ODD, step_cache=None), {"denoise_step": 6}),
    ):
        found = denoising_plan.list_programs(tiny_spec, settings, jax.devices()[:1], stages=("denoise",))
        assert {program.name: program.runs for program in found} == wanted
