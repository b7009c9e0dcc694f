"""What a file without alphas is multiplied by, from PEFT's config: its own layers are the oracle."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints import load
from comfyui_tpu.tpu_runtime.loras import adapter, merge
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import modules
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file

MODULE, WEIGHT = "blocks.0.attn1.to_q", "blocks.0.attn1.to_q.weight"
ALPHA, RANK = 6, 9


@pytest.mark.parametrize("where", ["in the file", "beside it"])
@pytest.mark.parametrize("use_rslora", [True, False, None])
def test_rslora_divides_by_the_ranks_root_and_others_by_the_rank(tmp_path: Path, where: str, use_rslora: bool | None):
    """Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"."""
    component = spec_for_family("Wan21").component("transformer")
    network = modules.build(component, component.tiny)
    (weight,) = (weight for weight in network.weights.values() if WEIGHT in weight.sources)
    out, inner = weight.tensor_shape
    tensors = {
        f"base_model.model.{MODULE}.lora_A.weight": torch.ones(RANK, inner),
        f"base_model.model.{MODULE}.lora_B.weight": torch.ones(out, RANK),
    }
    config = {"lora_alpha": ALPHA, "r": RANK} | ({} if use_rslora is None else {"use_rslora": use_rslora})
    path, metadata = tmp_path / "adapter_model.safetensors", {}
    if where == "beside it":
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    else:
        metadata["lora_adapter_metadata"] = json.dumps({f"transformer.{key}": value for key, value in config.items()})
    save_file(tensors, path, metadata)

    read = adapter.read(str(path), network)
    (change,) = read.changes[WEIGHT]
    with contextlib.ExitStack() as stack:
        found, scale = merge._read(load.Reader(stack, lambda: None), read, change, weight)
    theirs = torch.nn.Sequential(torch.nn.Linear(1, 1))
    chosen = LoraConfig(target_modules=["0"], r=RANK, lora_alpha=ALPHA, use_rslora=bool(use_rslora))
    inject_adapter_in_model(chosen, theirs)
    assert found.rank == RANK
    assert scale == pytest.approx(theirs[0].scaling["default"])
    assert scale == pytest.approx(2.0 if use_rslora else 2 / 3)
