"""Workflow files: the page's own format (UI) into the format that runs (API), and checks of the latter.

API format: `{node id: {"class_type": ..., "inputs": {name: value or [node id, output index]}}}`. In it the page has
unpacked subgraphs; those of its own format are not supported.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..declare import Declaration, Input
from ..graphs.graph import Table, Workflow, declaration_of, is_link, node_label
from ..graphs.upgrade import upgraded
from .structure import api_nodes, page_links, page_nodes, page_subgraphs

log = logging.getLogger(__name__)

PAGE_ONLY = frozenset({"Note", "MarkdownNote", "Reroute", "PrimitiveNode"})
_MUTED, _BYPASSED = 2, 4
# The page's name of a subgraph's kind.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def to_api(document: Any, table: Table) -> Workflow:
    """A workflow file's content in API format; ValueError says why a document is not a workflow that can run. One that
    the separate packs saved has today's nodes then, and the log says what was changed.
    """
    document, changes = upgraded(document, table)
    if changes:
        for change in changes:
            log.warning("%s", change)
    if isinstance(document, dict) and "nodes" in document and "links" in document:
        return _Page(document, table).to_api()
    if isinstance(document, dict) and document and all(_is_api_node(node) for node in document.values()):
        return api_nodes(document)
    raise ValueError("This is not a ComfyUI workflow: it has neither `nodes` and `links` nor nodes with a class_type.")


def _is_api_node(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str)


class _Page:
    """A document in the page's format."""

    def __init__(self, document: Mapping[str, Any], table: Table):
        self._nodes = page_nodes(document)
        self._links = page_links(document)
        self._table = table
        self._subgraphs = page_subgraphs(document)

    def to_api(self) -> Workflow:
        workflow = {}
        for node_id, node in self._nodes.items():
            if node["type"] in PAGE_ONLY or node.get("mode") in (_MUTED, _BYPASSED):
                continue
            try:
                inputs = self._widgets(node_id, node) | self._linked(node)
            except RecursionError:
                raise ValueError("The workflow's bypassed nodes or reroutes are linked in a circle.") from None
            workflow[node_id] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": _title(node)}}
        return workflow

    def _widgets(self, node_id: str, node: Mapping[str, Any]) -> dict[str, Any]:
        """The node's own values by name. The page stores them by position; too few is an older version of the node."""
        self._check_is_none(node_id, node["type"])
        declaration = declaration_of(self._table, node_id, node["type"])
        values = node.get("widgets_values") or []
        if isinstance(values, dict):
            return {i.name: values[i.name] for i in declaration.inputs if i.is_widget and i.name in values}
        names = []
        for declared in declaration.inputs:
            if declared.is_widget:
                names += [declared.name] + ([""] if declared.companion else [])
        return {name: value for name, value in zip(names, values, strict=False) if name}

    def _check_is_none(self, node_id: str, kind: str) -> None:
        """Raises ValueError for a subgraph, whose type is an id that no user knows."""
        if kind in self._table or (kind not in self._subgraphs and not _UUID.fullmatch(kind)):
            return
        name, inner = self._subgraphs.get(kind, ("", []))
        for one in inner:
            if one not in PAGE_ONLY and one not in self._subgraphs:
                # Raises for a node that runs in ComfyUI alone, however the workflow is saved.
                declaration_of(self._table, f"{node_id} (in the subgraph {name!r})", one)
        which = f"the subgraph {name!r}" if name else "a subgraph that the file does not hold"
        raise ValueError(
            f"Node {node_id} is {which}; a workflow that runs without ComfyUI's page has its nodes outside of "
            "subgraphs. Open it in the page and choose Unpack Subgraph on that node, or save it with Export (API), and "
            "run that file."
        )

    def _linked(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """The node's links by input name; a PrimitiveNode's value takes the link's place."""
        found = {}
        for socket in node.get("inputs", []):
            if socket.get("link") is not None:
                source = self._source(socket["link"], self._type(node, socket))
                if source is not None:
                    found[socket["name"]] = source
        return found

    def _type(self, node: Mapping[str, Any], socket: Mapping[str, Any]) -> str:
        """A socket's type: as the node is declared now, else as the page saved it."""
        declaration = self._table.get(node["type"])
        types = {declared.name: declared.type for declared in declaration.inputs} if declaration else {}
        return str(types.get(socket["name"], socket.get("type", "*")))

    def _source(self, link_id: int, wanted: str) -> Any:
        """What a link delivers to an input of type `wanted`: `[node id, output]`, a constant, or None when it comes
        from a muted node.
        """
        if link_id not in self._links:
            raise ValueError(f"The workflow names link {link_id}, which it does not have.")
        origin, output = self._links[link_id]
        if origin not in self._nodes:
            raise ValueError(f"The workflow's link {link_id} comes from node {origin}, which it does not have.")
        node = self._nodes[origin]
        if node["type"] == "PrimitiveNode":
            values = node.get("widgets_values")
            if not isinstance(values, list) or not values:
                raise ValueError(f"Node {origin}, a PrimitiveNode, has no value. Open the workflow and give it one.")
            return values[0]
        if node["type"] == "Reroute":
            return self._delivered(node.get("inputs", [])[:1], wanted)
        if node.get("mode") == _MUTED:
            return None
        if node.get("mode") == _BYPASSED:
            sockets = self._sockets(node)
            types = [self._type(node, socket) for socket in sockets]
            if not 0 <= output < len(node["outputs"]):
                raise ValueError(
                    f"The workflow's link {link_id} is of output {output} of node {origin}, which has none."
                )
            index = bypass_index(types, output, str(node["outputs"][output].get("type")), wanted)
            return None if index is None else self._delivered([sockets[index]], types[index])
        return [origin, output]

    def _sockets(self, node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """A node's inputs as the page has them: in the order of the declaration, what it does not know after it."""
        saved = {socket["name"]: socket for socket in node.get("inputs", [])}
        declaration = self._table.get(node["type"])
        names = [declared.name for declared in declaration.page_order()] if declaration else []
        return [saved.pop(name, {"name": name}) for name in names] + list(saved.values())

    def _delivered(self, sockets: Sequence[Mapping[str, Any]], wanted: str) -> Any:
        """What comes in at the first of `sockets`; None without one, or without a link."""
        link = sockets[0].get("link") if sockets else None
        return None if link is None else self._source(link, wanted)


def bypass_index(inputs: Sequence[str], output: int, given: str, wanted: str) -> int | None:
    """Which input stands in for an output of a bypassed node, as ComfyUI's page chooses it; None if none does.

    `inputs` are the types of the node's inputs in the page's order, `given` that of the output, `wanted` that of the
    input at the link's end. The input of the same number goes first, then one of exactly the wanted type.
    """

    def fits(kind: str) -> bool:
        return _connects(kind, given) and _connects(kind, wanted)

    if wanted in ("*", ""):
        return output if output < len(inputs) else 0 if inputs else None
    if output < len(inputs) and fits(inputs[output]):
        return output
    if wanted in inputs:
        return inputs.index(wanted)
    return next((index for index, kind in enumerate(inputs) if fits(kind)), None)


def _connects(one: str, other: str) -> bool:
    """Whether the page links sockets of these types; a type may list several, and `*` is any."""
    kinds, others = ({kind.lower() for kind in types.split(",")} for types in (one, other))
    return bool(kinds & others) or not {"", "*"}.isdisjoint(kinds | others)


def _title(node: Mapping[str, Any]) -> str:
    return node.get("title") or node.get("properties", {}).get("Node name for S&R") or node["type"]


def validate_workflow(workflow: Workflow, table: Table) -> list[str]:
    """Everything wrong with an API-format workflow, one sentence each; no model is looked at."""
    problems = []
    for node_id, node in workflow.items():
        try:
            declaration = declaration_of(table, node_id, node["class_type"])
        except ValueError as error:
            problems.append(str(error))
            continue
        label = node_label(node_id, node)
        problems += [f"{label}: {problem}" for problem in _node_problems(workflow, node, declaration, table)]
    return problems


def _node_problems(workflow: Workflow, node: Mapping[str, Any], declaration: Declaration, table: Table) -> list[str]:
    problems = []
    known = {declared.name: declared for declared in declaration.inputs}
    # The page writes the parts of a composite widget as `format.codec`.
    for name in node["inputs"]:
        if name.partition(".")[0] not in known:
            problems.append(f"it has no input {name}; its inputs are {', '.join(known)}.")
    for name, declared in known.items():
        value = node["inputs"].get(name)
        if value is None and not declared.optional:
            problems.append(f"{name} is missing.")
        elif is_link(value):
            problems += _link_problems(workflow, declared, value, table)
        elif value is not None and not declared.is_widget:
            problems.append(f"{name} is {value!r}; it must be a link to a node that gives {declared.type}.")
        elif value is not None:
            try:
                declared.parse(value)
            except ValueError as error:
                problems.append(str(error))
    return problems


def _link_problems(workflow: Workflow, declared: Input, link: list, table: Table) -> list[str]:
    source = workflow.get(link[0])
    if source is None:
        return [f"{declared.name} is linked to node {link[0]}, which does not exist."]
    if source["class_type"] not in table:
        return []
    outputs = table[source["class_type"]].outputs
    label = node_label(link[0], source)
    if not 0 <= link[1] < len(outputs):
        return [f"{declared.name} is linked to output {link[1]} of {label}, which has {len(outputs)}."]
    given = outputs[link[1]].type
    # COMBO takes any text, as in ComfyUI.
    if given != declared.type and not (given == "STRING" and declared.type == "COMBO"):
        return [f"{declared.name} takes {declared.type}; {label} gives {given} there."]
    return []
