"""Wan 2.2 I2V against `diffusers.WanImageToVideoPipeline` on the CPU in float32: every stage, on 1, 3 and 8 chips."""

import functools
import io
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.nodes import wan22_i2v as nodes
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless import core_nodes
from comfyui_tpu.nodes.headless.runner import TerminalContext
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK, difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tests.support.patience import mostly, slower
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime import media
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import conditioning
from comfyui_tpu.tpu_runtime.engine.memory_advice import HBM_VARIABLE
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.models.common import wan_vae
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from comfyui_tpu.tpu_runtime.units import GIB

SPEC = spec_for_family("Wan22I2V")
MODEL = parity.tiny_model(SPEC)
SHORT, NEGATIVE = "cat", "blurred details, overexposed"
# Tokens: 3 * 5 * 7 = 105, then 2 * 4 * 7 = 56: neither divides by 8 (nor 105 by 4, nor 56 by 3).
ODD = Settings(
    height=80, width=112, num_frames=9, num_inference_steps=4, guidance_scale=3.5, guidance_scale_2=5.0, seed=7,
    shift=5.0,
)  # fmt: skip
FLAT = replace(ODD, height=64, num_frames=5, guidance_scale=1.0, guidance_scale_2=1.0, seed=8, shift=3.0)
# The second expert runs one branch.
TALL = replace(ODD, height=112, width=48, num_frames=5, guidance_scale=4.0, guidance_scale_2=1.0, seed=9)
# Only the second expert is guided. Upstream guides neither while the first scale is 1.
MIXED = replace(FLAT, guidance_scale_2=3.0)
ONE = replace(ODD, height=64, width=64, num_frames=1)
CASES = {"odd": ODD, "flat": FLAT, "tall": TALL}


@dataclass(frozen=True)
class Oracle(parity.Result):
    condition: np.ndarray


def picture(settings: Settings) -> torch.Tensor:
    """An IMAGE of exactly the video's size: smooth, with colours and edges."""
    y, x = torch.meshgrid(torch.linspace(0, 1, settings.height), torch.linspace(0, 1, settings.width), indexing="ij")
    noise = torch.rand(settings.height, settings.width, generator=torch.Generator().manual_seed(3))
    return torch.stack([x, (y * 5) % 1, 0.5 * noise + 0.5 * (x > y)], dim=-1)[None]


@functools.cache
def pipeline() -> Any:
    return load_pipeline(tiny.ensure_random(SPEC))


def load_pipeline(folder: Any) -> Any:
    return parity.upstream("WanImageToVideoPipeline", folder, tokenizer=umt5_tokenizer(folder))


@functools.cache
def embeddings() -> np.ndarray:
    with torch.no_grad():
        return torch.cat(pipeline().encode_prompt(SHORT, NEGATIVE, True, max_sequence_length=512)).numpy()


@functools.cache
def oracle(settings: Settings) -> Oracle:
    return generate(pipeline(), settings)


def generate(pipe: Any, settings: Settings) -> Oracle:
    pipe.scheduler = solver_table.build_scheduler({**SPEC.recipe.scheduler, "flow_shift": settings.shift})
    kept: dict[str, torch.Tensor] = {}
    prepare = type(pipe).prepare_latents

    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        latents, kept["condition"] = prepare(pipe, *args, **kwargs)
        return latents, kept["condition"]

    pipe.prepare_latents = prepare_latents
    found = parity.generate(
        pipe, settings, image=picture(settings).movedim(-1, 1), prompt=SHORT, negative_prompt=NEGATIVE,
        num_frames=settings.num_frames, guidance_scale_2=settings.guidance_scale_2,
    )  # fmt: skip
    return Oracle(latents=found.latents, frames=found.frames, condition=kept["condition"].numpy())


def run(runner: Runner, settings: Settings, model: ModelRef = MODEL) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Condition, latents in the network's scale, frames."""
    condition, latents = denoise(runner, settings, model)
    return condition, normalised(latents), runner.decode(model, latents, SilentProgress())


def denoise(runner: Runner, settings: Settings, model: ModelRef = MODEL) -> tuple[dict, dict]:
    """Condition and latents."""
    condition = runner.encode_image(model, picture(settings), settings, SilentProgress())
    embeds = runner.encode(model, SHORT, NEGATIVE, SilentProgress())
    return condition, runner.denoise(model, settings, *embeds, SilentProgress(), condition)


