"""ComfyUI's MODEL, CLIP and VAE of a model's folder, as TPU Model Loader gives them, against core's torch ones of the
same weights in single files.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.comfyui.test_core_networks import DENOISERS_BY_NAME, VAES, WAN, check
from comfyui_tpu.tests.files import single_files, test_comfyui_encoders
from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, saved
from comfyui_tpu.tests.files.test_comfyui_encoders import UMT5
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.formats import tokenizer_files
from comfyui_tpu.tpu_runtime.models import lookup_spec
from safetensors.torch import load_file, save_file

pytestmark = [needs_comfyui, pytest.mark.slow]

SPEC = lookup_spec("wan2.2-t2v-a14b")
ONE = DENOISERS_BY_NAME["wan t2v"]
TEXT_SIZES = {**UMT5.sizes, "num_layers": 2, "d_ff": 64, "d_model": 4096, "num_heads": 1, "vocab_size": 320}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two denoisers, in diffusers' layout."""
    home = tmp_path_factory.mktemp("wan22")
    tiny.write_description(SPEC, home)
    for number, expert in enumerate(SPEC.denoiser.experts):
        (path,) = saved(WAN, home / expert, **DENOISERS[WAN]).glob("*.safetensors")
        # Experts that are equal would not be seen mixed up.
        save_file({name: x * (1.0 + 0.2 * number) for name, x in load_file(path).items()}, path, {"format": "pt"})
    kind, config, *_ = VAES["wan"]
    saved(kind, home / "vae", **config)
    made = tmp_path_factory.mktemp("umt5")
    replace(UMT5, sizes=TEXT_SIZES).write(made, "file")
    shutil.copytree(made / UMT5.module, home / "text_encoder")
    SPEC.text_encoders[0].write_tokenizer(home / "tokenizer")
    return home


@pytest.mark.parametrize(("expert", "cases"), [(0, ("LoRAs",)), (1, ("euler",))])
def test_folder_denoiser_matches_core_model(folder: Path, tmp_path: Path, expert: int, cases: tuple[str, ...]):
    name = SPEC.denoiser.experts[expert]
    path = single_files.write(tmp_path / "one.safetensors", folder / name, WAN)
    job = {**replace(ONE, cases=cases, latent="").job(path), "folder": ["Wan21", str(folder), expert]}
    check(run_script("core_graphs.py", job, tmp_path))


def test_folder_text_encoder_matches_core_clip(folder: Path, tmp_path: Path):
    carried = tokenizer_files.read_folder_tokenizer(folder / "tokenizer")
    assert list(carried) == ["spiece_model"]
    tokenizer = torch.frombuffer(bytearray(carried["spiece_model"]), dtype=torch.uint8)
    path = single_files.write(
        tmp_path / "text.safetensors", folder / "text_encoder", "UMT5EncoderModel",
        change=lambda tensors: {**tensors, "spiece_model": tokenizer},
    )  # fmt: skip
    options = replace(UMT5, sizes=TEXT_SIZES).job()["options"]
    job = {
        "kind": "clip", "type": "wan", "te": "wan.te", "tokenizer": "wan.WanT5Tokenizer", "paths": [str(path)],
        "options": options, "folder": ["Wan21", str(folder)],
    }  # fmt: skip
    check(run_script("core_parts.py", job, tmp_path))


def test_folder_vae_matches_core_vae(folder: Path, tmp_path: Path):
    kind, _, frames, latents, smaller = VAES["wan"]
    path = single_files.write(tmp_path / "vae.safetensors", folder / "vae", kind)
    job = {
        "kind": "vae", "paths": [str(path)], "frames": frames, "latents": latents, "sizes": smaller,
        "folder": ["Wan21", str(folder)],
    }  # fmt: skip
    check(run_script("core_parts.py", job, tmp_path))


def test_read_folder_tokenizer_returns_sentencepiece_file(tmp_path: Path):
    content = test_comfyui_encoders.sentencepiece_model()
    (tmp_path / "spiece.model").write_bytes(content)
    assert tokenizer_files.read_folder_tokenizer(tmp_path) == {"spiece_model": content}
