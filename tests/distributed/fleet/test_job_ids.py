"""What a job is known by: equal where it is the same job, on every machine, and another where anything differs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.distributed.fleet import jobs
from comfyui_tpu.distributed.fleet.jobs import MAX_PROBLEMS, JobTemplate, StagedJob, read_jobs
from comfyui_tpu.distributed.fleet.messages import ContentHash
from comfyui_tpu.nodes.declare import Folders, Node
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.support.fleet import WORKFLOW
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import save_file

SMALL = {"2.num_frames": 5, "2.num_inference_steps": 1}


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    found = to_api(json.loads(WORKFLOW.read_text()), HEADLESS_NODES)
    make_tiny(found)
    return found


@pytest.fixture
def recipe(workflow: dict[str, Any]) -> JobTemplate:
    return JobTemplate(workflow, Folders(), SilentProgress())


def line(**more: Any) -> str:
    return json.dumps({**SMALL, **{name.replace("_", ".", 1): value for name, value in more.items()}})


def test_staged_job_id_ignores_order_and_titles():
    """Written down, so that a batch begun by one version is known by the next."""
    marks = (ContentHash(kind="model", name="m", content="1"), ContentHash(kind="LoRA", name="l", content="2"))
    nodes = {"1": {"class_type": "A", "inputs": {"x": "é", "y": ["2", 0]}}, "2": {"class_type": "B", "inputs": {}}}
    turned = {"2": nodes["2"], "1": {"inputs": {"y": ["2", 0], "x": "é"}, "class_type": "A"}}
    one = StagedJob(workflow=nodes, files={}, marks=marks).id
    assert one == "18b1d5401acfaaabeea0"
    assert StagedJob(workflow=turned, files={"a": Path("b")}, marks=marks[::-1]).id == one
    titled = {**nodes, "2": {**nodes["2"], "_meta": {"title": "other"}}}
    assert StagedJob(workflow=titled, files={}, marks=marks).id == one


@pytest.mark.parametrize(
    "nodes",
    [
        {"1": {"class_type": "B", "inputs": {"x": 1}}},
        {"1": {"class_type": "A", "inputs": {"x": 2}}},
        {"1": {"class_type": "A", "inputs": {"x": "1"}}},
        {"1": {"class_type": "A", "inputs": {"y": 1}}},
        {"2": {"class_type": "A", "inputs": {"x": 1}}},
    ],
)
def test_staged_job_id_changes_with_nodes_and_marks(nodes: dict):
    mark = ContentHash(kind="model", name="m", content="1")
    own = StagedJob(workflow={"1": {"class_type": "A", "inputs": {"x": 1}}}, files={}, marks=(mark,))
    assert StagedJob(workflow=nodes, files={}, marks=(mark,)).id != own.id
    for other in (ContentHash(kind="LoRA", name="m", content="1"), ContentHash(kind="model", name="n", content="1"),
                  ContentHash(kind="model", name="m", content="2")):  # fmt: skip
        assert StagedJob(workflow=own.workflow, files={}, marks=(other,)).id != own.id


def test_read_jobs_merges_equivalent_lines(recipe: JobTemplate):
    """`16` for a number with a fraction, another order, blanks, and titles in place of ids."""
    lines = [
        line(**{"2_seed": 1, "2_guidance_scale": 4}), "", "  ",
        line(**{"2_guidance_scale": 4.0, "2_seed": 1}), line(**{"2_seed": 2}),
    ]  # fmt: skip
    found = read_jobs(recipe, lines, "jobs")
    assert [(job.line, job.text) for job in found] == [(1, lines[0]), (5, lines[4])]
    assert len({job.id for job in found}) == 2 and all(len(job.id) == 20 for job in found)


def test_job_group_depends_on_weights_and_programs(recipe: JobTemplate):
    own = recipe.job(1, line()).group
    for same in ({"2_seed": 9}, {"1_prompt": "another"}, {"1_negative_prompt": "another"}):
        assert recipe.job(1, line(**same)).group == own
    for other in ({"2_num_inference_steps": 2}, {"2_height": 96}, {"2_flow_shift": 7.0}):
        found = recipe.job(1, line(**other)).group
        assert found.model == own.model and found.size != own.size
    for other in ({"6_precision": "float32"}, {"6_quality": "int8"}, {"2_quality": "int8+sparse"}):
        found = recipe.job(1, line(**other)).group
        assert found.model != own.model and found.size == own.size


def test_job_group_changes_with_model(recipe: JobTemplate):
    marks = {mark.kind: mark for mark in recipe.prepare(line()).marks}
    assert marks["model"].name == "tiny/wan21" and len(marks["model"].content) > 4
    own, other = recipe.job(1, line()), recipe.job(1, line(**{"6_model_id": "tiny/random-wan21"}))
    assert own.group.model != other.group.model and own.id != other.id


def test_job_template_hashes_each_model_choice_once(recipe: JobTemplate, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(
        jobs,
        "hash_content",
        lambda kind, name, *_: asked.append((kind, name)) or ContentHash(kind=kind, name=name, content=""),
    )
    for seed in range(3):
        recipe.job(seed, line(**{"2_seed": seed}))
    assert asked == [("model", "tiny/wan21")]


def test_job_template_prepare_does_not_change_workflow(recipe: JobTemplate, workflow: dict):
    saved = json.dumps(workflow)
    prepared = recipe.prepare(line(**{"1_prompt": "mine"}))
    assert prepared.workflow["1"]["inputs"]["prompt"] == "mine" and json.dumps(workflow) == saved
    assert not any("_meta" in node for node in prepared.workflow.values())


def test_job_template_request_holds_prepared_workflow(recipe: JobTemplate):
    job = recipe.job(7, line())
    request = recipe.request(job, "out", "token")
    assert (request.job, request.line, request.out, request.token) == (job.id, 7, "out", "token")
    assert (request.workflow, request.marks) == (recipe.prepare(job.text).workflow, recipe.prepare(job.text).marks)
    assert request.files == {} and request.folders == Folders()


def test_read_jobs_lists_problems_by_line_up_to_limit(recipe: JobTemplate):
    lines = ["{", "", "[]", '{"2.seed": -1}', *['{"9.x": 1}'] * 20]
    with pytest.raises(ValueError) as error:
        read_jobs(recipe, lines, "the file")
    said = str(error.value).splitlines()
    assert len(said) == MAX_PROBLEMS == 10
    assert said[0].startswith("the file, line 1: it is not JSON (")
    assert said[1] == 'the file, line 3: it is a JSON list; it must be an object such as {"2.seed": 7}.'
    assert said[2].startswith("the file, line 4: ") and said[3].startswith("the file, line 5: 9.x: no node called '9'")
    with pytest.raises(
        ValueError, match=r'^the file has no jobs; each line must be a JSON object such as {"2.seed": 7}'
    ):
        read_jobs(recipe, [" ", ""], "the file")


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def image_job_template(tmp_path: Path) -> JobTemplate:
    found = to_api(json.loads((WORKFLOW.parent / "wan22_i2v_720p.json").read_text()), HEADLESS_NODES)
    make_tiny(found)
    for name in ("one.png", "two.png", "other.png"):
        (tmp_path / name).write_bytes(b"other" if name == "other.png" else b"same")
    return JobTemplate(found, Folders(input=tmp_path), SilentProgress())


def of_picture(recipe: JobTemplate, name: str) -> str:
    (node,) = (n for n, node in recipe._workflow.items() if node["class_type"] == "LoadImage")
    return json.dumps({f"{node}.image": name})


def test_staged_job_id_depends_on_image_content(image_job_template: JobTemplate, tmp_path: Path):
    one, two, other = (
        image_job_template.prepare(of_picture(image_job_template, f"{name}.png")) for name in ("one", "two", "other")
    )
    assert one.id == two.id != other.id
    ((name, path),) = one.files.items()
    assert name == "0967115f2813a3541eae.png" and path == tmp_path / "one.png"
    with pytest.raises(ValueError, match="There is no image .*none.png"):
        image_job_template.prepare(of_picture(image_job_template, "none.png"))


def test_request_with_changed_image_raises_value_error(image_job_template: JobTemplate, tmp_path: Path):
    job = image_job_template.job(1, of_picture(image_job_template, "one.png"))
    assert list(image_job_template.request(job, "out", "").files.values()) == [b"same"]
    (tmp_path / "one.png").write_bytes(b"changed")
    with pytest.raises(ValueError, match="one.png has changed since the batch began. Start the batch again"):
        image_job_template.request(job, "out", "")


# --- what nodes name --------------------------------------------------------------------------------------------------


def with_nodes(workflow: dict[str, Any], **nodes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(workflow)), **{name.removeprefix("n"): node for name, node in nodes.items()}}


def lora_file(folder: Path, name: str, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"blocks.0.attn1.to_q.lora_A.weight": torch.ones(rank, 8)}, folder / name)


def test_job_marks_hash_lora_content(workflow: dict, tmp_path: Path):
    folders = Folders(input=tmp_path, loras=(str(tmp_path / "loras"),))
    for name, rank in (("a.safetensors", 2), ("b.safetensors", 2), ("c.safetensors", 3)):
        lora_file(tmp_path / "loras", name, rank)
    loader = {
        "class_type": "TPULoraLoader",
        "inputs": {"model": ["6", 0], "lora_name": "a.safetensors", "strength": 1.0},
    }
    graph = with_nodes(workflow, n7=loader)
    for node_id in ("1", "2", "3"):
        graph[node_id]["inputs"]["model"] = ["7", 0]
    recipe = JobTemplate(graph, folders, SilentProgress())
    marks = {name: recipe.prepare(line(**{"7_lora_name": f"{name}.safetensors"})).marks for name in "abc"}
    loras = {name: [mark for mark in found if mark.kind == "LoRA"] for name, found in marks.items()}
    assert [mark.name for found in loras.values() for mark in found] == [f"{name}.safetensors" for name in "abc"]
    (a,), (b,), (c,) = loras.values()
    assert a.content == b.content != c.content and len(a.content) > 4
    # The model comes through the loader: the samplers' own names do not count.
    assert [mark.name for mark in marks["a"] if mark.kind == "model"] == ["tiny/wan21"]
    assert len(marks["a"]) == 2
    own = recipe.job(1, line()).group
    stronger = recipe.job(1, line(**{"7_strength": 0.5})).group
    assert stronger.model != own.model and stronger.size == own.size
    assert recipe.job(1, line(**{"7_lora_name": "c.safetensors"})).group.model not in (own.model, stronger.model)
    with raises_message(ValueError, "lora.name_not_found", name="none.safetensors"):
        recipe.prepare(line(**{"7_lora_name": "none.safetensors"}))


def test_job_marks_of_remote_model_have_no_content_hash(workflow: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_TPU_REMOTES", "127.0.0.1")
    remote = {"class_type": "TPURemote", "inputs": {**workflow["6"]["inputs"], "address": "127.0.0.1:8190"}}
    prepared = JobTemplate(with_nodes(workflow, n6=remote), Folders(), SilentProgress()).prepare(line())
    assert prepared.marks == (ContentHash(kind="remote model", name="tiny/wan21", content=""),)


def test_job_marks_without_line_model_use_workflow_model(workflow: dict):
    graph = with_nodes(workflow)
    graph["6"]["inputs"]["model_id"] = "tiny/random-wan21"
    own = JobTemplate(graph, Folders(), SilentProgress()).prepare(line()).marks
    assert [mark.name for mark in own] == ["tiny/random-wan21"]


def test_job_with_stage_files_requires_absolute_folder(workflow: dict, tmp_path: Path):
    from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
    from comfyui_tpu.tpu_runtime.engine import stage_files

    model = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21")
    stage_files.save_latents(tmp_path, {"samples": torch.zeros(1, 16, 2, 8, 8)}, model)
    load = {"class_type": "TPULoadStage", "inputs": {"folder": "relative", "model": ["6", 0]}}
    graph = with_nodes(workflow, n8=load)
    graph["3"]["inputs"]["latents"] = ["8", HEADLESS_NODES["TPULoadStage"].outputs.index(
        next(one for one in HEADLESS_NODES["TPULoadStage"].outputs if one.type == "LATENT")
    )]  # fmt: skip
    recipe = JobTemplate(graph, Folders(), SilentProgress())
    with pytest.raises(ValueError) as error:
        recipe.prepare(line())
    problem = "in a batch, folder must be an absolute path, such as /data/stages."
    assert str(error.value) == f"TPULoadStage (node 8): {problem}"
    named = line(**{"8_folder": str(tmp_path)})
    first = recipe.prepare(named)
    (files,) = (mark for mark in first.marks if mark.kind == "files")
    assert json.loads(files.name)["folder"] == str(tmp_path) and files.content not in ("None", "")
    stage_files.save_latents(tmp_path, {"samples": torch.ones(1, 16, 2, 8, 8)}, model)
    os.utime(tmp_path / stage_files.LATENTS, ns=(7, 7))
    assert recipe.prepare(named).id != first.id


def test_job_template_check_runs_once_per_choice(recipe: JobTemplate, tmp_path: Path):
    """A model, and whether it is connected: what one line names right another may not."""
    recipe.job(1, line())
    with raises_message(ValueError, "checkpoint.no_model_index", index="model_index.json"):
        recipe.job(2, line(**{"6_model_id": str(tmp_path)}))
    seen = []
    declaration = Node(
        id="A", title="A", description="", inputs=(), run=lambda host: (), checks=("model_id",),
        validated_links=("model",), check=lambda folders, model_id, model: seen.append((model_id, model)),
    )  # fmt: skip
    for inputs in (
        {"model_id": "a"}, {"model_id": "a", "seed": 1}, {"model_id": "a", "model": ["6", 0]}, {"model_id": "b"},
        {"model_id": "a", "other": ["6", 0]}, {"model_id": "a", "model": ["7", 0]}, {"model_id": "b", "model": None},
    ):  # fmt: skip
        recipe._check("1", {"inputs": inputs}, declaration)
    assert seen == [("a", False), ("a", True), ("b", False)]


def test_job_template_passes_constants_and_links_to_validation(recipe: JobTemplate, monkeypatch: pytest.MonkeyPatch):
    """Constants, and which inputs are linked; once for each choice."""
    seen = []
    declaration = HEADLESS_NODES["Wan21TPUSampler"]
    check = type(declaration).validate_constants

    def spy(self, folders, given, linked=frozenset()):
        if self is declaration:
            seen.append((dict(given), set(linked)))
        return check(self, folders, given, linked)

    monkeypatch.setattr(type(declaration), "validate_constants", spy)
    recipe.job(1, line(**{"2_seed": 1}))
    recipe.job(2, line(**{"2_seed": 2}))
    assert len(seen) == 1
    given, linked = seen[0]
    assert given["height"] == 80 and "seed" in given
    assert linked == {name for name, value in recipe._workflow["2"]["inputs"].items() if isinstance(value, list)}
    assert "model" in linked and not linked & set(given)
