"""Workflows that the separate TPU packs saved, brought to today's nodes, which have the same ids; and workflows of
ComfyUI's own nodes, with their loaders swapped for those of the TPU and back.

Both forms of a workflow are taken: the page's (`nodes`, `links`) and the API's. What a separate pack's node had, and
today's has not, is in `_OLD`; all else is looked up in the declarations by name.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from ...tpu_runtime import pipeline as runtime
from ...tpu_runtime.pipeline import QUALITIES
from ..declare import VALUE_TYPES, Declaration, Input
from ..model import CLIP_TYPES, quality_of

Document = dict[str, Any]
Table = Mapping[str, Declaration]


@dataclass(frozen=True, kw_only=True)
class Old:
    """A separate pack's node: its `widgets` in the order of saved values, its sockets that today have other names, and
    what each of its outputs is called today (empty for one that is gone). `added` are values of today's widgets with
    which it does what it did, where those are not the defaults.
    """

    widgets: tuple[str, ...]
    sockets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    added: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...]


_PROMPTS = ("prompt", "negative_prompt", "model_id")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
_VIDEO = ("height", "width", "num_frames")
_STEPS = ("num_inference_steps", "guidance_scale", "seed")
_FRAMES = ("frames", "fps")
# yangwhale/gpu-tpu-pedia, `tpu/ComfyUI/custom_nodes/*/nodes.py`.
_OLD = {
    "Flux2TextEncoder": Old(widgets=("prompt", "model_id"), outputs=_EMBEDS[:1]),
    "Flux2TPUSampler": Old(widgets=("height", "width", *_STEPS, "model_id"), outputs=("latents",)),
    "Flux2TPUVAEDecoder": Old(widgets=("height", "width", "model_id"), outputs=("image",)),
    "Flux2TPUPipeline": Old(widgets=("prompt", "height", "width", *_STEPS, "model_id"), outputs=("image",)),
    # Both encoded prompts came through one socket.
    "CogVideoXTextEncoder": Old(widgets=_PROMPTS, outputs=_EMBEDS[:1]),
    "CogVideoXTPUSampler": Old(
        widgets=(*_VIDEO, *_STEPS), sockets={"embeddings": _EMBEDS}, outputs=("latents", "")
    ),
    "CogVideoXTPUVAEDecoder": Old(widgets=("fps",), outputs=_FRAMES),
    "Wan21TextEncoder": Old(widgets=_PROMPTS, outputs=_EMBEDS),
    "Wan21TPUSampler": Old(widgets=(*_VIDEO, *_STEPS, "model_id", "flow_shift"), outputs=("latents", "num_frames")),
    "Wan21TPUVAEDecoder": Old(widgets=("model_id", "fps"), outputs=_FRAMES),
    "Wan21TPUPipeline": Old(
        widgets=("prompt", "negative_prompt", *_VIDEO, *_STEPS, "model_id", "fps", "flow_shift"), outputs=_FRAMES
    ),
    "Wan22I2VTextEncoder": Old(widgets=_PROMPTS, outputs=_EMBEDS),
    "Wan22I2VImageEncoder": Old(widgets=(*_VIDEO, "model_id"), outputs=("condition", "")),
    # The video's size comes with the encoded picture.
    "Wan22I2VTPUSampler": Old(
        widgets=("num_inference_steps", "guidance_scale", "shift", "seed", "model_id"),
        sockets={"latent_info": ()},
        added={"guidance_scale_2": 0.0},  # both experts had the one
        outputs=("latents", "num_frames"),
    ),
    "Wan22I2VTPUVAEDecoder": Old(widgets=("model_id", "fps"), outputs=_FRAMES),
}  # fmt: skip
# Types of sockets that today's nodes do not have.
_OLD_TYPES = frozenset({"TENSOR", "COGVIDEOX_EMBEDS", "COGVIDEOX_LATENTS", "CONDITION", "LATENT_INFO"})
# What the page may save behind a seed, and what it is where the file has none: the seed stays as it was saved.
_CONTROLS = ("fixed", "increment", "decrement", "randomize")
_HEADLINE = "This workflow was saved by the separate TPU packs; it now has ComfyUI-TPU's nodes."


def upgraded(document: Any, table: Table) -> tuple[Any, list[str]]:
    """A workflow with today's nodes, and what was changed, a sentence each: none for any other workflow, which is
    returned as it is. `table` has today's declarations by id.

    What is no workflow is returned as it is too: who reads it says so. ValueError for one that is nested too deeply.
    """
    try:
        return _upgraded(document, table)
    except RecursionError:
        raise ValueError("The workflow is nested too deeply to be read.") from None


def _upgraded(document: Any, table: Table) -> tuple[Any, list[str]]:
    if isinstance(document, dict) and isinstance(document.get("nodes"), list):
        found = copy.deepcopy(document)
        graphs = [_Graph(graph, table) for graph in _graphs(found)]
        if not any(graph.is_old() for graph in graphs):
            return document, []
        changes = [change for graph in graphs for change in graph.upgrade()]
        return found, [_HEADLINE, *changes]
    if isinstance(document, dict) and any(_is_old_in_api(node, table) for node in document.values()):
        found = copy.deepcopy(document)
        return found, [_HEADLINE, *_upgrade_api(found, table)]
    return document, []


def _graphs(document: Document) -> Iterator[Document]:
    """The workflow, and its subgraphs."""
    yield document
    definitions = document.get("definitions")
    subgraphs = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    for graph in subgraphs if isinstance(subgraphs, list) else ():
        if isinstance(graph, dict):
            yield graph


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _label(node: Mapping[str, Any]) -> str:
    return f"{node['type']} (node {node.get('id')})"


# --- the page's form --------------------------------------------------------------------------------------------------


class _Graph:
    """A graph in the page's form, changed in place. A link is `[id, origin, slot, target, slot, type]`, or in subgraphs
    an object with these.
    """

    def __init__(self, graph: Document, table: Table) -> None:
        self._graph, self._table = graph, table
        self._nodes = {
            node.get("id"): node
            for node in _dicts(graph.get("nodes"))
            if isinstance(node.get("type"), str) and isinstance(node.get("id"), int | str)
        }
        links = graph.get("links")
        read = [_Wire.read(raw) for raw in links] if isinstance(links, list) else []
        self._links = {link.id: link for link in read if link is not None}
        self._last = max((one for one in self._links if isinstance(one, int)), default=0)
        # What is looked up for each node or link: a file may have many of both.
        self._sockets: dict[int | str, list[dict[str, Any]]] = {}
        for node in self._nodes.values():
            for socket in _dicts(node.get("inputs")):
                if self._is_linked(socket):
                    self._sockets.setdefault(socket["link"], []).append(socket)
        self._origins: dict[int | str, int | str] = {}

    def is_old(self) -> bool:
        return any(self._is_old(node) for node in self._ours())

    def _ours(self) -> list[dict[str, Any]]:
        return [node for node in self._nodes.values() if node["type"] in _OLD and node["type"] in self._table]

    def _is_old(self, node: Mapping[str, Any]) -> bool:
        """By a socket that today's node does not have, or by values that do not fit today's widgets."""
        sockets = [*_dicts(node.get("inputs")), *_dicts(node.get("outputs"))]
        if any(str(socket.get("type")) in _OLD_TYPES for socket in sockets):
            return True
        values, declared = node.get("widgets_values"), self._table[node["type"]]
        if not isinstance(values, list) or len(values) not in _lengths(_OLD[node["type"]]):
            return False
        pairs = zip(_widgets(declared), values, strict=False)
        return not all(_is_typed(one, value) if one else value in _CONTROLS for one, value in pairs)

    def upgrade(self) -> list[str]:
        """Brings all nodes of the separate packs to today's; says what of each is another thing now."""
        changes = []
        for node in self._ours():
            said = [*self._upgrade_widgets(node), *self._upgrade_inputs(node)]
            changes += [f"{_label(node)}: {'; '.join(said)}."] if said else []
        leaving: dict[int | str, list[_Wire]] = {}
        for link in self._links.values():  # once all inputs are what they will be
            leaving.setdefault(link.origin, []).append(link)
        for node in self._ours():
            said = list(self._upgrade_outputs(node, leaving.get(node["id"], [])))
            changes += [f"{_label(node)}: {'; '.join(said)}."] if said else []
        self._graph["links"] = [link.written() for link in self._links.values()]
        return changes

    def _upgrade_widgets(self, node: dict[str, Any]) -> Iterator[str]:
        declared, old = self._table[node["type"]], _OLD[node["type"]]
        values, left = _named(old, node.get("widgets_values"))
        today = {one.name: one for one in declared.inputs if one.is_widget}
        for name in [name for name in values if name and name not in today]:
            yield f"{name} {values.pop(name)!r} is left out, what comes in has its own"
        if left:
            yield f"{', '.join(map(repr, left))} is left out, no input takes it"
        values = {**old.added, **values}
        written: list[Any] = []
        for one in today.values():
            written.append(values.get(one.name, one.default))
            if one.companion:
                written.append(values.get("", _CONTROLS[0]))
        node["widgets_values"] = written

    def _upgrade_inputs(self, node: dict[str, Any]) -> Iterator[str]:
        """Sockets in today's order; a link to one that has another name goes to that, or to several."""
        declared, old = self._table[node["type"]], _OLD[node["type"]]
        saved = {str(socket.get("name")): socket for socket in _dicts(node.get("inputs"))}
        linked = {name: self._links[socket["link"]] for name, socket in saved.items() if self._is_linked(socket)}
        for name, targets in old.sockets.items():
            if name in saved:
                yield f"{name} is {' and '.join(targets)} now" if targets else f"{name} is not needed any more"
            if (link := linked.pop(name, None)) is None:
                continue
            for offset, target in enumerate(targets):
                linked[target] = link if offset == 0 else self._add_link(link, offset)
            if not targets:
                self._remove(link)
        names = {one.name for one in declared.inputs}
        for name in [name for name in linked if name not in names]:
            self._remove(linked.pop(name))
            yield f"the link to {name} is left out, there is no such input"
        order = [one for one in declared.page_order() if not one.is_widget or one.name in saved]
        node["inputs"] = []
        for slot, one in enumerate(order):
            link = linked.get(one.name)
            if link is not None:
                link.target, link.target_slot, link.type = node["id"], slot, one.type
            widget = {"widget": {"name": one.name}} if one.is_widget else {}
            node["inputs"].append({"name": one.name, "type": one.type, "link": link and link.id, **widget})

    def _is_linked(self, socket: Mapping[str, Any]) -> bool:
        link = socket.get("link")
        return isinstance(link, int | str) and link in self._links

    def _upgrade_outputs(self, node: dict[str, Any], leaving: "list[_Wire]") -> Iterator[str]:
        """Outputs as today's node has them, each with those of the links `leaving` that the old one of its name had."""
        declared, old = self._table[node["type"]], _OLD[node["type"]]
        today = {one.name: slot for slot, one in enumerate(declared.outputs)}
        own: list[list[int | str]] = [[] for _ in declared.outputs]
        for link in leaving:
            names = tuple(today) if link.is_new else old.outputs
            name = dict(enumerate(names)).get(link.origin_slot, "")  # type: ignore[arg-type]
            if name in today:
                link.origin_slot = today[name]
                own[today[name]].append(link.id)
            else:
                self._remove(link)
                yield f"the link from output {link.origin_slot} is left out, there is no such output"
        node["outputs"] = [
            {"name": one.name, "type": one.type, "links": links or None}
            for one, links in zip(declared.outputs, own, strict=True)
        ]

    def _add_link(self, first: "_Wire", offset: int) -> "_Wire":
        """A further link from the node where `first` comes from, through nodes that only pass it on."""
        self._last += 1
        added = replace(first, id=self._last, origin=self._origin(first), origin_slot=offset, is_new=True)
        self._links[self._last] = added
        if isinstance(self._graph.get("last_link_id"), int):
            self._graph["last_link_id"] = max(self._last, self._graph["last_link_id"])
        if isinstance(state := self._graph.get("state"), dict):
            state["lastLinkId"] = self._last
        return added

    def _origin(self, link: "_Wire") -> int | str:
        """The node that a link comes from, behind all reroutes; in a circle of them any of these."""
        passed = []
        while link.id not in self._origins:
            passed.append(link.id)
            self._origins[link.id] = link.origin
            node = self._nodes.get(link.origin, {})
            socket = next(iter(_dicts(node.get("inputs"))), {})
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
    """A link from an output to an input; `raw` is what the file has for it."""

    raw: Any
    id: int | str
    origin: int | str
    origin_slot: int | str
    target: int | str
    target_slot: int | str
    type: Any
    is_new: bool = False

    @classmethod
    def read(cls, raw: Any) -> "_Wire | None":
        """None for what is no link."""
        parts: Any = [raw.get(name) for name in _FIELDS] if isinstance(raw, dict) else raw
        if not isinstance(parts, list) or len(parts) != len(_FIELDS):
            return None
        return cls(raw, *parts) if all(isinstance(one, int | str) for one in parts[:5]) else None

    def written(self) -> Any:
        parts = [self.id, self.origin, self.origin_slot, self.target, self.target_slot, self.type]
        return {**self.raw, **dict(zip(_FIELDS, parts, strict=True))} if isinstance(self.raw, dict) else parts


