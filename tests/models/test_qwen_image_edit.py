"""Qwen-Image Edit against `diffusers.QwenImageEditPlusPipeline` on the CPU in float32: every stage and the whole."""

import functools
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
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK, difference
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.patience import mostly, slower
from comfyui_tpu.tpu_runtime import api as runtime
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.file_resolution import SEPARATOR
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
from comfyui_tpu.tpu_runtime.engine.stage_values import ImageCondition
from comfyui_tpu.tpu_runtime.files import read_header
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.models.qwen_image.text_encoder import IMAGE_PAD
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as upstream
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import BatchFeature
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

pytestmark = pytest.mark.slow

SPEC = lookup_spec("qwen-image-edit-2511")
MODEL = parity.tiny_model(SPEC)
PROMPT, NEGATIVE = "a red hat", "blur"
ODD = Settings(height=80, width=112, num_inference_steps=3, guidance_scale=4.0, seed=7)
# In the place of a megapixel, and of 384 x 384.
AREAS = {"VAE_IMAGE_SIZE": 96 * 96, "CONDITION_IMAGE_SIZE": 160 * 160}


@pytest.fixture(autouse=True)
def use_small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, area in AREAS.items():
        monkeypatch.setattr(upstream, name, area)


class Processor:
    """`Qwen2_5_VLProcessor`, which needs torchvision for videos, of pictures alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, Qwen2VLImageProcessorPil()

    def __call__(self, text: list[str], images: list[Any], **options: Any) -> BatchFeature:
        seen = self.image_processor(images=images, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(dim=1) // 4).tolist()
        parts = [one.split(IMAGE_PAD) for one in text]
        filled = [
            "".join(part + IMAGE_PAD * count for part, count in zip(each, [*counts, 0], strict=True)) for each in parts
        ]
        return BatchFeature({**self.tokenizer(filled, padding=True, return_tensors="pt"), **seen})


@functools.cache
def pipeline() -> Any:
    return build_pipeline(tiny.ensure_random(SPEC))


def build_pipeline(folder: Path) -> Any:
    """With what transformers 4, which the makers published with, made of the ids by itself: which are pictures'."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipe = parity.upstream("QwenImageEditPlusPipeline", folder, processor=Processor(tokenizer))
    encoder, image_id = pipe.text_encoder, tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    encoder.config.image_token_id = encoder.model.config.image_token_id = image_id
    forward = encoder.forward
    encoder.forward = lambda **given: forward(**given, mm_token_type_ids=(given["input_ids"] == image_id).int())
    return pipe


