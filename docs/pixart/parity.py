"""PixArt-Sigma against `diffusers.PixArtSigmaPipeline` on the CPU in float32, on 8 simulated chips."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = spec_for_family("PixArt")
MODEL = parity.tiny_model(SPEC)
PROMPT, NEGATIVE = "cactus", "blurred details"
# 5 x 7 = 35 tokens, which no number of chips divides.
ODD = Settings(height=80, width=112, num_inference_steps=6, guidance_scale=4.5, seed=7)


@functools.cache
def pipeline() -> Any:
    return parity.upstream("PixArtSigmaPipeline", tiny.ensure_random(SPEC))


@functools.cache
def texts() -> dict[str, np.ndarray]:
    """Upstream's, a row for each branch: states `[2, 300, 40]`, lengths `[2]`."""
    with torch.no_grad():
        found = pipeline().encode_prompt(PROMPT, negative_prompt=NEGATIVE)
    states, masks = torch.cat(found[::2]).numpy(), torch.cat(found[1::2]).numpy()
    return {"text": states, "text_length": masks.sum(axis=1).astype(np.int32)}


def test_pixart_prompt_embeddings_match_diffusers(compare: Callable):
    embeds = parity.engine(8).encode(MODEL, PROMPT, NEGATIVE, SilentProgress())
    (prompt, said), (negative, _) = (branch[0] for branch in embeds)
    compare("embeddings", np.concatenate([prompt, negative]), texts()["text"])
    assert said["length"] == texts()["text_length"][0] == 2


def test_pixart_denoise_with_poisoned_padding_matches_diffusers(monkeypatch: pytest.MonkeyPatch, compare: Callable):
    """35 tokens on 4 chips, the added ones NaN; behind the texts' ends noise."""
    parity.poison_padding(monkeypatch)
    sample, given = parity.random_latents(SPEC, ODD), texts()
    with torch.no_grad():
        cond, uncond = (
            pipeline().transformer(
                sample, encoder_hidden_states=torch.from_numpy(states[None]), timestep=torch.tensor([700]),
                encoder_attention_mask=(torch.arange(300) < length)[None], return_dict=False,
            )[0][:, :4]
            for states, length in zip(given["text"], given["text_length"].tolist(), strict=True)
        )  # fmt: skip
    noise = 30 * np.random.default_rng(0).normal(size=given["text"].shape).astype(np.float32)
    real = np.arange(300)[None, :, None] < given["text_length"][:, None, None]
    ours = parity.denoise_once(SPEC, ODD, sample, {**given, "text": np.where(real, given["text"], noise)}, timestep=700)
    compare("denoiser", ours, (uncond + ODD.guidance_scale * (cond - uncond)).numpy())


def test_pixart_latents_and_image_match_diffusers(compare: Callable):
    runner, scale = parity.engine(8), pipeline().vae.config.scaling_factor
    expected = parity.generate(
        pipeline(), ODD, prompt=PROMPT, negative_prompt=NEGATIVE, use_resolution_binning=False, clean_caption=False
    )
    latents = runner.denoise(MODEL, ODD, *runner.encode(MODEL, PROMPT, NEGATIVE, SilentProgress()), SilentProgress())
    compare("latents", latents["samples"] * scale, expected.latents)
    compare("picture", runner.decode(MODEL, latents, SilentProgress()).numpy(), expected.frames)