def _widgets(declared: Declaration) -> list[Input | None]:
    """What each saved value is for; None for one that the page adds."""
    found: list[Input | None] = []
    for one in declared.inputs:
        if one.is_widget:
            found += [one, None] if one.companion else [one]
    return found


def _lengths(old: Old) -> tuple[int, int]:
    """How many values the old node saved, with and without the page's own."""
    return len(old.widgets), len(old.widgets) + ("seed" in old.widgets)


def _is_typed(declared: Input, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number if declared.type in ("INT", "FLOAT") else isinstance(value, VALUE_TYPES[declared.type])


def _named(old: Old, values: Any) -> tuple[dict[str, Any], list[Any]]:
    """Saved values by name, with what the page adds behind a seed under an empty one; and those that are over."""
    if isinstance(values, dict):
        return {name: values[name] for name in old.widgets if name in values}, []
    left = list(values) if isinstance(values, list) else []
    found: dict[str, Any] = {}
    for name in old.widgets:
        if not left:
            break
        found[name] = left.pop(0)
        if name == "seed" and left and left[0] in _CONTROLS:
            found[""] = left.pop(0)
    return found, left


# --- the API's form ---------------------------------------------------------------------------------------------------


def _is_old_in_api(node: Any, table: Table) -> bool:
    """By an input that the old node had, and today's has not."""
    return bool(_gone(node, table))


def _gone(node: Any, table: Table) -> list[str]:
    inputs = node.get("inputs") if isinstance(node, dict) else None
    kind = node.get("class_type") if isinstance(node, dict) else None
    if not isinstance(inputs, dict) or not isinstance(kind, str) or kind not in _OLD or kind not in table:
        return []
    names = {one.name for one in table[kind].inputs}
    return [name for name in inputs if name not in names and name in (*_OLD[kind].widgets, *_OLD[kind].sockets)]


def _upgrade_api(workflow: Document, table: Table) -> Iterator[str]:
    for node_id, node in workflow.items():
        said = []
        for name in _gone(node, table):
            value, targets = node["inputs"].pop(name), _OLD[node["class_type"]].sockets.get(name, ())
            is_link = isinstance(value, list) and len(value) == 2 and isinstance(value[1], int)
            if is_link:
                for offset, target in enumerate(targets):
                    node["inputs"].setdefault(target, [value[0], value[1] + offset])
            said.append(f"{name} is {' and '.join(targets)} now" if targets else f"{name} is left out")
        if said:
            node["inputs"] = {**_OLD[node["class_type"]].added, **node["inputs"]}
            yield f"{node['class_type']} (node {node_id}): {'; '.join(said)}."


# --- ComfyUI's own loaders --------------------------------------------------------------------------------------------

# Core's loaders and ours, which have the same widgets, in this order.
LOADERS = {
    "UNETLoader": ("TPUUNETLoader", ("unet_name", "weight_dtype")),
    "CLIPLoader": ("TPUCLIPLoader", ("clip_name", "type", "device")),
    "DualCLIPLoader": ("TPUDualCLIPLoader", ("clip_name1", "clip_name2", "type", "device")),
    "VAELoader": ("TPUVAELoader", ("vae_name",)),
    "CheckpointLoaderSimple": ("TPUCheckpointLoader", ("ckpt_name",)),
    "CLIPVisionLoader": ("TPUCLIPVisionLoader", ("clip_name",)),
}
_BACK = {ours: (theirs, names) for theirs, (ours, names) in LOADERS.items()}
_PARTLY = (
    "Only a part of this workflow can run on the TPU: ComfyUI runs {} on the CPU. It will not end in useful time. "
    "Open a template of which every loader can be swapped."
)
# Of more the headers are not read.
_MOST_LOADERS = 200


def with_tpu_loaders(document: Any, folders: Sequence[str], *, back: bool = False) -> tuple[Any, list[str]]:
    """A workflow, subgraphs included, with core's loaders of models that we run swapped for ours, or ours for core's;
    and a sentence for each loader, also for one that stays. ValueError for what is no workflow.

    `folders` are those that files are looked for in.
    """
    if not isinstance(document, dict):
        raise ValueError("This is no workflow: it must be an object, as ComfyUI's page saves or exports it.")
    try:
        found = copy.deepcopy(document)
    except RecursionError:
        raise ValueError("The workflow is nested too deeply to be read.") from None
    is_of_page = isinstance(found.get("nodes"), list)
    nodes = [node for graph in _graphs(found) for node in _dicts(graph.get("nodes"))] if is_of_page else found.values()
    key, table = "type" if is_of_page else "class_type", _BACK if back else LOADERS
    loaders = [node for node in nodes if isinstance(node, dict) and str(node.get(key)) in table]
    changes, staying = [], []
    for node in loaders[:_MOST_LOADERS]:
        kind = node[key]
        other, names = table[kind]
        said = node.get("widgets_values") if is_of_page else node.get("inputs")
        values = dict(zip(names, said, strict=False)) if isinstance(said, list) else said
        values = values if isinstance(values, dict) else {}
        label = f"{kind} ({', '.join(str(values.get(name, '')) for name in names if 'name' in name)})"
        if not back and (problem := _why_not(kind, values, folders)):
            changes.append(f"{label} stays: {problem}.")
            staying.append(label)
            continue
        node[key] = other
        if back and quality_of(values.get("weight_dtype")) != QUALITIES[0]:  # which core's loader does not have
            if isinstance(said, list):
                said[names.index("weight_dtype")] = "default"
            elif isinstance(said, dict):
                said["weight_dtype"] = "default"
        if is_of_page and isinstance(node.get("properties"), dict):
            # Which pack a node is of: the page would look it up in another.
            node["properties"] = {"Node name for S&R": other}
        changes.append(f"{label} is now {other}.")
    # What looks at pictures beside the model takes seconds on any processor.
    slow = [label for label in staying if not label.startswith("CLIPVision")]
    if slow and len(staying) < len(changes):
        changes.insert(0, _PARTLY.format(", ".join(slow)))
    return found, changes


def _why_not(kind: str, values: Mapping[str, Any], folders: Sequence[str]) -> str:
    """Why what a loader of core's names does not run here; empty where it does."""
    if "type" in LOADERS[kind][1]:
        known = ", ".join(CLIP_TYPES)
        return "" if values.get("type") in CLIP_TYPES else f"its type is none of {known}"
    name = str(values.get(LOADERS[kind][1][0], ""))
    if PurePath(name).name in runtime.published.models():
        return ""
    unknown = "the file is no model that runs on the TPU, or is not in ComfyUI's folders"
    if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or name.startswith("~"):
        return unknown
    try:
        runtime.choose_part(runtime.SPECS, name, folders=tuple(folders))
    except (ValueError, OSError):
        return unknown
    return ""
