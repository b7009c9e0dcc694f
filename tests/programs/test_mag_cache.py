"""MagCache: the steps that are left out are those of its authors' loop, and give what diffusers' own hook gives."""

import ast
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.tests.models import parity, test_cogvideox
from comfyui_tpu.tests.models.wan import test_wan21, test_wan_t2v_siblings
from comfyui_tpu.tests.programs import test_step_reuse as deep_cache
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.cache import magcache_curves
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import denoise
from comfyui_tpu.tpu_runtime.model_spec import MagCache, MagCacheCurve, ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs import denoising_plan, solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress

WAN = test_wan21.SPEC
WAN22, HUNYUAN, HUNYUAN_I2V, COGVIDEOX = (
    lookup_spec(name)
    for name in ("wan2.2-t2v-a14b", "hunyuanvideo1.5-t2v-720p", "hunyuanvideo1.5-i2v-720p", "cogvideox1.5-5b")
)
PUBLISHED = json.loads(Path(magcache_curves.__file__).with_name("curves.json").read_text())["curves"]
# Full of eight steps: 0, 1, 4, 5, 7.
RATIOS = (1.0, 1.2, 0.98, 1.03, 0.99, 0.8, 0.97, 0.9)
POLICY = MagCache(threshold=0.12, curve=MagCacheCurve(ratios=(RATIOS, RATIOS), retained=(0.25,)))
FULL = [0, 1, 4, 5, 7]


# --- which steps ------------------------------------------------------------------------------------------------------


def authors(ratios: Sequence[float], num_steps: int, threshold: float, most: int, retained: float) -> list[int]:
    """The steps that are full for one branch, by the loop of `magcache_generate.py` and its `nearest_interp`."""
    scale = (len(ratios) - 1) / (num_steps - 1)
    ratios = np.asarray(ratios)[np.round(np.arange(num_steps) * scale).astype(int)]
    ratio, error, steps, full = 1.0, 0.0, 0, []
    for index in range(num_steps):
        if 2 * index >= int(2 * num_steps * retained):  # it counts the calls of both branches
            ratio, steps = ratio * ratios[index], steps + 1
            error += np.abs(1 - ratio)
            if error < threshold and steps <= most:
                continue
            ratio, error, steps = 1.0, 0.0, 0
        full.append(index)
    return full


@pytest.mark.parametrize("threshold", [0.06, 0.12, 0.24])
@pytest.mark.parametrize(
    "name", [name for name, curve in PUBLISHED.items() if name.startswith("wan") and "retained" not in curve]
)
def test_full_steps_match_authors_loop(name: str, threshold: float):
    """With each branch alone; the published curves of both agree on every step."""
    curve = magcache_curves.find_curve(lookup_spec(name), "published")
    assert curve is not None
    for most, num_steps in ((2, 50), (2, 40), (2, 27), (4, 50), (6, 20)):
        policy = MagCache(threshold=threshold, curve=replace(curve, most_skipped=most))
        found = [index for index, full in enumerate(policy.full_steps(["one"] * num_steps)) if full]
        for ratios in PUBLISHED[name]["ratios"]:
            assert found == authors(ratios, num_steps, threshold, most, 0.2)
        assert len(found) < num_steps


@pytest.mark.parametrize(
    ("ratios", "num_steps"), [("few_steps", 20), ("few_steps", 12), ("ratios", 40), ("ratios", 50)]
)
def test_full_steps_of_hunyuanvideo_use_curve_for_few_steps(ratios: str, num_steps: int):
    for name in ("hunyuanvideo1.5-t2v-720p", "hunyuanvideo1.5-t2v-480p"):
        curve = magcache_curves.find_curve(lookup_spec(name), "published")
        assert curve is not None
        found = [
            i for i, full in enumerate(MagCache(threshold=0.03, curve=curve).full_steps(["one"] * num_steps)) if full
        ]
        branches = [authors(row, num_steps, 0.03, 2, 0.25) for row in PUBLISHED["hunyuanvideo1.5-t2v-720p"][ratios]]
        assert found in branches
        assert set(found) >= set(branches[0]) | set(branches[1]) and len(found) < 0.8 * num_steps


