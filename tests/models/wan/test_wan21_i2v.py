"""Wan 2.1 from a picture, and from a first to a last one, against `diffusers.WanImageToVideoPipeline` on the CPU."""

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.nodes import wan22_i2v as nodes
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless.runner import TerminalContext
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.models.wan import test_wan21
from comfyui_tpu.tests.models.wan.test_wan21 import NEGATIVE, SHORT, normalised
from comfyui_tpu.tests.support.closeness import NETWORK, OPERATION, difference
from comfyui_tpu.tests.support.messages import Expected, raises_message, refused_input
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime import api as runtime
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import resolve_variant
from comfyui_tpu.tpu_runtime.engine.stage_values import ImageCondition
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.models.wan import image_encoder
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from PIL import Image

pytestmark = pytest.mark.slow

FIRST, BOTH = lookup_spec("wan2.1-i2v-14b-480p"), lookup_spec("wan2.1-flf2v-14b-720p")
SPECS = pytest.mark.parametrize("spec", [FIRST, BOTH], ids=lambda spec: spec.name)
# Tokens: 3 * 5 * 7 = 105, and 257 or 514 of pictures: none divides by the chips.
ODD = Settings(height=80, width=112, num_frames=9, num_inference_steps=2, guidance_scale=5.0, seed=7, shift=3.0)


@dataclass(frozen=True)
class Oracle(parity.Result):
    condition: np.ndarray
    tokens: np.ndarray


def pictures(spec: ModelSpec) -> list[Image.Image]:
    """Of exactly the video's size, in bytes, as upstream's processor for CLIP takes them."""
    pixels = np.random.default_rng(3).integers(0, 256, (2, 10, 14, 3), np.uint8)
    size = ODD.width, ODD.height
    return [Image.fromarray(one).resize(size, Image.Resampling.BICUBIC) for one in pixels[: spec.pictures.numbers[0]]]


def pixels_of(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture, np.float32))[None] / 255.0


@functools.cache
def pipeline(name: str) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    folder = tiny.ensure_random(lookup_spec(name))
    return parity.upstream(
        "WanImageToVideoPipeline", folder, tokenizer=umt5_tokenizer(folder),
        image_processor=CLIPImageProcessorPil.from_pretrained(folder / "image_processor"),
    )  # fmt: skip


