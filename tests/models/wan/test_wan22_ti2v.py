"""Wan 2.2 TI2V 5B against diffusers on the CPU in float32: from text alone, and from a picture."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs import graph
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.closeness import NETWORK, OPERATION
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.published import umt5_tokenizer
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.models.common import wan_vae
from comfyui_tpu.tpu_runtime.programs import solver_table
from comfyui_tpu.tpu_runtime.progress import SilentProgress

SPEC = lookup_spec("wan2.2-ti2v-5b")
MODEL = parity.tiny_model(SPEC)
SHORT, NEGATIVE = "cat", "blurred details, overexposed"
# Tokens: 3 * 5 * 7 = 105 on 4 chips, 32 each: the first frame's 35 end on the second.
ODD = Settings(
    height=160, width=224, num_frames=9, num_inference_steps=2, guidance_scale=3.5, seed=7, shift=5.0
)  # fmt: skip
# 2 * 5 * 3 tokens on 3 chips; nothing of the picture divides by 3 but its latents' columns.
TALL = replace(ODD, height=160, width=96, num_frames=5, guidance_scale=1.0, seed=8, shift=3.0)
CASES = {"odd": ODD, "tall": TALL}


def picture(settings: Settings) -> torch.Tensor:
    """An IMAGE of exactly the video's size: smooth, with colours and edges."""
    y, x = torch.meshgrid(torch.linspace(0, 1, settings.height), torch.linspace(0, 1, settings.width), indexing="ij")
    return torch.stack([x, (y * 5) % 1, 0.7 * (x > y) + 0.3 * x * y], dim=-1)[None]


@functools.cache
def pipeline(pipeline_class: str) -> Any:
    """Both of the checkpoint's index, which says `expand_timesteps`."""
    folder = tiny.ensure_random(SPEC)
    pipe = parity.upstream(pipeline_class, folder, tokenizer=umt5_tokenizer(folder))
    assert pipe.config.expand_timesteps
    return pipe


@functools.cache
def embeddings() -> np.ndarray:
    with torch.no_grad():
        found = pipeline("WanPipeline").encode_prompt(SHORT, NEGATIVE, True, max_sequence_length=512)
    return torch.cat(found).numpy()


@functools.cache
def first_frame(settings: Settings) -> np.ndarray:
    """Upstream's encoded picture, normalised, `[1, 48, 1, h, w]`."""
    pixels, size = picture(settings).movedim(-1, 1) * 2 - 1, (settings.height, settings.width, settings.num_frames)
    with torch.no_grad():
        _, condition, _ = pipeline("WanImageToVideoPipeline").prepare_latents(
            pixels, 1, 48, *size, torch.float32, "cpu", torch.Generator()
        )
    return condition.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "case", "given"), [(8, "odd", True), (3, "tall", False)])
def test_ti2v_condition_latents_and_frames_match_diffusers(chips: int, case: str, given: bool, compare: Callable):
    settings, runner = CASES[case], engine(chips)
    pipe = pipeline("WanImageToVideoPipeline" if given else "WanPipeline")
    pipe.scheduler = solver_table.build_scheduler({**SPEC.recipe.scheduler, "flow_shift": settings.shift})
    arguments = {"image": picture(settings).movedim(-1, 1)} if given else {}
    expected = parity.generate(
        pipe, settings, prompt=SHORT, negative_prompt=NEGATIVE, num_frames=settings.num_frames, **arguments
    )
    condition = runner.encode_image(MODEL, picture(settings), settings, SilentProgress()) if given else None
    latents = runner.denoise(
        MODEL, settings, *runner.encode(MODEL, SHORT, NEGATIVE, SilentProgress()), SilentProgress(), condition
    )
    mean, std = wan_vae.latent_stats(SPEC.component(SPEC.vae.component).config)
    ours = ((latents["samples"] - mean) / std).numpy()
    if condition is not None:
        # Upstream's scheduler steps that frame too; it is replaced after the last step.
        compare("condition", condition["tensors"]["first_frame"], first_frame(settings), error=NETWORK)
        compare("first frame", ours[:, :, :1], first_frame(settings))
        ours, expected = ours[:, :, 1:], replace(expected, latents=expected.latents[:, :, 1:])
    compare("latents", ours, expected.latents)
    compare("frames", runner.decode(MODEL, latents, SilentProgress()).numpy(), expected.frames)


