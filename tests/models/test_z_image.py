"""Z-Image against `diffusers.ZImagePipeline` on the CPU in float32: every stage and the whole, on 1, 3 and 8 chips."""

import functools
import itertools
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
from comfyui_tpu.tests.support.patience import mostly
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

TURBO, BASE = lookup_spec("z-image-turbo"), lookup_spec("z-image")
SHORT = "cat"
LONG = "A small steam train on a snowy mountain. " * 40  # over 512 tokens
# 5 x 7 = 35 patches, which are padded to 64; and 32, which are not.
ODD = Settings(height=80, width=112, num_inference_steps=2, guidance_scale=1.0, seed=7)
WHOLE = Settings(height=128, width=64, num_inference_steps=2, guidance_scale=4.0, seed=8)
GUIDED = replace(ODD, guidance_scale=4.0)


@functools.cache
def pipeline(name: str) -> Any:
    return parity.upstream("ZImagePipeline", tiny.ensure_random(lookup_spec(name)))


@functools.cache
def states(prompt: str) -> np.ndarray:
    """Upstream's, `[tokens, dim]`: without padding."""
    with torch.no_grad():
        return pipeline(TURBO.name).encode_prompt(prompt, do_classifier_free_guidance=False)[0][0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "prompt"), mostly([(1, LONG), (3, SHORT), (8, SHORT)], (1, LONG), (3, SHORT)))
def test_z_image_prompt_embeddings_match_diffusers(chips: int, prompt: str, compare: Callable):
    both = parity.encode_anew(chips, parity.tiny_model(TURBO), prompt, "")
    for given, found in zip((prompt, ""), both, strict=True):
        assert found is not None
        wanted = states(given)
        assert found[0][1]["length"] == len(wanted)
        assert (len(wanted) == 512) == (given == LONG)
        compare(f"{given[:9]!r}, {chips} chips", found[0][0][0, : len(wanted)].numpy(), wanted, error=NETWORK)


def denoiser_inputs(*texts: np.ndarray) -> dict[str, np.ndarray]:
    """The denoiser's inputs, whose padding holds noise."""
    text = np.random.default_rng(3).normal(size=(len(texts), 512, texts[0].shape[1])).astype(np.float32) * 30
    for row, each in zip(text, texts, strict=True):
        row[: len(each)] = each
    return {"text": text, "text_length": np.array([len(each) for each in texts], np.int32)}


def upstreams_flow(noise: torch.Tensor, texts: tuple[np.ndarray, ...], transformer: Any = None) -> list[np.ndarray]:
    """Of each row, at time 0.3 of upstream's, which is timestep 700."""
    with torch.no_grad():
        flows = (transformer or pipeline(TURBO.name).transformer)(
            [noise[0][:, None]] * len(texts), torch.full((len(texts),), 0.3), [*map(torch.from_numpy, texts)]
        )[0]
    return [-flow.transpose(0, 1).numpy() for flow in flows]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 511, 512])
def test_z_image_denoise_every_text_length_matches_diffusers(length: int, compare: Callable):
    """Around a multiple of 32, to which texts are padded by tokens that are attended to."""
    text = np.random.default_rng(length).normal(size=(length, 40)).astype(np.float32)
    noise = parity.random_latents(TURBO, ODD)
    (wanted,) = upstreams_flow(noise, (text,))
    compare(f"denoiser, {length} tokens", poisoned_denoiser()(noise, denoiser_inputs(text)), wanted, error=NETWORK)


@functools.cache
def poisoned_denoiser() -> Callable:
    """Compile ours on three chips, whose padding is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        parity.poison_padding(patch)
        return parity.compile_denoiser(
            TURBO, ODD, denoiser_inputs(np.zeros((1, 40), np.float32)), timestep=700.0, chips=3
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    mostly(
        itertools.product((MeshShape(), MeshShape(sp=3), MeshShape(dp=2, sp=4)), (GUIDED, WHOLE)),
        (MeshShape(), GUIDED), (MeshShape(sp=3), WHOLE), (MeshShape(dp=2, sp=4), GUIDED),
    ),
    ids=lambda x: {id(GUIDED): "odd", id(WHOLE): "whole"}.get(id(x), str(x)),
)  # fmt: skip
def test_z_image_guided_denoise_matches_diffusers(
    mesh: MeshShape, settings: Settings, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """Rows with texts of different lengths, each with its own places. Padding of the chips' shares is NaN."""
    noise, texts = parity.random_latents(BASE, settings), (states(LONG)[:77], states(""))
    flows = upstreams_flow(noise, texts)
    parity.poison_padding(monkeypatch)
    ours = parity.denoise_once(BASE, settings, noise, denoiser_inputs(*texts), timestep=700.0, mesh=mesh)
    compare(f"denoiser, {mesh}", ours, flows[1] + 4.0 * (flows[0] - flows[1]), error=NETWORK)


def test_z_image_denoise_with_random_weights_matches_diffusers(monkeypatch: pytest.MonkeyPatch, compare: Callable):
    """All weights are drawn: those of norms are ones in the miniature, where nobody would see two exchanged."""
    drawn: dict[str, Any] = {}
    draw = parity.drawn_weights
    monkeypatch.setattr(parity, "drawn_weights", lambda program: drawn.setdefault("weights", draw(program)))
    text, noise = states(SHORT), parity.random_latents(TURBO, ODD)
    changes = {"n_layers": 2}
    ours = parity.denoise_once(TURBO, ODD, noise, denoiser_inputs(text), timestep=700.0, chips=3, changes=changes)
    own = pipeline(TURBO.name).transformer
    transformer = type(own).from_config({**own.config, **changes})
    transformer.load_state_dict(
        {
            name.replace("*", str(layer)): torch.from_numpy(np.array(weight[layer] if "*" in name else weight))
            for name, weight in drawn["weights"].items()
            for layer in range(len(weight) if "*" in name else 1)
        }
    )
    (wanted,) = upstreams_flow(noise, (text,), transformer)
    compare("denoiser, all weights drawn", ours, wanted, error=NETWORK)


@pytest.mark.parametrize(
    ("spec", "settings"), [(TURBO, ODD), pytest.param(BASE, WHOLE, marks=pytest.mark.recorded)], ids=["turbo", "base"]
)
def test_z_image_latents_and_image_match_diffusers(spec: ModelSpec, settings: Settings, compare: Callable):
    """Upstream's guidance is added to the prompt's own flow: one less than ours."""
    theirs = replace(settings, guidance_scale=settings.guidance_scale - 1)
    expected = parity.generate(pipeline(spec.name), theirs, prompt=SHORT, negative_prompt="blur")
    runner, model = engine(8), parity.tiny_model(spec)
    embeds = engine(1).encode(model, SHORT, "blur", SilentProgress())
    latents = runner.denoise(model, settings, *embeds, SilentProgress())
    vae = pipeline(spec.name).vae.config
    compare("latents", latents["samples"].numpy(), expected.latents / vae.scaling_factor + vae.shift_factor)
    compare("picture", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)


def test_z_image_turbo_advice_names_recommended_settings():
    assert TURBO.recipe.advice(TURBO.settings()) is None and TURBO.branches(TURBO.settings().guidance_scale) == 1
    assert TURBO.recipe.advice(replace(WHOLE, num_inference_steps=9)) == (
        "guidance_scale is 4.0, but it is distilled and needs none (1.0); num_inference_steps is 9, but it is "
        "distilled to 8."
    )
    assert BASE.recipe.advice(WHOLE) is None and BASE.branches(BASE.settings().guidance_scale) == 2
