"""Convert ComfyUI's templates from the page's format to the prompts that the page sends.

Subgraphs are unpacked. `to_api` then treats the result like any workflow, with the widgets of ComfyUI's own classes.
"""

import importlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from comfyui_tpu.nodes.declare import Declaration, Input, Output
from comfyui_tpu.nodes.graphs.graph import Workflow
from comfyui_tpu.nodes.headless.workflow import to_api

_SUBGRAPH_INPUTS = -10
_MUTED, _BYPASSED = 2, 4
_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
# For each input, its name, and its type and options as ComfyUI's INPUT_TYPES has them.
Declared = Iterator[tuple[str, Any, Mapping[str, Any]]]


def import_comfyui() -> Mapping[str, Any]:
    """Return ComfyUI's node classes by name. Needs a real ComfyUI (COMFYUI_PATH, else ~/ComfyUI)."""
    from comfyui_tpu.tests.support.comfyui_server import STUBS

    stubs = Path(tempfile.mkdtemp())
    (stubs / "_comfyui_stubs.py").write_text(STUBS)
    home = Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()
    sys.path[:0] = [str(home), str(stubs)]
    importlib.import_module("_comfyui_stubs")
    for package, parts in (("kornia", ("color", "filters", "morphology")), ("spandrel", ())):
        if importlib.util.find_spec(package) is None:
            sys.modules |= {name: _Stub(name) for name in (package, *(f"{package}.{part}" for part in parts))}
    sys.argv = [sys.argv[0], "--cpu"]
    importlib.import_module("comfy.options").enable_args_parsing()
    import asyncio

    core = importlib.import_module("nodes")
    asyncio.run(core.init_builtin_extra_nodes())
    return core.NODE_CLASS_MAPPINGS


class _Stub(ModuleType):
    """A package that is not installed, whose functions no node calls while its class is read."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


# --- subgraphs --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Scope:
    """A workflow, or a subgraph of one of its nodes."""

    graph: Mapping[str, Any]
    definitions: Mapping[str, Any]
    prefix: str = ""
    parent: "_Scope | None" = None
    instance: Mapping[str, Any] = field(default_factory=dict)
    children: dict[Any, "_Scope"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = {node["id"]: node for node in self.graph["nodes"]}
        self.links = dict(map(_read_link, self.graph["links"]))
        for node in self.nodes.values():
            if node["type"] in self.definitions and node.get("mode") not in (_MUTED, _BYPASSED):
                inner = self.definitions[node["type"]]
                prefix = f"{self.prefix}{node['id']}:"
                self.children[node["id"]] = _Scope(inner, self.definitions, prefix, self, node)

    def all(self) -> "Iterator[_Scope]":
        yield self
        for child in self.children.values():
            yield from child.all()

    def resolve(self, link: Any) -> tuple[str, Any, int] | None:
        """Return where a link comes from: ("node", id, output), ("value", value, 0), or None without a source."""
        if link not in self.links:
            return None
        origin, output = self.links[link]
        if origin == _SUBGRAPH_INPUTS:
            return self.outer(self.graph["inputs"][output]["name"])
        if origin in self.children:
            child = self.children[origin]
            inner = child.graph["outputs"][output].get("linkIds") or [None]
            return child.resolve(inner[0])
        return ("node", f"{self.prefix}{origin}", output) if origin in self.nodes else None

    def outer(self, name: str) -> tuple[str, Any, int] | None:
        """Return where an input of a subgraph comes from."""
        sockets = {socket["name"]: socket for socket in self.instance.get("inputs", [])}
        if sockets.get(name, {}).get("link") is not None and self.parent is not None:
            return self.parent.resolve(sockets[name]["link"])
        promoted = [entry["name"] for entry in self.graph["inputs"] if self._is_widget(entry)]
        values = self.instance.get("widgets_values") or []
        if name not in promoted or len(values) != len(promoted):
            return None  # other pages keep the values of promoted widgets in the inner nodes
        return "value", dict(zip(promoted, values, strict=True))[name], 0

    def _is_widget(self, entry: Mapping[str, Any]) -> bool:
        """Return whether an input of a subgraph is a widget of an inner node."""
        ids = set(entry.get("linkIds") or ())
        sockets = [socket for node in self.nodes.values() for socket in node.get("inputs", [])]
        return any(socket.get("link") in ids and socket.get("widget") for socket in sockets)


def _read_link(link: Any) -> tuple[int, tuple[Any, int]]:
    if isinstance(link, dict):
        return link["id"], (link["origin_id"], link["origin_slot"])
    return link[0], (link[1], link[2])


def unpack_subgraphs(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the nodes of its subgraphs outside of them, called `<id of the subgraph's node>:<id>`."""
    definitions = {graph["id"]: graph for graph in (document.get("definitions") or {}).get("subgraphs", [])}
    nodes: list[dict[str, Any]] = []
    links: list[list[Any]] = []
    numbers = itertools.count(1)
    for scope in _Scope(document, definitions).all():
        for node in scope.nodes.values():
            if node["id"] in scope.children:
                continue
            sockets = []
            for socket in node.get("inputs", []):
                source, number = scope.resolve(socket.get("link")), None
                if source is not None:
                    number = next(numbers)
                    origin: Any = source[1]
                    if source[0] == "value":
                        origin = f"value {number}"
                        nodes.append({"id": origin, "type": "PrimitiveNode", "widgets_values": [source[1]]})
                    links.append([number, origin, source[2], f"{scope.prefix}{node['id']}", 0, socket.get("type")])
                sockets.append({**socket, "link": number})
            nodes.append({**node, "id": f"{scope.prefix}{node['id']}", "inputs": sockets})
    return {"nodes": nodes, "links": links}


