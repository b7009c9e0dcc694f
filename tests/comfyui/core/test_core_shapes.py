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
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tpu_runtime.engine import conditioning
from comfyui_tpu.tpu_runtime.messages import read_message
from comfyui_tpu.tpu_runtime.models import lookup_spec


def refuse_latents(channels: int, expected: int) -> Expected:
    return Expected("comfyui.latent_channels_wrong", channel_count=channels, expected_channels=expected)


def refuse_states(width: int, expected: int, what: str = "comfyui.prompt_states") -> Expected:
    return Expected("comfyui.states_width_wrong", what=what, actual_width=width, width=expected)


def refuse_concat(channels: int, expected: int) -> Expected:
    vae = "comfyui.encode_with_own_vae"
    return Expected(
        "comfyui.concat_latent_channels_wrong", channel_count=channels, expected_channels=expected, other_vae=vae
    )


def refuse_reference(number: int, channels: int, expected: int, **parameters: object) -> Expected:
    return Expected(
        "comfyui.channels_wrong",
        what=f"reference_latents {number}",
        channel_count=channels,
        expected_channels=expected,
        **parameters,
    )


# By model and case: what is wrong, and the message, with both numbers.
WRONG: dict[str, dict[str, tuple[dict[str, Any], Expected]]] = {
    "wan t2v": {
        "latents of Wan 2.2's VAE": ({"samples": (1, 48, 3, 9, 6)}, refuse_latents(48, 16)),
        "latents of a picture": ({"samples": (1, 4, 1, 9, 6)}, refuse_latents(4, 16)),
        "another encoder": ({"width": 2560}, refuse_states(2560, 4096)),
    },
    "wan 2.1 i2v": {
        "a picture of Wan 2.2's VAE": ({"concat_latent_image": (1, 48, 3, 9, 6)}, refuse_concat(48, 16)),
        "a picture of another length": (
            {"concat_latent_image": (1, 16, 5, 9, 6)},
            Expected("comfyui.concat_latent_frames_wrong", frame_count=5, sample_frames=3),
        ),
        "a mask of another length": (
            {"concat_mask": (1, 1, 5, 9, 6)},
            Expected("comfyui.concat_mask_frames_wrong", frame_count=5, sample_frames=3),
        ),
        "another image encoder": (
            {"clip_vision_output": (1, 729, 1152)},
            Expected("comfyui.clip_vision_width_wrong", actual_width=1152, width=1280),
        ),
    },
    "wan 2.1 flf2v": {
        "three pictures": (
            {"clip_vision_output": (1, 771, 1280)},
            Expected("comfyui.clip_vision_too_long", token_count=771, max_tokens=514),
        )
    },
    "wan 2.2 ti2v": {"latents of Wan 2.1's VAE": ({"samples": (1, 16, 3, 9, 6)}, refuse_latents(16, 48))},
    "flux.2 dev": {
        "T5's states": ({"width": 80}, refuse_states(80, 96)),
        "references of FLUX.1's VAE": (
            {"reference_latents": [(1, 128, 4, 6), (1, 16, 8, 12)]},
            refuse_reference(2, 16, 128),
        ),
        "a reference of a video": (
            {"reference_latents": [(1, 128, 2, 4, 6)]},
            refuse_reference(1, 128, 128, shape=(1, 128, 2, 4, 6), expected_shape="1, 128, height, width"),
        ),
        "latents of FLUX.1's VAE": ({"samples": (1, 16, 14, 10)}, refuse_latents(16, 128)),
    },
    "qwen-image edit": {
        "references of another VAE": (
            {"reference_latents": [(1, 48, 1, 8, 12)]},
            refuse_reference(1, 48, 16, other_vae="comfyui.encode_with_own_vae"),
        ),
        "a reference without frames": (
            {"reference_latents": [(1, 16, 8, 12)]},
            refuse_reference(1, 16, 16, shape=(1, 16, 8, 12), expected_shape="1, 16, 1, height, width"),
        ),
        "a video's latents": (
            {"samples": (1, 16, 3, 12, 8)},
            Expected("comfyui.latent_of_several_frames", frame_count=3),
        ),
        "another encoder": ({"width": 100}, refuse_states(100, 96)),
    },
    # Its file has neither the mark of 2511 nor its name.
    "qwen-image": {
        "references as 2511 takes them": (
            {"reference_latents": [(1, 16, 1, 8, 12)], "reference_latents_method": "index_timestep_zero"},
            Expected("comfyui.reference_method_needs_2511", method="index_timestep_zero", own="index"),
        ),
        "references as FLUX.1 Kontext takes them": (
            {"reference_latents": [(1, 16, 1, 8, 12)], "reference_latents_method": "offset"},
            Expected("comfyui.reference_method_unsupported", method="offset", own="index"),
        ),
    },
    "hunyuanvideo 1.5 i2v, distilled": {
        "a picture of Wan's VAE": ({"concat_latent_image": (1, 16, 3, 5, 6)}, refuse_concat(16, 32)),
        "a picture of another length": (
            {"concat_latent_image": (1, 32, 4, 5, 6)},
            Expected("comfyui.concat_latent_frames_wrong", frame_count=4, sample_frames=3),
        ),
        "another image encoder": (
            {"clip_vision_output": (1, 257, 1280)},
            Expected("comfyui.clip_vision_width_wrong", actual_width=1280, width=1152),
        ),
        "other glyphs": ({"conditioning_byt5small": (1, 19, 512)}, refuse_states(512, 1472, "comfyui.glyphs_states")),
    },
    "cogvideox i2v": {
        "a picture of another VAE": ({"concat_latent_image": (1, 32, 1, 8, 6)}, refuse_concat(32, 16)),
        "another encoder": ({"width": 100}, refuse_states(100, 96)),
    },
}


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
        for case, (_, expected) in wrong.items():
            error = found[name][case]
            print(f"{name}, {case}: {error['text']}")
            assert error["type"] == "ValueError"
            assert_message(read_message(error), expected)


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