@functools.cache
def oracle(name: str) -> Oracle:
    pipe, spec, kept = pipeline(name), lookup_spec(name), {}
    pipe.scheduler = solver_table.build_scheduler({**spec.recipe.scheduler, "flow_shift": ODD.shift})

    def keep(method: str, choose: Callable) -> None:
        original = getattr(pipe, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            kept[method] = choose(result).numpy()
            return result

        setattr(pipe, method, run)

    keep("prepare_latents", lambda result: result[1])
    keep("encode_image", lambda result: result)
    first, *last = pictures(spec)
    found = parity.generate(
        pipe, ODD, image=first, last_image=last[0] if last else None, prompt=SHORT, negative_prompt=NEGATIVE,
        num_frames=ODD.num_frames,
    )  # fmt: skip
    tokens = kept["encode_image"].reshape(1, -1, kept["encode_image"].shape[-1])
    return Oracle(latents=found.latents, frames=found.frames, condition=kept["prepare_latents"], tokens=tokens)


def encode(spec: ModelSpec, **given: Any) -> ImageCondition:
    """What the node makes of pictures."""
    first, *last = [pixels_of(picture) for picture in pictures(spec)]
    host = TerminalContext(Folders(), stream=io.StringIO())
    values = nodes.IMAGE_ENCODER.values(
        {
            "image": first, "last_image": last[0] if last else None, "model": parity.tiny_model(spec),
            "height": ODD.height, "width": ODD.width, "num_frames": ODD.num_frames, **given,
        }
    )  # fmt: skip
    return nodes.IMAGE_ENCODER.run(host, **values)[0]


# Two pictures are the same network with more tokens. Without a last one the condition is that of Wan 2.2.
@pytest.mark.parametrize("spec", slower((FIRST, BOTH), FIRST), ids=lambda spec: spec.name)
def test_wan21_i2v_condition_latents_and_frames_match_diffusers(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    monkeypatch.setattr(runtime, "get_engine", lambda progress: engine(8))
    model, runner, expected = parity.tiny_model(spec), engine(8), oracle(spec.name)
    condition = encode(spec)
    compare(f"{spec.name}, tokens of pictures", condition["tensors"]["image_embeds"], expected.tokens, error=NETWORK)
    compare(f"{spec.name}, condition", condition["tensors"]["condition"], expected.condition, error=NETWORK)
    embeds = runner.encode(model, SHORT, NEGATIVE, SilentProgress())
    latents = runner.denoise(model, ODD, *embeds, SilentProgress(), condition)
    compare(f"{spec.name}, latents", normalised(latents["samples"]), expected.latents)
    compare(f"{spec.name}, frames", runner.decode(model, latents, SilentProgress()).numpy(), expected.frames)


@pytest.mark.parametrize(("spec", "chips"), [(FIRST, 3), (BOTH, 8)], ids=lambda x: getattr(x, "name", x))
def test_wan21_i2v_denoise_with_poisoned_padding_matches_diffusers(
    spec: ModelSpec, chips: int, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    parity.poison_padding(monkeypatch)
    text, of_pictures = test_wan21.embeddings(SHORT), oracle(spec.name)
    noise, tokens = parity.random_latents(spec, ODD), torch.from_numpy(of_pictures.tokens)
    with torch.no_grad():
        sample = torch.cat([noise, torch.from_numpy(of_pictures.condition)], dim=1)
        cond, uncond = (
            pipeline(spec.name).transformer(
                sample, torch.tensor([700]), torch.from_numpy(row[None]), tokens.unflatten(1, (-1, 257))[0],
                return_dict=False,
            )[0]
            for row in text
        )  # fmt: skip
    given = {
        "text": text, "text_length": np.full(2, 512, np.int32), "condition": of_pictures.condition,
        "image_embeds": of_pictures.tokens,
    }  # fmt: skip
    denoiser = parity.compile_denoiser(spec, ODD, given, timestep=700, chips=chips)
    ours = denoiser(noise, given)
    compare(f"{spec.name}, denoiser", ours, (uncond + ODD.guidance_scale * (cond - uncond)).numpy(), error=NETWORK)
    blank = denoiser(noise, {**given, "image_embeds": 0 * of_pictures.tokens})
    assert difference(blank, ours) > 0.01  # so that pictures are seen to count


@pytest.mark.parametrize(("height", "width"), [(80, 112), (1280, 720), (33, 331), (224, 224), (49, 49), (300, 225)])
def test_preprocess_images_matches_clip_processor(height: int, width: int, compare: Callable):
    image = np.random.default_rng(5).integers(0, 256, (height, width, 3), np.uint8)
    expected = pipeline(FIRST.name).image_processor(images=Image.fromarray(image), return_tensors="pt")
    ours = image_encoder.preprocess_images(torch.from_numpy(image.astype(np.float32))[None] / 255.0)
    compare(f"{height} x {width}", ours, expected["pixel_values"], error=OPERATION)


def test_wan21_i2v_480p_and_720p_differ_only_in_defaults():
    other = lookup_spec("wan2.1-i2v-14b-720p")
    own = {name: getattr(FIRST, name) for name in ("name", "title", "published", "miniature", "inputs")}
    assert replace(other, **own) == FIRST
    defaults = [(s.settings().height, s.settings().width, s.settings().shift) for s in (FIRST, other, BOTH)]
    assert defaults == [(480, 832, 3.0), (720, 1280, 5.0), (720, 1280, 16.0)]


@SPECS
def test_resolve_variant_finds_wan21_i2v_models(spec: ModelSpec):
    for model_id in (spec.published.hub_id, spec.miniature.id, str(tiny.ensure_random(spec))):
        assert resolve_variant(nodes.SPEC, model_id) is spec


OTHER = Expected("condition.or_use_model", hub_id="Wan-AI/Wan2.2-I2V-A14B-Diffusers")


@pytest.mark.parametrize(
    ("spec", "given", "expected"),
    [
        (
            BOTH,
            {"last_image": None},
            Expected("condition.last_image_missing", title=BOTH.title, end="condition.the_last_image", other=OTHER),
        ),
        (
            FIRST,
            {"last_image": torch.zeros(1, 64, 64, 3)},
            Expected("condition.last_image_unused", title=FIRST.title, end="condition.the_last_image", other=OTHER),
        ),
        (
            BOTH,
            {"num_frames": 1},
            refused_input(
                "num_frames",
                "settings.breaks_rule",
                title=BOTH.title,
                value=1,
                rule=Expected(
                    "settings.grid", multiple_of=4, plus=1, rule=Expected("settings.between", low=5, high=241)
                ),
                nearest=[5],
            ),
        ),
        (
            nodes.SPEC,
            {"num_frames": 1, "last_image": torch.zeros(1, 64, 64, 3)},
            Expected("condition.too_few_frames_for_last_image", title=nodes.SPEC.title, num_frames=1, least=5),
        ),
    ],
    ids=["missing", "useless", "too short for the model", "too short"],
)
def test_image_encoder_invalid_last_image_raises_value_error(spec: ModelSpec, given: dict, expected: Expected):
    with raises_message(ValueError, expected):
        encode(spec, **given)


def test_denoise_condition_of_other_model_raises_value_error():
    given = {"tpu_family": "Wan22I2V", "height": 80, "width": 112, "num_frames": 9}
    condition: Any = {**given, "tensors": {"condition": torch.zeros(1, 20, 3, 10, 14)}}
    embeds = engine(8).encode(parity.tiny_model(FIRST), SHORT, NEGATIVE, SilentProgress())
    with raises_message(ValueError, "condition.shape_of_another_model", family="Wan22I2V"):
        engine(8).denoise(parity.tiny_model(FIRST), ODD, *embeds, SilentProgress(), condition)
