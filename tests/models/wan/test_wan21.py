"""Wan 2.1 against `diffusers.WanPipeline` on the CPU in float32: every stage and the whole, on 1, 3 and 8 chips."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.closeness import NETWORK, difference
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.models.common import wan_vae
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("Wan21")
MODEL = parity.tiny_model(SPEC)
CHIPS = (1, 3, 8)
# The vocabulary knows no Chinese.
SHORT, NEGATIVE = "cat", "blurred details, 过曝 overexposed"
LONG = " ".join([SPEC.texts["prompt"]] * 60)  # over 512 tokens
# Tokens: 3 * 5 * 7 = 105, then 2 * 4 * 7 = 56: neither divides by 8 (nor 105 by 4, nor 56 by 3). Four steps: the solver
# begins with order 1, goes on with 2, and ends with 1.
ODD = Settings(height=80, width=112, num_frames=9, num_inference_steps=4, guidance_scale=5.0, seed=7, shift=5.0)
FLAT = Settings(height=64, width=112, num_frames=5, num_inference_steps=4, guidance_scale=1.0, seed=8, shift=3.0)
TALL = Settings(height=112, width=48, num_frames=5, num_inference_steps=4, guidance_scale=5.0, seed=9, shift=3.0)
CASES = {"odd": ODD, "flat": FLAT, "tall": TALL}
FEW = replace(ODD, num_inference_steps=2)


@functools.cache
def pipeline() -> Any:
    return load_pipeline(tiny.ensure_random(SPEC))


def load_pipeline(folder: Path) -> Any:
    return parity.upstream("WanPipeline", folder, tokenizer=umt5_tokenizer(folder))


@functools.cache
def embeddings(prompt: str) -> np.ndarray:
    """Upstream's, of the prompt and of the negative one, `[2, 512, dim]`."""
    with torch.no_grad():
        return torch.cat(pipeline().encode_prompt(prompt, NEGATIVE, True, max_sequence_length=512)).numpy()


@functools.cache
def oracle(settings: Settings) -> parity.Result:
    return generate(pipeline(), settings)


def generate(pipe: Any, settings: Settings) -> parity.Result:
    pipe.scheduler = solver_table.build_scheduler({**SPEC.recipe.scheduler, "flow_shift": settings.shift})
    return parity.generate(pipe, settings, prompt=SHORT, negative_prompt=NEGATIVE, num_frames=settings.num_frames)


@pytest.mark.parametrize("name", ["wan2.1-t2v-14b", "wan2.2-i2v-a14b"])
def test_wan_negative_prompt_equals_published_text(name: str):
    """The digest of `sample_neg_prompt` in the makers' shared_config.py; every example has it too."""
    published = "ce96e0324e4b54ce4b6e867f669ca520952e1a34cc116543516b1897f0d3c47e"
    text = lookup_spec(name).texts["negative_prompt"]
    assert hashlib.sha256(text.encode()).hexdigest() == published
    files = [path for path in examples.API if path.stem.startswith("wan21" if "t2v" in name else "wan22")]
    assert len(files) >= 2 and all(text in file.read_text("utf-8") for file in files)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("i2v-14b-480p", "镜头晃动，"), ("i2v-14b-720p", "镜头晃动，"), ("flf2v-14b-720p", "镜头切换，镜头晃动，")],
)
def test_wan21_i2v_negative_prompt_starts_with_camera_shake(name: str, prefix: str):
    """`wan/configs/wan_i2v_14B.py` and `wan/configs/__init__.py` in the makers' repository put it there."""
    spec = lookup_spec(f"wan2.1-{name}")
    assert spec.texts["negative_prompt"] == prefix + SPEC.texts["negative_prompt"]
    assert spec.texts["prompt"] == lookup_spec("wan2.2-i2v-a14b").texts["prompt"]


def normalised(samples: torch.Tensor) -> np.ndarray:
    mean, std = wan_vae.latent_stats(pipeline().vae.config)
    return ((samples - mean) / std).numpy()


@pytest.mark.parametrize(("chips", "prompt"), [(1, SHORT), (3, LONG), (8, SHORT)])
def test_wan21_prompt_embeddings_match_diffusers(chips: int, prompt: str, compare: Callable):
    prompt_embeds, negative = parity.encode_anew(chips, MODEL, prompt, NEGATIVE)
    ours = np.concatenate([prompt_embeds[0][0].numpy(), negative[0][0].numpy()])
    compare(f"embeddings, {chips} chips", ours, embeddings(prompt), error=NETWORK)
    assert prompt_embeds[0][1]["length"] == {SHORT: 2, LONG: 512}[prompt]


