"""A page's workflow as it would run: names, values and links, and a sentence for what leads nowhere."""

from typing import Any

import pytest
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import find_bypass_input, to_api, validate_workflow

DECODER, VIDEO = "Wan21TPUVAEDecoder", "CreateVideo"
MUTED, BYPASSED = 2, 4


def node(node_id: int, kind: str, inputs: dict[str, int | None] | None = None, **fields: Any) -> dict[str, Any]:
    sockets = [{"name": name, "link": link} for name, link in (inputs or {}).items()]
    return {"id": node_id, "type": kind, "inputs": sockets, **fields}


def inputs(*nodes: dict[str, Any], links: list[list[Any]] | None = None) -> dict[str, dict[str, Any]]:
    found = to_api({"nodes": list(nodes), "links": links or []}, HEADLESS_NODES)
    return {name: each["inputs"] for name, each in found.items()}


def test_to_api_title_is_user_title_page_name_or_type():
    named = {"properties": {"Node name for S&R": "named"}}
    nodes = [
        node(1, VIDEO, title="mine", **named),
        node(2, VIDEO, **named),
        node(3, VIDEO, properties={}),
        node(4, VIDEO),
    ]
    found = to_api({"nodes": nodes, "links": []}, HEADLESS_NODES)
    assert [found[name]["_meta"]["title"] for name in "1234"] == ["mine", "named", VIDEO, VIDEO]


def test_to_api_accepts_named_widget_values():
    assert inputs(node(1, VIDEO, widgets_values={"fps": 24.0, "images": 3, "unknown": 1})) == {"1": {"fps": 24.0}}
    assert inputs(node(1, VIDEO)) == {"1": {}}


def test_to_api_reroute_passes_input_and_muted_node_passes_none():
    nodes = [node(1, DECODER), node(2, "Reroute", {"": 1, "other": 9}), node(3, VIDEO, {"images": 2})]
    links = [[1, 1, 0, 2, 0, "*"], [2, 2, 0, 3, 0, "IMAGE"]]
    assert inputs(*nodes, links=links)["3"] == {"images": ["1", 0]}
    assert inputs({**nodes[0], "mode": MUTED}, *nodes[1:], links=links) == {"3": {}}
    assert inputs(nodes[0], node(2, "Reroute"), nodes[2], links=links)["3"] == {}
    assert inputs(nodes[0], node(2, "Reroute", {"": None}), nodes[2], links=links)["3"] == {}


def test_to_api_primitive_value_replaces_link():
    links = [[1, 1, 0, 2, 0, "FLOAT"]]
    assert inputs(node(1, "PrimitiveNode", widgets_values=[24, "fixed"]), node(2, VIDEO, {"fps": 1}), links=links) == {
        "2": {"fps": 24}
    }
    for values in ({}, {"widgets_values": []}, {"widgets_values": {"value": 3}}):
        with pytest.raises(ValueError) as error:
            inputs(node(1, "PrimitiveNode", **values), node(2, VIDEO, {"fps": 1}), links=links)
        assert str(error.value) == "Node 1, a PrimitiveNode, has no value. Open the workflow and give it one."


UUID = "3f2b1c9a-77e0-4a52-9c1e-0d5f6a7b8c9d"


@pytest.mark.parametrize(
    ("definitions", "said"),
    [
        ({"subgraphs": [{"id": UUID, "name": "Two passes"}]}, "Node 7 is the subgraph 'Two passes'; a workflow"),
        ({"subgraphs": [{"id": UUID}]}, "Node 7 is a subgraph that the file does not hold"),
        ({"subgraphs": [{"id": 3}, None]}, "Node 7 is a subgraph that the file does not hold"),
        ({"subgraphs": None}, "Node 7 is a subgraph that the file does not hold"),
        (None, "Node 7 is a subgraph that the file does not hold"),
    ],
)
def test_to_api_subgraph_error_names_subgraph(definitions: Any, said: str):
    document = {"nodes": [node(7, UUID)], "links": [], "definitions": definitions}
    with pytest.raises(ValueError) as error:
        to_api(document, HEADLESS_NODES)
    assert said in str(error.value) and UUID not in str(error.value)
    assert "Unpack Subgraph" in str(error.value) and "Export (API)" in str(error.value)
    document["nodes"][0]["mode"] = MUTED
    assert to_api(document, HEADLESS_NODES) == {}