def normalised(latents: dict) -> torch.Tensor:
    mean, std = wan_vae.latent_stats(SPEC.component(SPEC.vae.component).config)
    return (latents["samples"] - mean) / std


@pytest.mark.parametrize(
    ("chips", "case"),
    [*(pytest.param(*one, marks=pytest.mark.recorded) for one in ((1, "tall"), (3, "flat"))), (8, "odd")],
)
def test_wan22_i2v_condition_latents_and_frames_match_diffusers(chips: int, case: str, compare: Callable):
    settings = CASES[case]
    expected = oracle(settings)
    condition, latents, frames = run(engine(chips), settings)
    compare(f"condition, {case}, {chips} chips", condition["tensors"]["condition"], expected.condition, error=NETWORK)
    compare(f"latents, {case}, {chips} chips", latents.numpy(), expected.latents)
    compare(f"frames, {case}, {chips} chips", frames.numpy(), expected.frames)


@pytest.mark.slow
def test_wan22_i2v_unguided_expert_runs_one_branch(monkeypatch: pytest.MonkeyPatch, compare: Callable):
    """Two programs of other arrangements of the chips; upstream is told to run both branches for both."""
    monkeypatch.setattr(type(pipeline()), "do_classifier_free_guidance", True)
    expected = generate(pipeline(), MIXED)
    runner = engine(8)
    before = {*map(id, runner.device_cache.programs())}
    _, latents = denoise(runner, MIXED)
    compare("latents, mixed", normalised(latents).numpy(), expected.latents)
    steps = [one.program for one in runner.device_cache.programs() if one.program.name == "denoise_step"]
    new = [one for one in runner.device_cache.programs() if id(one) not in before and one.program in steps]
    assert sorted(tuple(one.program.mesh.devices.shape) for one in new) == [(1, 8, 1), (2, 4, 1)]


def test_wan22_i2v_single_frame_condition_matches_diffusers(compare: Callable):
    with torch.no_grad():
        pixels = picture(ONE).movedim(-1, 1) * 2 - 1
        _, expected = pipeline().prepare_latents(pixels, 1, 16, 64, 64, 1, torch.float32, "cpu", torch.Generator())
    condition = engine(8).encode_image(MODEL, picture(ONE), ONE, SilentProgress())
    compare("condition, one frame, 8 chips", condition["tensors"]["condition"], expected, error=NETWORK)
    assert (condition["height"], condition["width"], condition["num_frames"]) == (64, 64, 1)


def test_wan22_i2v_last_image_condition_matches_diffusers(compare: Callable):
    settings, last = replace(ONE, num_frames=5), picture(ONE).flip(2)
    with torch.no_grad():
        first, end = (one.movedim(-1, 1) * 2 - 1 for one in (picture(ONE), last))
        _, expected = pipeline().prepare_latents(
            first, 1, 16, 64, 64, 5, torch.float32, "cpu", torch.Generator(), last_image=end
        )
    condition = engine(8).encode_image(MODEL, torch.cat([picture(ONE), last]), settings, SilentProgress())
    compare("condition, first and last frame, 8 chips", condition["tensors"]["condition"], expected, error=NETWORK)


@pytest.mark.slow
@pytest.mark.parametrize("chips", slower((1, 3, 8), 1, 3))  # Wan 2.1's encoder, which runs on all three
def test_wan22_i2v_prompt_embeddings_match_diffusers(chips: int, compare: Callable):
    prompt_embeds, negative = parity.encode_anew(chips, MODEL, SHORT, NEGATIVE)
    ours = np.concatenate([prompt_embeds[0][0].numpy(), negative[0][0].numpy()])
    compare(f"embeddings, {chips} chips", ours, embeddings(), error=NETWORK)
    assert prompt_embeds[0][1]["length"] == 2


