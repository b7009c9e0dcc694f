"""CogVideoX 1.5 I2V against `diffusers.CogVideoXImageToVideoPipeline` on the CPU in float32: every stage and the whole,
on 3 and 8 chips.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.nodes import cogvideox as nodes
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models import test_cogvideox as flagship
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK, difference
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, resolve_variant
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

T2V, SPEC = flagship.SPEC, lookup_spec("cogvideox1.5-5b-i2v")
MODEL = parity.tiny_model(SPEC)
# Latent frames 5 and 3, padded to 6 and 4; tokens 3 * 5 * 7 = 105 and 2 * 7 * 3 = 42.
ODD, TALL = replace(flagship.ODD, num_inference_steps=3), replace(flagship.TALL, num_inference_steps=3)


@functools.cache
def upstream_pipeline() -> Any:
    return parity.upstream("CogVideoXImageToVideoPipeline", tiny.ensure_random(SPEC))


def picture(settings: Settings) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((settings.width, settings.height), Image.Resampling.BICUBIC)


def condition(model: ModelRef, settings: Settings, chips: int) -> Any:
    pixels = torch.from_numpy(np.asarray(picture(settings), np.float32) / 255)[None]
    return engine(chips).encode_image(model, pixels, settings, SilentProgress())


@functools.cache
def prepare_upstream_latents(settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's noise and picture, with the settings' seed; `num_frames` as its pipeline gives them, whole patches."""
    pipe = upstream_pipeline()
    frames = 4 * SPEC.geometry.latent_frames(settings.num_frames) - 3
    size, generator = (settings.height, settings.width), torch.Generator().manual_seed(settings.seed)
    pixels = pipe.video_processor.preprocess(picture(settings), *size)
    with torch.no_grad():
        found = pipe.prepare_latents(pixels, 1, 16, frames, *size, torch.float32, torch.device("cpu"), generator)
    return tuple(latents.transpose(1, 2) for latents in found)


@pytest.mark.parametrize(("chips", "inverted"), [(8, True), (3, False)])
def test_cogvideox_i2v_encode_image_matches_diffusers(chips: int, inverted: bool, tmp_path: Path, compare: Callable):
    model, pipe = MODEL, upstream_pipeline()
    if not inverted:
        changes = {part.name: {} for part in SPEC.components}
        changes |= {
            name: {"invert_scale_latents": False, "scaling_factor": 1.3} for name in ("vae_encoder", "vae_decoder")
        }
        model = parity.write_other_dimensions(SPEC, tmp_path / "other", changes)
        pipe = parity.upstream("CogVideoXImageToVideoPipeline", tmp_path / "other")
    found = condition(model, ODD, chips)["tensors"]
    with torch.no_grad():
        pixels = pipe.video_processor.preprocess(picture(ODD), ODD.height, ODD.width)
        expected = pipe.vae.encode(pixels[:, :, None]).latent_dist
    scale = 1 / 0.7 if inverted else 1.3
    compare(f"mean, {chips} chips", found["image"].numpy(), scale * expected.mean.numpy(), error=NETWORK)
    compare(f"deviation, {chips} chips", found["image_std"].numpy(), scale * expected.std.numpy(), error=NETWORK)


def test_cogvideox_i2v_noise_and_image_draws_match_diffusers(compare: Callable):
    """From one generator, the picture first."""
    noise, latents = prepare_upstream_latents(ODD)
    generator = torch.Generator().manual_seed(ODD.seed)
    given = {name: tensor.numpy() for name, tensor in condition(MODEL, ODD, 8)["tensors"].items()}
    drawn = SPEC.recipe.draw_inputs(given, generator)
    compare("picture", drawn["image"], latents[:, :, :1].numpy(), error=NETWORK)
    assert torch.equal(SPEC.recipe.noise(SPEC.geometry.latent_shape(ODD), generator), noise)
    assert not latents[:, :, 1:].any()
    assert difference(drawn["image"], given["image"]) > 1e-3


