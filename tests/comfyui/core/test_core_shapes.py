"""Arrays that nodes of ComfyUI's own hand to a network: what it does not take is said before the first step."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.comfyui.test_core_networks import DENOISERS_BY_NAME, write_denoiser
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.engine import conditioning
from comfyui_tpu.tpu_runtime.models import lookup_spec

# By model and case: what is wrong, and what its sentence holds, both numbers among it.
WRONG: dict[str, dict[str, tuple[dict[str, Any], tuple[str, ...]]]] = {
    "wan t2v": {
        "latents of Wan 2.2's VAE": ({"samples": (1, 48, 3, 9, 6)}, ("48 channels", "expects 16", "VAE")),
        "latents of a picture": ({"samples": (1, 4, 1, 9, 6)}, ("4 channels", "expects 16")),
        "another encoder": ({"width": 2560}, ("2560 wide", "expects 4096", "text encoder")),
    },
    "wan 2.1 i2v": {
        "a picture of Wan 2.2's VAE": (
            {"concat_latent_image": (1, 48, 3, 9, 6)}, ("concat_latent_image has 48 channels", "expects 16", "VAE"),
        ),
        "a picture of another length": (
            {"concat_latent_image": (1, 16, 5, 9, 6)}, ("5 latent frames", "sample has 3", "length of the video"),
        ),
        "a mask of another length": (
            {"concat_mask": (1, 1, 5, 9, 6)}, ("concat_mask has 5 latent frames", "sample has 3"),
        ),
        "another image encoder": (
            {"clip_vision_output": (1, 729, 1152)}, ("1152 wide", "expects 1280", "image encoder"),
        ),
    },
    "wan 2.1 flf2v": {
        "three pictures": ({"clip_vision_output": (1, 771, 1280)}, ("771 tokens", "at most 514")),
    },
    "wan 2.2 ti2v": {
        "latents of Wan 2.1's VAE": ({"samples": (1, 16, 3, 9, 6)}, ("16 channels", "expects 48", "VAE")),
    },
    "flux.2 dev": {
        "T5's states": ({"width": 80}, ("80 wide", "expects 96", "text encoder")),
        "references of FLUX.1's VAE": (
            {"reference_latents": [(1, 128, 4, 6), (1, 16, 8, 12)]}, ("reference_latents 2", "16 channels", "128"),
        ),
        "a reference of a video": (
            {"reference_latents": [(1, 128, 2, 4, 6)]}, ("shape (1, 128, 2, 4, 6)", "(1, 128, height, width)"),
        ),
        "latents of FLUX.1's VAE": ({"samples": (1, 16, 14, 10)}, ("16 channels", "expects 128")),
    },
    "qwen-image edit": {
        "references of another VAE": (
            {"reference_latents": [(1, 48, 1, 8, 12)]}, ("48 channels", "expects 16", "VAE"),
        ),
        "a reference without frames": (
            {"reference_latents": [(1, 16, 8, 12)]}, ("shape (1, 16, 8, 12)", "(1, 16, 1, height, width)"),
        ),
        "a video's latents": ({"samples": (1, 16, 3, 12, 8)}, ("3 frames", "expects 1", "length")),
        "another encoder": ({"width": 100}, ("100 wide", "expects 96")),
    },
    # Its file has neither the mark of 2511 nor its name.
    "qwen-image": {
        "references as 2511 takes them": (
            {"reference_latents": [(1, 16, 1, 8, 12)], "reference_latents_method": "index_timestep_zero"},
            (
                "reference_latents_method is index_timestep_zero", "supports index", "put 2511 into its name",
                "add + qwen-image-edit-2511 to the model_id of TPUModelLoader",
            ),
        ),
        "references as FLUX.1 Kontext takes them": (
            {"reference_latents": [(1, 16, 1, 8, 12)], "reference_latents_method": "offset"},
            ("reference_latents_method is offset", "supports index", "Set that, or remove the node"),
        ),
    },
    "hunyuanvideo 1.5 i2v, distilled": {
        "a picture of Wan's VAE": ({"concat_latent_image": (1, 16, 3, 5, 6)}, ("16 channels", "expects 32")),
        "a picture of another length": ({"concat_latent_image": (1, 32, 4, 5, 6)}, ("4 latent frames", "sample has 3")),
        "another image encoder": ({"clip_vision_output": (1, 257, 1280)}, ("1280 wide", "expects 1152")),
        "other glyphs": ({"conditioning_byt5small": (1, 19, 512)}, ("512 wide", "expects 1472", "text encoder")),
    },
    "cogvideox i2v": {
        "a picture of another VAE": ({"concat_latent_image": (1, 32, 1, 8, 6)}, ("32 channels", "expects 16", "VAE")),
        "another encoder": ({"width": 100}, ("100 wide", "expects 96")),
    },
}  # fmt: skip


@needs_comfyui
@pytest.mark.slow
def test_network_shape_error_names_both_shapes_and_cause(tmp_path: Path):
    job = []
    for name, wrong in WRONG.items():
        one = DENOISERS_BY_NAME[name]
        path = write_denoiser(tmp_path, one, re.sub(r"\W", "_", name))
        job.append((name, one.job(path) | {"cases": []}, {case: what for case, (what, _) in wrong.items()}))
    found = run_script("core/shapes.py", job, tmp_path)
    for name, wrong in WRONG.items():
        for case, (_, parts) in wrong.items():
            said = found[name][case]
            print(f"{name}, {case}: {said}")
            assert all(part in said for part in parts), (name, case, said)


def make_call_inputs(name: str, **changed: Any) -> tuple[Any, ...]:
    """One that a model takes, but for what is changed in it."""
    spec = lookup_spec(name)
    component = spec.component(spec.denoiser.experts[0])
    config = {**component.config, **component.tiny}
    frames = (2,) if spec.geometry.stride_t else ()
    shape = (1, spec.geometry.channels, *frames, 4, 6)
    inputs = {
        text.name: np.zeros((1, 5, int(config[text.width_key])), np.float32) for text in spec.text_encoders
    } | {one: np.zeros(size, np.float32) for one, size in spec.condition_shapes(config, shape).items()}  # fmt: skip
    inputs |= {key: np.zeros(size, np.float32) for key, size in changed.items() if key != "sample"}
    sample = torch.zeros(changed.get("sample", shape))
    return spec, config, sample, inputs


SHAPE = "condition.input_shape_wrong"


@pytest.mark.parametrize(
    ("name", "changed", "key", "parameters"),
    [
        (
            "wan2.1-t2v-14b",
            {"sample": (1, 48, 2, 4, 6)},
            SHAPE,
            {"shape": "(1, 48, 2, 4, 6)", "shown": "rows, 16, frames, height, width"},
        ),
        (
            "wan2.1-t2v-14b",
            {"sample": (1, 16, 4, 6)},
            SHAPE,
            {"shape": "(1, 16, 4, 6)", "shown": "rows, 16, frames, height, width"},
        ),
        (
            "wan2.1-t2v-14b",
            {"sample": (1, 16, 2, 3, 6)},
            "condition.sample_not_in_patches",
            {"shape": "(1, 16, 2, 3, 6)", "patch": "(1, 2, 2)"},
        ),
        (
            "wan2.1-i2v-14b-480p",
            {"condition": (1, 16, 2, 4, 6)},
            SHAPE,
            {"name": "condition", "shape": "(1, 16, 2, 4, 6)", "shown": "rows, 20, 2, 4, 6"},
        ),
        (
            "wan2.1-i2v-14b-480p",
            {"image_embeds": (1, 257, 9)},
            SHAPE,
            {"name": "image_embeds", "shape": "(1, 257, 9)", "shown": re.compile("tokens")},
        ),
        (
            "flux2-dev",
            {"text": (1, 512, 7)},
            SHAPE,
            {"name": "text", "shape": "(1, 512, 7)", "advice": "condition.encode_with_own_text_encoder"},
        ),
        (
            "flux2-dev",
            {"reference_0": (1, 16, 4, 6)},
            SHAPE,
            {"name": "reference_0", "shown": "rows, 128, height, width"},
        ),
        (
            "flux2-dev",
            {"reference_0": (3, 128, 4, 6), "guidance": (2,)},
            "condition.rows_wrong",
            {"count": 2, "rows": 3},
        ),
        (
            "qwen-image-edit-2511",
            {"reference_0": (1, 16, 2, 4, 6)},
            SHAPE,
            {"name": "reference_0", "shown": "rows, 16, 1, height, width"},
        ),
        ("z-image", {"guidance": (1, 1)}, SHAPE, {"name": "guidance", "shape": "(1, 1)", "shown": "rows"}),
    ],
)
def test_check_call_inputs_mismatched_shape_raises_value_error(
    name: str, changed: dict[str, Any], key: str, parameters: dict[str, Any]
):
    conditioning.check_call_inputs(*make_call_inputs(name))
    with raises_message(ValueError, key, title=lookup_spec(name).title, **parameters):
        conditioning.check_call_inputs(*make_call_inputs(name, **changed))


@pytest.mark.parametrize(
    ("name", "shape", "names", "stride"),
    [
        ("wan2.1-t2v-14b", (1, 48, 3, 9, 6), "batch, 16, frames", 8),
        ("wan2.2-ti2v-5b", (1, 16, 3, 9, 6), "batch, 48, frames", 16),
        ("flux2-dev", (1, 16, 8, 8), "batch, 128", 16),
        ("z-image", (1, 16, 3, 8, 8), "batch, 16", 8),
    ],
)
def test_get_latent_samples_of_another_vae_raises_value_error(
    name: str, shape: tuple[int, ...], names: str, stride: int
):
    with raises_message(ValueError, "condition.latent_shape_wrong", shape=shape, names=names, stride=stride):
        conditioning.get_latent_samples(lookup_spec(name), {"samples": torch.zeros(shape)})