@pytest.mark.slow
# On three chips it is Wan 2.1's, which has its own test of them.
@pytest.mark.parametrize(
    ("chips", "expert"),
    mostly(
        [(1, "transformer_2"), (3, "transformer"), (8, "transformer_2")], (1, "transformer_2"), (8, "transformer_2")
    ),
)
def test_wan22_i2v_denoise_with_poisoned_padding_matches_diffusers(
    chips: int, expert: str, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """105 tokens: those that 4 chips need beside them are NaN."""
    parity.poison_padding(monkeypatch)
    noise, condition = parity.random_latents(SPEC, ODD).numpy(), oracle(ODD).condition
    with torch.no_grad():
        sample = torch.from_numpy(np.concatenate([noise, condition], axis=1))
        cond, uncond = (
            getattr(pipeline(), expert)(sample, torch.tensor([700]), torch.from_numpy(row[None]), return_dict=False)[0]
            for row in embeddings()
        )
    expected = uncond + ODD.guidance_scale * (cond - uncond)
    compare(f"{expert}, {chips} chips", denoise_once(chips, expert), expected.numpy(), error=NETWORK)


def test_wan22_i2v_experts_differ_and_split_the_steps():
    """So that the parity of the whole shows which of them ran when."""
    found = pipeline()
    first, second = (next(expert.parameters()) for expert in (found.transformer, found.transformer_2))
    assert not torch.equal(first, second)
    for settings in CASES.values():
        scheduler = solver_table.build_scheduler({**SPEC.recipe.scheduler, "flow_shift": settings.shift})
        scheduler.set_timesteps(settings.num_inference_steps)
        assert 0 < sum(timestep >= 900 for timestep in scheduler.timesteps) < settings.num_inference_steps


@pytest.mark.slow
def test_wan22_i2v_idle_expert_is_evicted_when_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    """With room for one expert and a step, the same latents to the bit, and each expert loaded once."""
    runner = engine(8)
    runner.free()
    condition = runner.encode_image(MODEL, picture(ODD), ODD, SilentProgress())
    embeds = runner.encode(MODEL, SHORT, NEGATIVE, SilentProgress())
    runner.free()
    expected = runner.denoise(MODEL, ODD, *embeds, SilentProgress(), condition)["samples"]
    assert [resident.component for resident in runner.device_cache.list()] == list(SPEC.denoiser.experts)
    (step,) = runner.device_cache.programs()
    one = runner.device_cache.list()[0].size_bytes
    runner.device_cache.clear()
    before = runner.counts["load"]
    monkeypatch.setenv(HBM_VARIABLE, str((1.5 * one + step.code_bytes + step.workspace_bytes) / GIB))
    assert torch.equal(runner.denoise(MODEL, ODD, *embeds, SilentProgress(), condition)["samples"], expected)
    assert runner.counts["load"] - before == 2
    assert [resident.component for resident in runner.device_cache.list()] == [SPEC.denoiser.experts[1]]


@pytest.mark.slow
def test_wan22_i2v_bfloat16_error_stays_within_bound(compare: Callable):
    """Against the float32 oracle: rounding of 8 bits through the VAE twice, 2 blocks, 4 steps."""
    expected = oracle(ONE)
    condition, latents, frames = run(engine(1), ONE, replace(MODEL, precision="bfloat16"))
    first_frame = condition["tensors"]["condition"]
    compare("condition, bfloat16", first_frame, expected.condition, error=2.5e-2, overall=5e-3, slope=3e-3)
    compare("latents, bfloat16", latents.numpy(), expected.latents, error=4e-2, slope=3e-3)
    compare("frames, bfloat16", frames.numpy(), expected.frames, error=1e-1, overall=2.5e-2, slope=5e-3)


@pytest.mark.recorded
def test_wan22_i2v_other_dimensions_match_diffusers(tmp_path: Path, compare: Callable):
    """Nothing is tuned to the built-in checkpoint: other heads, widths, depths, text, and another boundary.

    The second expert's scale is None, upstream's way to say: as the first.
    """
    settings = replace(TALL, guidance_scale_2=None)
    denoiser = {"num_attention_heads": 7, "attention_head_dim": 12, "ffn_dim": 130, "num_layers": 3, "text_dim": 56}
    changes = {
        "text_encoder": {"d_model": 56, "num_heads": 7, "d_ff": 90, "num_layers": 3},
        "transformer": denoiser,
        "transformer_2": denoiser,
        "vae_encoder": {"base_dim": 6},
        "vae_decoder": {"base_dim": 6},
    }
    other = replace(SPEC, published=replace(SPEC.published, index={"boundary_ratio": 0.7}))
    model = parity.write_other_dimensions(other, tmp_path / "other", changes)
    expected = generate(load_pipeline(tmp_path / "other"), settings)
    condition, latents, frames = run(engine(3), settings, model)
    compare("condition, other dimensions", condition["tensors"]["condition"], expected.condition, error=NETWORK)
    compare("latents, other dimensions", latents.numpy(), expected.latents)
    compare("frames, other dimensions", frames.numpy(), expected.frames)


@pytest.mark.slow
def test_wan22_i2v_every_setting_and_the_image_change_the_latents():
    """Each has its effect when everything is loaded and compiled; and nothing is loaded or compiled for it."""
    runner, few = engine(8), replace(ODD, num_inference_steps=2)  # a step for each expert
    condition = runner.encode_image(MODEL, picture(ODD), ODD, SilentProgress())
    embeds = runner.encode(MODEL, SHORT, NEGATIVE, SilentProgress())
    first = runner.denoise(MODEL, few, *embeds, SilentProgress(), condition)["samples"]
    before = dict(runner.counts)
    for change in (
        {"shift": 3.0}, {"num_inference_steps": 3}, {"seed": 11}, {"guidance_scale": 2.0}, {"guidance_scale_2": 1.5},
    ):  # fmt: skip
        other = runner.denoise(MODEL, replace(few, **change), *embeds, SilentProgress(), condition)["samples"]
        assert difference(first, other) > 1e-3, change
    dark = runner.encode_image(MODEL, picture(ODD) * 0.3, ODD, SilentProgress())
    other = runner.denoise(MODEL, few, *embeds, SilentProgress(), dark)["samples"]
    assert difference(first, other) > 1e-3
    assert dict(runner.counts) == before


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 96), (96, 32)])
def test_resize_keeps_aspect_ratio(height: int, width: int):
    """A disc stays a disc: as wide as high, in the middle; crop leaves no bars, fit leaves nothing out."""
    y, x = torch.meshgrid(torch.arange(200.0), torch.arange(320.0), indexing="ij")
    disc = ((y - 99.5) ** 2 + (x - 159.5) ** 2 < 40**2).float()
    image = torch.stack([disc, torch.ones_like(disc), torch.ones_like(disc)], dim=-1)[None]
    sizes = {}
    for how in media.RESIZE_MODES:
        resized = media.resize(image, height, width, how)
        assert resized.shape == (1, height, width, 3)
        assert 0 <= resized.min() and resized.max() <= 1
        found = resized[0, :, :, 0] > 0.5
        sizes[how] = (int(found.any(dim=1).sum()), int(found.any(dim=0).sum()))
        rows, columns = (torch.nonzero(found.any(dim=axis)).flatten().float().mean() for axis in (1, 0))
        assert abs(rows - (height - 1) / 2) <= 1 and abs(columns - (width - 1) / 2) <= 1
        bars = (resized[0, :, :, 1] < 0.5).float().mean()
        assert (bars == 0) == (how == "crop")
    scales = (height / 200, width / 320)
    for how, scale in (("crop", max(scales)), ("fit", min(scales))):
        for side, limit in zip(sizes[how], (height, width), strict=True):
            assert abs(side - min(80 * scale, limit)) <= 2