@functools.cache
def pictures() -> list[torch.Tensor]:
    """Two of different shapes, `[1, height, width, 3]` of whole bytes."""
    random = np.random.default_rng(4)
    sizes = (60, 100), (90, 50)
    coarse = [random.integers(0, 256, (height // 10, width // 10, 3), np.uint8) for height, width in sizes]
    return [torch.from_numpy(x.repeat(10, 0).repeat(10, 1).astype(np.float32) / 255.0)[None] for x in coarse]


def as_pil(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray((picture[0].numpy() * 255.0).round().astype(np.uint8))


def encode_references(chips: int, number: int) -> ImageCondition:
    found = [engine(chips).encode_image(MODEL, each, ODD, SilentProgress()) for each in pictures()[:number]]
    return runtime.join_references(found)


@functools.cache
def states(prompt: str, number: int) -> np.ndarray:
    """Upstream's, `[tokens, dim]`, of a prompt about so many pictures."""
    pipe, given = pipeline(), []
    for picture in map(as_pil, pictures()[:number]):
        size = upstream.calculate_dimensions(upstream.CONDITION_IMAGE_SIZE, picture.width / picture.height)
        given.append(pipe.image_processor.resize(picture, *reversed(size)))
    with torch.no_grad():
        return pipe.encode_prompt(prompt, image=given)[0][0].numpy()


@pytest.mark.parametrize(
    ("chips", "number"),
    [pytest.param(1, 1, marks=pytest.mark.recorded), (3, 2), pytest.param(8, 2, marks=pytest.mark.recorded)],
)
def test_qwen_edit_prompt_embeddings_with_images_match_diffusers(chips: int, number: int, compare: Callable):
    condition = encode_references(chips, number)
    both = engine(chips).run(
        "encode", MODEL, SilentProgress(), prompt=PROMPT, negative_prompt=NEGATIVE, condition=condition
    )
    for given, found in zip((PROMPT, NEGATIVE), both, strict=True):
        wanted = states(given, number)
        assert found is not None and found[0][1]["length"] == len(wanted)
        compare(f"{given!r}, {number} pictures", found[0][0][0, : len(wanted)].numpy(), wanted, error=NETWORK)


def denoiser_inputs(condition: ImageCondition, *texts: np.ndarray) -> dict[str, np.ndarray]:
    """The denoiser's inputs, whose padding holds noise."""
    text = np.random.default_rng(3).normal(size=(len(texts), 1024, texts[0].shape[1])).astype(np.float32) * 30
    for row, each in zip(text, texts, strict=True):
        row[: len(each)] = each
    references = {name: x.numpy() for name, x in condition["tensors"].items() if name.startswith("reference_")}
    return {"text": text, "text_length": np.array([len(each) for each in texts], np.int32), **references}


def upstreams_flow(noise: torch.Tensor, condition: ImageCondition, text: np.ndarray, transformer: Any) -> torch.Tensor:
    """At timestep 700, `[1, patches, 64]` of the sample."""
    pipe, found = pipeline(), denoiser_inputs(condition, text)
    latents = [noise, *(torch.from_numpy(x) for name, x in found.items() if name.startswith("reference_"))]
    packed = [pipe._pack_latents(each, 1, 16, *each.shape[3:]) for each in latents]
    with torch.no_grad():
        flow = transformer(
            hidden_states=torch.cat(packed, dim=1),
            timestep=torch.tensor([0.7]),
            encoder_hidden_states=torch.from_numpy(text)[None],
            encoder_hidden_states_mask=torch.ones(1, len(text)),
            img_shapes=[[(1, each.shape[3] // 2, each.shape[4] // 2) for each in latents]],
        ).sample
    return flow[:, : packed[0].shape[1]]


@pytest.mark.parametrize(
    ("mesh", "number"),
    mostly(
        itertools.product((MeshShape(), MeshShape(sp=3), MeshShape(dp=2, sp=2, tp=2)), (0, 1, 2)),
        (MeshShape(), 0), (MeshShape(), 2), (MeshShape(dp=2, sp=2, tp=2), 2),
    ),
    ids=str,
)  # fmt: skip
def test_qwen_edit_guided_denoise_matches_diffusers(
    mesh: MeshShape, number: int, monkeypatch: pytest.MonkeyPatch, compare: Callable
):
    """With so many pictures, whose time is 0; padding of each sequence is NaN."""
    condition = encode_references(1, number) if number else ImageCondition(tpu_family=SPEC.family, tensors={})
    noise, texts = parity.random_latents(SPEC, ODD), (states(PROMPT, 2)[:77], states(NEGATIVE, 1)[:40])
    prompt, negative = (upstreams_flow(noise, condition, text, pipeline().transformer) for text in texts)
    guided = negative + 4.0 * (prompt - negative)
    guided = guided * (prompt.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    parity.poison_padding(monkeypatch)
    ours = parity.denoise_once(SPEC, ODD, noise, denoiser_inputs(condition, *texts), timestep=700.0, mesh=mesh)
    compare(
        f"denoiser, {number} pictures, {mesh}",
        ours,
        pipeline()._unpack_latents(guided, ODD.height, ODD.width, 8).numpy(),
        error=NETWORK,
    )


def test_qwen_edit_2509_without_zero_cond_t_matches_diffusers(compare: Callable):
    condition, settings = encode_references(1, 1), replace(ODD, guidance_scale=1.0)
    noise, text = parity.random_latents(SPEC, settings), states(PROMPT, 1)
    own = pipeline().transformer
    changed = type(own).from_config({**own.config, "zero_cond_t": False})
    changed.load_state_dict(own.state_dict())
    flows = (upstreams_flow(noise, condition, text, each) for each in (changed, own))
    wanted, timed = (pipeline()._unpack_latents(flow, ODD.height, ODD.width, 8).numpy() for flow in flows)
    miniature = parity.tiny_weights
    with pytest.MonkeyPatch.context() as patch:
        # The miniature's weights, which `changes` would draw anew.
        patch.setattr(parity, "drawn_weights", lambda program: miniature(SPEC, "transformer", program))
        ours = parity.denoise_once(
            SPEC,
            settings,
            noise,
            denoiser_inputs(condition, text),
            timestep=700.0,
            chips=2,
            changes={"zero_cond_t": False},
        )
    compare("denoiser of 2509", ours, wanted, error=NETWORK)
    assert difference(wanted, timed) > 10 * NETWORK


@pytest.mark.parametrize("number", slower((1, 2), 2))
def test_qwen_edit_latents_and_image_match_diffusers(number: int, compare: Callable):
    expected = parity.generate(
        pipeline(), ODD, image=[*map(as_pil, pictures()[:number])], prompt=PROMPT, negative_prompt=NEGATIVE,
        true_cfg_scale=ODD.guidance_scale,
    )  # fmt: skip
    runner, condition = engine(8), encode_references(1, number)
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "condition": condition}
    embeds = engine(1).run("encode", MODEL, SilentProgress(), **given)
    latents = runner.denoise(MODEL, ODD, *embeds, SilentProgress(), condition=condition)
    wanted = pipeline()._unpack_latents(torch.from_numpy(expected.latents), ODD.height, ODD.width, 8)
    config = pipeline().vae.config
    mean, std = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    compare("latents", latents["samples"].numpy(), (wanted * std + mean).numpy())
    compare("picture", runner.decode(MODEL, latents, SilentProgress()).numpy(), expected.frames)


@pytest.mark.parametrize("times", [4, 24])
def test_qwen_edit_too_many_images_raise_value_error(times: int):
    """Too many by themselves, or with the words."""
    many = runtime.join_references([encode_references(1, 2)] * times)
    one = next(x for name, x in many["tensors"].items() if name.startswith("seen_"))
    prompt = PROMPT * (1024 // len(PROMPT) if times == 4 else 1)
    assert (2 * times * one[0, ..., 0].numel() > 1024) == (times == 24)
    with raises_message(ValueError, "model.prompt_and_images_too_long", number=f"{2 * times} images"):
        engine(1).run("encode", MODEL, SilentProgress(), prompt=prompt, negative_prompt="", condition=many)


@pytest.mark.parametrize("shape", [(1, 6, 6, 59), (6, 6, 60), (2, 6, 6, 60), (1, 0, 6, 60)])
def test_qwen_edit_malformed_vision_tensor_raises_value_error(shape: tuple[int, ...]):
    """As another model's condition, or a damaged file, may hold."""
    condition = ImageCondition(tpu_family=SPEC.family, tensors={"seen_0": torch.zeros(shape)})
    with raises_message(ValueError, "condition.embeddings_shape_wrong", name="seen_0", width=60):
        engine(1).run("encode", MODEL, SilentProgress(), prompt=PROMPT, negative_prompt="", condition=condition)


@pytest.mark.parametrize("size", [(1, 60), (300, 4)])
def test_qwen_edit_extreme_aspect_ratio_raises_value_error(size: tuple[int, int]):
    with raises_message(ValueError, "model.image_too_elongated", width=size[1], height=size[0], max_aspect_ratio=50):
        engine(1).encode_image(MODEL, torch.zeros(1, *size, 3), ODD, SilentProgress())


def test_qwen_edit_condition_of_other_family_raises_value_error():
    condition = ImageCondition(tpu_family="Flux2", tensors={"reference_0": torch.zeros(1, 128, 4, 4)})
    with raises_message(ValueError, "condition.of_another_model", tpu_family="Flux2"):
        engine(1).run("encode", MODEL, SilentProgress(), prompt=PROMPT, negative_prompt="", condition=condition)


def test_qwen_edit_single_files_match_folder(tmp_path: Path):
    """As Comfy-Org repackages them: the encoder's file has what it sees with too, by the names of transformers 4. Only
    its name says that the denoiser is 2511, as of fp8 files and GGUF's.
    """
    source = tiny.ensure_random(SPEC)
    folders = "transformer", "text_encoder", "vae"
    files = [single_files.write_folder(tmp_path / f"{name}.safetensors", source, SPEC, name) for name in folders]
    tensors, config = load_file(files[0]), json.loads(read_header(files[0])[1]["config"])
    assert tensors.pop("__index_timestep_zero__").numel() == 0 and config.pop("zero_cond_t")
    files[0] = tmp_path / "qwen_image_edit_2511_fp8_e4m3fn.safetensors"
    save_file(tensors, files[0], {"config": json.dumps(config)})
    rest = tmp_path / "rest"
    shutil.copytree(source / "tokenizer", rest / "tokenizer")
    shutil.copytree(source / "scheduler", rest / "scheduler")
    shutil.copy(source / "model_index.json", rest)
    chosen = choose_model(SPEC, SEPARATOR.join(map(str, (*files, rest))), precision="float32")
    assert chosen.spec_name == SPEC.name
    found = []
    for model in (MODEL, chosen):
        runner = engine(1)
        condition = runner.encode_image(model, pictures()[0], ODD, SilentProgress())
        embeds = runner.run("encode", model, SilentProgress(), prompt=PROMPT, negative_prompt="", condition=condition)
        found.append(runner.denoise(model, ODD, *embeds, SilentProgress(), condition=condition)["samples"])
    assert torch.equal(*found)
