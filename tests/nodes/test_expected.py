"""What a workflow says of its generations before it runs: their programs are compiled behind its first nodes."""

import json
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.graph import Workflow, list_generations, plan_generations
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, PlannedGeneration

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = examples.PAGES + examples.PIPELINES


@pytest.fixture(autouse=True)
def _skip_model_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRef, "check", lambda model: None)


def workflow_of(path: Path, **changes: Any) -> Workflow:
    """An example with each node's input of these names changed."""
    workflow = to_api(json.loads(path.read_text()), HEADLESS_NODES)
    for node in workflow.values():
        node["inputs"] |= {key: value for key, value in changes.items() if key in node["inputs"]}
    return workflow


def one_expected(workflow: Workflow) -> PlannedGeneration:
    """As ComfyUI's side asks, which knows no declarations of core nodes."""
    (found,) = plan_generations(workflow, Folders(), DECLARATIONS)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_plan_generations_returns_model_settings_and_stages(path: Path):
    workflow = workflow_of(path)
    found = one_expected(workflow)
    assert [(found.model, found.settings)] == list_generations(workflow, Folders(), HEADLESS_NODES)
    with_picture = found.model.spec.pictures.encode is not None and "i2v" in examples.twin(path).stem
    looks = found.model.spec.pictures.are_references and any("condition" in one["inputs"] for one in workflow.values())
    before = () if looks else (*(("image",) if with_picture else ()), "denoise")
    assert found.stages == (*before, "decode")


@pytest.mark.parametrize(("name", "is_known"), [("width", False), ("guidance_scale", False), ("seed", True)])
def test_plan_generations_with_linked_size_has_no_settings(name: str, is_known: bool):
    found = one_expected(workflow_of(examples.page("wan21_t2v_720p"), **{name: ["77", 0]}))
    assert (found.settings is not None) == is_known and found.stages == ("denoise", "decode")


def test_plan_generations_without_decoder_omits_decode_stage():
    workflow = workflow_of(examples.page("wan21_t2v_720p"))
    workflow = {key: node for key, node in workflow.items() if "Decoder" not in node["class_type"]}
    assert one_expected(workflow).stages == ("denoise",)


def test_plan_generations_with_references_omits_denoise_stage():
    workflow = workflow_of(EXAMPLES / "api" / "flux2_t2i.json")
    workflow["20"] = {"class_type": "Flux2ImageEncoder", "inputs": {"image": ["21", 0]}}
    assert one_expected(workflow).stages == ("decode",)


def test_plan_generations_of_invalid_workflow_is_empty():
    assert plan_generations(workflow_of(examples.page("wan21_t2v_720p"), width=81), Folders(), DECLARATIONS) == []
    assert plan_generations({"1": {"class_type": "SaveImage", "inputs": {}}}, Folders(), DECLARATIONS) == []
