"""Bypassing a node: what its outputs give then, as ComfyUI's page decides it, and in workflows run without the page."""

from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Declaration
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import find_bypass_input, to_api

SAVE_STAGE = DECLARATIONS["TPUSaveStage"]
BYPASSED = 4


def page_inputs(node: Declaration) -> list[tuple[str, str]]:
    """Names and types of a node's inputs in the page: sockets first, and of each kind what ComfyUI calls required."""
    listed: list[tuple[str, str]] = []
    for is_widget in (False, True):
        for is_optional in (False, True):
            listed += [
                (declared.name, declared.type)
                for declared in node.inputs
                if declared.is_widget == is_widget and (declared.optional or declared.listed_last) == is_optional
            ]
    return listed


def page_bypass(inputs: list[tuple[str, str]], slot: int, wanted: str) -> str | None:
    """`ExecutableNodeDTO._getBypassSlotIndex` of the page (1.49), for types that are one name: the input's name."""
    if slot < len(inputs) and inputs[slot][1] == wanted:
        return inputs[slot][0]
    return next((name for name, kind in inputs if kind == wanted), None)


PASSES = [
    pytest.param(node, output.name, id=f"{node.id}.{output.name}")
    for node in DECLARATIONS.values()
    for output in node.outputs
    if output.name in {declared.name for declared in node.inputs if not declared.is_widget}
]


@pytest.mark.parametrize(("node", "name"), PASSES)
def test_bypassed_node_joins_output_to_input_of_same_name(node: Declaration, name: str):
    slot = [output.name for output in node.outputs].index(name)
    assert page_bypass(page_inputs(node), slot, node.outputs[slot].type) == name


def test_bypass_cases_include_pass_through_nodes():
    assert {value.values[0].id for value in PASSES} >= {"TPUSaveStage", "TPUFreeMemory", "Flux2ImageEncoder"}


def page_node(node_id: int, kind: str, inputs: dict[str, int | None], outputs: list[list[int]], **fields: Any) -> dict:
    """A node as the page saves it: links by input name, and by number of the output."""
    node = DECLARATIONS[kind]
    return {
        "id": node_id,
        "type": kind,
        "pos": [400 * node_id, 0],
        "inputs": [{"name": name, "type": node.input(name).type, "link": link} for name, link in inputs.items()],
        "outputs": [
            {"name": output.name, "type": output.type, "links": links}
            for output, links in zip(node.outputs, [*outputs, *[[]] * len(node.outputs)], strict=False)
        ],
        **fields,
    }


def saved_page(order: list[str]) -> dict[str, Any]:
    """A loader and an encoder, a bypassed TPU Save Stage whose sockets were saved in `order`, and a sampler."""
    saved = {"model": 5, "prompt_embeds": 1, "negative_prompt_embeds": 2}
    sockets = {name: saved.get(name) for name in order if not SAVE_STAGE.input(name).is_widget}
    slots = {link: slot for slot, link in enumerate(sockets.values())}
    prompts = {"prompt_embeds": 3, "negative_prompt_embeds": 4}
    return {
        "version": 0.4,
        "last_node_id": 9,
        "last_link_id": 5,
        "nodes": [
            page_node(9, "TPUModelLoader", {}, [[5]], widgets_values=["tiny/wan21", "Wan21"]),
            page_node(1, "Wan21TextEncoder", {}, [[1], [2]], widgets_values=["cat", "dog", "tiny/wan21"]),
            page_node(2, "TPUSaveStage", sockets, [[3], [4]], widgets_values=["here"], mode=BYPASSED),
            page_node(3, "Wan21TPUSampler", prompts, [], widgets_values=[80, 112, 5, 2, 5, 7, "fixed", "tiny/wan21"]),
        ],
        "links": [
            [5, 9, 0, 2, slots[5], "TPU_MODEL"],
            *([link, 1, link - 1, 2, slots[link], "CONDITIONING"] for link in (1, 2)),
            *([link, 2, link - 3, 3, link - 3, "CONDITIONING"] for link in (3, 4)),
        ],
    }


OLD_ORDER = ["folder", "model", "prompt_embeds", "negative_prompt_embeds", "latents", "condition"]
NEW_ORDER = [name for name, _ in page_inputs(SAVE_STAGE)]


@pytest.mark.parametrize("order", [OLD_ORDER, NEW_ORDER], ids=["saved before", "saved now"])
def test_bypassed_save_stage_passes_prompts_to_matching_inputs(order: list[str]):
    """The page reorders what was saved by the declaration: so older workflows are bypassed right too."""
    inputs = to_api(saved_page(order), HEADLESS_NODES)["3"]["inputs"]
    assert (inputs["prompt_embeds"], inputs["negative_prompt_embeds"]) == (["1", 0], ["1", 1])


def test_active_save_stage_of_older_page_keeps_named_inputs():
    document = saved_page(OLD_ORDER)
    (node,) = (node for node in document["nodes"] if node["type"] == "TPUSaveStage")
    node["mode"] = 0
    assert to_api(document, HEADLESS_NODES)["2"]["inputs"] == {
        "folder": "here", "model": ["9", 0], "prompt_embeds": ["1", 0], "negative_prompt_embeds": ["1", 1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "output", "given", "wanted", "expected"),
    [
        (["A", "B", "A"], 2, "A", "A", 2),  # same number first
        (["A", "B", "A"], 1, "A", "A", 0),  # then exactly the type
        (["*", "A"], 1, "B", "B", 0),  # then any that links
        (["A,B", "C"], 0, "B", "B", 0),
        (["A", "B"], 1, "C", "*", 1),  # to an input that takes anything: the same number, whatever it is
        (["A"], 1, "C", "*", 0),
        (["A"], 0, "B", "B", None),
        ([], 0, "B", "*", None),
    ],
)
def test_find_bypass_input_follows_page_rule(
    inputs: list[str], output: int, given: str, wanted: str, expected: int | None
):
    assert find_bypass_input(inputs, output, given, wanted) == expected


def test_bypassed_nodes_in_cycle_raise_value_error():
    document = saved_page(NEW_ORDER)
    document["links"] = [[link, 2 if link in (1, 2) else origin, *rest] for link, origin, *rest in document["links"]]
    with pytest.raises(ValueError, match="bypassed nodes or reroutes are linked in a circle"):
        to_api(document, HEADLESS_NODES)


def test_bypassed_foreign_node_follows_saved_input_order():
    """Of a node that is not ours the page's saved order is all there is."""
    document = saved_page(NEW_ORDER)
    (node,) = (node for node in document["nodes"] if node["type"] == "TPUSaveStage")
    node["type"] = "SomeoneElses"
    inputs = to_api(document, HEADLESS_NODES)["3"]["inputs"]
    assert (inputs["prompt_embeds"], inputs["negative_prompt_embeds"]) == (["1", 0], ["1", 1])