def test_cogvideox_i2v_denoise_with_poisoned_padding_matches_diffusers(
    monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """105 tokens on 4 chips for each branch: the three added ones are NaN."""
    parity.poison_padding(monkeypatch)
    pipe, (noise, latents) = upstream_pipeline(), prepare_upstream_latents(ODD)
    text = flagship.embeddings(flagship.SHORT)
    given = {"text": text, "text_length": np.full(2, 226, np.int32)}
    given |= {"image": latents[:, :, :1].numpy(), "image_std": np.full_like(latents[:, :, :1].numpy(), np.nan)}
    ours = parity.denoise_once(SPEC, ODD, noise, given, timestep=700)
    rope = pipe._prepare_rotary_positional_embeddings(ODD.height, ODD.width, noise.shape[2], "cpu")
    with torch.no_grad():
        cond, uncond = (
            pipe.transformer(
                torch.cat([noise, latents], 1).transpose(1, 2), torch.from_numpy(row[None]), torch.tensor([700]),
                ofs=torch.full((1,), 2.0), image_rotary_emb=rope,
            ).sample.transpose(1, 2)
            for row in text
        )  # fmt: skip
    compare("denoiser, poisoned padding", ours, (uncond + ODD.guidance_scale * (cond - uncond)).numpy(), error=NETWORK)


@pytest.mark.parametrize(("chips", "settings"), [pytest.param(3, TALL, marks=pytest.mark.recorded), (8, ODD)])
def test_cogvideox_i2v_latents_and_frames_match_diffusers(chips: int, settings: Settings, compare: Callable):
    runner = engine(chips)
    expected = flagship.generate(upstream_pipeline(), settings, image=picture(settings))
    embeds = runner.encode(MODEL, flagship.SHORT, flagship.NEGATIVE, SilentProgress())
    latents = runner.denoise(MODEL, settings, *embeds, SilentProgress(), condition(MODEL, settings, chips))
    compare(f"latents, {chips} chips", latents["samples"].numpy() * 0.7, expected.latents)
    frames = runner.decode(MODEL, latents, SilentProgress())
    assert frames.shape == (settings.num_frames, settings.height, settings.width, 3)
    compare(f"frames, {chips} chips", frames.numpy(), expected.frames)


def test_cogvideox_nodes_missing_or_unused_image_raises_value_error():
    class Host(SilentProgress):
        folders = Folders()

    numbers = {"height": 80, "width": 112, "num_frames": 9, "num_inference_steps": 1, "guidance_scale": 1.0, "seed": 0,
               "scheduler": "checkpoint", "use_dynamic_cfg": False, "model": None, "precision": "auto"}  # fmt: skip
    embeds = [[torch.zeros(1, 226, 40), {"tpu_family": SPEC.family}]]
    encoded = {"height": 80, "width": 112, "num_frames": 9, "tpu_family": SPEC.family}
    with raises_message(ValueError, "condition.not_connected", title=re.compile(r"I2V$"), family="CogVideoX"):
        nodes.SAMPLER.run(Host(), prompt_embeds=embeds, model_id=SPEC.miniature.random_id, **numbers)
    with raises_message(ValueError, "node.image_unused", name="input.condition", model_title="CogVideoX 1.5 5B"):
        nodes.SAMPLER.run(Host(), prompt_embeds=embeds, condition=encoded, model_id=T2V.miniature.id, **numbers)
    size = {name: numbers[name] for name in ("height", "width", "num_frames", "model", "precision")}
    with raises_message(ValueError, "node.image_unused", name="input.image", model_title="CogVideoX 1.5 5B"):
        nodes.IMAGE_ENCODER.run(Host(), image=None, resize="crop", model_id=T2V.miniature.id, **size)


def test_cogvideox_i2v_resolve_variant_and_check_use_config(tmp_path: Path):
    assert resolve_variant(T2V, str(tiny.ensure_random(SPEC))) is SPEC
    assert resolve_variant(SPEC, str(tiny.ensure_random(T2V))) is T2V
    changes = {part.name: {} for part in SPEC.components} | {"transformer": {"ofs_embed_dim": None}}
    folder = parity.write_other_dimensions(SPEC, tmp_path / "other", changes).model_id
    with raises_message(
        ValueError,
        "compatibility.config_unsupported",
        title=re.compile(r"I2V$"),
        key="ofs_embed_dim",
        state=Expected("compatibility.has_value", value="null"),
        folder="transformer",
        need="a number",
    ):
        ModelRef(spec_name=SPEC.name, model_id=folder).check()


def test_cogvideox_i2v_advice_warns_about_unpublished_sizes():
    shown = SPEC.settings()
    assert (shown.height, shown.width, shown.num_frames) == (768, 1360, 81)
    for size in ({}, {"height": 1360, "width": 768}, {"height": 768, "width": 1008, "num_frames": 161}):
        assert SPEC.recipe.advice(SPEC.settings(**size)) is None
    advice = SPEC.recipe.advice(SPEC.settings(height=480))
    assert advice is not None and "768 pixels by 768 to 1360, and 16k + 1 frames" in advice