def test_to_api_dangling_link_raises_value_error():
    for links, said in (
        ([], "The workflow names link 5, which it does not have."),
        ([[5, 9, 0, 2, 0, "IMAGE"]], "The workflow's link 5 comes from node 9, which it does not have."),
    ):
        with pytest.raises(ValueError) as error:
            inputs(node(2, VIDEO, {"images": 5}), links=links)
        assert str(error.value) == said


def bypass_foreign_node(types: list[str], outputs: list[str], slot: int, saved: str = "IMAGE") -> dict[str, Any]:
    """What Create Video's `images` is linked to, behind a bypassed node that nobody knows."""
    sockets = [{"name": f"in{n}", "type": kind, "link": 10 + n} for n, kind in enumerate(types)]
    other = {
        "id": 2, "type": "Somebody's", "mode": BYPASSED, "inputs": sockets,
        "outputs": [{"name": f"out{n}", "type": kind} for n, kind in enumerate(outputs)],
    }  # fmt: skip
    links = [[1, 2, slot, 3, 0, saved], *([10 + n, 1, n, 2, n, kind] for n, kind in enumerate(types))]
    return inputs(node(1, DECODER), other, node(3, VIDEO, {"images": 1}), links=links)["3"]


def test_to_api_bypassed_foreign_node_joins_matching_types():
    assert bypass_foreign_node(["IMAGE"], ["IMAGE"], 0) == {"images": ["1", 0]}
    assert bypass_foreign_node(["LATENT", "IMAGE"], ["IMAGE"], 0) == {"images": ["1", 1]}
    assert bypass_foreign_node(["LATENT"], ["IMAGE"], 0) == {}
    # What Create Video takes says its declaration, not the link.
    assert bypass_foreign_node(["LATENT", "IMAGE"], ["*"], 0, saved="LATENT") == {"images": ["1", 1]}
    with pytest.raises(ValueError) as error:
        bypass_foreign_node(["IMAGE"], ["IMAGE"], 1)
    assert str(error.value) == "The workflow's link 1 is of output 1 of node 2, which has none."


@pytest.mark.parametrize(
    ("types", "output", "given", "wanted", "index"),
    [
        (["LATENT", "IMAGE"], 0, "IMAGE", "*", 0), (["LATENT"], 1, "IMAGE", "*", 0), ([], 0, "IMAGE", "*", None),
        (["LATENT", "IMAGE"], 1, "IMAGE", "", 1), (["LATENT"], 1, "IMAGE", "", 0),
        (["A"], 0, "A", "B", None), (["A", "B"], 0, "A", "B", 1), (["B"], 0, "A", "B", 0), (["C", "B"], 0, "B", "B", 1),
        (["LATENT"], 1, "LATENT", "LATENT", 0), (["latent"], 0, "LATENT", "LATENT", 0), ([""], 0, "A", "A", 0),
        (["A,B"], 0, "B", "B", 0), (["*"], 0, "A", "A", 0), (["X", "a,b"], 0, "A", "A,C", 1),
    ],
)  # fmt: skip
def test_find_bypass_input_matches_types_and_positions(
    types: list[str], output: int, given: str, wanted: str, index: int | None
):
    assert find_bypass_input(types, output, given, wanted) == index


def test_validate_workflow_invalid_link_names_output_and_type():
    decoder = {"class_type": DECODER, "inputs": {"latents": ["9", 0]}, "_meta": {"title": "D"}}
    outputs = HEADLESS_NODES[DECODER].outputs
    frames = [one.name for one in outputs].index("frames")

    def said(link: list[Any], name: str = "images") -> list[str]:
        video = {"class_type": VIDEO, "inputs": {"images": ["1", frames], "fps": 16.0, name: link}}
        return [one for one in validate_workflow({"1": decoder, "2": video}, HEADLESS_NODES) if one.startswith(VIDEO)]

    assert said(["1", frames]) == []
    assert said(["7", 0]) == [f"{VIDEO} (node 2): images is linked to node 7, which does not exist."]
    assert said(["1", len(outputs)])[0].endswith(f"{DECODER} (node 1), which has {len(outputs)}.")
    assert said(["1", -1])[0].startswith(
        f"{VIDEO} (node 2): images is linked to output -1 of {DECODER} (node 1), which"
    )
    assert said(["1", frames], "fps") == [f"{VIDEO} (node 2): fps takes FLOAT; {DECODER} (node 1) gives IMAGE there."]
