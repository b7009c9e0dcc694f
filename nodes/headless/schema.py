"""Checks the structure of a workflow file: types of its parts, not their meaning."""

from collections.abc import Mapping

from ..declare import Json

# Types of the fields of a page's node. Each may be missing or null, as older pages write it.
_NODE = {
    "id": (int, str),
    "type": str,
    "mode": int,
    "title": str,
    "inputs": list,
    "outputs": list,
    "properties": Mapping,
    "widgets_values": (list, Mapping),
}
_SOCKET = {"name": str, "link": int}


def read_page_nodes(document: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return the nodes of a page by id, without null fields. Raises ValueError for a malformed one."""
    nodes = {}
    for number, raw in enumerate(_list(document, "nodes"), start=1):
        which = f"Node number {number} of the workflow"
        node = _check(raw, _NODE, which)
        if "id" not in node or "type" not in node:
            raise ValueError(f"{which} has no {'id' if 'id' not in node else 'type'}. Save the workflow again.")
        sockets = [_check(socket, _SOCKET, f"An input of node {node['id']}") for socket in node.get("inputs", [])]
        outputs = [_check(socket, {}, f"An output of node {node['id']}") for socket in node.get("outputs", [])]
        if unnamed := [socket for socket in sockets if "name" not in socket]:
            raise ValueError(f"{len(unnamed)} inputs of node {node['id']} have no name. Save the workflow again.")
        nodes[str(node["id"])] = {**node, "inputs": sockets, "outputs": outputs}
    return nodes


def read_page_links(document: Mapping[str, Json]) -> dict[int, tuple[str, int]]:
    """Return `id -> (origin node, origin output)`, from the page's list form or its newer dict form.

    Raises ValueError for a malformed link.
    """
    origins = {}
    for link in _list(document, "links"):
        names = ("id", "origin_id", "origin_slot")
        parts = [link.get(name) for name in names] if isinstance(link, dict) else link
        if not isinstance(parts, list) or len(parts) < 3 or not _are_ints(parts[0], parts[2]) or not _is_id(parts[1]):
            raise ValueError(f"A link of the workflow is {link!r:.80}; it must have an id, origin node and output.")
        origins[parts[0]] = (str(parts[1]), parts[2])
    return origins


def read_page_subgraphs(document: Mapping[str, Json]) -> dict[str, tuple[str, list[str]]]:
    """Return the name and the node types of each subgraph of a document, by its id, the type of its node outside."""
    definitions = document.get("definitions")
    listed = definitions.get("subgraphs") if isinstance(definitions, Mapping) else None
    subgraphs = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    return {
        graph["id"]: (str(graph.get("name", ""))[:80], _types(graph.get("nodes")))
        for graph in subgraphs
        if isinstance(graph.get("id"), str)
    }


def _types(nodes: Json) -> list[str]:
    listed = nodes if isinstance(nodes, list) else []
    return [node["type"] for node in listed if isinstance(node, Mapping) and isinstance(node.get("type"), str)]


def read_api_nodes(document: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Return copies of the nodes of a workflow in API format. Raises ValueError for a malformed one."""
    nodes = {}
    for name, raw in document.items():
        node = _check(raw, {"inputs": Mapping, "_meta": Mapping}, f"Node {name}")
        title = node.get("_meta", {}).get("title")
        nodes[name] = {**node, "inputs": dict(node.get("inputs", {})), "_meta": {"title": title}}
        if not isinstance(title, str):
            del nodes[name]["_meta"]
    return nodes


def _list(document: Mapping[str, Json], name: str) -> list[Json]:
    if not isinstance(document[name], list):
        raise ValueError(f"The workflow's {name} are {document[name]!r:.80}; they must be a list.")
    return document[name]


def _check(given: Json, parts: Mapping[str, Json], which: str) -> dict[str, Json]:
    """Return an object without its null fields.

    Raises ValueError if it is not an object, or one of its `parts` has another type. `which` names it in errors.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{which} is {given!r:.80}; it must be an object. Save the workflow again.")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, kind in parts.items():
        if name in fields and (not isinstance(fields[name], kind) or isinstance(fields[name], bool)):
            raise ValueError(f"{which} has {name} {fields[name]!r:.80}, which is of the wrong kind. Save it again.")
    return fields


def _is_id(value: Json) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _are_ints(*values: Json) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