# --- widgets ----------------------------------------------------------------------------------------------------------


def _declared(kind: type | None, values: list[Any]) -> Declared:
    """Yield the inputs of a class in order; of a choice among groups of inputs those of the saved one."""
    if kind is None:
        return
    types = kind.INPUT_TYPES()  # type: ignore[attr-defined]
    position = 0
    for group in ("required", "optional"):
        for name, entry in types.get(group, {}).items():
            options = entry[1] if len(entry) > 1 else {}
            yield name, entry[0], options
            if entry[0] == "COMFY_DYNAMICCOMBO_V3":
                chosen = values[position] if position < len(values) else None
                for option in options.get("options", []):
                    if option["key"] == chosen:
                        for part in ("required", "optional"):
                            for inner, more in option["inputs"].get(part, {}).items():
                                yield f"{name}.{inner}", more[0], more[1] if len(more) > 1 else {}
            position += _number_of_widgets(name, entry[0], options)


def _is_widget(kind: Any, options: Mapping[str, Any]) -> bool:
    is_plain = isinstance(kind, list | tuple) or kind in (*_WIDGETS, "COMFY_DYNAMICCOMBO_V3")
    return is_plain and not options.get("forceInput") and not options.get("rawLink")


def _number_of_widgets(name: str, kind: Any, options: Mapping[str, Any]) -> int:
    """Return how many values the page saves for an input."""
    if not _is_widget(kind, options):
        return 0
    is_seed = kind == "INT" and name in ("seed", "noise_seed")
    return 2 if options.get("control_after_generate") or is_seed or options.get("image_upload") else 1


def read_prompt(document: Mapping[str, Any], classes: Mapping[str, Any]) -> Workflow:
    """Return the prompt that the page sends for a template.

    classes: ComfyUI's, by name. Nodes of other types have no widgets.
    """
    unpacked, table = unpack_subgraphs(document), {}
    for node in unpacked["nodes"]:
        kind, values = node["type"], node.get("widgets_values") or []
        if kind == "PrimitiveNode":
            continue
        named: dict[str, Any] = {}
        entries = list(_declared(classes.get(kind), values if isinstance(values, list) else []))
        left = list(values) if isinstance(values, list) else []
        for name, type_, options in entries:
            number = _number_of_widgets(name, type_, options)
            if number and left:
                named[name] = left[0]
                left = left[number:]
        node["widgets_values"] = values if isinstance(values, dict) else named
        inputs = table[kind].inputs if kind in table else ()
        known = {declared.name: declared for declared in inputs}
        for name, type_, options in entries:
            widget_type = type_ if type_ in _WIDGETS else "COMBO"
            type_ = widget_type if _is_widget(type_, options) else str(type_)
            known.setdefault(name, Input(name=name, type=type_, tooltip="", optional=True))
        outputs = tuple(Output(name=str(one.get("name")), type=str(one.get("type"))) for one in node.get("outputs", []))
        table[kind] = Declaration(
            id=kind, title=kind, description="", inputs=tuple(known.values()), outputs=outputs
        )  # fmt: skip
    return to_api(unpacked, table)
