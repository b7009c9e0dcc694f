"""The LoRA loader without ComfyUI: what it finds, refuses and hands on, and its place in a workflow."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.nodes import family, lora, wan21
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.graph import list_generations
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, run_workflow
from comfyui_tpu.nodes.headless.workflow import validate_workflow
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from safetensors.torch import save_file


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Of a page: its loras hold one file, in a folder of its own; another lies outside."""
    (tmp_path / "loras" / "wan").mkdir(parents=True)
    module = "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 144), f"{module}.lora_B.weight": torch.ones(144, 2)}
    for path in ("loras/wan/style.safetensors", "other.safetensors"):
        save_file(tensors, tmp_path / path)
    (tmp_path / "loras" / "old.pt").write_bytes(b"")
    return Folders(loras=(str(tmp_path / "loras"),), workflow=tmp_path, confined=True)


def workflow(*names: str) -> dict[str, Any]:
    """A model, LoRAs, and a node that takes the model."""
    nodes: dict[str, Any] = {"0": ("TPUModelLoader", {"model_id": "tiny/wan21", "family": "Wan21"})}
    for number, name in enumerate(names, 1):
        inputs = {"model": [str(number - 1), 0], "lora_name": name, "strength": number / 2}
        nodes[str(number)] = ("TPULoraLoader", inputs)
    nodes["9"] = ("TPUWarmup", {"model": [str(len(names)), 0]})
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def test_lora_loader_chain_passes_all_loras_to_model(folders: Folders, monkeypatch: pytest.MonkeyPatch):
    """By the name in the list, by a path, and beside the workflow."""
    given: list[ModelRef] = []
    monkeypatch.setattr(api, "warm_up", lambda model, settings, progress: given.append(model) or 0)
    open_ = replace(folders, confined=False)
    outside = folders.workflow / "other.safetensors"
    names = ("wan/style.safetensors", str(outside), "other.safetensors")
    screen = io.StringIO()
    run_workflow(workflow(*names), TerminalContext(open_, stream=screen))
    paths = [str(folders.workflow / "loras" / "wan" / "style.safetensors"), str(outside), str(outside)]
    expected = tuple(Lora(path=path, strength=n / 2) for n, path in enumerate(paths, 1))
    assert given[0].loras == expected
    assert "style.safetensors, strength 0.5: changes 1 weights of Wan 2.1 T2V 14B." in screen.getvalue()
    chosen = family._chosen(wan21.SPEC, Folders(), model_id="", model=given[0], precision="auto")
    assert chosen.loras == expected


@pytest.mark.parametrize(
    ("name", "confined", "key"),
    [
        ("", True, "lora.name_empty"),
        ("missing.safetensors", True, "lora.name_not_found"),
        ("missing.safetensors", False, "lora.name_not_found"),
        ("../other.safetensors", True, "lora.name_outside_folder"),
        ("/etc/passwd", True, "lora.name_outside_folder"),
        ("old.pt", True, "lora.name_not_safetensors"),
    ],
)
def test_lora_loader_invalid_name_raises_value_error(folders: Folders, name: str, confined: bool, key: str):
    parameters = {"name": name} if name else {}
    if key != "lora.name_not_safetensors":
        parameters["loras"] = re.compile("loras$")
    with raises_message(ValueError, key, **parameters):
        lora.LOADER.validate_constants(replace(folders, confined=confined), {"lora_name": name})


def test_lora_loader_fingerprint_changes_with_file_content(folders: Folders):
    assert lora.LOADER.fingerprint is not None
    name = "wan/style.safetensors"
    before = lora.LOADER.fingerprint(folders, lora_name=name, strength=1.0, expert="both")
    assert before == lora.LOADER.fingerprint(folders, lora_name=name, strength=1.0, expert="both")
    save_file({"x": torch.ones(1)}, folders.workflow / "loras" / name)
    assert before != lora.LOADER.fingerprint(folders, lora_name=name, strength=1.0, expert="both")


def test_make_tiny_and_list_generations_skip_loras(folders: Folders):
    made = workflow("wan/style.safetensors", "wan/style.safetensors")
    sampler = {"class_type": "Wan21TPUSampler", "inputs": {"model": ["2", 0]}}
    assert list_generations({**made, "8": sampler}, folders, HEADLESS_NODES)[0][0].model_id == "tiny/wan21"
    make_tiny(made)
    assert made["9"]["inputs"]["model"] == ["0", 0] and len(made) == 2
    assert validate_workflow(made, HEADLESS_NODES) == []
