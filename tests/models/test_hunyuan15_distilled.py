"""HunyuanVideo 1.5's other checkpoints against diffusers' pipelines on the CPU in float32, on 1 to 8 chips."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models import test_hunyuan15 as flagship
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK, difference
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, resolve_variant
from comfyui_tpu.tpu_runtime.engine import conditioning
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.models.hunyuan15 import distilled
from comfyui_tpu.tpu_runtime.programs.denoising_plan import DenoisingPlan
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

SPEC = spec_for_family("HunyuanVideo15")
MEAN_FLOW, DISTILLED = distilled.I2V_480P_STEP_DISTILLED, distilled.T2V_480P_DISTILLED
# 105 tokens on 8 and on 3 chips: only 3 divides them. The checkpoint's own shift.
PICTURE = replace(flagship.PICTURE, guidance_scale=1.0)
FLAT = replace(flagship.FLAT, num_inference_steps=2, shift=0.0)
# Makers' name, shift, guidance, steps, size: diffusers' conversion script, and the makers' README for the steps.
PUBLISHED = [
    ("720p_t2v", 9.0, 6.0, 50, (1280, 720)),
    ("720p_i2v", 7.0, 6.0, 50, (1280, 720)),
    ("480p_t2v", 5.0, 6.0, 50, (848, 480)),
    ("480p_i2v", 5.0, 6.0, 50, (848, 480)),
    ("480p_t2v_distilled", 5.0, 1.0, 50, (848, 480)),
    ("480p_i2v_distilled", 5.0, 1.0, 50, (848, 480)),
    ("720p_i2v_distilled", 7.0, 1.0, 50, (1280, 720)),
    ("480p_i2v_step_distilled", 7.0, 1.0, 12, (848, 480)),
]


@pytest.mark.parametrize(("name", "shift", "guidance", "steps", "size"), PUBLISHED)
def test_hunyuan15_recipes_match_published_settings(
    name: str, shift: float, guidance: float, steps: int, size: tuple[int, int]
):
    from diffusers.pipelines.hunyuan_video1_5 import image_processor

    (spec,) = (spec for spec in SPECS if spec.published.hub_id.endswith(f"-Diffusers-{name}"))
    settings = spec.settings()
    assert (settings.guidance_scale, settings.num_inference_steps) == (guidance, steps)
    assert (settings.width, settings.height, settings.num_frames) == (*size, 121)
    assert spec.published.files["guider/guider_config.json"]["guidance_scale"] == guidance
    assert spec.branches(settings.guidance_scale) == (2 if guidance > 1 else 1)
    area = spec.component("transformer").config["target_size"]
    processor = image_processor.HunyuanVideo15ImageProcessor(vae_scale_factor=16)
    assert processor.calculate_default_height_width(9, 16, area) == (settings.height, settings.width)
    even = np.linspace(1, 0, steps + 1)
    shifted = 1000 * shift * even / (1 + (shift - 1) * even)
    table = DenoisingPlan.published(spec, settings).table
    np.testing.assert_allclose(table.timesteps, shifted[:-1], rtol=1e-6)
    np.testing.assert_allclose(table.next_timesteps, shifted[1:], rtol=1e-6)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.family == SPEC.family], ids=lambda spec: spec.name)
def test_resolve_variant_hunyuan15_folder_uses_configs(spec: ModelSpec):
    """Whichever of the family's nodes it is given to. What guidance is, is read when it runs."""
    found = resolve_variant(SPEC, str(tiny.ensure_random(spec)))
    assert found.name == spec.name.removesuffix("-distilled" if "step" not in spec.name else "")
    assert resolve_variant(SPEC, spec.published.hub_id) is spec


def test_model_check_mean_flow_mismatch_raises_value_error():
    plain = lookup_spec("hunyuanvideo1.5-i2v-480p")
    with raises_message(
        ValueError,
        "compatibility.config_unsupported",
        title=re.compile(r"I2V 480p$"),
        key="use_meanflow",
        state=Expected("compatibility.has_value", value="true"),
        need="false",
    ):
        ModelRef(spec_name=plain.name, model_id=str(tiny.ensure_random(MEAN_FLOW))).check()
    with raises_message(
        ValueError,
        "compatibility.config_unsupported",
        title=re.compile(r"480p-step-distilled$"),
        key="use_meanflow",
        state=Expected("compatibility.has_value", value="false"),
        need="true",
    ):
        ModelRef(spec_name=MEAN_FLOW.name, model_id=str(tiny.ensure_random(plain))).check()


