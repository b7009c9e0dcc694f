"""Workflows that the separate packs saved: brought to today's nodes, with the values that they had, and run."""

import contextlib
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli.main import main
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.graph import expand, plan_generations
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.graphs.upgrade import upgrade_workflow
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api, validate_workflow
from comfyui_tpu.tests.nodes import examples, separate_packs
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.patience import slower
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
EVERY_EXAMPLE = [*examples.PAGES, *examples.PIPELINES, *examples.API]
HEADLINE = "This workflow was saved by the separate TPU packs; it now has ComfyUI-TPU's nodes."


def constants(workflow: dict[str, Any], kind: str) -> dict[str, Any]:
    (inputs,) = (node["inputs"] for node in workflow.values() if node["class_type"] == kind)
    return inputs


def check_links(document: dict[str, Any]) -> None:
    """Every link is known to the sockets at both of its ends, and they to it."""
    nodes = {node["id"]: node for node in document["nodes"]}
    for link in document["links"]:
        number, origin, slot, target, target_slot, kind = link.values() if isinstance(link, dict) else link
        assert number in nodes[origin]["outputs"][slot]["links"]
        assert nodes[target]["inputs"][target_slot]["link"] == number
        assert nodes[target]["type"] not in DECLARATIONS or nodes[target]["inputs"][target_slot]["type"] == kind
    known = {link["id"] if isinstance(link, dict) else link[0] for link in document["links"]}
    for node in nodes.values():
        assert {socket["link"] for socket in node["inputs"]} <= {*known, None}
        assert {link for socket in node["outputs"] for link in socket["links"] or ()} <= known


@pytest.mark.parametrize("pack", separate_packs.ALL)
def test_upgrade_workflow_gives_current_nodes_for_separate_packs(pack: str):
    before = separate_packs.ALL[pack]()
    document, changes = upgrade_workflow(before, DECLARATIONS)
    assert before == separate_packs.ALL[pack]()  # a copy was changed
    assert changes[0] == HEADLINE
    check_links(document)
    for node in document["nodes"]:
        if node["type"] in DECLARATIONS:
            declared = [one for one in HEADLESS_NODES[node["type"]].inputs if one.is_widget]
            assert len(node["widgets_values"]) == len(declared) + sum(bool(one.companion) for one in declared)
            sockets = [one for one in HEADLESS_NODES[node["type"]].page_order() if not one.is_widget]
            assert [(one["name"], one["type"]) for one in node["inputs"]] == [(one.name, one.type) for one in sockets]
    assert validate_workflow(to_api(document, HEADLESS_NODES), HEADLESS_NODES) == []
    assert upgrade_workflow(document, DECLARATIONS) == (document, [])  # and has nothing more to change


def test_to_api_of_separate_pack_workflow_keeps_values():
    flux2 = to_api(separate_packs.flux2(), HEADLESS_NODES)
    sampler = constants(flux2, "Flux2TPUSampler")
    assert {name: sampler[name] for name in ("height", "width", "num_inference_steps", "guidance_scale", "seed")} == {
        "height": 1024, "width": 1024, "num_inference_steps": 50, "guidance_scale": 4.0, "seed": 719528488,
    }  # fmt: skip
    assert constants(flux2, "Flux2TPUVAEDecoder") == {
        "model_id": separate_packs.FLUX2, "precision": "auto", "latents": ["2", 0],
    }  # fmt: skip
    cogvideox = constants(to_api(separate_packs.cogvideox(), HEADLESS_NODES), "CogVideoXTPUSampler")
    assert (cogvideox["height"], cogvideox["width"], cogvideox["num_frames"], cogvideox["seed"]) == (720, 1280, 81, 42)
    assert (cogvideox["prompt_embeds"], cogvideox["negative_prompt_embeds"]) == (["1", 0], ["1", 1])
    wan22 = to_api(separate_packs.wan22_i2v(), HEADLESS_NODES)
    sampler = constants(wan22, "Wan22I2VTPUSampler")
    assert (sampler["seed"], sampler["shift"], sampler["model_id"]) == (0, 5.0, separate_packs.WAN22)
    # The separate pack had one guidance for both experts; the size comes with the picture.
    assert (sampler["guidance_scale"], sampler["guidance_scale_2"], sampler["height"]) == (3.5, 0.0, 0)
    assert "latent_info" not in sampler and sampler["condition"] == ["2", 0]
    assert constants(wan22, "Wan22I2VImageEncoder")["height"] == 1104


