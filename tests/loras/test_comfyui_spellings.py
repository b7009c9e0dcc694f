"""Files with several names for one weight, merged by ComfyUI's own loader of LoRAs and by ours."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, run_comfyui, saved
from comfyui_tpu.tests.support.closeness import OPERATION, difference
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora
from comfyui_tpu.tpu_runtime.formats.key_map import lookup
from comfyui_tpu.tpu_runtime.loras import apply
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load_file, save_file

pytestmark = [needs_comfyui, pytest.mark.slow]

SIZE = 1152
KOHYA, PEFT = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight")


class File:
    """Tensors of a LoRA in the making, of Z-Image's or Qwen-Image's attention."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.random = torch.Generator().manual_seed(3)

    def lora(
        self, module: str, out: int, inner: int, names: tuple[str, str] = ("lora_A.weight", "lora_B.weight")
    ) -> None:
        for name, shape in zip(names, ((4, inner), (out, 4)), strict=True):
            self.tensors[f"{module}.{name}"] = torch.randn(shape, generator=self.random) / 8

    def diff(self, name: str, *shape: int) -> None:
        self.tensors[name] = torch.randn(shape, generator=self.random)


def fused_of_kohya(file: File) -> None:
    """The published kind: ComfyUI takes `qkv` and `out` and leaves the others."""
    file.lora("lora_unet_layers_0_attention_qkv", 3 * SIZE, SIZE, KOHYA)
    for name in "qkv":
        file.lora(f"lora_unet_layers_0_attention_to_{name}", SIZE, SIZE, KOHYA)
    for name in ("out", "to_out_0"):
        file.lora(f"lora_unet_layers_1_attention_{name}", SIZE, SIZE, KOHYA)
    file.tensors["lora_unet_layers_0_attention_qkv.alpha"] = torch.tensor(2)


def fused_and_a_part(file: File) -> None:
    file.lora("diffusion_model.layers.0.attention.qkv", 3 * SIZE, SIZE)
    file.lora("transformer.layers.0.attention.to_k", SIZE, SIZE)


def prefixes(file: File) -> None:
    """Of one module in four orders of their names."""
    for name in ("transformer.", "diffusion_model.", ""):
        file.lora(f"{name}layers.0.attention.to_q", SIZE, SIZE)
    for name in ("lycoris_layers_1_attention_to_out_0", "lora_unet_layers_1_attention_out"):
        file.lora(name, SIZE, SIZE, KOHYA)
    for name in ("diffusion_model.layers.0.attention.out", "transformer.layers.0.attention.to_out.0"):
        file.lora(name, SIZE, SIZE)


def matrices_and_kinds(file: File) -> None:
    module = "diffusion_model.layers.0.attention.out"
    for names in (KOHYA, PEFT, ("lora.down.weight", "lora.up.weight")):
        file.lora(module, SIZE, SIZE, names)
    file.lora("diffusion_model.layers.1.attention.out", SIZE, SIZE)
    file.diff("diffusion_model.layers.1.attention.out.diff", SIZE, SIZE)
    file.lora("diffusion_model.layers.1.attention.to_q", SIZE, SIZE, ("lora_A.default.weight", "lora_B.default.weight"))
    file.lora("diffusion_model.layers.1.attention.to_q", SIZE, SIZE, ("lora_A", "lora_B"))


def qwen(file: File) -> None:
    names = ("transformer.", "", "diffusion_model.")
    for name in names:
        file.lora(f"{name}transformer_blocks.0.attn.to_q", 256, 256)
    for name in ("lora_unet_", "lycoris_"):
        file.lora(f"{name}transformer_blocks_0_attn_to_k", 256, 256, KOHYA)
    for name in (*names[:2], "base_model.model."):
        file.lora(f"{name}transformer_blocks.1.attn.to_v", 256, 256)


CASES = {"ZImage": (fused_of_kohya, fused_and_a_part, prefixes, matrices_and_kinds), "QwenImage": (qwen,)}


def merge_by_us(family: str, folder: Path, lora: Path) -> dict[str, np.ndarray]:
    """All weights by their name in the folder, with their changes."""
    component = spec_for_family(family).component("transformer")
    config = {name: value for name, value in DENOISERS[component.class_name].items()}
    own = upstream_network.build_network(component, {**component.config, **config})
    files = checkpoint.match_weights(own, checkpoint.read_headers(folder, component), folder)
    changes = apply.make_merge((Lora(path=str(lora), strength=1.0),), own)
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    wanted = {
        name: want for name, want in weights.abstract_weights(own, mesh, "float32").items() if name in changes.names
    }
    loaded = weight_loader.load_weights(own, files, wanted, "test", SilentProgress(), changes)
    found = {name: x.numpy() for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}
    for name, array in loaded.items():
        weight = own.weights[name]
        for layer, source in enumerate(weight.sources):
            found[source] = np.asarray(array)[layer] if weight.stacked else np.asarray(array)
    return found


def test_merge_with_repeated_names_matches_comfyui(tmp_path: Path):
    jobs, made = [], []
    for family, cases in CASES.items():
        kind = spec_for_family(family).component("transformer").class_name
        folder = saved(kind, tmp_path / family, **DENOISERS[kind])
        model = single_files.write(tmp_path / f"{family}.safetensors", folder, kind)
        for case in cases:
            file, path = File(), tmp_path / f"{case.__name__}.safetensors"
            case(file)
            save_file(file.tensors, path)
            jobs.append({"kind": "lora", "paths": [str(model), str(path)]})
            made.append((family, folder, path))
    for (family, folder, path), theirs in zip(made, run_comfyui(tmp_path, *jobs), strict=True):
        found = merge_by_us(family, folder, path)
        table = spec_for_family(family).component("transformer").original_keys
        assert theirs
        for name, weight in theirs.items():
            module = name.removesuffix(".weight")
            for rows in lookup(module, table) or (None,):
                own = found[f"{rows.name}.weight" if rows else name]
                part = weight.chunk(rows.of)[rows.groups[0]] if rows else weight
                assert difference(own.reshape(part.shape), part.numpy()) <= OPERATION, (path.name, name)
