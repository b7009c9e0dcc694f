"""Networks of a folder by the names of their makers, against files that were written without the pack's own tables."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.support.host import Host
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, file_resolution
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, choose_partial_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.models import lookup_spec
from safetensors.torch import load_file

NAMES = (
    "wan2.1-flf2v-14b-720p", "wan2.2-ti2v-5b", "hunyuanvideo1.5-i2v-480p-step-distilled", "flux2-dev", "z-image",
    "qwen-image-edit-2511", "cogvideox1.5-5b-i2v",
)  # fmt: skip
# In the makers' code of Z-Image and used nowhere, so in no folder.
UNUSED = {"z-image": {"norm_final.weight"}}


def export_tensors(model: ModelRef, name: str) -> Mapping[str, torch.Tensor]:
    """A component's tensors, read through what they are made of."""
    found = checkpoint.export_network(model.locate(), name, Host())
    tensors = {}
    for own, tensor in found.tensors.items():
        value = torch.zeros(0) if tensor.shape == (0,) else file_resolution.read_tensor(found.tensors[own])
        assert value is not None and tuple(value.shape) == tensor.shape
        tensors[own] = value
    return tensors


@pytest.mark.parametrize("name", NAMES)
def test_export_network_matches_single_file_tensors(name: str, tmp_path: Path):
    spec = lookup_spec(name)
    model = ModelRef(spec_name=name, model_id=spec.miniature.ids[-1], precision="float32")
    home = model.locate().home(Host())
    for component in map(spec.component, (spec.denoiser.experts[0], spec.vae.component)):
        path = single_files.write(tmp_path / component.name, home / component.folder, component.class_name)
        wanted = {own.replace("_norm.scale", "_norm.weight"): x for own, x in load_file(path).items()}
        found = export_tensors(model, component.name)
        assert found.keys() == wanted.keys() - UNUSED.get(name, set())
        # Attention of a VAE is of 1 x 1 convolutions there.
        assert all(torch.equal(x.flatten(), wanted[own].flatten()) for own, x in found.items())


def test_export_network_missing_network_raises_checkpoint_error(tmp_path: Path):
    spec = lookup_spec("wan2.1-t2v-14b")
    home = ModelRef(spec_name=spec.name, model_id=spec.miniature.ids[-1]).locate().home(Host())
    path = single_files.write(tmp_path / "vae.safetensors", home / "vae", "AutoencoderKLWan")
    model = choose_partial_model([spec], str(path))
    with raises_message(CheckpointError, "checkpoint.class_not_in_file", class_name="WanTransformer3DModel"):
        checkpoint.export_network(model.locate(), "transformer", Host())