def test_upgrade_workflow_lists_changes_of_each_pack():
    said = {pack: upgrade_workflow(make(), DECLARATIONS)[1][1:] for pack, make in separate_packs.ALL.items()}
    assert said == {
        "flux2": [
            "Flux2TPUVAEDecoder (node 3): height 1024 is left out: the connected input has its own; width 1024 "
            "is left out: the connected input has its own."
        ],
        "cogvideox": [
            "CogVideoXTPUSampler (node 2): 8 is left out: no input takes it; embeddings is prompt_embeds and "
            "negative_prompt_embeds now."
        ],
        "wan21": [],
        "wan22_i2v": ["Wan22I2VTPUSampler (node 4): latent_info is not needed any more."],
    }


def test_upgrade_workflow_keeps_seed_control_or_sets_fixed():
    for pack, kind, control in (
        ("flux2", "Flux2TPUSampler", "randomize"), ("cogvideox", "CogVideoXTPUSampler", "fixed"),
        ("wan22_i2v", "Wan22I2VTPUSampler", "fixed"),
    ):  # fmt: skip
        document, _ = upgrade_workflow(separate_packs.ALL[pack](), DECLARATIONS)
        (values,) = (node["widgets_values"] for node in document["nodes"] if node["type"] == kind)
        widgets = [one for one in HEADLESS_NODES[kind].inputs if one.is_widget]
        names = [name for one in widgets for name in ([one.name, "control"] if one.companion else [one.name])]
        assert dict(zip(names, values, strict=True))["control"] == control


@pytest.mark.parametrize(
    ("kind", "values", "is_old"),
    [
        ("Flux2TPUVAEDecoder", [1024, 1024, separate_packs.FLUX2], True),
        ("Flux2TPUVAEDecoder", [separate_packs.FLUX2, "auto"], False),
        ("Flux2TPUVAEDecoder", [1024, 1024, separate_packs.FLUX2, "auto"], False),  # nobody's
        ("CogVideoXTPUVAEDecoder", [16], False),  # today's begins alike
        ("CogVideoXTPUSampler", [720, 1280, 81, 50, 6.0, 42, 8], True),  # where the page has "fixed" or "randomize"
        ("Wan21TPUSampler", [720, 1280, 81, 50, 5, 42, "fixed", separate_packs.WAN21, 5], False),
        ("Wan22I2VTPUSampler", [40, 3.5, 5.0, 0, separate_packs.WAN22], True),
        ("Wan22I2VImageEncoder", [1104, 832, 81, separate_packs.WAN22], False),
    ],
)
def test_upgrade_workflow_without_sockets_detects_pack_by_values(kind: str, values: list, is_old: bool):
    node = {"id": 1, "type": kind, "inputs": [], "outputs": [], "widgets_values": values}
    document, changes = upgrade_workflow({"nodes": [node], "links": []}, DECLARATIONS)
    assert (changes[:1] == [HEADLINE]) == is_old
    if is_old:
        assert separate_packs.FLUX2 not in values or document["nodes"][0]["widgets_values"][0] == separate_packs.FLUX2