def test_resize_to_same_size_is_identity():
    for how in media.RESIZE_MODES:
        assert torch.equal(media.resize(picture(ODD), ODD.height, ODD.width, how), picture(ODD))


@pytest.mark.parametrize(
    ("given", "key", "parameters"),
    [
        (None, "condition.not_connected", {"family": "Wan22I2V"}),
        (
            {"tpu_family": "HunyuanVideo15"},
            "condition.of_another_image_encoder",
            {"tpu_family": "HunyuanVideo15", "family": "Wan22I2V"},
        ),
        (
            {"tpu_family": "Wan22I2V", "height": ODD.height, "width": ODD.width, "num_frames": ODD.num_frames},
            "condition.shape_of_another_model",
            {
                "name": "condition",
                "actual_shape": "(1, 20, 2, 8, 8)",
                "shape": f"(1, 20, 3, {ODD.height // 8}, {ODD.width // 8})",
                "family": "Wan22I2V",
            },
        ),
        (
            {"tpu_family": "Wan22I2V", "height": 64, "width": 64, "num_frames": 5},
            "condition.of_another_size",
            {"size": "64x64, 5 frames"},
        ),
    ],
    ids=["none", "another family's", "another model's", "another size's"],
)
def test_denoise_mismatched_condition_raises_value_error(given: dict | None, key: str, parameters: dict[str, str]):
    embeds = engine(8).encode(MODEL, SHORT, NEGATIVE, SilentProgress())
    if given is not None:
        given = {**given, "tensors": {"condition": torch.zeros(1, 20, 2, 8, 8)}}
    with raises_message(ValueError, key, title="Wan 2.2 I2V A14B", **parameters):
        engine(8).denoise(MODEL, ODD, *embeds, SilentProgress(), given)


