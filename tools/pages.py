"""Convert a workflow from API format to the format that ComfyUI's page saves: sockets, widgets by position, a layout.

Nodes are in columns from left to right, in the order of the stages. A link to the next column stays in the gap between
them. A longer link passes above the columns in between, which are placed lower. `behind` checks this geometrically.
"""

import itertools
import math
import tomllib
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Declaration
from comfyui_tpu.nodes.graphs.graph import Workflow, is_link
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.model import build_catalogue
from graphs import Graph

Document = dict[str, Any]
Box = tuple[float, float, float, float]  # left, top, right, bottom; the title is above the top
Point = tuple[float, float]

# The pack's version, which the page stores with each node.
VERSION = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]["version"]
# Sizes of LiteGraph, in pixels.
TITLE, SLOT, WIDGET, MARGIN = 30, 20, 24, 16
GAP, LANE, TEXT = 60, 40, 130
# Distance to the next node below: a Vue node has one more row, and a button for advanced inputs.
BELOW = 100
WIDTHS = {"Encoder": 320, "Pipeline": 380, "CreateVideo": 212, "SaveVideo": 280, "SaveImage": 320}
WIDTH = 310
# Height of an image below the widgets.
SHOWN = {"LoadImage": 220}
# Assumed width of the screen.
VIEW = 1500
# Bottom of a column below which a note fits, and the top from which on a note would be too low.
LOW, HIGH = 150, 600
# Nodes with the user's choices are coloured: model, prompt and image.
COLOURS = {"Loader": ("#323", "#535"), "TextEncoder": ("#232", "#353"), "LoadImage": ("#223", "#335")}
NOTE = {"type": "MarkdownNote", "title": "How to use this", "color": "#432", "bgcolor": "#321"}


def page(name: str, graph: Graph, note: str) -> Document:
    """Return the document of a graph.

    note: Markdown; it is placed below the first columns.
    The page offers to download missing files.
    """
    workflow, columns, models = graph.workflow, graph.columns, graph.files
    boxes = _places(workflow, columns, graph.raised)
    links = [
        [number, int(source[0]), source[1], int(target), _slots(workflow[target]).index(socket),
         HEADLESS_NODES[workflow[source[0]]["class_type"]].outputs[source[1]].type]
        for number, (source, target, socket) in enumerate(_links(workflow), 1)
    ]  # fmt: skip
    nodes = [_note(max(map(int, workflow)) + 1, note, boxes, columns)]
    for order, (node_id, node) in enumerate(workflow.items(), 1):
        nodes.append(_node(int(node_id), node, boxes[node_id], links))
        nodes[-1]["order"] = order
        if node_id in models:
            nodes[-1]["properties"]["models"] = models[node_id]
    left, right = min(node["pos"][0] for node in nodes), max(box[2] for box in boxes.values())
    scale = round(min(0.8, VIEW / (right - left)), 2)
    document = {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"comfyui-tpu/examples/{name}")),
        "revision": 0,
        "last_node_id": nodes[0]["id"],
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {"ds": {"scale": scale, "offset": [80 - left, 140]}},
        "version": 0.4,
    }
    assert not behind(document), f"{name}: links run behind nodes: {behind(document)}"
    return document


def _node(node_id: int, node: Mapping[str, Any], box: Box, links: Sequence[Sequence[Any]]) -> Document:
    kind = node["class_type"]
    declaration, is_ours = HEADLESS_NODES[kind], kind in DECLARATIONS
    coming = {slot: number for number, _, _, target, slot, _ in links if target == node_id}
    inputs = []
    for slot, name in enumerate(_slots(node)):
        declared = declaration.input(name)
        entry: Document = {"name": name, "type": declared.type, "link": coming.get(slot)}
        if declared.is_widget:
            entry["widget"] = {"name": name}
        elif declared.is_listed_optional:
            entry["shape"] = 7
        inputs.append(entry)
    outputs = []
    for slot, output in enumerate(declaration.outputs):
        going = [number for number, origin, index, *_ in links if (origin, index) == (node_id, slot)]
        outputs.append({"name": output.name, "type": output.type, "links": going or None})
    colours = next((found for end, found in COLOURS.items() if kind.endswith(end)), ())
    return {
        "id": node_id,
        "type": kind,
        "pos": list(box[:2]),
        "size": [box[2] - box[0], box[3] - box[1]],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {
            "cnr_id": "comfyui-tpu" if is_ours else "comfy-core",
            "ver": VERSION if is_ours else "0.33.0",
            "Node name for S&R": kind,
        },
        "widgets_values": _widget_values(declaration, node["inputs"]),
        **dict(zip(("color", "bgcolor"), colours, strict=False)),
    }


def _widget_values(declaration: Declaration, inputs: Mapping[str, Any]) -> list[Any]:
    """Return values by position. A seed is followed by its action after a run, an image by its upload button."""
    values = []
    for declared in declaration.inputs:
        if declared.is_widget:
            value = inputs.get(declared.name, declared.default)
            values.append(declared.default if is_link(value) else value)
            values += {"": [], "upload": ["image"]}.get(declared.companion, ["randomize"])
    return values


def _slots(node: Mapping[str, Any]) -> list[str]:
    """Return the names of a node's input sockets from the top: the declared ones, then linked widgets."""
    named = [declared.name for declared in HEADLESS_NODES[node["class_type"]].page_order() if not declared.is_widget]
    return named + [name for name, value in node["inputs"].items() if is_link(value) and name not in named]


