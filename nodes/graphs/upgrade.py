"""Upgrades of workflows: nodes of the separate TPU packs, which have the same ids, become today's nodes.

Both the page's form of a workflow (`nodes`, `links`) and the API's are accepted. `_OLD` describes where a separate
pack's node differs from today's; all else is looked up in the declarations by name.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ...tpu_runtime.messages import compose, compose_list, compose_term
from ..declare import VALUE_TYPES, Declaration, Input, Json, Value, Values

Document: TypeAlias = dict[str, Json]
Table: TypeAlias = Mapping[str, Declaration]


@dataclass(frozen=True, kw_only=True)
class LegacyNode:
    """A separate pack's node."""

    widgets: tuple[str, ...]  # in the order of saved values
    sockets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # today's names of renamed sockets
    added: Values = field(default_factory=dict)  # values of new widgets that keep the old behaviour; else the defaults
    outputs: tuple[str, ...]  # today's names; "" for an output that no longer exists


_PROMPTS = ("prompt", "negative_prompt", "model_id")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
_VIDEO = ("height", "width", "num_frames")
_STEPS = ("num_inference_steps", "guidance_scale", "seed")
_FRAMES = ("frames", "fps")
# yangwhale/gpu-tpu-pedia, `tpu/ComfyUI/custom_nodes/*/nodes.py`.
_OLD = {
    "Flux2TextEncoder": LegacyNode(widgets=("prompt", "model_id"), outputs=_EMBEDS[:1]),
    "Flux2TPUSampler": LegacyNode(widgets=("height", "width", *_STEPS, "model_id"), outputs=("latents",)),
    "Flux2TPUVAEDecoder": LegacyNode(widgets=("height", "width", "model_id"), outputs=("image",)),
    "Flux2TPUPipeline": LegacyNode(widgets=("prompt", "height", "width", *_STEPS, "model_id"), outputs=("image",)),
    # One socket carried both encoded prompts.
    "CogVideoXTextEncoder": LegacyNode(widgets=_PROMPTS, outputs=_EMBEDS[:1]),
    "CogVideoXTPUSampler": LegacyNode(
        widgets=(*_VIDEO, *_STEPS), sockets={"embeddings": _EMBEDS}, outputs=("latents", "")
    ),
    "CogVideoXTPUVAEDecoder": LegacyNode(widgets=("fps",), outputs=_FRAMES),
    "Wan21TextEncoder": LegacyNode(widgets=_PROMPTS, outputs=_EMBEDS),
    "Wan21TPUSampler": LegacyNode(
        widgets=(*_VIDEO, *_STEPS, "model_id", "flow_shift"), outputs=("latents", "num_frames")
    ),
    "Wan21TPUVAEDecoder": LegacyNode(widgets=("model_id", "fps"), outputs=_FRAMES),
    "Wan21TPUPipeline": LegacyNode(
        widgets=("prompt", "negative_prompt", *_VIDEO, *_STEPS, "model_id", "fps", "flow_shift"), outputs=_FRAMES
    ),
    "Wan22I2VTextEncoder": LegacyNode(widgets=_PROMPTS, outputs=_EMBEDS),
    "Wan22I2VImageEncoder": LegacyNode(widgets=(*_VIDEO, "model_id"), outputs=("condition", "")),
    # The encoded image now holds the video's size.
    "Wan22I2VTPUSampler": LegacyNode(
        widgets=("num_inference_steps", "guidance_scale", "shift", "seed", "model_id"),
        sockets={"latent_info": ()},
        added={"guidance_scale_2": 0.0},  # both experts shared one
        outputs=("latents", "num_frames"),
    ),
    "Wan22I2VTPUVAEDecoder": LegacyNode(widgets=("model_id", "fps"), outputs=_FRAMES),
}  # fmt: skip
# Types of sockets that today's nodes do not have.
_OLD_TYPES = frozenset({"TENSOR", "COGVIDEOX_EMBEDS", "COGVIDEOX_LATENTS", "CONDITION", "LATENT_INFO"})
# Values of the page's widget after a seed. The first is used where the file has none, so that the seed stays.
_CONTROLS = ("fixed", "increment", "decrement", "randomize")
_HEADLINE = compose("workflow.upgraded")


