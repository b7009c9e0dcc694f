"""Provenance: records in a saved workflow which model, quality, chips and seconds produced a result.

ComfyUI's own nodes write the page's workflow into their files, and its page reads it back. So the notes are in that
workflow's `extra`, by node; a workflow in API format has none, and holds them in each node's `_meta`.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from ...tpu_runtime.checkpoints.file_resolution import SEPARATOR
from ...tpu_runtime.redact import hide_tokens
from ..declare import Json, Values
from .graph import Table, Workflow, is_link

KEY = "comfyui-tpu"
# The stages that a node ran, each with model, chips, seconds and so on; see `api.record_stages`.
Notes = Sequence[Mapping[str, Json]]
# Limits: nodes of a prompt, which may be anyone's, and nodes whose notes are kept.
MAX_NODES, MAX_RECORDS = 2000, 256


class ProvenanceLog:
    """Notes of nodes that ran in this process, for later prompts whose results come from ComfyUI's cache."""

    def __init__(self, kinds: frozenset[str]) -> None:
        """Create an empty log.

        kinds: types of the nodes that run stages.
        """
        self._kinds = kinds
        self._kept: OrderedDict[str, Notes] = OrderedDict()

    def begin(self, prompt: Json, workflow: Json) -> None:
        """Replace the notes in a workflow by those of the same nodes with the same inputs, before a prompt runs.

        prompt, workflow: of the request, unchecked.
        """
        if not isinstance(workflow, dict) or not isinstance(workflow.setdefault("extra", {}), dict):
            return
        workflow["extra"].pop(KEY, None)
        if not self._kept or not isinstance(prompt, dict) or len(prompt) > MAX_NODES:
            return
        known: dict[str, str | None] = {}
        for node_id, node in prompt.items():
            if isinstance(node, dict) and node.get("class_type") in self._kinds:
                if (notes := self._kept.get(_signature(prompt, node_id, known) or "")) is not None:
                    _put(workflow, node_id, notes)

    def add(self, prompt: Json, workflow: Json, node_id: str, notes: Notes) -> None:
        """Record the notes of a node that ran, or of a stage that it was expanded to.

        prompt, workflow: of the request, unchecked.
        node_id: of the node, or `<node id>.<stage>`.
        notes: of its stages.
        """
        node_id = node_id.partition(".")[0]
        if not notes or not isinstance(prompt, dict) or node_id not in prompt or len(prompt) > MAX_NODES:
            return
        if (key := _signature(prompt, node_id, {})) is None:
            return
        stages = {note["stage"] for note in notes}
        # The stages of an expanded node arrive one after another; each replaces its earlier note.
        self._kept[key] = [*(note for note in self._kept.pop(key, ()) if note["stage"] not in stages), *notes]
        if len(self._kept) > MAX_RECORDS:
            self._kept.popitem(last=False)
        if isinstance(workflow, dict) and isinstance(workflow.get("extra"), dict):
            _put(workflow, node_id, self._kept[key])


def _put(workflow: dict[str, Json], node_id: str, notes: Notes) -> None:
    workflow["extra"].setdefault(KEY, {})[node_id] = list(notes)


def _signature(prompt: Mapping[str, Json], node_id: str, known: dict[str, str | None]) -> str | None:
    """Return a digest of a node, its id and values, and of all nodes that it depends on.

    known: digests by node; each node is hashed once, and new digests are added.
    None is the digest of a node that is nested too deep, whose links form a circle, or that depends on such a node.
    """
    waiting, entered = [node_id], set()
    while waiting:
        name = waiting[-1]
        if name in known:
            waiting.pop()
            continue
        sources = dict.fromkeys(source for source in _sources(prompt.get(name)) if source in prompt)
        missing = [source for source in sources if source not in known]
        if missing and name not in entered:
            entered.add(name)
            waiting += missing
            continue
        waiting.pop()
        digests = {source: known.get(source) for source in sources}  # None for a node in a circle
        known[name] = None if None in digests.values() else _digest(name, prompt.get(name), digests)
    return known[node_id]


def _inputs(node: Json) -> Values:
    inputs = node.get("inputs") if isinstance(node, dict) else None
    return inputs if isinstance(inputs, dict) else {}


def _sources(node: Json) -> Iterator[str]:
    """Return the nodes that a node's links come from."""
    return (value[0] for value in _inputs(node).values() if is_link(value))


def _digest(name: str, node: Json, sources: Mapping[str, str | None]) -> str | None:
    kind = node.get("class_type") if isinstance(node, dict) else None
    content = [name, kind, {key: _plain(value) for key, value in _inputs(node).items()}, sources]
    try:
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()
    except RecursionError:
        return None


def _plain(value: Json) -> Json:
    """Convert a whole float to an integer: ComfyUI turns a FLOAT's 5 into 5.0 when it checks the prompt."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def build_metadata(workflow: Workflow, notes: Mapping[str, Notes], table: Table) -> dict[str, str]:
    """Return a file's metadata entry `prompt` for a workflow in API format, as ASCII JSON that ComfyUI reads.

    notes: by id of the expanded nodes.
    table: the known declarations.
    Texts that a user writes are recorded unchanged, except for this process's tokens. Values are cleaned before they
    are written as JSON, so that the entry is valid JSON whatever they hold.
    """
    nodes = {}
    for node_id, node in workflow.items():
        meta = node.get("_meta", {})
        ran = [note for name, node_notes in notes.items() if name.partition(".")[0] == node_id for note in node_notes]
        texts = {declared.name for declared in table[node["class_type"]].inputs if declared.multiline}
        inputs = {name: value if name in texts else _strip_paths(value) for name, value in node["inputs"].items()}
        nodes[node_id] = {**node, "inputs": inputs, "_meta": {**meta, KEY: ran} if ran else meta}
    return {"prompt": json.dumps(_without_tokens(nodes))}


def _without_tokens(value: Json) -> Json:
    """Return a JSON value without this process's tokens in its texts and names."""
    if isinstance(value, str):
        return hide_tokens(value)
    if isinstance(value, dict):
        return {_without_tokens(name): _without_tokens(inner) for name, inner in value.items()}
    return [_without_tokens(inner) for inner in value] if isinstance(value, list | tuple) else value


def _strip_paths(value: Json) -> Json:
    """Reduce paths of this machine to their last part, also in several joined files."""
    if not isinstance(value, str) or not any(start in value for start in ("/", "~", "\\")):
        return value
    return SEPARATOR.join(map(_last_part, value.split(SEPARATOR)))


def _last_part(entry: str) -> str:
    """Return the last part of an absolute path, whether it exists or not; other texts, such as a Hub id, stay."""
    path = entry.strip()
    if path.startswith("~"):
        try:
            is_here = Path(path).expanduser().exists()
        except (OSError, RuntimeError, ValueError):
            is_here = False
        return Path(path).name or entry if is_here or path.startswith("~/") else entry
    if not PurePosixPath(path).is_absolute() and not PureWindowsPath(path).is_absolute():
        return entry
    return PureWindowsPath(path).name or entry