@pytest.mark.parametrize(
    ("change", "key", "parameters"),
    [
        (
            {"num_frames": 80},
            "settings.breaks_rule",
            {
                "rule": Expected(
                    "settings.grid", multiple_of=4, plus=1, rule=Expected("settings.between", low=1, high=241)
                ),
                "nearest": [77, 81],
            },
        ),
        (
            {"width": 1272},
            "settings.breaks_rule",
            {
                "rule": Expected(
                    "settings.multiple", multiple_of=16, rule=Expected("settings.between", low=64, high=1920)
                ),
                "nearest": [1264, 1280],
            },
        ),
        ({"guidance_scale_2": 21.0}, "settings.outside", {"low": 0.0, "high": 20.0, "near": 20.0}),
        ({"shift": 0.0}, "settings.outside", {"low": 0.1, "high": 20.0, "near": 0.1}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_check_settings_invalid_value_raises_value_error(change: dict, key: str, parameters: dict):
    ((name, value),) = change.items()
    with raises_message(ValueError, refused_input(name, key, title=SPEC.title, value=value, **parameters)):
        SPEC.check_settings(replace(ODD, **change))


def test_locate_missing_second_expert_raises_value_error(tmp_path: Path):
    folder = tmp_path / "half"
    shutil.copytree(tiny.ensure_random(SPEC), folder)
    shutil.rmtree(folder / "transformer_2")
    with raises_message(ValueError, "checkpoint.folder_missing", name="'transformer_2'"):
        checkpoint.locate(SPEC, str(folder)).check()


def test_denoiser_inputs_guidance_without_negative_prompt_raises():
    prompt, _ = engine(8).encode(MODEL, SHORT, NEGATIVE, SilentProgress())
    plan = DenoisingPlan.create(SPEC, TALL, {part.name: part.tiny for part in SPEC.components}, SPEC.recipe.scheduler)
    assert SPEC.branches(FLAT.guidance_scale) == 1 and SPEC.branches(TALL.guidance_scale) == 2
    with raises_message(
        ValueError, "condition.negative_not_connected", name="input.negative_prompt_embeds", guidance_scale="4.0"
    ):
        conditioning.build_denoiser_inputs(plan, prompt, None, None)


@pytest.mark.parametrize(
    ("node", "widgets"),
    [
        (nodes.IMAGE_ENCODER, "height width num_frames model_id resize precision"),
        (nodes.TEXT_ENCODER, "prompt negative_prompt model_id precision"),
        (
            nodes.SAMPLER,
            "num_inference_steps guidance_scale shift seed model_id guidance_scale_2 precision scheduler sigmas "
            "high_noise_steps start_step end_step add_noise return_with_leftover_noise height width num_frames "
            "quality step_cache cache_threshold",
        ),
        (nodes.DECODER, "model_id fps precision"),
    ],
    ids=lambda value: getattr(value, "id", ""),
)
def test_wan22_i2v_node_widgets_keep_their_order(node: Any, widgets: str):
    """Saved workflows hold values by position."""
    assert " ".join(declared.name for declared in node.inputs if declared.is_widget) == widgets


def test_load_image_searches_input_workflow_and_example_folders(tmp_path: Path):
    """In the input folder, else beside the workflow, else among the examples."""
    host = TerminalContext(Folders(input=tmp_path / "input", workflow=tmp_path), stream=io.StringIO())
    load_image = core_nodes.LOAD_IMAGE.run
    assert load_image(host, image="wan_i2v_input.jpg")[0].shape == (1, 720, 1280, 3)
    media.save_image(tmp_path / "wan_i2v_input.jpg", torch.zeros(2, 4, 3))
    assert load_image(host, image="wan_i2v_input.jpg")[0].shape == (1, 2, 4, 3)
    media.save_image(tmp_path / "input" / "wan_i2v_input.jpg", torch.zeros(6, 8, 3))
    assert load_image(host, image="wan_i2v_input.jpg")[0].shape == (1, 6, 8, 3)
    with raises_message(ValueError, "media.no_image", path=re.compile(r"input.other\.png$")):
        load_image(host, image="other.png")


def denoise_once(chips: int, expert: str) -> np.ndarray:
    given = {"text": embeddings(), "text_length": np.full(2, 512, np.int32), "condition": oracle(ODD).condition}
    noise = parity.random_latents(SPEC, ODD)
    return parity.denoise_once(SPEC, ODD, noise, given, timestep=700, chips=chips, expert=expert)
