"""FLUX.2 klein against `diffusers.Flux2KleinPipeline` on the CPU in float32: distilled, and base with guidance."""

import copy
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.nodes import family as node_stages
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.models.common import qwen3
from comfyui_tpu.tpu_runtime.programs import network_call, upstream_network
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget
from comfyui_tpu.tpu_runtime.progress import SilentProgress

DEV = spec_for_family("Flux2")
DISTILLED, BASE = lookup_spec("flux2-klein-4b"), lookup_spec("flux2-klein-base-4b")
SHORT = "cat"
LONG = "A cat holding a sign that says hello world. " * 60  # over 512 tokens
# 5 x 7 = 35 latent tokens, with the text 547: neither divides by 4 or by 3.
ODD = Settings(height=80, width=112, num_inference_steps=3, guidance_scale=4.0, seed=7)
FOUR_STEPS = replace(ODD, num_inference_steps=4)


class Host(SilentProgress):
    folders = Folders(models=())


@functools.cache
def pipeline(name: str) -> Any:
    return parity.upstream("Flux2KleinPipeline", tiny.ensure_random(lookup_spec(name)))


@functools.cache
def embeddings(prompt: str) -> np.ndarray:
    with torch.no_grad():
        return pipeline(BASE.name).encode_prompt(prompt)[0].numpy()


@functools.cache
def reference() -> np.ndarray:
    """A picture whose sides are no multiples of 16: 5 x 6 tokens."""
    return np.random.default_rng(4).integers(0, 256, (83, 100, 3)).astype(np.uint8)


@pytest.mark.slow
# Z-Image has the same encoder, which runs on three chips there.
@pytest.mark.parametrize(("chips", "prompt"), [(1, LONG), pytest.param(8, SHORT, marks=pytest.mark.recorded)])
def test_klein_prompt_embeddings_match_diffusers(chips: int, prompt: str, compare: Callable):
    both = parity.encode_anew(chips, parity.tiny_model(BASE), prompt, "")
    for given, found in zip((prompt, ""), both, strict=True):
        assert found is not None
        compare(f"embeddings of {given[:9]!r}, {chips} chips", found[0][0].numpy(), embeddings(given), error=NETWORK)
        assert (found[0][1]["length"] == 512) == (given == LONG)


def test_qwen3_tokenize_pads_on_the_right():
    tokenizer = copy.deepcopy(pipeline(BASE.name).tokenizer)
    tokenizer.padding_side = "left"
    _, mask = qwen3.tokenize(tokenizer, [SHORT])
    assert 0 < mask.sum() < 512 and mask[0, : mask.sum()].all()


@pytest.mark.slow
def test_qwen3_encode_text_left_padding_matches_transformers(compare: Callable):
    component = BASE.component("text_encoder")
    pipe = pipeline(BASE.name)
    ids, mask = qwen3.tokenize(pipe.tokenizer, [SHORT])
    assert pipe.tokenizer.decode(ids[0, : mask.sum()]) == (
        "<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    ids, mask = (np.roll(x, int((mask == 0).sum())) for x in (ids, mask))
    run = network_call.build_call_program(
        BASE, "text_encoder", component.tiny, CompileTarget(devices=tuple(jax.devices()[:3]), precision="float32"),
        qwen3.encode_text, (ids, mask), partition="replicated", carries=False,
    )  # fmt: skip
    network = upstream_network.build_network(component, component.tiny)
    assert mask[0, -1] == 1 and not any("lm_head" in name or "norm.weight" == name for name in network.weights)
    ours, *_ = run.compile()(parity.tiny_weights(BASE, "text_encoder", run), ids, mask)
    with torch.no_grad():
        states = pipe.text_encoder(
            torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), output_hidden_states=True
        ).hidden_states
    expected = torch.cat([states[k] for k in (9, 18, 27)], -1).numpy()
    compare("embeddings, padded before, 3 chips", np.asarray(ours), expected, error=NETWORK)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshShape(dp=2, sp=2, tp=2), MeshShape(sp=3)], ids=str)