def test_full_steps_are_full_if_any_branch_is():
    both = ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 2.0))
    found = [
        MagCache(threshold=0.1, curve=MagCacheCurve(ratios=rows, retained=(0.0,)))
        for rows in (both[:1], both, both[::-1])
    ]
    assert [policy.full_steps(["one"] * 4) for policy in found] == [
        (True, False, False, True), (True, False, False, True), (True, False, False, True)
    ]  # fmt: skip
    assert found[1].full_steps(["one"] * 3) == (True, False, True)


def test_full_steps_restart_for_each_expert():
    curve = MagCacheCurve(ratios=((1.0,) * 20,), retained=(0.5, 0.1), most_skipped=3)
    found = MagCache(threshold=0.1, curve=curve).full_steps(["high"] * 8 + ["low"] * 12)
    assert [index for index, full in enumerate(found) if full] == [0, 1, 2, 3, 7, 8, 12, 16]


def test_full_steps_of_wan22_i2v_skip_only_second_expert_steps():
    """Its authors leave out steps of the second expert alone, behind a tenth of them."""
    spec = lookup_spec("wan2.2-i2v-a14b")
    settings = spec.settings(step_cache=True)
    policy = magcache_curves.attach_curve(spec, spec.published.hub_id, settings.step_cache)
    plan = denoising_plan.DenoisingPlan.published(spec, replace(settings, step_cache=policy))
    first, second = ([i for i, (name, _) in enumerate(plan.experts) if name == each] for each in spec.denoiser.experts)
    assert all(plan.is_full[index] for index in first)
    assert [plan.is_full[index] for index in second][:4] == [True, True, True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratios": ()}, {"ratios": ((),)}, {"ratios": [[1.0]]}, {"ratios": ((1.0,), (1.0, 1.0))},
        {"ratios": ((1.0,),) * 3}, {"ratios": ((1.0,) * 1001,)}, {"ratios": ((float("nan"),),)},
        {"ratios": ((float("inf"),),)}, {"ratios": ((-1.0,),)}, {"ratios": ((0,),)}, {"ratios": ((10**400,),)},
        {"ratios": (("1",),)}, {"ratios": ((True,),)},
        {"few_steps": [[1.0]]}, {"few_steps": ((-1.0,),)}, {"retained": ()}, {"retained": (2.0,)}, {"retained": "0"},
        {"most_skipped": -1}, {"most_skipped": 1.5}, {"most_skipped": 10**9},
    ],
)  # fmt: skip
def test_mag_cache_curve_invalid_values_raise_value_error(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="ratio|retained|most_skipped"):
        MagCacheCurve(**{"ratios": ((1.0, 1.0),), **wrong})


# --- what they give ---------------------------------------------------------------------------------------------------


@contextmanager
def upstreams_cache(*configs: tuple[Any, Any]) -> Iterator[list[int]]:
    """Diffusers' hook on networks, by config; gives how often the last block of each ran."""
    from diffusers.hooks import HookRegistry, apply_mag_cache
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TransformerBlock

    # Upstream has forgotten this one.
    TransformerBlockRegistry.register(
        HunyuanVideo15TransformerBlock,
        TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=1),
    )
    ran, undo = [0] * len(configs), []
    for number, (network, config) in enumerate(configs):

        def count(*_: Any, number: int = number) -> None:
            ran[number] += 1

        blocks = network.blocks if hasattr(network, "blocks") else network.transformer_blocks
        undo.append(blocks[-1].norm1.register_forward_hook(count))
        apply_mag_cache(network, config)
    try:
        yield ran
    finally:
        for handle in undo:
            handle.remove()
        for network, _ in configs:
            for block in network.blocks if hasattr(network, "blocks") else network.transformer_blocks:
                registry = HookRegistry.check_if_exists_or_initialize(block)
                for name in [*registry.hooks]:
                    registry.remove_hook(name)


def config_of(policy: MagCache, num_steps: int = len(RATIOS), **more: Any) -> Any:
    import diffusers

    assert policy.curve is not None
    return diffusers.MagCacheConfig(
        threshold=policy.threshold, max_skip_steps=policy.curve.most_skipped,
        retention_ratio=policy.curve.retained[0], num_inference_steps=num_steps,
        **{"mag_ratios": list(policy.curve.ratios[0]), **more},
    )  # fmt: skip


