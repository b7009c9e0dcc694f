"""Whether a workflow file's content is built as one: what is where, not what it means."""

from collections.abc import Mapping
from typing import Any

# What a part of a page's node must be, where it is there: older pages leave some out, others write null.
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


def page_nodes(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes of a page by id, without what is null in them; ValueError where one is built otherwise."""
    nodes = {}
    for number, given in enumerate(_list(document, "nodes"), start=1):
        which = f"Node number {number} of the workflow"
        node = _checked(given, _NODE, which)
        if "id" not in node or "type" not in node:
            raise ValueError(f"{which} has no {'id' if 'id' not in node else 'type'}. Save the workflow again.")
        sockets = [_checked(socket, _SOCKET, f"An input of node {node['id']}") for socket in node.get("inputs", [])]
        outputs = [_checked(socket, {}, f"An output of node {node['id']}") for socket in node.get("outputs", [])]
        if unnamed := [socket for socket in sockets if "name" not in socket]:
            raise ValueError(f"{len(unnamed)} inputs of node {node['id']} have no name. Save the workflow again.")
        nodes[str(node["id"])] = {**node, "inputs": sockets, "outputs": outputs}
    return nodes


def page_links(document: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    """`id -> (origin node, origin output)`, from the page's list form or its newer dict form."""
    found = {}
    for link in _list(document, "links"):
        names = ("id", "origin_id", "origin_slot")
        parts = [link.get(name) for name in names] if isinstance(link, dict) else link
        if not isinstance(parts, list) or len(parts) < 3 or not _are_ints(parts[0], parts[2]) or not _is_id(parts[1]):
            raise ValueError(f"A link of the workflow is {link!r:.80}; it must say its id, from which node and output.")
        found[parts[0]] = (str(parts[1]), parts[2])
    return found


def page_subgraphs(document: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Return the name and the nodes' types of each subgraph of a document, by the type of its node outside."""
    definitions = document.get("definitions")
    listed = definitions.get("subgraphs") if isinstance(definitions, Mapping) else None
    found = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return {
        one["id"]: (str(one.get("name", ""))[:80], _types(one.get("nodes")))
        for one in found
        if isinstance(one.get("id"), str)
    }


def _types(nodes: Any) -> list[str]:
    listed = nodes if isinstance(nodes, list) else []
    return [node["type"] for node in listed if isinstance(node, Mapping) and isinstance(node.get("type"), str)]


def api_nodes(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The nodes of a workflow in API format, copied; ValueError where one is built otherwise."""
    nodes = {}
    for name, given in document.items():
        node = _checked(given, {"inputs": Mapping, "_meta": Mapping}, f"Node {name}")
        title = node.get("_meta", {}).get("title")
        nodes[name] = {**node, "inputs": dict(node.get("inputs", {})), "_meta": {"title": title}}
        if not isinstance(title, str):
            del nodes[name]["_meta"]
    return nodes


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(document[name], list):
        raise ValueError(f"The workflow's {name} are {document[name]!r:.80}; they must be a list.")
    return document[name]


def _checked(given: Any, parts: Mapping[str, Any], which: str) -> dict[str, Any]:
    """An object without its nulls; ValueError where it is none, or one of its `parts` is of another kind."""
    if not isinstance(given, dict):
        raise ValueError(f"{which} is {given!r:.80}; it must be an object. Save the workflow again.")
    found = {name: value for name, value in given.items() if value is not None}
    for name, kind in parts.items():
        if name in found and (not isinstance(found[name], kind) or isinstance(found[name], bool)):
            raise ValueError(f"{which} has {name} {found[name]!r:.80}, which is of the wrong kind. Save it again.")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _are_ints(*values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
