"""Converts workflow files from the page's own format (UI) to the format that runs (API), and validates the latter.

API format: `{node id: {"class_type": ..., "inputs": {name: value or [node id, output index]}}}`. The page unpacks
subgraphs into it; subgraphs in the page's own format are not supported.
"""

import logging
import re
from collections.abc import Mapping, Sequence

from ..declare import Declaration, Input, Json, Value
from ..graphs.graph import Table, Workflow, find_declaration, is_link, node_label
from ..graphs.upgrade import upgrade_workflow
from .schema import read_api_nodes, read_page_links, read_page_nodes, read_page_subgraphs

log = logging.getLogger(__name__)

FRONTEND_ONLY = frozenset({"Note", "MarkdownNote", "Reroute", "PrimitiveNode"})
_MUTED, _BYPASSED = 2, 4
# A subgraph's type on the page.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def to_api(document: Json, table: Table) -> Workflow:
    """Return a workflow file's content in API format.

    Nodes of the separate packs are upgraded to today's, and the log lists the changes. Raises ValueError if the
    document is not a workflow that can run.
    """
    document, changes = upgrade_workflow(document, table)
    if changes:
        for change in changes:
            log.warning("%s", change)
    if isinstance(document, dict) and "nodes" in document and "links" in document:
        return _Page(document, table).to_api()
    if isinstance(document, dict) and document and all(_is_api_node(node) for node in document.values()):
        return read_api_nodes(document)
    raise ValueError("This is not a ComfyUI workflow: it needs `nodes` and `links`, or nodes with a class_type.")


def _is_api_node(node: Json) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str)


