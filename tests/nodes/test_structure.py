"""Whether a workflow file is built as one: what is taken, and the sentence for anything else."""

from typing import Any

import pytest
from comfyui_tpu.nodes.headless.schema import read_api_nodes, read_page_links, read_page_nodes

AGAIN = " Save the workflow again."
KIND = ", which is of the wrong kind. Save it again."


def page(*nodes: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "links": []}


def test_read_page_nodes_returns_nodes_by_id_without_nulls():
    first = {
        "id": 1, "type": "A", "title": None, "mode": 0, "properties": {}, "widgets_values": ["x", None],
        "inputs": [{"name": "a", "type": None, "link": 3}, {"name": "b", "link": None}],
        "outputs": [{"name": "c", "links": None}],
    }  # fmt: skip
    second = {"id": "2:1", "type": "B", "widgets_values": {"x": 1}}
    assert read_page_nodes(page(first, second)) == {
        "1": {
            "id": 1, "type": "A", "mode": 0, "properties": {}, "widgets_values": ["x", None],
            "inputs": [{"name": "a", "link": 3}, {"name": "b"}], "outputs": [{"name": "c"}],
        },
        "2:1": {"id": "2:1", "type": "B", "widgets_values": {"x": 1}, "inputs": [], "outputs": []},
    }  # fmt: skip


OF_NODE_1 = {"id": 7, "type": "A"}


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (3, "Node number 2 of the workflow is 3; it must be an object." + AGAIN),
        ({"type": "A"}, "Node number 2 of the workflow has no id." + AGAIN),
        ({"id": 1}, "Node number 2 of the workflow has no type." + AGAIN),
        ({}, "Node number 2 of the workflow has no id." + AGAIN),
        ({"id": None, "type": "A"}, "Node number 2 of the workflow has no id." + AGAIN),
        ({"id": True, "type": "A"}, "Node number 2 of the workflow has id True" + KIND),
        ({"id": 1.5, "type": "A"}, "Node number 2 of the workflow has id 1.5" + KIND),
        ({"id": 1, "type": 2}, "Node number 2 of the workflow has type 2" + KIND),
        ({**OF_NODE_1, "widgets_values": "xxx"}, "Node number 2 of the workflow has widgets_values 'xxx'" + KIND),
        ({**OF_NODE_1, "inputs": [1]}, "An input of node 7 is 1; it must be an object." + AGAIN),
        ({**OF_NODE_1, "outputs": ["x"]}, "An output of node 7 is 'x'; it must be an object." + AGAIN),
        ({**OF_NODE_1, "inputs": [{}, {"name": "a"}, {}]}, "2 inputs of node 7 have no name." + AGAIN),
        ({**OF_NODE_1, "inputs": [{"name": "a", "link": "3"}]}, "An input of node 7 has link '3'" + KIND),
        ({**OF_NODE_1, "inputs": [{"name": 1}]}, "An input of node 7 has name 1" + KIND),
        ("y" * 200, "Node number 2 of the workflow is '" + "y" * 79 + "; it must be an object." + AGAIN),
    ],
)  # fmt: skip
def test_read_page_nodes_invalid_node_raises_value_error(node: Any, sentence: str):
    with pytest.raises(ValueError) as error:
        read_page_nodes(page({"id": 1, "type": "A"}, node))
    assert str(error.value) == sentence


@pytest.mark.parametrize("name", ["nodes", "links"])
def test_read_page_nodes_and_links_require_lists(name: str):
    with pytest.raises(ValueError) as error:
        (read_page_nodes if name == "nodes" else read_page_links)({**page(), name: {"1": 2}})
    assert str(error.value) == f"The workflow's {name} are {{'1': 2}}; they must be a list."


def test_read_page_links_accepts_both_link_forms():
    links = [[1, 5, 0, 6, 2, "LATENT"], [2, "5:1", 1], {"id": 3, "origin_id": 5, "origin_slot": 2, "type": "X"}]
    assert read_page_links({"links": links}) == {1: ("5", 0), 2: ("5:1", 1), 3: ("5", 2)}


@pytest.mark.parametrize(
    "link",
    [
        *(3, None, [], [1, 2], ["1", 2, 0], [1, 2, "0"], [1, None, 0], [True, 2, 0], [1, False, 0], [1, 2.5, 0]),
        {"id": 1},
    ],
)  # fmt: skip
def test_read_page_links_invalid_link_raises_value_error(link: Any):
    with pytest.raises(ValueError) as error:
        read_page_links({"links": [link]})
    assert str(error.value) == f"A link of the workflow is {link!r}; it must have an id, origin node and output."


def test_read_api_nodes_keeps_only_type_inputs_and_title():
    document = {"1": {"class_type": "A", "inputs": {"x": 1}, "_meta": {"title": "T", "more": 2}, "is_changed": None}}
    found = read_api_nodes(document)
    assert found == {"1": {"class_type": "A", "inputs": {"x": 1}, "_meta": {"title": "T"}}}
    found["1"]["inputs"]["x"] = 2
    assert document["1"]["inputs"] == {"x": 1}
    for meta in ({}, {"_meta": {}}, {"_meta": {"title": 3}}, {"_meta": None}):
        assert read_api_nodes({"1": {"class_type": "A", **meta}}) == {"1": {"class_type": "A", "inputs": {}}}
    for node, said in (({"inputs": []}, "has inputs []"), ({"_meta": "x"}, "has _meta 'x'")):
        with pytest.raises(ValueError) as error:
            read_api_nodes({"9": node})
        assert str(error.value) == f"Node 9 {said}, which is of the wrong kind. Save it again."
