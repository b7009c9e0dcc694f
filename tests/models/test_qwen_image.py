"""Qwen-Image against `diffusers.QwenImagePipeline` on the CPU in float32: every stage and the whole."""

import functools
import inspect
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

SPEC = lookup_spec("qwen-image-2512")
MODEL = parity.tiny_model(SPEC)
SHORT = "cat"
LONG = "A coffee shop entrance with a chalkboard sign. " * 120  # over 1024 tokens
# 5 x 7 = 35 patches, of which the chips' halves are padded; and 8 x 4.
ODD = Settings(height=80, width=112, num_inference_steps=3, guidance_scale=4.0, seed=7)
WHOLE = Settings(height=128, width=64, num_inference_steps=2, guidance_scale=1.0, seed=8)
GUIDED = replace(WHOLE, guidance_scale=4.0)


@functools.cache
def pipeline() -> Any:
    return parity.upstream("QwenImagePipeline", tiny.ensure_random(SPEC))


@functools.cache
def states(prompt: str) -> np.ndarray:
    """Upstream's, `[tokens, dim]`: without padding."""
    with torch.no_grad():
        return pipeline().encode_prompt(prompt)[0][0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "prompt"), mostly([(1, LONG), (3, SHORT), (8, SHORT)], (1, LONG), (3, SHORT)))
def test_qwen_image_prompt_embeddings_match_diffusers(chips: int, prompt: str, compare: Callable):
    both = parity.encode_anew(chips, MODEL, prompt, "")
    for given, found in zip((prompt, ""), both, strict=True):
        assert found is not None
        wanted = states(given)
        assert found[0][1]["length"] == len(wanted)
        assert (len(wanted) == 1024) == (given == LONG)
        compare(f"{given[:9]!r}, {chips} chips", found[0][0][0, : len(wanted)].numpy(), wanted, error=NETWORK)


def denoiser_inputs(*texts: np.ndarray) -> dict[str, np.ndarray]:
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


def unpack_latents(flow: torch.Tensor, settings: Settings) -> np.ndarray:
    return pipeline()._unpack_latents(flow, settings.height, settings.width, 8).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 33, 1024])
def test_qwen_image_denoise_every_text_length_matches_diffusers(length: int, compare: Callable):
    text = np.random.default_rng(length).normal(size=(length, 60)).astype(np.float32)
    noise = parity.random_latents(SPEC, ODD)
    wanted = unpack_latents(upstreams_flow(noise, text), ODD)
    compare(f"denoiser, {length} tokens", poisoned_denoiser()(noise, denoiser_inputs(text)), wanted, error=NETWORK)


