"""ComfyUI's nodes that merge and save models, with core's models on the TPU beside its torch ones of the same files."""

from dataclasses import replace
from pathlib import Path

import pytest
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.comfyui.test_core_networks import DENOISERS_BY_NAME, VAES, check, write_denoiser
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.comfyui_oracle import saved
from comfyui_tpu.tests.files.test_comfyui_encoders import UMT5, carrying
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.models import lookup_spec

pytestmark = [needs_comfyui, pytest.mark.slow]


def test_merge_and_save_nodes_match_core_or_are_refused(tmp_path: Path):
    one = DENOISERS_BY_NAME["wan t2v"]
    path = write_denoiser(tmp_path, replace(one, config={"num_layers": 2}), "wan")
    other = write_denoiser(tmp_path, replace(one, config={"num_layers": 2, "ffn_dim": 384}), "sibling")
    kind, config, *_ = VAES["wan"]
    vae = single_files.write(tmp_path / "vae.safetensors", saved(kind, tmp_path / "vae", **config), kind)
    clip = replace(UMT5, sizes={**UMT5.sizes, "num_layers": 2, "d_ff": 64}).write(
        tmp_path, "clip", carrying("spiece_model")
    )
    component = lookup_spec("wan2.1-i2v-14b-480p").component("image_encoder")
    tiny.write_weights(component, tmp_path / "image_encoder", 0)
    vision = single_files.write(tmp_path / "vision.safetensors", tmp_path / "image_encoder", component.class_name)
    job = {
        **one.job(path), "cases": ["a LoRA"], "sibling": str(other), "clip": [str(clip)], "vae": str(vae),
        "vision": str(vision),
    }  # fmt: skip
    found = run_script(Path(__file__).with_name("models.py"), job, tmp_path)
    refused = {name: what for name, what in found.items() if isinstance(what, str)}
    for name, what in refused.items():
        print(f"{name}: {what}")
    check({name: what for name, what in found.items() if name not in refused})
    for name, sentence in {
        "another size": "A node merges two models whose diffusion_model.blocks.0.ffn.0",
        "no values": "no.safetensors was not written: a has the shape (2,), but no values here",
        "a patched VAE": "of this VAE, which is not supported on the TPU",
        "a saved patched VAE": "of this VAE, which is not supported on the TPU",
        "training": "A node such as Train LoRA trains this network",
        "another device": "puts this network on another device",
        "its memory": "asks for the memory address",
        "a part of the VAE": "a node uses per_channel_statistics of the VAE's network",
        "cancelled": "cancelled",
    }.items():
        assert sentence in refused[name], refused[name]