@pytest.mark.slow
@pytest.mark.parametrize("chips", CHIPS)
def test_wan21_denoise_with_poisoned_padding_matches_diffusers(
    chips: int, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """105 tokens: those that 4 chips need beside them are NaN."""
    parity.poison_padding(monkeypatch)
    noise = parity.random_latents(SPEC, ODD)
    with torch.no_grad():
        cond, uncond = (
            pipeline().transformer(noise, torch.tensor([700]), torch.from_numpy(row[None]), return_dict=False)[0]
            for row in embeddings(SHORT)
        )
    expected = uncond + ODD.guidance_scale * (cond - uncond)
    compare(f"denoiser, {chips} chips", denoise_once(noise, chips), expected.numpy(), error=NETWORK)


# One branch on three chips is in `tests/engine/test_few_steps.py`, with every solver.
@pytest.mark.parametrize(
    ("case", "chips"),
    [("odd", 8), pytest.param("flat", 3, marks=pytest.mark.recorded), pytest.param("tall", 1, marks=pytest.mark.slow)],
)
def test_wan21_latents_and_frames_match_diffusers(case: str, chips: int, compare: Callable):
    settings, runner = CASES[case], engine(chips)
    expected = oracle(settings)
    embeds = runner.encode(MODEL, SHORT, NEGATIVE, SilentProgress())
    latents = runner.denoise(MODEL, settings, *embeds, SilentProgress())
    compare(f"latents, {case}, {chips} chips", normalised(latents["samples"]), expected.latents)
    frames = runner.decode(MODEL, latents, SilentProgress())
    compare(f"frames, {case}, {chips} chips", frames.numpy(), expected.frames)


# Wan 2.2's from a picture goes through the same networks in bfloat16, and through the VAE's encoder.
@pytest.mark.recorded
def test_wan21_bfloat16_error_stays_within_bound(compare: Callable):
    """Against the float32 oracle: rounding of 8 bits through 2 + 3 blocks, 4 steps and the VAE."""
    runner, expected = engine(8), oracle(FLAT)
    model = replace(MODEL, precision="bfloat16")
    embeds = runner.encode(model, SHORT, NEGATIVE, SilentProgress())
    latents = runner.denoise(model, FLAT, *embeds, SilentProgress())
    frames = runner.decode(model, latents, SilentProgress())
    compare("embeddings, bfloat16", embeds[0][0][0].numpy(), embeddings(SHORT)[:1], error=3e-2, slope=3e-3)
    compare("latents, bfloat16", normalised(latents["samples"]), expected.latents, error=1.5e-2, slope=3e-3)
    compare("frames, bfloat16", frames.numpy(), expected.frames, error=1.3e-1, overall=3.5e-2, slope=6e-3)


@pytest.mark.slow
def test_wan21_other_dimensions_match_diffusers(tmp_path, compare: Callable):
    """Nothing is tuned to the built-in checkpoint: other heads, widths, depths and text."""
    changes = {
        "text_encoder": {"d_model": 56, "num_heads": 7, "d_ff": 90, "num_layers": 3},
        "transformer": {
            "num_attention_heads": 7,
            "attention_head_dim": 12,
            "ffn_dim": 130,
            "num_layers": 2,
            "text_dim": 56,
        },
        "vae_decoder": {"base_dim": 6},
    }
    model = parity.write_other_dimensions(SPEC, tmp_path / "other", changes)
    expected = generate(load_pipeline(tmp_path / "other"), TALL)
    runner = engine(8)
    latents = runner.denoise(model, TALL, *runner.encode(model, SHORT, NEGATIVE, SilentProgress()), SilentProgress())
    compare("frames, other dimensions", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"shift": 3.0},
        {"num_inference_steps": 3},
        {"seed": 11},
        {"guidance_scale": 2.0},
        {"negative_prompt": "other words"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_wan21_every_setting_changes_the_latents(change: dict):
    """Each widget has its effect on a second run, when everything is loaded and compiled."""
    settings = replace(FEW, **{name: value for name, value in change.items() if name != "negative_prompt"})
    first = few_latents(FEW, NEGATIVE)
    assert difference(first, few_latents(settings, change.get("negative_prompt", NEGATIVE))) > 1e-3


@functools.cache
def few_latents(settings: Settings, negative: str) -> torch.Tensor:
    runner = engine(8)
    embeds = runner.encode(MODEL, SHORT, negative, SilentProgress())
    return runner.denoise(MODEL, settings, *embeds, SilentProgress())["samples"]


@pytest.mark.slow
def test_wan21_new_seed_loads_encodes_and_compiles_nothing():
    runner = engine(8)

    def generate(seed: int) -> torch.Tensor:
        settings = replace(FEW, seed=seed)
        embeds = runner.encode(MODEL, SHORT, NEGATIVE, SilentProgress())
        return runner.decode(MODEL, runner.denoise(MODEL, settings, *embeds, SilentProgress()), SilentProgress())

    first = generate(1)
    compiled: list[str] = []

    def note(event: str, *_: Any, **__: Any) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    before = dict(runner.counts)
    second = generate(2)
    jax.monitoring.unregister_event_duration_listener(note)
    assert dict(runner.counts) == before
    assert [event for event in compiled if "compile" in event] == []
    assert difference(first, second) > 1e-3


def denoise_once(noise: torch.Tensor, chips: int) -> np.ndarray:
    given = {"text": embeddings(SHORT), "text_length": np.full(2, 512, np.int32)}
    return parity.denoise_once(SPEC, ODD, noise, given, timestep=700, chips=chips)