@functools.cache
def embeds(name: str) -> tuple:
    return parity.engine(1).encode(
        parity.tiny_model(lookup_spec(name)), test_wan21.SHORT, test_wan21.NEGATIVE, SilentProgress()
    )


def run_denoise(spec: ModelSpec, settings: Settings, chips: int = 1, given: tuple = ()) -> torch.Tensor:
    model = parity.tiny_model(spec)
    return parity.engine(chips).denoise(model, settings, *(given or embeds(spec.name)), SilentProgress())["samples"]


def test_mag_cache_policy_of_this_file_has_expected_full_steps():
    assert [index for index, full in enumerate(POLICY.full_steps(["one"] * 8)) if full] == FULL


@pytest.mark.slow
def test_mag_cache_wan_matches_diffusers(compare: Callable):
    settings = replace(test_wan21.ODD, num_inference_steps=8, step_cache=POLICY)
    pipe = test_wan21.pipeline()
    with upstreams_cache((pipe.transformer, config_of(POLICY))) as ran:
        expected = test_wan21.generate(pipe, settings).latents
    assert ran == [2 * len(FULL)]
    found = run_denoise(WAN, settings, chips=3)
    compare("latents with MagCache, 3 chips", test_wan21.normalised(found), expected)
    whole = run_denoise(WAN, replace(settings, step_cache=None), chips=3)
    assert difference(found, whole) > 1e-3


@pytest.mark.slow
def test_mag_cache_two_experts_match_diffusers(compare: Callable):
    settings = replace(test_wan_t2v_siblings.SHARED, num_inference_steps=8, step_cache=POLICY)
    plan = denoising_plan.DenoisingPlan.published(WAN22, settings)
    first = [expert for expert, _ in plan.experts].count("transformer")
    pipe, halves = test_wan_t2v_siblings.pipeline(WAN22.name), (RATIOS[:first], RATIOS[first:])
    configs = (config_of(POLICY, len(half), mag_ratios=list(half)) for half in halves)
    with upstreams_cache(*zip((pipe.transformer, pipe.transformer_2), configs, strict=True)) as ran:
        expected = test_wan_t2v_siblings.generate(WAN22, settings).latents
    assert ran == [2 * sum(plan.is_full[:first]), 2 * sum(plan.is_full[first:])]
    assert ran[0] < 2 * first and ran[1] < 2 * (8 - first)
    compare("latents of two experts", test_wan21.normalised(run_denoise(WAN22, settings)), expected)


@pytest.mark.slow
def test_mag_cache_cogvideox_matches_diffusers(compare: Callable):
    settings = replace(test_cogvideox.TALL, num_inference_steps=8, step_cache=POLICY)
    pipe = test_cogvideox.upstream_pipeline()
    with upstreams_cache((pipe.transformer, config_of(POLICY))) as ran:
        expected = test_cogvideox.generate(pipe, settings).latents
    assert ran == [len(FULL)]
    given = parity.engine(1).encode(
        parity.tiny_model(COGVIDEOX), test_cogvideox.SHORT, test_cogvideox.NEGATIVE, SilentProgress()
    )
    found = run_denoise(COGVIDEOX, settings, given=given)
    compare("latents with MagCache", test_cogvideox.normalised({"samples": found}), expected)


HUNYUANS = replace(deep_cache.ODD, height=48, num_frames=5, num_inference_steps=8, step_cache=POLICY)


@pytest.mark.slow
def test_mag_cache_hunyuanvideo_matches_diffusers(compare: Callable):
    import diffusers

    pipe = diffusers.HunyuanVideo15Pipeline.from_pretrained(tiny.ensure_random(HUNYUAN))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = solver_table.build_scheduler(HUNYUAN.recipe.scheduler)
    pipe.guider.guidance_scale = deep_cache.ODD.guidance_scale
    settings = HUNYUANS
    with upstreams_cache((pipe.transformer, config_of(POLICY))) as ran, torch.no_grad():
        expected = pipe(
            prompt=deep_cache.PROMPT, negative_prompt=deep_cache.NEGATIVE, height=settings.height,
            width=settings.width, num_frames=settings.num_frames, num_inference_steps=8, output_type="latent",
            generator=torch.Generator().manual_seed(settings.seed),
        ).frames.numpy()  # fmt: skip
    assert ran == [2 * len(FULL)]
    found = run_denoise(HUNYUAN, settings, chips=2, given=deep_cache.embeds())
    compare("latents with MagCache, 2 chips", found.numpy() * deep_cache.SCALE, expected)


