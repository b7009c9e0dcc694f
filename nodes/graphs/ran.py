"""What ran for a result, noted in the workflow that is saved with it: nothing else tells the model, quality, chips and
seconds of a picture that somebody was sent.

ComfyUI's own nodes write the page's workflow into what they save, and its page reads it back from there, so the notes
lie in that workflow's `extra`, by node; a workflow in API form, which has none, holds them in each node's `_meta`.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ...tpu_runtime.pipeline import SEPARATOR, hide_tokens
from .graph import Table, Workflow, is_link

KEY = "comfyui-tpu"
Notes = Sequence[Mapping[str, Any]]
# Of a prompt, which may be anyone's, so much is looked at; and so many nodes' notes are kept.
MOST_NODES, MOST_KEPT = 2000, 256


class Records:
    """The notes of nodes that ran in this process, for prompts that find their results in ComfyUI's cache."""

    def __init__(self, kinds: frozenset[str]) -> None:
        """`kinds` are the nodes that run stages."""
        self._kinds = kinds
        self._kept: OrderedDict[str, Notes] = OrderedDict()

    def begin(self, prompt: Any, workflow: Any) -> None:
        """Before a prompt runs: the workflow's notes become those of the same nodes with the same inputs."""
        if not isinstance(workflow, dict) or not isinstance(workflow.setdefault("extra", {}), dict):
            return
        workflow["extra"].pop(KEY, None)
        if not self._kept or not isinstance(prompt, dict) or len(prompt) > MOST_NODES:
            return
        known: dict[str, str | None] = {}
        for node_id, node in prompt.items():
            if isinstance(node, dict) and node.get("class_type") in self._kinds:
                if (notes := self._kept.get(_signature(prompt, node_id, known) or "")) is not None:
                    _put(workflow, node_id, notes)

    def add(self, prompt: Any, workflow: Any, node_id: str, notes: Notes) -> None:
        """After a node ran, or one that it was expanded to."""
        node_id = node_id.partition(".")[0]
        if not notes or not isinstance(prompt, dict) or node_id not in prompt or len(prompt) > MOST_NODES:
            return
        if (key := _signature(prompt, node_id, {})) is None:
            return
        stages = {note["stage"] for note in notes}
        # Of an expanded node one stage after another, each in the place of what it was before.
        self._kept[key] = [*(one for one in self._kept.pop(key, ()) if one["stage"] not in stages), *notes]
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        if isinstance(workflow, dict) and isinstance(workflow.get("extra"), dict):
            _put(workflow, node_id, self._kept[key])


def _put(workflow: dict[str, Any], node_id: str, notes: Notes) -> None:
    workflow["extra"].setdefault(KEY, {})[node_id] = list(notes)


def _signature(prompt: Mapping[str, Any], node_id: str, known: dict[str, str | None]) -> str | None:
    """Returns a digest of a node, its id and values, and of all nodes that it depends on.

    Each node is hashed once: `known` has the digests so far, and gets those that are found. None is the digest of a
    node that is nested too deep, whose links form a circle, or that depends on such a node.
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
        digests = {source: known.get(source) for source in sources}  # of a node in a circle None
        known[name] = None if None in digests.values() else _digest(name, prompt.get(name), digests)
    return known[node_id]


def _inputs(node: Any) -> Mapping[str, Any]:
    inputs = node.get("inputs") if isinstance(node, dict) else None
    return inputs if isinstance(inputs, dict) else {}


def _sources(node: Any) -> Iterator[str]:
    """The nodes that a node's links come from."""
    return (value[0] for value in _inputs(node).values() if is_link(value))


def _digest(name: str, node: Any, sources: Mapping[str, str | None]) -> str | None:
    kind = node.get("class_type") if isinstance(node, dict) else None
    told = [name, kind, {key: _plain(value) for key, value in _inputs(node).items()}, sources]
    try:
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=repr).encode()).hexdigest()
    except RecursionError:
        return None


def _plain(value: Any) -> Any:
    """ComfyUI makes 5.0 of a FLOAT's 5 once it has checked the prompt."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def metadata(workflow: Workflow, notes: Mapping[str, Notes], table: Table) -> dict[str, str]:
    """Returns the entry `prompt` that a file holds of a workflow in API form, as ASCII JSON that ComfyUI reads.

    Texts that a user writes are recorded as they are, but for this process's tokens. Values are cleaned before they
    are written as JSON, so that the entry is JSON whatever they hold.
    """
    nodes = {}
    for node_id, node in workflow.items():
        meta = node.get("_meta", {})
        ran = [note for name, found in notes.items() if name.partition(".")[0] == node_id for note in found]
        texts = {declared.name for declared in table[node["class_type"]].inputs if declared.multiline}
        inputs = {name: value if name in texts else _named(value) for name, value in node["inputs"].items()}
        nodes[node_id] = {**node, "inputs": inputs, "_meta": {**meta, KEY: ran} if ran else meta}
    return {"prompt": json.dumps(_without_tokens(nodes))}


def _without_tokens(value: Any) -> Any:
    """Returns a JSON value whose texts, names included, hold no token of this process."""
    if isinstance(value, str):
        return hide_tokens(value)
    if isinstance(value, dict):
        return {_without_tokens(name): _without_tokens(inner) for name, inner in value.items()}
    return [_without_tokens(inner) for inner in value] if isinstance(value, list | tuple) else value


def _named(value: Any) -> Any:
    """A path that only this machine has says no more than its name, also each of several files that are joined."""
    if not isinstance(value, str) or not any(start in value for start in ("/", "~", "\\")):
        return value
    return SEPARATOR.join(map(_last_part, value.split(SEPARATOR)))


def _last_part(entry: str) -> str:
    """The last part of an absolute path, whether it is there or not; what is none stays, such as a Hub id."""
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