def test_klein_guided_denoise_with_reference_matches_diffusers(
    mesh: MeshShape, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """The tokens that only fill up the chips' shares are NaN."""
    noise, shown = (
        parity.random_latents(BASE, ODD),
        torch.randn(1, 128, 5, 6, generator=torch.Generator().manual_seed(6)),
    )
    pipe, rows = pipeline(BASE.name), [embeddings(SHORT), embeddings("")]
    tokens = torch.cat([x.flatten(2).transpose(1, 2) for x in (noise, shown)], dim=1)
    places = torch.cat([pipe._prepare_latent_ids(noise), pipe._prepare_image_ids([shown])], dim=1)
    with torch.no_grad():
        flows = [
            pipe.transformer(
                hidden_states=tokens, encoder_hidden_states=text, timestep=torch.tensor([0.7]), guidance=None,
                img_ids=places, txt_ids=pipe._prepare_text_ids(text), return_dict=False,
            )[0][:, :35].transpose(1, 2).reshape(noise.shape).numpy()
            for text in map(torch.from_numpy, rows)
        ]  # fmt: skip
    parity.poison_padding(monkeypatch)
    given = {"text": np.concatenate(rows), "text_length": np.full(2, 512, np.int32), "reference_0": shown.numpy()}
    ours = parity.denoise_once(BASE, ODD, noise, given, timestep=700.0, mesh=mesh)
    compare(f"denoiser, {mesh}", ours, flows[1] + 4.0 * (flows[0] - flows[1]), error=NETWORK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "settings", "pictures"),
    [
        # `tests/models/miniatures/test_flux2_klein.py` compares a distilled generation with diffusers in every run.
        pytest.param(DISTILLED, FOUR_STEPS, 0, id="distilled", marks=pytest.mark.recorded),
        pytest.param(BASE, ODD, 1, id="base, a reference"),
    ],
)
def test_klein_latents_and_image_match_diffusers(spec: ModelSpec, settings: Settings, pictures: int, compare: Callable):
    """Upstream ignores the guidance of a distilled checkpoint."""
    from PIL import Image

    shown = {"image": [Image.fromarray(reference())]} if pictures else {}
    expected = parity.generate(pipeline(spec.name), settings, prompt=SHORT, **shown)
    runner, model = engine(8), parity.tiny_model(spec)
    image = torch.from_numpy(reference().astype(np.float32) / 255.0)[None]
    condition = runner.encode_image(model, image, settings, SilentProgress()) if pictures else None
    embeds = engine(1).encode(model, SHORT, "", SilentProgress())
    assert (embeds[1] is None) == (spec is DISTILLED)
    latents = runner.denoise(model, settings, *embeds, SilentProgress(), condition)
    wanted = expected.latents.swapaxes(1, 2).reshape(latents["samples"].shape)
    compare(f"latents, {spec.name}", latents["samples"].numpy(), wanted)
    picture = runner.decode(model, latents, SilentProgress()).numpy()
    compare(f"picture, {spec.name}", picture, expected.frames)


def test_choose_model_klein_reads_distillation_from_index(tmp_path: Path):
    for name, said in {"distilled": {"is_distilled": True}, "base": {}, "also_base": {"is_distilled": False}}.items():
        shutil.copytree(tiny.ensure_random(BASE), tmp_path / name)
        index = json.loads((tmp_path / name / "model_index.json").read_text())
        (tmp_path / name / "model_index.json").write_text(json.dumps({**index, **said}))
        wanted = DISTILLED if name == "distilled" else BASE
        assert choose_model(DEV, str(tmp_path / name)).spec_name == wanted.name
    assert choose_model(DEV, "black-forest-labs/FLUX.2-klein-base-9B").spec_name == "flux2-klein-base-9b"


@pytest.mark.parametrize("spec", [DEV, DISTILLED], ids=lambda spec: spec.name)
def test_encode_unused_negative_prompt_raises_value_error(spec: ModelSpec):
    with raises_message(
        ValueError,
        "node.negative_prompt_unused",
        title=spec.title,
        negative_prompt="'blur'",
        guided="flux2-klein-base-4b, flux2-klein-base-9b",
    ):
        node_stages._encode(
            DEV,
            Host(),
            prompt=SHORT,
            negative_prompt="blur",
            model_id=spec.miniature.id,
            model=None,
            precision="float32",
        )


def test_klein_distilled_advice_names_recommended_settings():
    assert DISTILLED.recipe.advice(DISTILLED.settings()) is None and DISTILLED.branches(FOUR_STEPS.guidance_scale) == 1
    assert DISTILLED.recipe.advice(replace(FOUR_STEPS, num_inference_steps=50)) == (
        "guidance_scale is 4.0, but it is distilled and runs without; num_inference_steps is 50, but it is distilled "
        "to 4."
    )