def _links(workflow: Workflow) -> Iterator[tuple[list, str, str]]:
    """Yield the source, the target node and its socket of every link."""
    for node_id, node in workflow.items():
        yield from ((node["inputs"][name], node_id, name) for name in _slots(node) if is_link(node["inputs"].get(name)))


# --- layout -----------------------------------------------------------------------------------------------------------


def _places(workflow: Workflow, columns: Sequence[Sequence[str]], raised: Collection[str]) -> dict[str, Box]:
    """Return the box of every node.

    The last column is placed first, because links to it determine how low the others are. Nodes in `raised` are above
    all links.
    """
    sizes = {node_id: _size(node["class_type"], _hidden(node, workflow)) for node_id, node in workflow.items()}
    column_of = {node_id: index for index, column in enumerate(columns) for node_id in column}
    widths = [max(sizes[node_id][0] for node_id in column) for column in columns]
    boxes: dict[str, Box] = {}
    for index in reversed(range(len(columns))):
        left, top = sum(widths[:index]) + GAP * index, 0
        for source, target, socket in _links(workflow):
            if column_of[source[0]] < index < column_of[target]:
                top = max(top, boxes[target][1] + SLOT * (_slots(workflow[target]).index(socket) + 1) + LANE + TITLE)
        for node_id in columns[index]:
            height = sizes[node_id][1]
            start = -height - 2 * TITLE - LANE if node_id in raised else top
            boxes[node_id] = (left, start, left + widths[index], start + height)
            top += 0 if node_id in raised else height + BELOW
    return boxes


def _hidden(node: Mapping[str, Any], workflow: Workflow) -> Collection[str]:
    """Return the widgets that the page hides.

    These are advanced ones at their defaults, those that a connected model replaces, and those that it does not use.
    """
    given = node["inputs"]
    advanced = (one for one in HEADLESS_NODES[node["class_type"]].inputs if one.advanced)
    hidden = [one.name for one in advanced if given.get(one.name, one.default) == one.default]
    if "model" not in given:
        return hidden
    source = node
    while is_link(source["inputs"].get("model")):
        source = workflow[source["inputs"]["model"][0]]
    return (*hidden, "model_id", "precision", *build_catalogue()[source["inputs"]["model_id"]]["unused"])


def _size(kind: str, hidden: Collection[str]) -> tuple[int, int]:
    """Return width and height without `hidden` widgets, at least as large as LiteGraph computes them."""
    declaration = HEADLESS_NODES[kind]
    widgets = [declared for declared in declaration.inputs if declared.is_widget and declared.name not in hidden]
    rows = sum(1 + bool(declared.companion) for declared in widgets if not declared.multiline)
    texts = sum(declared.multiline for declared in widgets)
    slots = max(sum(not declared.is_widget for declared in declaration.inputs), len(declaration.outputs))
    height = SLOT * slots + WIDGET * rows + TEXT * texts + MARGIN + SHOWN.get(kind, 0)
    width = next((found for end, found in WIDTHS.items() if kind.endswith(end) and "VAE" not in kind), WIDTH)
    return width, height


def _note(node_id: int, text: str, boxes: Mapping[str, Box], columns: Sequence[Sequence[str]]) -> Document:
    """Return the note's node: below the first columns if they are short, else to the left of the graph."""
    low = list(itertools.takewhile(lambda column: boxes[column[-1]][3] < LOW, columns[:3])) or columns[:1]
    left, right = 0.0, boxes[low[-1][0]][2]
    top = max(boxes[column[-1]][3] for column in low) + BELOW
    if top > HIGH:
        left, top, right = -WIDTH - GAP, 0.0, -GAP
    lines = sum(math.ceil(len(line) * 6 / (right - left - 50)) for line in text.splitlines() if line)
    return {
        "id": node_id,
        **NOTE,
        "pos": [left, top],
        "size": [right - left, 80 + 16 * lines],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "properties": {},
        "widgets_values": [text],
    }


# --- geometry ---------------------------------------------------------------------------------------------------------


def behind(document: Document) -> list[str]:
    """Return the links that pass behind a node, and the nodes that overlap, as LiteGraph draws them."""
    nodes = {node["id"]: node for node in document["nodes"]}
    outer = {key: _outer(node) for key, node in nodes.items()}
    problems = [f"{a} on {b}" for a, b in itertools.combinations(outer, 2) if _overlap(outer[a], outer[b])]
    for number, origin, output, target, slot, _ in document["links"]:
        start, end = nodes[origin], nodes[target]
        first = (start["pos"][0] + start["size"][0], start["pos"][1] + SLOT * (output + 0.7))
        last = (end["pos"][0], end["pos"][1] + SLOT * (slot + 0.7))
        for x, y in _curve(first, last):
            problems += [
                f"link {number} behind {key}"
                for key, (left, top, right, bottom) in outer.items()
                if left < x < right and top < y < bottom and key not in (origin, target)
            ]
    return sorted(set(problems))


def _outer(node: Document) -> Box:
    (left, top), (width, height) = node["pos"], node["size"]
    return (left, top - TITLE, left + width, top + height)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _curve(first: Point, last: Point) -> Iterator[Point]:
    """Yield points of the curve between two sockets: a Bezier curve with handles of a quarter of the distance."""
    reach = math.dist(first, last) / 4
    points = (first, (first[0] + reach, first[1]), (last[0] - reach, last[1]), last)
    for step in range(101):
        t = step / 100
        weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
        yield (
            sum(weight * x for weight, (x, _) in zip(weights, points, strict=True)),
            sum(weight * y for weight, (_, y) in zip(weights, points, strict=True)),
        )
