"""Wan 2.1 T2V 1.3B and Wan 2.2 T2V A14B against `diffusers.WanPipeline` on the CPU in float32."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.models.wan import test_wan21
from comfyui_tpu.tests.models.wan.test_wan21 import NEGATIVE, ODD, SHORT
from comfyui_tpu.tests.support.closeness import NETWORK
from comfyui_tpu.tests.support.patience import mostly
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, resolve_variant
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SMALL, TWO = lookup_spec("wan2.1-t2v-1.3b"), lookup_spec("wan2.2-t2v-a14b")
# Three steps of the first expert, one of the second, each with a scale of its own.
SHARED = replace(ODD, guidance_scale=4.0, guidance_scale_2=3.0, shift=12.0)
# 12 heads on 8 chips: 4 exchange heads, 2 pass keys around.
ALONE = replace(ODD, guidance_scale=1.0, shift=8.0)


@functools.cache
def pipeline(name: str) -> Any:
    return test_wan21.load_pipeline(tiny.ensure_random(lookup_spec(name)))


def generate(spec: ModelSpec, settings: Settings) -> parity.Result:
    pipe = pipeline(spec.name)
    pipe.scheduler = solver_table.build_scheduler({**spec.recipe.scheduler, "flow_shift": settings.shift})
    return parity.generate(
        pipe, settings, prompt=SHORT, negative_prompt=NEGATIVE, num_frames=settings.num_frames,
        guidance_scale_2=settings.guidance_scale_2,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "settings"), mostly([(SMALL, ALONE), (TWO, SHARED)], (TWO, SHARED)), ids=lambda x: getattr(x, "name", "")
)
def test_wan_t2v_sibling_latents_and_frames_match_diffusers(spec: ModelSpec, settings: Settings, compare: Callable):
    model, runner, expected = parity.tiny_model(spec), engine(8), generate(spec, settings)
    latents = runner.denoise(
        model, settings, *runner.encode(model, SHORT, NEGATIVE, SilentProgress()), SilentProgress()
    )
    compare(f"{spec.name}, latents", test_wan21.normalised(latents["samples"]), expected.latents)
    compare(f"{spec.name}, frames", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)


@pytest.mark.parametrize(("chips", "spec", "expert"), [(3, SMALL, "transformer"), (8, TWO, "transformer_2")])
def test_wan_t2v_sibling_denoise_with_poisoned_padding_matches_diffusers(
    chips: int, spec: ModelSpec, expert: str, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """The text encoder is Wan 2.1's, to the weight."""
    parity.poison_padding(monkeypatch)
    noise, text = parity.random_latents(spec, ODD), test_wan21.embeddings(SHORT)
    denoiser = getattr(pipeline(spec.name), expert)
    with torch.no_grad():
        cond, uncond = (
            denoiser(noise, torch.tensor([700]), torch.from_numpy(row[None]), return_dict=False)[0] for row in text
        )
    given = {"text": text, "text_length": np.full(2, 512, np.int32)}
    ours = parity.denoise_once(spec, ODD, noise, given, timestep=700, chips=chips, expert=expert)
    compare(f"{spec.name}, {expert}", ours, (uncond + ODD.guidance_scale * (cond - uncond)).numpy(), error=NETWORK)


def test_wan22_t2v_experts_differ_and_split_the_steps():
    """So that the parity of the whole shows which of them ran when."""
    table = solver_table.build_table(TWO, TWO.recipe.scheduler, SHARED, TWO.geometry.latent_shape(SHARED))
    assert [timestep >= 875 for timestep in table.timesteps] == [True] * 3 + [False]
    first, second = (
        component.state_dict() for component in (pipeline(TWO.name).transformer, pipeline(TWO.name).transformer_2)
    )
    assert not torch.equal(first["blocks.0.attn1.to_q.weight"], second["blocks.0.attn1.to_q.weight"])


def test_select_loras_respects_expert_of_each_lora():
    loras = tuple(Lora(path=expert, strength=1.0, expert=expert) for expert in ("both", "high", "low"))
    model = replace(parity.tiny_model(TWO), loras=loras)
    found = {expert: [lora.path for lora in model.select_loras(expert)] for expert in TWO.denoiser.experts}
    assert found == {"transformer": ["both", "high"], "transformer_2": ["both", "low"]}


@pytest.mark.parametrize("spec", [SMALL, TWO], ids=lambda spec: spec.name)
def test_resolve_variant_finds_wan_t2v_siblings(spec: ModelSpec):
    for model_id in (
        spec.published.hub_id,
        spec.miniature.id,
        *([str(tiny.ensure_random(TWO))] if spec is TWO else []),
    ):
        assert resolve_variant(test_wan21.SPEC, model_id) is spec