class _Page:
    """A document in the page's format."""

    def __init__(self, document: Mapping[str, Json], table: Table):
        self._nodes = read_page_nodes(document)
        self._links = read_page_links(document)
        self._table = table
        self._subgraphs = read_page_subgraphs(document)

    def to_api(self) -> Workflow:
        workflow = {}
        for node_id, node in self._nodes.items():
            if node["type"] in FRONTEND_ONLY or node.get("mode") in (_MUTED, _BYPASSED):
                continue
            try:
                inputs = self._widgets(node_id, node) | self._read_links(node)
            except RecursionError:
                raise ValueError("The workflow's bypassed nodes or reroutes are linked in a circle.") from None
            workflow[node_id] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": _title(node)}}
        return workflow

    def _widgets(self, node_id: str, node: Mapping[str, Json]) -> dict[str, Value]:
        """Return the node's own values by name.

        The page stores them by position; an older version of the node has fewer.
        """
        self._check_no_subgraph(node_id, node["type"])
        declaration = find_declaration(self._table, node_id, node["type"])
        values = node.get("widgets_values") or []
        if isinstance(values, dict):
            return {i.name: values[i.name] for i in declaration.inputs if i.is_widget and i.name in values}
        names = []
        for declared in declaration.inputs:
            if declared.is_widget:
                names += [declared.name] + ([""] if declared.companion else [])
        return {name: value for name, value in zip(names, values, strict=False) if name}

    def _check_no_subgraph(self, node_id: str, kind: str) -> None:
        """Raise ValueError for a subgraph; its type is an id that users do not know."""
        if kind in self._table or (kind not in self._subgraphs and not _UUID.fullmatch(kind)):
            return
        name, inner = self._subgraphs.get(kind, ("", []))
        for node_type in inner:
            if node_type not in FRONTEND_ONLY and node_type not in self._subgraphs:
                # Raises for a node that only runs in ComfyUI, in whatever format the workflow is saved.
                find_declaration(self._table, f"{node_id} (in the subgraph {name!r})", node_type)
        which = f"the subgraph {name!r}" if name else "a subgraph that the file does not hold"
        raise ValueError(
            f"Node {node_id} is {which}; a workflow that runs without ComfyUI's page has its nodes outside of "
            "subgraphs. Open it in the page and choose Unpack Subgraph on that node, or save it with Export (API), and "
            "run that file."
        )

    def _read_links(self, node: Mapping[str, Json]) -> dict[str, Value]:
        """Return the node's links by input name; for a PrimitiveNode its value instead of a link."""
        links = {}
        for socket in node.get("inputs", []):
            if socket.get("link") is not None:
                source = self._source(socket["link"], self._type(node, socket))
                if source is not None:
                    links[socket["name"]] = source
        return links

    def _type(self, node: Mapping[str, Json], socket: Mapping[str, Json]) -> str:
        """Return a socket's type: as the node is declared now, else as the page saved it."""
        declaration = self._table.get(node["type"])
        types = {declared.name: declared.type for declared in declaration.inputs} if declaration else {}
        return str(types.get(socket["name"], socket.get("type", "*")))

    def _source(self, link_id: int, wanted: str) -> Value:
        """Return the value of a link to an input of type `wanted`.

        That is `[node id, output]`, a constant, or None if it comes from a muted node.
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
            return self._follow(node.get("inputs", [])[:1], wanted)
        if node.get("mode") == _MUTED:
            return None
        if node.get("mode") == _BYPASSED:
            sockets = self._sockets(node)
            types = [self._type(node, socket) for socket in sockets]
            if not 0 <= output < len(node["outputs"]):
                raise ValueError(
                    f"The workflow's link {link_id} is of output {output} of node {origin}, which has none."
                )
            index = find_bypass_input(types, output, str(node["outputs"][output].get("type")), wanted)
            return None if index is None else self._follow([sockets[index]], types[index])
        return [origin, output]

    def _sockets(self, node: Mapping[str, Json]) -> list[Mapping[str, Json]]:
        """Return a node's inputs in the page's order: that of the declaration, then unknown ones."""
        saved = {socket["name"]: socket for socket in node.get("inputs", [])}
        declaration = self._table.get(node["type"])
        names = [declared.name for declared in declaration.page_order()] if declaration else []
        return [saved.pop(name, {"name": name}) for name in names] + list(saved.values())

    def _follow(self, sockets: Sequence[Mapping[str, Json]], wanted: str) -> Value:
        """Return the value of the link at the first of `sockets`; None without a socket or a link."""
        link = sockets[0].get("link") if sockets else None
        return None if link is None else self._source(link, wanted)


def find_bypass_input(inputs: Sequence[str], output: int, given: str, wanted: str) -> int | None:
    """Return the index of the input that replaces an output of a bypassed node; None if no input fits.

    ComfyUI's page chooses in the same way.

    inputs: types of the node's inputs in the page's order.
    output: index of the output. given: its type.
    wanted: type of the input at the link's end.
    The input of the same number comes first, then one of exactly the wanted type.
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
    """Return whether the page links sockets of these types; a type may list several, and `*` is any."""
    kinds, others = ({kind.lower() for kind in types.split(",")} for types in (one, other))
    return bool(kinds & others) or not {"", "*"}.isdisjoint(kinds | others)


def _title(node: Mapping[str, Json]) -> str:
    return node.get("title") or node.get("properties", {}).get("Node name for S&R") or node["type"]


def validate_workflow(workflow: Workflow, table: Table) -> list[str]:
    """Return all problems of a workflow in API format, one sentence each; no model is looked up."""
    problems = []
    for node_id, node in workflow.items():
        try:
            declaration = find_declaration(table, node_id, node["class_type"])
        except ValueError as error:
            problems.append(str(error))
            continue
        label = node_label(node_id, node)
        problems += [f"{label}: {problem}" for problem in _node_problems(workflow, node, declaration, table)]
    return problems


def _node_problems(workflow: Workflow, node: Mapping[str, Json], declaration: Declaration, table: Table) -> list[str]:
    problems = []
    known = {declared.name: declared for declared in declaration.inputs}
    # The page writes a composite widget as several inputs, such as `format.codec`.
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
            problems.append(f"{name} is {value!r}; it must be a link to a node that outputs {declared.type}.")
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
    output_type = outputs[link[1]].type
    # COMBO takes any text, as in ComfyUI.
    if output_type != declared.type and not (output_type == "STRING" and declared.type == "COMBO"):
        return [f"{declared.name} takes {declared.type}; {label} gives {output_type} there."]
    return []