def upgrade_workflow(document: Json, table: Table) -> tuple[Json, list[str]]:
    """Return a workflow with today's nodes, and a sentence for each change.

    table: today's declarations by id.
    Any other document is returned unchanged, without sentences: its reader reports errors. Raises ValueError for one
    that is nested too deeply.
    """
    try:
        return _upgrade(document, table)
    except RecursionError:
        raise ValueError(compose("workflow.too_deep")) from None


def _upgrade(document: Json, table: Table) -> tuple[Json, list[str]]:
    if isinstance(document, dict) and isinstance(document.get("nodes"), list):
        copied = copy.deepcopy(document)
        graphs = [_Graph(graph, table) for graph in list_graphs(copied)]
        if not any(graph.is_old() for graph in graphs):
            return document, []
        changes = [change for graph in graphs for change in graph.upgrade()]
        return copied, [_HEADLINE, *changes]
    if isinstance(document, dict) and any(_is_old_in_api(node, table) for node in document.values()):
        copied = copy.deepcopy(document)
        return copied, [_HEADLINE, *_upgrade_api(copied, table)]
    return document, []


def list_graphs(document: Document) -> Iterator[Document]:
    """Yield the workflow and its subgraphs."""
    yield document
    definitions = document.get("definitions")
    subgraphs = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    for graph in subgraphs if isinstance(subgraphs, list) else ():
        if isinstance(graph, dict):
            yield graph


def list_dicts(values: Json) -> list[Document]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _label(node: Mapping[str, Json]) -> str:
    return f"{node['type']} (node {node.get('id')})"


# --- the page's form --------------------------------------------------------------------------------------------------