@functools.cache
def condition() -> dict[str, np.ndarray]:
    """Of one picture, by upstream."""
    pipe, image = flagship.image_pipeline(MEAN_FLOW.name), flagship.picture()
    with flagship.upstream():
        zeros = torch.zeros(MEAN_FLOW.geometry.latent_shape(PICTURE))
        size = PICTURE.height, PICTURE.width
        latent, mask = pipe.prepare_cond_latents_and_mask(zeros, image, 1, *size, torch.float32, "cpu")
        tokens = pipe.encode_image(image, 1, "cpu", torch.float32)
    return {"condition": torch.cat([latent, mask], 1).numpy(), "image_embeds": tokens.numpy()}


def upstream_call(noise: torch.Tensor, given: dict[str, np.ndarray], timestep: float, following: float) -> Any:
    pipe = flagship.image_pipeline(MEAN_FLOW.name)
    mask, mask_2 = (
        (torch.arange(given[name].shape[1])[None] < int(given[f"{name}_length"][0])).float()
        for name in ("text", "text_2")
    )
    given = {name: torch.from_numpy(value) for name, value in given.items()}
    return pipe.transformer(
        hidden_states=torch.cat([noise, given["condition"]], 1),
        timestep=torch.tensor([timestep]), timestep_r=torch.tensor([following]),
        encoder_hidden_states=given["text"], encoder_attention_mask=mask,
        encoder_hidden_states_2=given["text_2"], encoder_attention_mask_2=mask_2,
        image_embeds=given["image_embeds"], return_dict=False,
    )[0]  # fmt: skip


# The flagship's test of the same blocks has the padding, and the latents below, on three chips, where the flow ends.
@pytest.mark.recorded
def test_mean_flow_denoise_with_poisoned_padding_matches_diffusers(monkeypatch: pytest.MonkeyPatch, compare: Callable):
    """105 tokens on 8 chips, whose added ones are NaN."""
    parity.poison_padding(monkeypatch)
    noise = parity.random_latents(MEAN_FLOW, PICTURE)
    given = {**flagship.embeddings(flagship.QUOTED), **condition()}
    ours = parity.denoise_once(MEAN_FLOW, PICTURE, noise, given, timestep=700.5, next_timestep=410.25)
    with flagship.upstream():
        expected, other = (upstream_call(noise, given, 700.5, following).numpy() for following in (410.25, 0.0))
    compare("mean flow, poisoned padding", ours, expected, error=NETWORK)
    assert difference(expected, other) > 1e-3, "where the flow ends matters"


def embeds(prompt: str) -> Any:
    """Upstream's as CONDITIONING."""
    given = flagship.embeddings(prompt)
    encoded = [(given[name], given[f"{name}_length"]) for name in ("text", "text_2")]
    return conditioning.build_conditioning(SPEC, encoded, 0)


def test_mean_flow_latents_match_diffusers(compare: Callable):
    """Encoders and decoder are the flagship's. One branch on three chips, whatever the widget says."""
    pipe, model = flagship.image_pipeline(MEAN_FLOW.name), parity.tiny_model(MEAN_FLOW)
    expected = flagship.generate(pipe, MEAN_FLOW, PICTURE, flagship.QUOTED, image=flagship.picture())
    picture = conditioning.build_condition(MEAN_FLOW, PICTURE, condition())
    asked = replace(PICTURE, guidance_scale=6.0)
    latents = engine(3).denoise(model, asked, embeds(flagship.QUOTED), None, SilentProgress(), picture)
    compare("latents, mean flow", latents["samples"].numpy() * flagship.SCALE, expected.latents)


def test_cfg_distilled_checkpoint_runs_one_branch(compare: Callable, caplog: pytest.LogCaptureFixture):
    """As upstream's pipeline, which takes the scale from the checkpoint; the widget still says 6."""
    pipe, model = parity.upstream("HunyuanVideo15Pipeline", tiny.ensure_random(DISTILLED)), parity.tiny_model(DISTILLED)
    flat = replace(FLAT, guidance_scale=pipe.guider.guidance_scale)
    expected = flagship.generate(pipe, DISTILLED, flat, flagship.PLAIN, height=flat.height, width=flat.width)
    asked = replace(flat, guidance_scale=6.0)
    latents = engine(1).denoise(
        model, asked, embeds(flagship.PLAIN), None, SilentProgress()
    )  # the flagship's own program
    compare("latents, distilled", latents["samples"].numpy() * flagship.SCALE, expected.latents)
    assert "guidance_scale is 1 instead of 6.0" in caplog.text
