"""LoRAs against diffusers' `load_lora_weights` and `set_adapters`, on the CPU in float32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from comfyui_tpu.tests.models import test_wan21
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora
from comfyui_tpu.tpu_runtime.progress import Silent
from safetensors.torch import save_file


def write_diffusers(path: Path, module: torch.nn.Module, rank: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear) and name.startswith("blocks."):
            own = rank + len(tensors) % 3
            out, inner = part.weight.shape
            tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(own, inner, generator=generator) / inner**0.5
            tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(out, own, generator=generator) / own
    save_file(tensors, path)
    return path


def test_two_loras_of_wan21(tmp_path: Path, compare: Callable):
    settings = test_wan21.FLAT
    pipe = test_wan21.load_pipeline(tiny.ensure(test_wan21.SPEC))
    files = [write_diffusers(tmp_path / f"{n}.safetensors", pipe.transformer, 3 + n, n) for n in range(2)]
    base = test_wan21.generate(pipe, settings)
    for n, file in enumerate(files):
        pipe.load_lora_weights(str(file), adapter_name=str(n))
    pipe.set_adapters(["0", "1"], [0.7, -0.3])
    expected = test_wan21.generate(pipe, settings)
    runner = engine(8)
    model = replace(
        test_wan21.MODEL, loras=(Lora(path=str(files[0]), strength=0.7), Lora(path=str(files[1]), strength=-0.3))
    )
    embeds = runner.encode(model, test_wan21.SHORT, test_wan21.NEGATIVE, Silent())
    latents = runner.denoise(model, settings, *embeds, Silent())
    compare("latents with two LoRAs", test_wan21.normalised(latents["samples"]), expected.latents)
    assert abs(expected.latents - base.latents).max() > 0.05