class _Graph:
    """A graph in the page's form, changed in place.

    A link is `[id, origin, slot, target, slot, type]`, or in subgraphs an object with these.
    """

    def __init__(self, graph: Document, table: Table) -> None:
        self._graph, self._table = graph, table
        self._nodes = {
            node.get("id"): node
            for node in list_dicts(graph.get("nodes"))
            if isinstance(node.get("type"), str) and isinstance(node.get("id"), int | str)
        }
        links = graph.get("links")
        read = [_Wire.read(raw) for raw in links] if isinstance(links, list) else []
        self._links = {link.id: link for link in read if link is not None}
        self._last = max((key for key in self._links if isinstance(key, int)), default=0)
        # Indexes for lookups: a file may have many nodes and links.
        self._sockets: dict[int | str, list[Document]] = {}
        for node in self._nodes.values():
            for socket in list_dicts(node.get("inputs")):
                if self._is_linked(socket):
                    self._sockets.setdefault(socket["link"], []).append(socket)
        self._origins: dict[int | str, int | str] = {}

    def is_old(self) -> bool:
        return any(self._is_old(node) for node in self._ours())

    def _ours(self) -> list[Document]:
        return [node for node in self._nodes.values() if node["type"] in _OLD and node["type"] in self._table]

    def _is_old(self, node: Mapping[str, Json]) -> bool:
        """Return whether a socket does not exist on today's node, or saved values do not match today's widgets."""
        sockets = [*list_dicts(node.get("inputs")), *list_dicts(node.get("outputs"))]
        if any(str(socket.get("type")) in _OLD_TYPES for socket in sockets):
            return True
        values, declared = node.get("widgets_values"), self._table[node["type"]]
        if not isinstance(values, list) or len(values) not in _lengths(_OLD[node["type"]]):
            return False
        pairs = zip(_widgets(declared), values, strict=False)
        return not all(_is_typed(widget, value) if widget else value in _CONTROLS for widget, value in pairs)

    def upgrade(self) -> list[str]:
        """Upgrade all nodes of the separate packs; return the changes of each as a sentence."""
        changes = []
        for node in self._ours():
            notes = [*self._upgrade_widgets(node), *self._upgrade_inputs(node)]
            changes += [_describe(_label(node), notes)] if notes else []
        leaving: dict[int | str, list[_Wire]] = {}
        for link in self._links.values():  # once all inputs are final
            leaving.setdefault(link.origin, []).append(link)
        for node in self._ours():
            notes = list(self._upgrade_outputs(node, leaving.get(node["id"], [])))
            changes += [_describe(_label(node), notes)] if notes else []
        self._graph["links"] = [link.to_raw() for link in self._links.values()]
        return changes

    def _upgrade_widgets(self, node: Document) -> Iterator[str]:
        declared, old = self._table[node["type"]], _OLD[node["type"]]
        values, left = _name_values(old, node.get("widgets_values"))
        today = {widget.name: widget for widget in declared.inputs if widget.is_widget}
        for name in [name for name in values if name and name not in today]:
            yield compose("workflow.value_left_out", input_name=name, value=repr(values.pop(name)))
        if left:
            yield compose("workflow.values_left_out", left=", ".join(map(repr, left)))
        values = {**old.added, **values}
        written: list[Json] = []
        for widget in today.values():
            written.append(values.get(widget.name, widget.default))
            if widget.companion:
                written.append(values.get("", _CONTROLS[0]))
        node["widgets_values"] = written

    def _upgrade_inputs(self, node: Document) -> Iterator[str]:
        """Put sockets into today's order. A link to a renamed socket moves to it, or to several."""
        declared, old = self._table[node["type"]], _OLD[node["type"]]
        saved = {str(socket.get("name")): socket for socket in list_dicts(node.get("inputs"))}
        linked = {name: self._links[socket["link"]] for name, socket in saved.items() if self._is_linked(socket)}
        for name, targets in old.sockets.items():
            if name in saved:
                yield (
                    compose("workflow.input_renamed", name=name, targets=_names(targets))
                    if targets
                    else compose("workflow.input_not_needed", name=name)
                )
            if (link := linked.pop(name, None)) is None:
                continue
            for offset, target in enumerate(targets):
                linked[target] = link if offset == 0 else self._add_link(link, offset)
            if not targets:
                self._remove(link)
        names = {declared_input.name for declared_input in declared.inputs}
        for name in [name for name in linked if name not in names]:
            self._remove(linked.pop(name))
            yield compose("workflow.input_link_left_out", name=name)
        order = [entry for entry in declared.page_order() if not entry.is_widget or entry.name in saved]
        node["inputs"] = []
        for slot, entry in enumerate(order):
            link = linked.get(entry.name)
            if link is not None:
                link.target, link.target_slot, link.type = node["id"], slot, entry.type
            widget = {"widget": {"name": entry.name}} if entry.is_widget else {}
            node["inputs"].append({"name": entry.name, "type": entry.type, "link": link and link.id, **widget})

    def _is_linked(self, socket: Mapping[str, Json]) -> bool:
        link = socket.get("link")
        return isinstance(link, int | str) and link in self._links

    def _upgrade_outputs(self, node: Document, leaving: "list[_Wire]") -> Iterator[str]:
        """Write today's outputs, each with those of the links `leaving` that the old output of its name had."""
        declared, old = self._table[node["type"]], _OLD[node["type"]]
        today = {output.name: slot for slot, output in enumerate(declared.outputs)}
        link_ids: list[list[int | str]] = [[] for _ in declared.outputs]
        for link in leaving:
            names = tuple(today) if link.is_new else old.outputs
            name = dict(enumerate(names)).get(link.origin_slot, "")  # type: ignore[arg-type]
            if name in today:
                link.origin_slot = today[name]
                link_ids[today[name]].append(link.id)
            else:
                self._remove(link)
                yield compose("workflow.output_link_left_out", origin_slot=link.origin_slot)
        node["outputs"] = [
            {"name": output.name, "type": output.type, "links": ids or None}
            for output, ids in zip(declared.outputs, link_ids, strict=True)
        ]

    def _add_link(self, first: "_Wire", offset: int) -> "_Wire":
        """Add a link from the node where `first` comes from, through nodes that only pass it on."""
        self._last += 1
        added = replace(first, id=self._last, origin=self._origin(first), origin_slot=offset, is_new=True)
        self._links[self._last] = added
        if isinstance(self._graph.get("last_link_id"), int):
            self._graph["last_link_id"] = max(self._last, self._graph["last_link_id"])
        if isinstance(state := self._graph.get("state"), dict):
            state["lastLinkId"] = self._last
        return added

    def _origin(self, link: "_Wire") -> int | str:
        """Return the node that a link comes from, through all reroutes; in a circle of them any of these."""
        passed = []
        while link.id not in self._origins:
            passed.append(link.id)
            self._origins[link.id] = link.origin
            node = self._nodes.get(link.origin, {})
            socket = next(iter(list_dicts(node.get("inputs"))), {})
            if node.get("type") != "Reroute" or not self._is_linked(socket):
                break
            link = self._links[socket["link"]]
        origin = self._origins[link.id]
        self._origins.update(dict.fromkeys(passed, origin))
        return origin

    def _remove(self, link: "_Wire") -> None:
        self._links.pop(link.id, None)
        for socket in self._sockets.get(link.id, ()):
            socket["link"] = None