def test_step_caches_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """Of one size: what an engine has for DeepCache is not taken for MagCache, nor for neither."""
    monkeypatch.setattr(denoise.score_bound, "is_bounded", lambda *_: True)
    stage: Any = SimpleNamespace(target="chips", fetch_weights=lambda _: {}, norm_deltas=lambda _: {})

    def list_keys(policy: Any) -> list[Any]:
        plan = denoising_plan.DenoisingPlan.published(HUNYUAN, replace(HUNYUANS, step_cache=policy))
        requests = denoise.denoiser_requests(stage, plan, {})
        return [request.key for of_expert in requests.values() for request in of_expert]

    keys = [list_keys(policy) for policy in (None, deep_cache.POLICY, POLICY)]
    assert [len(own) for own in keys] == [1, 2, 2]
    assert not [key for own, other in itertools.combinations(keys, 2) for key in own if key in other]


@pytest.mark.slow
def test_calibrate_curve_matches_diffusers(capsys: pytest.CaptureFixture):
    """Upstream prints that of each branch."""
    settings = replace(test_wan21.ODD, num_inference_steps=8)
    pipe = test_wan21.pipeline()
    with upstreams_cache((pipe.transformer, config_of(POLICY, calibrate=True, mag_ratios=None))):
        test_wan21.generate(pipe, settings)
    printed = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    assert len(printed) == 2
    runner, model = parity.engine(3), parity.tiny_model(WAN)
    arguments = {"prompt_embeds": embeds(WAN.name)[0], "negative_prompt_embeds": embeds(WAN.name)[1]}
    curve = runner.run("calibrate", model, SilentProgress(), settings=settings, **arguments)
    assert difference(np.array(curve.ratios) - 1, np.array(printed) - 1) < 1e-2
    assert np.ptp(printed) > 1e-3


# --- on and off, and where curves come from ---------------------------------------------------------------------------


def test_mag_cache_off_uses_plain_program_without_curve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(magcache_curves, "find_curve", lambda *_: pytest.fail("looked for"))
    settings = WAN.settings(cache_threshold=0.5)
    assert settings == WAN.settings() and magcache_curves.attach_curve(WAN, "any", settings.step_cache) is None
    plan = denoising_plan.DenoisingPlan.published(WAN, settings)
    assert [(part.kind, len(part.steps)) for part in plan.step_groups] == [("plain", 50)]
    nothing = replace(settings, num_inference_steps=8, step_cache=replace(POLICY, threshold=0.0))
    assert [part.kind for part in denoising_plan.DenoisingPlan.published(WAN, nothing).step_groups] == ["plain"]


def test_list_programs_mag_cache_counts_runs_of_both_programs():
    spec = replace(WAN, components=tuple(replace(each, config=each.tiny) for each in WAN.components))
    for step_cache, wanted in (
        (POLICY, {"denoise_step": 5, "denoise_step.from_features": 3}), (None, {"denoise_step": 8})
    ):  # fmt: skip
        settings = replace(test_wan21.ODD, num_inference_steps=8, step_cache=step_cache)
        found = denoising_plan.list_programs(spec, settings, jax.devices()[:1], stages=("denoise",))
        assert {program.name: program.runs for program in found} == wanted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path))
    return tmp_path


