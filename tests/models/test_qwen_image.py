"""Qwen-Image against `diffusers.QwenImagePipeline` on the CPU in float32: every stage and the whole."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_by_name
from comfyui_tpu.tpu_runtime.progress import Silent

SPEC = spec_by_name("qwen-image-2512")
MODEL = parity.tiny_model(SPEC)
SHORT = "cat"
LONG = "A coffee shop entrance with a chalkboard sign. " * 120  # over 1024 tokens
# 5 x 7 = 35 patches, of which the chips' halves are padded; and 8 x 4.
ODD = Settings(height=80, width=112, num_inference_steps=3, guidance_scale=4.0, seed=7)
WHOLE = Settings(height=128, width=64, num_inference_steps=2, guidance_scale=1.0, seed=8)


@functools.cache
def pipeline() -> Any:
    return parity.upstream("QwenImagePipeline", tiny.ensure(SPEC))


@functools.cache
def states(prompt: str) -> np.ndarray:
    """Upstream's, `[tokens, dim]`: without padding."""
    with torch.no_grad():
        return pipeline().encode_prompt(prompt)[0][0].numpy()


@pytest.mark.parametrize(("chips", "prompt"), [(1, LONG), (3, SHORT), (8, SHORT)])
def test_prompts_are_encoded_as_upstream_encodes_them(chips: int, prompt: str, compare: Callable):
    both = engine(chips).encode(MODEL, prompt, "", Silent())
    for given, found in zip((prompt, ""), both, strict=True):
        assert found is not None
        wanted = states(given)
        assert found[0][1]["length"] == len(wanted)
        assert (len(wanted) == 1024) == (given == LONG)
        compare(f"{given[:9]!r}, {chips} chips", found[0][0][0, : len(wanted)].numpy(), wanted, error=NETWORK)


def given(*texts: np.ndarray) -> dict[str, np.ndarray]:
    """The denoiser's inputs, whose padding holds noise."""
    text = np.random.default_rng(3).normal(size=(len(texts), 1024, texts[0].shape[1])).astype(np.float32) * 30
    for row, each in zip(text, texts, strict=True):
        row[: len(each)] = each
    return {"text": text, "text_length": np.array([len(each) for each in texts], np.int32)}


def upstreams_flow(noise: torch.Tensor, text: np.ndarray) -> torch.Tensor:
    """At timestep 700, `[1, patches, 64]`."""
    pipe, (height, width) = pipeline(), noise.shape[-2:]
    with torch.no_grad():
        return pipe.transformer(
            hidden_states=pipe._pack_latents(noise, 1, 16, height, width),
            timestep=torch.tensor([0.7]),
            encoder_hidden_states=torch.from_numpy(text)[None],
            encoder_hidden_states_mask=torch.ones(1, len(text)),
            img_shapes=[[(1, height // 2, width // 2)]],
        ).sample


def unpacked(flow: torch.Tensor, settings: Settings) -> np.ndarray:
    return pipeline()._unpack_latents(flow, settings.height, settings.width, 8).numpy()


@pytest.mark.parametrize("length", [1, 33, 1024])
def test_one_call_equals_upstreams_for_texts_of_any_length(
    length: int, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    text = np.random.default_rng(length).normal(size=(length, 60)).astype(np.float32)
    settings = replace(ODD, guidance_scale=1.0)
    noise = parity.random_latents(SPEC, settings)
    wanted = unpacked(upstreams_flow(noise, text), settings)
    parity.poison_padding(monkeypatch)
    ours = parity.denoise_once(SPEC, settings, noise, given(text), timestep=700.0, chips=3)
    compare(f"denoiser, {length} tokens", ours, wanted, error=NETWORK)


@pytest.mark.parametrize("settings", [ODD, replace(WHOLE, guidance_scale=4.0)], ids=["odd", "whole"])
@pytest.mark.parametrize(
    "mesh", [MeshShape(), MeshShape(sp=3), MeshShape(dp=2, tp=3), MeshShape(dp=2, sp=2, tp=2)], ids=str
)
def test_one_guided_call_equals_upstreams(
    mesh: MeshShape, settings: Settings, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """Rows with texts of different lengths; guidance keeps every token's length."""
    noise, texts = parity.random_latents(SPEC, settings), (states(LONG)[:77], states(""))
    prompt, negative = (upstreams_flow(noise, text) for text in texts)
    guided = negative + 4.0 * (prompt - negative)
    guided = guided * (prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    parity.poison_padding(monkeypatch)
    ours = parity.denoise_once(SPEC, settings, noise, given(*texts), timestep=700.0, mesh=mesh)
    compare(f"denoiser, {mesh}", ours, unpacked(guided, settings), error=NETWORK)


@pytest.mark.parametrize("settings", [ODD, WHOLE], ids=["guided", "alone"])
def test_latents_and_picture_equal_upstreams(settings: Settings, compare: Callable):
    expected = parity.generate(
        pipeline(), settings, prompt=SHORT, negative_prompt="blur", true_cfg_scale=settings.guidance_scale
    )
    runner = engine(8)
    embeds = runner.encode(MODEL, SHORT, "blur", Silent())
    latents = runner.denoise(MODEL, settings, *embeds, Silent())
    found = torch.from_numpy(expected.latents)
    wanted = pipeline()._unpack_latents(found, settings.height, settings.width, 8)
    config = pipeline().vae.config
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    compare("latents", latents["samples"].numpy(), (wanted * std + mean).numpy())
    compare("picture", runner.decode(MODEL, latents, Silent()).numpy(), expected.frames)