@pytest.mark.slow
@pytest.mark.parametrize(("chips", "given"), [(8, True), (8, False), (3, True)])
def test_ti2v_denoise_with_poisoned_padding_matches_diffusers(chips: int, given: bool, compare: Callable):
    sample = parity.random_latents(SPEC, ODD)
    timesteps = torch.full((1, 3, 5, 7), 700.0)
    seen = sample.clone()
    if given:
        timesteps[:, 0] = 0
        seen[:, :, :1] = torch.from_numpy(first_frame(ODD))
    with torch.no_grad():
        cond, uncond = (
            pipeline("WanPipeline").transformer(
                seen, timesteps.flatten(1), torch.from_numpy(row[None]), return_dict=False
            )[0]
            for row in embeddings()
        )
    expected = uncond + ODD.guidance_scale * (cond - uncond)
    ours = poisoned_denoiser(chips)(sample, inputs(given))
    if given:
        compare("first frame", ours[:, :, :1], first_frame(ODD), error=OPERATION)
    compare("denoiser", ours[:, :, given:], expected[:, :, given:].numpy(), error=NETWORK)


def inputs(given: bool) -> dict[str, np.ndarray]:
    """Return the denoiser's, with or without the first frame."""
    return {
        "text": embeddings(), "text_length": np.full(2, 512, np.int32),
        "first_frame": first_frame(ODD) * given, "is_given": np.full(1, given, np.float32),
    }  # fmt: skip


@functools.cache
def poisoned_denoiser(chips: int) -> Callable:
    """Compile ours on so many chips, whose padding is NaN."""
    with pytest.MonkeyPatch.context() as patch:
        parity.poison_padding(patch)
        return parity.compile_denoiser(SPEC, ODD, inputs(given=True), timestep=700, chips=chips)


def workflow(**inputs: Any) -> dict[str, dict[str, Any]]:
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": "wan_i2v_input.jpg"}},
        "2": {"class_type": "Wan22I2VTPUPipeline", "inputs": inputs},
        "3": {"class_type": "SaveVideo", "inputs": {"video": ["2", 2], "filename_prefix": "x"}},
    }


@pytest.mark.parametrize("with_picture", [False, True])
def test_plan_generations_ti2v_runs_with_and_without_image(with_picture: bool):
    """What is compiled ahead is what runs: with a picture its encoder too; the size is the pipeline's."""
    size = {"height": 160, "width": 96, "num_frames": 5}
    image = {"image": ["1", 0]} if with_picture else {}
    (found,) = graph.plan_generations(workflow(model_id=SPEC.miniature.id, **size, **image), Folders(), HEADLESS_NODES)
    assert found.model.spec == SPEC
    assert found.stages == (("image",) if with_picture else ()) + ("denoise", "decode")
    assert {name: getattr(found.settings, name) for name in size} == size


def test_ti2v_sampler_size_comes_from_image_inputs_or_model():
    sampler, encoder = DECLARATIONS["Wan22I2VTPUSampler"], {"height": 160, "width": 96, "num_frames": 5}
    nodes = {"9": {"class_type": "Wan22I2VImageEncoder", "inputs": {**encoder, "model_id": SPEC.miniature.id}}}

    def size(**inputs: Any) -> tuple[int, int, int]:
        asked = {**nodes, "4": {"class_type": sampler.id, "inputs": {"model_id": SPEC.miniature.id, **inputs}}}
        ((_, found),) = graph.list_generations(asked, Folders(), HEADLESS_NODES)
        return found.height, found.width, found.num_frames

    assert size(condition=["9", 0]) == (160, 96, 5)
    assert size(height=0, width=224, num_frames=0) == (704, 224, 121)
    with raises_message(
        ValueError,
        "settings.input",
        title="Wan 2.2 TI2V 5B",
        name="input.height",
        problem=Expected("settings.breaks_rule", value=720, rule=Expected("settings.multiple", multiple_of=32)),
    ):
        size(height=720)


@pytest.mark.parametrize(("node", "name"), [("Wan22I2VTPUSampler", "condition"), ("Wan22I2VTPUPipeline", "image")])
def test_i2v_node_without_required_image_raises_value_error(node: str, name: str):
    declared, needs_one = DECLARATIONS[node], {"model_id": "tiny/wan22i2v"}
    other = Expected("node.or_use_model", hub_id="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
    with raises_message(ValueError, "node.image_missing", title="Wan 2.2 I2V A14B", name=f"input.{name}", ids=other):
        declared.validate_constants(Folders(), needs_one, set())
    for linked in ({name}, {"model"}, None):
        declared.validate_constants(Folders(), needs_one, linked)
    declared.validate_constants(Folders(), {"model_id": SPEC.miniature.id}, set())


def test_ti2v_node_last_image_alone_raises_value_error():
    declared = DECLARATIONS["Wan22I2VTPUPipeline"]
    with raises_message(ValueError, "node.last_image_alone", title="Wan 2.2 TI2V 5B", name="input.image"):
        declared.validate_constants(Folders(), {"model_id": SPEC.miniature.id}, {"last_image"})