def test_find_curve_prefers_measured_over_published(folder: Path):
    measured = MagCacheCurve(ratios=((1.0, 0.5),))
    path = magcache_curves.save_curve(WAN22, "mine", measured)
    assert path.is_file() and folder in path.parents
    # Which steps run whole in any case is no matter of a measurement.
    assert magcache_curves.find_curve(WAN22, "mine") == replace(measured, retained=(0.4, 0.4))
    magcache_curves.save_curve(HUNYUAN, "mine", measured)
    assert magcache_curves.find_curve(HUNYUAN, "mine") == replace(measured, retained=(0.25,))  # in few steps, too
    published = magcache_curves.find_curve(WAN22, "another")
    assert published is not None and len(published.ratios[0]) == 40
    assert magcache_curves.find_curve(COGVIDEOX, "mine") is None
    magcache_curves.save_curve(COGVIDEOX, "mine", measured)
    assert (
        magcache_curves.find_curve(COGVIDEOX, "mine") == measured
        and magcache_curves.find_curve(COGVIDEOX, "another") is None
    )
    settings = COGVIDEOX.settings(step_cache=True)
    found = magcache_curves.attach_curve(COGVIDEOX, "mine", settings.step_cache)
    assert found == MagCache(threshold=0.06, curve=measured)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"nothing", b"[" * 5000, b'{"ratios": 1}', b'{"ratios": [[1.0], 2]}',
        b'{"ratios": [[NaN]]}', b'{"ratios": [["1"]]}', b'{"ratios": [[1.0]], "more": 1}',
        b'{"ratios": [[1.0]], "few_steps": [1.0]}', b'{"ratios": [[1.0]], "few_steps": [[1.0], ["1"]]}',
        b'{"ratios": [[1.0]], "retained": {}}', b'{"ratios": [[1.0]]}' + b" " * 2**16,
    ],
)  # fmt: skip
def test_find_curve_invalid_file_is_deleted(content: bytes, folder: Path):
    key = magcache_curves.signature(COGVIDEOX.name, "mine")
    magcache_curves.MEASURED.put(key, content)
    assert magcache_curves.find_curve(COGVIDEOX, "mine") is None
    assert not magcache_curves.MEASURED.path(key).exists()


def test_denoise_without_curve_raises_error_with_calibrate_command(folder: Path):
    for spec, model_id, option, instead in (
        (COGVIDEOX, "a/b", " --model-id a/b", ""),
        (HUNYUAN_I2V, HUNYUAN_I2V.published.hub_id, "", re.compile("cache_threshold to 0")),
    ):
        model = ModelRef(spec_name=spec.name, model_id=model_id)
        settings = spec.settings(step_cache=True, cache_threshold=0.1)
        named = {"title": spec.title, "name": spec.name, "option": option, "instead": instead}
        with raises_message(ValueError, "settings.no_curve", threshold=0.1, **named):
            api.run_stage("denoise", model, SilentProgress(), settings=settings)


@pytest.mark.slow
def test_cli_calibrate_saves_curve_used_by_denoise(folder: Path, capsys: pytest.CaptureFixture):
    size = ["--height", "64", "--width", "64", "--num-frames", "9", "--num-inference-steps", "4"]
    command = ["calibrate", COGVIDEOX.name, "--model-id", COGVIDEOX.miniature.id, *size]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    curve = magcache_curves.find_curve(COGVIDEOX, COGVIDEOX.miniature.id)
    assert curve is not None and (len(curve.ratios), len(curve.ratios[0])) == (2, 4)
    assert f"prompt: {', '.join(f'{ratio:.4f}' for ratio in curve.ratios[0])}\n" in said
    model = ModelRef(spec_name=COGVIDEOX.name, model_id=COGVIDEOX.miniature.id)
    settings = COGVIDEOX.settings(
        height=64, width=64, num_frames=9, num_inference_steps=4, step_cache=True, cache_threshold=1.0
    )
    given = api.encode_prompt(model, "a cat", "", progress=SilentProgress())
    steps = [api.denoise(model, one, *given, progress=SilentProgress())["samples"] for one in (
        settings, replace(settings, step_cache=None), replace(settings, step_cache=MagCache(threshold=1.0, curve=curve))
    )]  # fmt: skip
    assert torch.equal(steps[0], steps[2]) and difference(steps[0], steps[1]) > 1e-4
    assert cli.main(["calibrate", COGVIDEOX.name, "--model-id", WAN.miniature.id]) == 2


def test_video_nodes_have_step_cache_off_as_last_widgets():
    for spec in SPECS:
        assert ("cache_threshold" in spec.inputs) == (not spec.is_image)
    for node in (node for name, node in DECLARATIONS.items() if name.endswith(("TPUSampler", "TPUPipeline"))):
        names = [one.name for one in node.inputs]
        is_image = spec_for_family(node.family).is_image
        assert ("step_cache" in names) == (not is_image)
        if not is_image:
            assert names[-1] == "cache_threshold"
            assert {one.name: one.default for one in node.inputs}["step_cache"] is False