@functools.cache
def poisoned_denoiser() -> Callable:
    """Compile ours for one branch on three chips, whose padding is NaN."""
    settings, inputs = replace(ODD, guidance_scale=1.0), denoiser_inputs(np.zeros((1, 60), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        parity.poison_padding(patch)
        return parity.compile_denoiser(SPEC, settings, inputs, timestep=700.0, chips=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    mostly(
        itertools.product(
            (MeshShape(), MeshShape(sp=3), MeshShape(dp=2, tp=3), MeshShape(dp=2, sp=2, tp=2)), (ODD, GUIDED)
        ),
        (MeshShape(), ODD), (MeshShape(sp=3), GUIDED), (MeshShape(dp=2, sp=2, tp=2), ODD),
    ),
    ids=lambda x: {id(ODD): "odd", id(GUIDED): "whole"}.get(id(x), str(x)),
)  # fmt: skip
def test_qwen_image_guided_denoise_matches_diffusers(
    mesh: MeshShape, settings: Settings, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """Rows with texts of different lengths; guidance keeps every token's length."""
    noise, texts = parity.random_latents(SPEC, settings), (states(LONG)[:77], states(""))
    prompt, negative = (upstreams_flow(noise, text) for text in texts)
    guided = negative + 4.0 * (prompt - negative)
    guided = guided * (prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    parity.poison_padding(monkeypatch)
    ours = parity.denoise_once(SPEC, settings, noise, denoiser_inputs(*texts), timestep=700.0, mesh=mesh)
    compare(f"denoiser, {mesh}", ours, unpack_latents(guided, settings), error=NETWORK)


# A guided generation through all stages is that of the published folder, below.
@pytest.mark.parametrize("settings", [pytest.param(ODD, marks=pytest.mark.recorded), WHOLE], ids=["guided", "alone"])
def test_qwen_image_latents_and_image_match_diffusers(settings: Settings, compare: Callable):
    expected = parity.generate(
        pipeline(), settings, prompt=SHORT, negative_prompt="blur", true_cfg_scale=settings.guidance_scale
    )
    runner = engine(8)
    embeds = engine(1).encode(MODEL, SHORT, "blur", SilentProgress())
    latents = runner.denoise(MODEL, settings, *embeds, SilentProgress())
    found = torch.from_numpy(expected.latents)
    wanted = pipeline()._unpack_latents(found, settings.height, settings.width, 8)
    config = pipeline().vae.config
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    compare("latents", latents["samples"].numpy(), (wanted * std + mean).numpy())
    compare("picture", runner.decode(MODEL, latents, SilentProgress()).numpy(), expected.frames)


def as_published(folder: Path) -> Path:
    """The miniature as the makers have theirs: the language model within one that also sees, by the names and with the
    config that transformers 4 wrote, its head and its eyes beside it; and the VAE by its own class.
    """
    shutil.copytree(tiny.ensure_random(SPEC), folder)
    own = AutoModel.from_pretrained(folder / "text_encoder")
    sizes = {"depth": 2, "hidden_size": 40, "intermediate_size": 52, "num_heads": 5, "out_hidden_size": 60}
    text = {name: value for name, value in own.config.to_dict().items() if name not in ("architectures", "model_type")}
    shutil.rmtree(folder / "text_encoder")
    whole = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=sizes))
    whole.model.language_model.load_state_dict(own.state_dict())
    whole.save_pretrained(folder / "text_encoder")
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    older = (("model.language_model.", "model."), ("model.visual.", "visual."))
    tensors = {}
    for name, tensor in load_file(file).items():
        new = next((there + name.removeprefix(here) for here, there in older if name.startswith(here)), name)
        tensors[new] = tensor.clone()
    save_file(tensors, file, {"format": "pt"})
    path = folder / "text_encoder" / "config.json"
    config = json.loads(path.read_text())
    # What the whole model's numbers were before they had a place of their own is still there.
    path.write_text(json.dumps({**config["text_config"], **config, "hidden_size": 60, "num_attention_heads": 6}))
    vae = folder / "vae" / "config.json"
    known = inspect.signature(AutoencoderKLQwenImage.__init__).parameters
    found = {name: value for name, value in json.loads(vae.read_text()).items() if name in known}
    vae.write_text(json.dumps({**found, "_class_name": "AutoencoderKLQwenImage"}))
    index = json.loads((folder / "model_index.json").read_text())
    index |= {
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.slow
def test_qwen_image_published_folder_matches_diffusers(tmp_path: Path, compare: Callable):
    folder = as_published(tmp_path / "published")
    pipe = parity.upstream("QwenImagePipeline", folder)
    assert type(pipe.vae) is AutoencoderKLQwenImage and type(pipe.text_encoder) is Qwen2_5_VLForConditionalGeneration
    expected = parity.generate(pipe, ODD, prompt=SHORT, negative_prompt="blur", true_cfg_scale=4.0)
    model, runner = ModelRef(spec_name=SPEC.name, model_id=str(folder), precision="float32"), engine(2)
    latents = runner.denoise(model, ODD, *runner.encode(model, SHORT, "blur", SilentProgress()), SilentProgress())
    compare("picture", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)