def test_upgrade_workflow_splits_link_through_reroute():
    document = separate_packs.cogvideox()
    document["nodes"].append({
        "id": 9, "type": "Reroute", "mode": 0, "inputs": [{"name": "", "type": "*", "link": 1}],
        "outputs": [{"name": "", "type": "COGVIDEOX_EMBEDS", "links": [8]}],
    })  # fmt: skip
    document["nodes"][1]["inputs"][0]["link"] = 8
    document["links"][0] = [1, 1, 0, 9, 0, "*"]
    document["links"].append([8, 9, 0, 2, 0, "COGVIDEOX_EMBEDS"])
    sampler = constants(to_api(document, HEADLESS_NODES), "CogVideoXTPUSampler")
    assert (sampler["prompt_embeds"], sampler["negative_prompt_embeds"]) == (["1", 0], ["1", 1])


def test_upgrade_workflow_converts_subgraph():
    inner = separate_packs.cogvideox()
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    inner["links"] = [dict(zip(names, link, strict=True)) for link in inner["links"]]
    outer = {"nodes": [], "links": [], "definitions": {"subgraphs": [{**inner, "state": {"lastLinkId": 4}}]}}
    document, changes = upgrade_workflow(outer, DECLARATIONS)
    (found,) = document["definitions"]["subgraphs"]
    check_links(found)
    assert len(changes) == 2 and found["state"]["lastLinkId"] == 5


def in_api_form(pack: str) -> dict[str, Any]:
    """As the page of that time exported it: values by name."""
    from comfyui_tpu.nodes.graphs.upgrade import _OLD

    document, workflow = separate_packs.ALL[pack](), {}
    sources = {link[0]: [str(link[1]), link[2]] for link in document["links"]}
    for node in document["nodes"]:
        old = _OLD.get(node["type"])
        names = list(old.widgets) if old else [one.name for one in HEADLESS_NODES[node["type"]].inputs if one.is_widget]
        values = [value for value in node["widgets_values"] if value not in ("fixed", "randomize", "image")]
        links = {one["name"]: sources[one["link"]] for one in node["inputs"] if one["link"] is not None}
        workflow[str(node["id"])] = {
            "class_type": node["type"],
            "inputs": {**dict(zip(names, values, strict=False)), **links},
        }
    return workflow


@pytest.mark.parametrize("pack", separate_packs.ALL)
def test_upgrade_workflow_converts_api_form(pack: str):
    before = in_api_form(pack)
    kept = copy.deepcopy(before)
    after, changes = upgrade_workflow(before, DECLARATIONS)
    assert before == kept and bool(changes) == (pack != "wan21")
    assert validate_workflow(to_api(before, HEADLESS_NODES), HEADLESS_NODES) == []
    assert upgrade_workflow(after, DECLARATIONS) == (after, [])
    own = to_api(separate_packs.ALL[pack](), HEADLESS_NODES)
    for node_id, node in after.items():  # the same as from the page's form, but for what has its default
        assert node["inputs"].items() <= own[node_id]["inputs"].items()


