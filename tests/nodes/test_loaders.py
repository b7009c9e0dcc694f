"""Replacement of ComfyUI's loaders in a workflow and back: both formats, kept loaders, untrusted workflows."""

import json
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli import main
from comfyui_tpu.nodes.graphs.loader_swap import LOADERS, swap_loaders
from comfyui_tpu.tests.support.messages import raises_message

PAGE = {
    "nodes": [
        {"id": 1, "type": "UNETLoader", "widgets_values": ["wan2.1_t2v_14B_fp16.safetensors", "default"],
         "properties": {"cnr_id": "comfy-core", "ver": "0.3", "Node name for S&R": "UNETLoader"}},
        {"id": 2, "type": "CLIPLoader", "widgets_values": ["t5.safetensors", "sd3", "default"]},
        {"id": 3, "type": "KSampler", "widgets_values": [1]},
    ],
    "links": [],
    "definitions": {"subgraphs": [{"nodes": [
        {"id": 4, "type": "CLIPLoader", "widgets_values": {"clip_name": "umt5.safetensors", "type": "wan"}},
        {"id": 5, "type": "VAELoader", "widgets_values": ["unknown.safetensors"]},
    ]}]},
}  # fmt: skip


def kinds(document: dict[str, Any]) -> list[str]:
    graphs = [document, *document["definitions"]["subgraphs"]]
    return [node["type"] for graph in graphs for node in graph["nodes"]]


def test_swap_loaders_swaps_supported_loaders_and_names_others():
    before = json.dumps(PAGE)
    found, changes = swap_loaders(PAGE, [])
    assert json.dumps(PAGE) == before
    assert kinds(found) == ["TPUUNETLoader", "CLIPLoader", "KSampler", "TPUCLIPLoader", "VAELoader"]
    assert found["nodes"][0]["widgets_values"] == PAGE["nodes"][0]["widgets_values"]
    assert found["nodes"][0]["properties"] == {"Node name for S&R": "TPUUNETLoader"}
    assert changes == [
        "Only part of this workflow can run on the TPU: ComfyUI runs CLIPLoader (t5.safetensors), VAELoader "
        "(unknown.safetensors) on the CPU. That takes far too long. Open a template whose loaders can all be "
        "swapped.",
        "UNETLoader (wan2.1_t2v_14B_fp16.safetensors) is now TPUUNETLoader.",
        "CLIPLoader (t5.safetensors) stays: its type is not one of wan, hunyuan_video_15, flux2, "
        "lumina2, qwen_image, cogvideox.",
        "CLIPLoader (umt5.safetensors) is now TPUCLIPLoader.",
        "VAELoader (unknown.safetensors) stays: the file is not a model that runs on the TPU, or is not in ComfyUI's "
        "folders.",
    ]
    again, changes = swap_loaders(found, [], back=True)
    assert kinds(again) == kinds(PAGE) and len(changes) == 2


def test_swap_loaders_converts_api_form():
    api = {"1": {"class_type": "VAELoader", "inputs": {"vae_name": "wan_2.1_vae.safetensors"}}}
    found, _ = swap_loaders(api, [])
    assert found == {"1": {"class_type": "TPUVAELoader", "inputs": api["1"]["inputs"]}}
    assert swap_loaders(found, [], back=True)[0] == api


@pytest.mark.parametrize("is_of_page", [True, False])
def test_swap_loaders_back_replaces_tpu_quality_by_default(is_of_page: bool):
    file = "wan2.1_t2v_14B_fp16.safetensors"
    if is_of_page:
        ours: dict[str, Any] = {"nodes": [{"id": 1, "type": "TPUUNETLoader", "widgets_values": [file, "int8"]}]}
        wanted: Any = [file, "default"]
    else:
        ours = {"1": {"class_type": "TPUUNETLoader", "inputs": {"unet_name": file, "weight_dtype": "int8"}}}
        wanted = {"unet_name": file, "weight_dtype": "default"}
    found, _ = swap_loaders(ours, [], back=True)
    (node,) = found["nodes"] if is_of_page else found.values()
    assert node["widgets_values" if is_of_page else "inputs"] == wanted


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret.safetensors", "~/x.safetensors", "", "a\0b.safetensors"])
def test_swap_loaders_does_not_read_files_outside_model_folders(name: str, tmp_path: Path):
    """The message does not reveal whether the file exists."""
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    (tmp_path / "models").mkdir()
    for kind, (_, names) in LOADERS.items():
        if "CLIP" in kind:
            continue
        api = {"1": {"class_type": kind, "inputs": {names[0]: name}}}
        found, (change,) = swap_loaders(api, [str(tmp_path / "models")])
        assert found == api and "the file is not a model that runs on the TPU, or is not in" in change


@pytest.mark.parametrize("document", [None, [], 3, "x"])
def test_swap_loaders_invalid_document_raises_value_error(document: Any):
    with raises_message(ValueError, "workflow.not_object"):
        swap_loaders(document, [])


@pytest.mark.parametrize(
    "document",
    [{"nodes": 3}, {"nodes": [None, {"type": 3}, {"type": ["UNETLoader"]}]}, {"1": None, "2": {"class_type": None}},
     {"nodes": [{"type": "UNETLoader", "widgets_values": None}, {"type": "VAELoader", "properties": 3}]}],
)  # fmt: skip
def test_swap_loaders_returns_damaged_workflow_unchanged(document: dict[str, Any]):
    assert swap_loaders(document, [])[0] == document


def test_convert_command_writes_file_and_prints_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(PAGE))
    assert main.main(["convert", str(path), "--to", str(tmp_path / "tpu.json")]) == 0
    assert "is now TPUUNETLoader." in capsys.readouterr().out and json.loads(path.read_text()) == PAGE
    assert kinds(json.loads((tmp_path / "tpu.json").read_text()))[0] == "TPUUNETLoader"
    assert main.main(["convert", str(tmp_path / "tpu.json"), "--back"]) == 0
    assert kinds(json.loads((tmp_path / "tpu.json").read_text())) == kinds(PAGE)
