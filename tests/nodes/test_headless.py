"""Workflows without ComfyUI: conversion of the page's format, order, errors, `comfyui-tpu run`."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.cli.common_arguments import list_tiny_prompts
from comfyui_tpu.nodes.declare import Expansion, Folders, Input, Link, Node, Output, Ref, StageNode, by_id
from comfyui_tpu.nodes.graphs.graph import expand
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless.overrides import apply_assignment
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, execution_order, run_workflow
from comfyui_tpu.nodes.headless.workflow import to_api, validate_workflow
from comfyui_tpu.tests.nodes import examples
from PIL import Image

ROOT = Path(__file__).parents[2]
EXAMPLE = examples.page("wan21_t2v_720p")

_NUMBER = Input(name="a", type="INT", tooltip="A number.", default=1, low=0, high=9)
_SUM = Input(name="a", type="SUM", tooltip="A sum.")


def declaration(kind: type, **fields: Any) -> Any:
    return kind(title=fields["id"], category="test", description="", **fields)


# `Number` makes a sum, `Next` adds one, `Show` collects; `Twice` is two of `Next`.
TABLE = by_id(
    [
        declaration(
            Node,
            id="Number",
            inputs=(_NUMBER, Input(name="b", type="INT", tooltip="B.", default=5, optional=True, companion="control")),
            outputs=(Output(name="sum", type="SUM"),),
            run=lambda host, a, b: (a + b,),
        ),
        declaration(
            Node, id="Next", inputs=(_SUM,), outputs=(Output(name="sum", type="SUM"),), run=lambda host, a: (a + 1,)
        ),
        declaration(Node, id="Show", inputs=(_SUM,), run=lambda host, a: (a,), is_output=True),
        declaration(
            Expansion,
            id="Twice",
            inputs=(_SUM,),
            outputs=(Output(name="sum", type="SUM"),),
            stages=(
                StageNode(name="one", node_id="Next", inputs={"a": Ref("a")}),
                StageNode(name="two", node_id="Next", inputs={"a": Link("one", 0)}),
            ),
            results=(Link("two", 0),),
        ),
    ]
)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def run(workflow: dict) -> dict:
    return run_workflow(workflow, TerminalContext(Folders(), stream=io.StringIO()), TABLE)


def page_node(node_id: int, kind: str, link: int | None = None, **fields: Any) -> dict[str, Any]:
    sockets = {"inputs": [{"name": "a", "type": "SUM", "link": link}], "outputs": [{"name": "sum", "type": "SUM"}]}
    return {"id": node_id, "type": kind, **sockets, **fields}


def page(*nodes: dict, links: list) -> dict:
    return {"nodes": list(nodes), "links": links}


def test_run_workflow_orders_nodes_and_fills_defaults():
    assert run({"9": node("Show", a=["5", 0]), "5": node("Next", a=["7", 0]), "7": node("Number", a=2)}) == {"9": (8,)}


def test_execution_order_includes_only_nodes_of_outputs():
    graph = {"1": node("Number", a=1), "2": node("Number", a=2), "3": node("Show", a=["2", 0])}
    assert execution_order(graph, TABLE) == ["2", "3"]


def test_save_animated_webp_embeds_workflow(tmp_path: Path):
    inputs = {"images": ["1", 0], "filename_prefix": "moving", "fps": 8.0, "lossless": False, "quality": 60}
    workflow = {
        "1": node("LoadImage", image="wan_i2v_input.jpg"),
        "2": node("SaveAnimatedWEBP", **inputs, method="fastest"),
    }
    folders = Folders(input=tmp_path, output=tmp_path / "out")
    run_workflow(workflow, TerminalContext(folders, stream=io.StringIO(), tells=True), HEADLESS_NODES)
    with Image.open(tmp_path / "out" / "moving.webp") as opened:
        told = json.loads(opened.getexif()[0x0110].removeprefix("prompt:"))
        assert told["2"]["inputs"] == inputs | {"method": "fastest"}


def test_expand_replaces_node_by_stages():
    workflow = {"1": node("Number", a=1), "2": node("Twice", a=["1", 0]), "3": node("Show", a=["2", 0])}
    assert list(expand(workflow, TABLE)) == ["1", "2.one", "2.two", "3"]
    assert run(workflow) == {"3": (8,)}


@pytest.mark.parametrize("picture", [True, False])
def test_expand_omits_stage_without_required_input(picture: bool):
    """The pipeline node is text to video without a picture, image to video with one."""
    inputs = {"image": ["1", 0]} if picture else {}
    workflow = {"1": node("LoadImage", image="a.png"), "2": node("HunyuanVideo15TPUPipeline", **inputs)}
    expanded = expand(workflow, HEADLESS_NODES)
    assert ("2.image" in expanded) == picture
    assert expanded["2.denoise"]["inputs"].get("condition") == (["2.image", 0] if picture else None)
    assert {"2.encode", "2.denoise", "2.decode", "2.video"} <= set(expanded)


def test_run_workflow_chains_two_expansions():
    workflow = {
        "4": node("Show", a=["3", 0]),
        "3": node("Twice", a=["2", 0]),
        "2": node("Twice", a=["1", 0]),
        "1": node("Number", a=0),
    }
    assert run(workflow) == {"4": (9,)}


@pytest.mark.parametrize(
    ("workflow", "problem"),
    [
        (
            {"1": node("KSampler"), "2": node("Show", a=["1", 0])},
            "Node 1 is a KSampler, which does not run without ComfyUI: queue this workflow there. Known here: "
            "Next, Number, Show, Twice.",
        ),
        ({"2": node("Show")}, "Show (node 2): a is missing."),
        ({"2": node("Show", a=["1", 0])}, "Show (node 2): a is linked to node 1, which does not exist."),
        ({"2": node("Show", a=3)}, "Show (node 2): a is 3; it must be a link to a node that outputs SUM."),
        (
            {"1": node("Number", a=1), "2": node("Show", a=["1", 1])},
            "Show (node 2): a is linked to output 1 of Number (node 1), which has 1.",
        ),
        (
            {"1": node("Number", a=["3", 0]), "3": node("Number", a=1), "2": node("Show", a=["1", 0])},
            "Number (node 1): a takes INT; Number (node 3) gives SUM there.",
        ),
        (
            {"1": node("Number", a=10), "2": node("Show", a=["1", 0])},
            "Number (node 1): a is 10; it must be between 0 and 9.",
        ),
        (
            {"1": node("Number", a=1, c=2), "2": node("Show", a=["1", 0])},
            "Number (node 1): it has no input c; its inputs are a, b.",
        ),
        (
            {"1": node("Number", a=1)},
            "The workflow has no output node, such as SaveVideo: nothing would come of running it.",
        ),
        (
            {"1": node("Next", a=["2", 0]), "2": node("Next", a=["1", 0]), "3": node("Show", a=["1", 0])},
            "The workflow's links form a circle: 1 -> 2 -> 1.",
        ),
    ],
)
def test_run_workflow_invalid_graph_raises_value_error(workflow: dict, problem: str):
    with pytest.raises(ValueError) as error:
        run(workflow)
    assert str(error.value) == problem


def test_validate_workflow_lists_all_problems():
    assert len(validate_workflow({"1": node("Gone"), "2": node("Show"), "3": node("Show", a=1)}, TABLE)) == 3


def test_to_api_converts_page_workflow():
    document = page(
        page_node(1, "Number", widgets_values=[3, 4, "fixed"], title="Mine"),
        page_node(2, "Show", link=7),
        {"id": 3, "type": "Note", "widgets_values": ["hello"]},
        links=[[7, 1, 0, 2, 0, "SUM"]],
    )
    assert to_api(document, TABLE) == {
        "1": {"class_type": "Number", "inputs": {"a": 3, "b": 4}, "_meta": {"title": "Mine"}},
        "2": {"class_type": "Show", "inputs": {"a": ["1", 0]}, "_meta": {"title": "Show"}},
    }


def test_to_api_older_page_uses_defaults_of_new_widgets():
    document = page(
        page_node(1, "Number", widgets_values=[3]), page_node(2, "Show", link=7), links=[[7, 1, 0, 2, 0, "SUM"]]
    )
    assert run(to_api(document, TABLE)) == {"2": (8,)}


@pytest.mark.parametrize(
    ("middle", "result"),
    [({"kind": "Next"}, 9), ({"kind": "Next", "mode": 4}, 8), ({"kind": "Reroute"}, 8)],
    ids=["active", "bypassed", "reroute"],
)
def test_to_api_links_pass_bypassed_nodes_and_reroutes(middle: dict, result: int):
    document = page(
        page_node(1, "Number", widgets_values=[3]),
        page_node(2, link=7, **middle),
        page_node(3, "Show", link=8),
        links=[[7, 1, 0, 2, 0, "SUM"], {"id": 8, "origin_id": 2, "origin_slot": 0, "target_id": 3, "target_slot": 0}],
    )
    assert run(to_api(document, TABLE)) == {"3": (result,)}


def test_to_api_muted_node_leaves_linked_input_missing():
    document = page(
        page_node(1, "Number", widgets_values=[3], mode=2), page_node(2, "Show", link=7), links=[[7, 1, 0, 2, 0, "SUM"]]
    )
    with pytest.raises(ValueError, match=r"Show \(node 2\): a is missing."):
        run(to_api(document, TABLE))


def test_to_api_primitive_node_becomes_constant():
    document = page(
        {"id": 1, "type": "PrimitiveNode", "widgets_values": [6, "fixed"], "outputs": []},
        page_node(2, "Number", link=5, widgets_values=[1]),
        page_node(3, "Show", link=7),
        links=[[5, 1, 0, 2, 0, "INT"], [7, 2, 0, 3, 0, "SUM"]],
    )
    assert run(to_api(document, TABLE)) == {"3": (11,)}


def test_to_api_invalid_document_raises_value_error():
    for document in ([], {}, {"a": 1}, {"1": {"inputs": {}}}):
        with pytest.raises(ValueError, match="This is not a ComfyUI workflow"):
            to_api(document, TABLE)


def test_to_api_loads_workflow_of_original_pack():
    """Its widgets end before ours: flow_shift is there, precision is not."""
    values = [720, 1280, 81, 50, 5, 42, "fixed", "Wan-AI/Wan2.1-T2V-14B-Diffusers", 5]
    document = page({"id": 2, "type": "Wan21TPUSampler", "widgets_values": values}, links=[])
    inputs = to_api(document, HEADLESS_NODES)["2"]["inputs"]
    assert (inputs["seed"], inputs["model_id"], inputs["flow_shift"]) == (42, values[7], 5)
    assert "precision" not in inputs


def test_terminal_context_shows_titles_and_times():
    stream = io.StringIO()
    host = TerminalContext(Folders(), stream=stream)
    with host.time_node("Encode"):
        host.text("loading")
        host.step(1, 2, "step")
    assert stream.getvalue() == "Encode\n  loading\n"
    assert [timing.title for timing in host.timings] == ["Encode"]


# --- the command ------------------------------------------------------------------------------------------------------


def example() -> dict:
    return to_api(json.loads(EXAMPLE.read_text()), HEADLESS_NODES)


def test_list_tiny_prompts_names_prompt_of_tiny_model():
    workflow = example()
    make_tiny(workflow)
    said = 'tiny/wan21 shows "a red circle moves right on blue"; to change it: --set 1.prompt="..."'
    assert list(list_tiny_prompts(workflow)) == [said]


def test_list_tiny_prompts_warns_about_random_weights():
    """Of a model that no trained miniature stands for."""
    workflow = to_api(json.loads(examples.page("wan22_i2v_720p").read_text()), HEADLESS_NODES)
    for node in workflow.values():
        node["inputs"] |= {"model_id": "Wan-AI/Wan2.2-TI2V-5B-Diffusers"} if "model_id" in node["inputs"] else {}
    make_tiny(workflow)
    said = "tiny/wan22ti2v has random weights: it shows noise, whatever the prompt."
    assert list(list_tiny_prompts(workflow)) == [said]


def test_make_tiny_changes_only_models_sizes_and_prompts():
    workflow, before = example(), example()
    make_tiny(workflow)
    changed = {
        (node_id, name): value
        for node_id, node in workflow.items()
        for name, value in node["inputs"].items()
        if value != before[node_id]["inputs"].get(name)
    }
    models = {(node_id, "model_id"): "tiny/wan21" for node_id in ("1", "2", "3", "6")}
    sizes = {("2", "height"): 80, ("2", "width"): 112, ("2", "num_frames"): 17}
    texts = {("1", "prompt"): "a red circle moves right on blue", ("1", "negative_prompt"): ""}
    assert changed == {**models, **sizes, **texts}


@pytest.mark.parametrize(
    ("assignment", "place", "value"),
    [
        ("2.seed=7", ("2", "seed"), 7),
        ("Wan21TPUSampler.guidance_scale=1.5", ("2", "guidance_scale"), 1.5),
        ("Wan21TextEncoder.prompt=a=b", ("1", "prompt"), "a=b"),
        ("1.prompt=12", ("1", "prompt"), "12"),
        ("Save Video.filename_prefix=x", ("5", "filename_prefix"), "x"),
    ],
)
def test_apply_assignment_changes_one_input(assignment: str, place: tuple[str, str], value: Any):
    workflow = example()
    workflow["5"]["_meta"] = {"title": "Save Video"}
    apply_assignment(workflow, assignment)
    assert workflow[place[0]]["inputs"][place[1]] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "seed=7"], "--set seed=7: it must look like NODE.INPUT=VALUE, such as 2.seed=7."),
        (
            ["--set", "9.seed=7"],
            "--set 9.seed=7: no node called '9' in this workflow; its nodes are 1 (Wan21TextEncoder), 2 (",
        ),
        (
            ["--set", "2.sed=7"],
            "--set 2.sed=7: 2 has no input sed; it has prompt_embeds, negative_prompt_embeds, height",
        ),
        (
            ["--set", "2.height=721"],
            "Wan21TPUSampler (node 2): Wan 2.1 T2V 14B: height is 721; it must be a multiple of",
        ),
        (["--set", "1.model_id="], "Wan 2.1 T2V 14B: model_id is empty."),
    ],
)
def test_run_invalid_assignment_prints_one_line_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert cli.main(["run", str(EXAMPLE), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"comfyui-tpu: {message}") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_run_missing_workflow_file_is_named(capsys: pytest.CaptureFixture):
    assert cli.main(["run", "nowhere.json"]) == 2
    assert capsys.readouterr().err == "comfyui-tpu: the file nowhere.json does not exist.\n"


def test_run_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_workflow", interrupted)
    assert cli.main(["run", str(EXAMPLE)]) == 130
    assert capsys.readouterr().err == "comfyui-tpu: cancelled\n"


def test_doctor_reports_topics_and_exit_code(capsys: pytest.CaptureFixture):
    code = cli.main(["doctor"])
    report = capsys.readouterr().out
    assert code == (1 if f"\n{'':<22} -> " in report else 0)
    for topic in ("Python", "torch", "jax", "devices", "mesh with guidance", "cache"):
        assert f"\n{topic} " in f"\n{report}"


def test_terminal_context_limits_step_lines_in_files(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("comfyui_tpu.nodes.headless.runner.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    host = TerminalContext(Folders(), stream=stream)
    for step in range(1, 9):
        host.text(f"Denoising, step {step} of 50, {step / 10:.2f} s a step")
        now[0] += 9.0
    host.text("Loading the vae decoder")
    assert stream.getvalue().splitlines() == [
        "  Denoising, step 1 of 50, 0.10 s a step",
        "  Denoising, step 5 of 50, 0.50 s a step",
        "  Loading the vae decoder",
    ]