_FIELDS = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")


@dataclass
class _Wire:
    """A link from an output to an input."""

    raw: Json  # the file's own form
    id: int | str
    origin: int | str
    origin_slot: int | str
    target: int | str
    target_slot: int | str
    type: Json
    is_new: bool = False

    @classmethod
    def read(cls, raw: Json) -> "_Wire | None":
        """Return a link from the file's form; None if it is not valid."""
        parts: Json = [raw.get(name) for name in _FIELDS] if isinstance(raw, dict) else raw
        if not isinstance(parts, list) or len(parts) != len(_FIELDS):
            return None
        return cls(raw, *parts) if all(isinstance(entry, int | str) for entry in parts[:5]) else None

    def to_raw(self) -> Json:
        parts = [self.id, self.origin, self.origin_slot, self.target, self.target_slot, self.type]
        return {**self.raw, **dict(zip(_FIELDS, parts, strict=True))} if isinstance(self.raw, dict) else parts


def _widgets(declared: Declaration) -> list[Input | None]:
    """Return the widget of each saved value; None for a value that the page adds."""
    widgets: list[Input | None] = []
    for widget in declared.inputs:
        if widget.is_widget:
            widgets += [widget, None] if widget.companion else [widget]
    return widgets


def _lengths(old: LegacyNode) -> tuple[int, int]:
    """Return how many values the old node saved, without and with the page's own."""
    return len(old.widgets), len(old.widgets) + ("seed" in old.widgets)


def _is_typed(declared: Input, value: Value) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number if declared.type in ("INT", "FLOAT") else isinstance(value, VALUE_TYPES[declared.type])


def _name_values(old: LegacyNode, values: Json) -> tuple[dict[str, Json], list[Json]]:
    """Return saved values by name, and the values that are left over.

    The value that the page adds after a seed has the name "".
    """
    if isinstance(values, dict):
        return {name: values[name] for name in old.widgets if name in values}, []
    left = list(values) if isinstance(values, list) else []
    named: dict[str, Json] = {}
    for name in old.widgets:
        if not left:
            break
        named[name] = left.pop(0)
        if name == "seed" and left and left[0] in _CONTROLS:
            named[""] = left.pop(0)
    return named, left


# --- the API's form ---------------------------------------------------------------------------------------------------


def _is_old_in_api(node: Json, table: Table) -> bool:
    """Return whether the node has an input that only the old node had."""
    return bool(_list_removed_inputs(node, table))


def _list_removed_inputs(node: Json, table: Table) -> list[str]:
    inputs = node.get("inputs") if isinstance(node, dict) else None
    kind = node.get("class_type") if isinstance(node, dict) else None
    if not isinstance(inputs, dict) or not isinstance(kind, str) or kind not in _OLD or kind not in table:
        return []
    names = {declared.name for declared in table[kind].inputs}
    return [name for name in inputs if name not in names and name in (*_OLD[kind].widgets, *_OLD[kind].sockets)]


def _describe(label: str, notes: Iterable[str]) -> str:
    return compose("workflow.changes", label=label, notes=compose_list(notes, "semicolon"))


def _names(targets: Iterable[str]) -> str:
    return compose_list((compose_term("input", target) for target in targets), "and")


def _upgrade_api(workflow: Document, table: Table) -> Iterator[str]:
    for node_id, node in workflow.items():
        notes = []
        for name in _list_removed_inputs(node, table):
            value, targets = node["inputs"].pop(name), _OLD[node["class_type"]].sockets.get(name, ())
            is_link = isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)
            if is_link:
                for offset, target in enumerate(targets):
                    node["inputs"].setdefault(target, [value[0], value[1] + offset])
            notes.append(
                compose("workflow.input_renamed", name=name, targets=_names(targets))
                if targets
                else compose("workflow.input_left_out", name=name)
            )
        if notes:
            node["inputs"] = {**_OLD[node["class_type"]].added, **node["inputs"]}
            yield compose(
                "workflow.changes_of_node", class_type=node["class_type"], node_id=node_id,
                notes=compose_list(notes, "semicolon"),
            )  # fmt: skip