@pytest.mark.parametrize("path", EVERY_EXAMPLE, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_upgrade_workflow_leaves_current_examples_unchanged(path: Path):
    document = json.loads(path.read_text())
    assert upgrade_workflow(document, DECLARATIONS) == (document, [])


@pytest.mark.parametrize(
    "document", [None, 3, [], {}, {"nodes": 3}, {"nodes": [None, {"type": []}], "links": 7}, {"1": 2}]
)
def test_upgrade_workflow_returns_other_documents_unchanged(document: Any):
    assert upgrade_workflow(document, DECLARATIONS) == (document, [])


def test_upgrade_workflow_deep_nesting_raises_value_error():
    document = separate_packs.flux2()
    document["extra"] = nested = []
    for _ in range(100_000):
        nested.append([])
        nested = nested[0]
    with raises_message(ValueError, "workflow.too_deep"):
        upgrade_workflow(document, DECLARATIONS)


@pytest.mark.parametrize("pack", separate_packs.ALL)
def test_upgrade_workflow_damaged_document_raises_only_value_error(pack: str):
    """Any part of it replaced by something else: a result or a ValueError."""
    draw = random.Random(pack)
    strange = [None, 3, -1, 1e300, True, "x", [], {}, [[]], [1, 2, 3, 4, 5, 6], {"link": []}, float("nan")]
    for _ in range(300):
        document = separate_packs.ALL[pack]()
        place: Any = document
        while isinstance(place, dict | list) and place:
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if draw.random() < 0.3 or not isinstance(place[key], dict | list) or not place[key]:
                place[key] = draw.choice(strange)
                break
            place = place[key]
        with contextlib.suppress(ValueError):
            upgrade_workflow(document, DECLARATIONS)


SAVED = {"flux2": "*.png", "cogvideox": "*.mp4", "wan21": "*.mp4", "wan22_i2v": "*.mp4"}


@pytest.mark.slow
@pytest.mark.parametrize("pack", slower(SAVED, "cogvideox", "wan21", "wan22_i2v"))
def test_separate_pack_workflow_runs_on_tiny_model(pack: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "input").mkdir()
    Image.new("RGB", (96, 64), "red").save(tmp_path / "input" / separate_packs.PICTURE, "PNG")
    (tmp_path / "saved.json").write_text(json.dumps(separate_packs.ALL[pack]()))
    steps = next(
        f"{node['type']}.num_inference_steps=2"
        for node in separate_packs.ALL[pack]()["nodes"]
        if node["type"].endswith("Sampler")
    )
    words = ["run", str(tmp_path / "saved.json"), "--tiny", "--set", steps, "--out", str(tmp_path / "out")]
    assert main([*words, "--input", str(tmp_path / "input")]) == 0
    assert [path.stat().st_size > 500 for path in (tmp_path / "out").rglob(SAVED[pack])] == [True]
    assert [record.message.partition("\n")[0] for record in caplog.records].count(HEADLINE) == 1


WRONG = (
    *(None, [], [1, 2], ["9", 0], {}, {"a": 1}, True, "", "many", "nan"),
    *(-1, 0, 2**80, 1.5, 1e300, float("nan"), float("inf")),
)


def problems_of(document: Any, is_tiny: bool) -> list[str]:
    """What `run` says of a workflow, with the real models or with miniatures, up to where the first node would run."""
    try:
        workflow = to_api(document, HEADLESS_NODES)
        if is_tiny:
            make_tiny(workflow)
        if problems := validate_workflow(workflow, HEADLESS_NODES):
            return problems
        for node in workflow.values():
            given = {name: value for name, value in node["inputs"].items() if not isinstance(value, list)}
            HEADLESS_NODES[node["class_type"]].validate_constants(Folders(), given)
        expand(workflow, HEADLESS_NODES)
        plan_generations(workflow, Folders(), HEADLESS_NODES)
    except ValueError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("path", EVERY_EXAMPLE, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_example_wrong_widget_type_returns_readable_problems(path: Path):
    draw = random.Random(path.stem)
    document = json.loads(path.read_text())
    for number in range(20):
        workflow = to_api(document, HEADLESS_NODES)
        node = workflow[draw.choice([node_id for node_id, node in workflow.items() if node["inputs"]])]
        node["inputs"][draw.choice(sorted(node["inputs"]))] = draw.choice(WRONG)
        assert all(problem.endswith((".", ")")) for problem in problems_of(workflow, bool(number % 2)))


@pytest.mark.parametrize("pack", separate_packs.ALL)
def test_separate_pack_wrong_widget_type_returns_readable_problems(pack: str):
    draw, refused = random.Random(pack), 0
    for number in range(20):
        document = separate_packs.ALL[pack]()
        values = draw.choice([node["widgets_values"] for node in document["nodes"] if node["widgets_values"]])
        values[draw.randrange(len(values))] = draw.choice(WRONG)
        problems = problems_of(document, bool(number % 2))
        assert all(problem.endswith((".", ")")) for problem in problems)
        refused += bool(problems)
    assert refused
