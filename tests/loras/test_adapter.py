"""What a LoRA file is multiplied by where it has no alphas, with PEFT's layers as the oracle; what it is known by."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
from comfyui_tpu.tpu_runtime.formats.key_map import KeyMap
from comfyui_tpu.tpu_runtime.loras import adapter, change, merge
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import upstream_network
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file

MODULE, WEIGHT = "blocks.0.attn1.to_q", "blocks.0.attn1.to_q.weight"
ALPHA, RANK = 6, 9


@pytest.mark.parametrize("where", ["in the file", "beside it"])
@pytest.mark.parametrize("use_rslora", [True, False, None])
def test_read_adapter_scaling_matches_peft_with_and_without_rslora(tmp_path: Path, where: str, use_rslora: bool | None):
    """Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"."""
    component = spec_for_family("Wan21").component("transformer")
    network = upstream_network.build_network(component, component.tiny)
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

    read = adapter.read_adapter(str(path), network)
    (change,) = read.changes[WEIGHT]
    with contextlib.ExitStack() as stack:
        found, scale = merge._read(weight_loader.TensorReader(stack, lambda: None), read, change, weight)
    theirs = torch.nn.Sequential(torch.nn.Linear(1, 1))
    chosen = LoraConfig(target_modules=["0"], r=RANK, lora_alpha=ALPHA, use_rslora=bool(use_rslora))
    inject_adapter_in_model(chosen, theirs)
    assert found.rank == RANK
    assert scale == pytest.approx(theirs[0].scaling["default"])
    assert scale == pytest.approx(2.0 if use_rslora else 2 / 3)


# --- what a file is known by ------------------------------------------------------------------------------------------


def lora_file(path: Path, rank: int = 4, metadata: dict[str, str] | None = None, fill: float = 1.0) -> str:
    names = {f"{MODULE}.lora_A.weight": torch.full((rank, 8), fill), f"{MODULE}.lora_B.weight": torch.ones(8, rank)}
    save_file(names, path, metadata)
    return str(path)


def test_identify_source_depends_on_path_size_and_time(tmp_path: Path):
    path = lora_file(tmp_path / "a.safetensors")
    os.utime(path, ns=(5, 5))
    one = adapter.identify_source(path)
    assert adapter.identify_source(path) == one
    copied = shutil.copy2(path, tmp_path / "b.safetensors")
    found = {one, adapter.identify_source(copied)}
    os.utime(path, ns=(5, 6))
    found.add(adapter.identify_source(path))
    Path(path).write_bytes(Path(path).read_bytes() + b" ")
    os.utime(path, ns=(5, 5))
    found.add(adapter.identify_source(path))
    assert len(found) == 4
    missing = tmp_path / "missing.safetensors"
    with raises_message(adapter.LoraError, "lora.unreadable", source=missing, strerror="No such file or directory"):
        adapter.identify_source(str(missing))


def test_hash_content_depends_on_size_tensors_and_config(tmp_path: Path):
    one = adapter.hash_content(lora_file(tmp_path / "a.safetensors"))
    assert (
        adapter.hash_content(lora_file(tmp_path / "b.safetensors", fill=2.0)) == one
    )  # the header is all that is read
    longer = lora_file(tmp_path / "longer.safetensors", metadata={"note": "x" * 100})
    configs = [json.dumps({"transformer.lora_alpha": alpha, "transformer.r": 4}) for alpha in (4, 8)]
    others = [
        lora_file(tmp_path / f"{alpha}.safetensors", metadata={"lora_adapter_metadata": config})
        for alpha, config in zip((4, 8), configs, strict=True)
    ]
    ranks = [lora_file(tmp_path / "rank.safetensors", rank=5)]
    assert len({one, *(adapter.hash_content(path) for path in (longer, *others, *ranks))}) == 5
    # As many bytes of another module.
    module = MODULE.replace("to_q", "to_k")
    other = {f"{module}.lora_A.weight": torch.ones(4, 8), f"{module}.lora_B.weight": torch.ones(8, 4)}
    save_file(other, tmp_path / "module.safetensors")
    assert (tmp_path / "module.safetensors").stat().st_size == (tmp_path / "a.safetensors").stat().st_size
    assert adapter.hash_content(str(tmp_path / "module.safetensors")) != one
    # The order in which a file has its tensors and settings is no difference.
    turned = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 4})
    same = lora_file(tmp_path / "turned.safetensors", metadata={"lora_adapter_metadata": turned})
    assert adapter.hash_content(same) == adapter.hash_content(others[0])


def test_shorten_value_truncates_long_names():
    assert change.shorten_value("x" * 58) == repr("x" * 58)
    assert change.shorten_value("x" * 59) == repr("x" * 59)[:60] + "…"


def test_key_map_keeps_each_number_in_place():
    names = KeyMap(["a.3.b.12.weight"], {"x.*.y.*": "a.*.b.*"})
    assert [rows.name for rows in names.find("model.x.3.y.12")] == ["a.3.b.12"]
