"""Runs a workflow without ComfyUI: the same declarations, in dependency order, with a terminal as the host."""

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO

from ...tpu_runtime import api
from ...tpu_runtime.checkpoints.model_ref import ModelRef
from ...tpu_runtime.model_spec import Settings
from ...tpu_runtime.progress import Preview
from ...tpu_runtime.redact import printable
from .. import DECLARATIONS
from ..declare import Folders, Node, Value, Values, by_id
from ..graphs import provenance
from ..graphs.graph import Table, Workflow, expand, is_link, list_generations, node_label, plan_generations
from . import core_nodes
from .workflow import validate_workflow

HEADLESS_NODES: Table = by_id((*DECLARATIONS.values(), *core_nodes.NODES))


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    """The duration of one node."""

    title: str
    elapsed_s: float


class TimedContext(core_nodes.SavingContext, Protocol):
    """A host that is notified which node of which workflow runs."""

    tells: bool  # whether saved files get the provenance of their results
    workflow: Workflow

    def time_node(self, title: str) -> AbstractContextManager[None]:
        """Return a context in which a node of this title runs."""
        ...


# Seconds between two progress lines if the output is not a terminal.
LINE_INTERVAL_S = 30.0
_OF = re.compile(r"\d+ of \d+")
_NUMBER = re.compile(r"\d+(\.\d+)?")


class TerminalContext:
    """Progress on a terminal: one line per node with its time, and a status line that is overwritten."""

    def __init__(self, folders: Folders, stream: TextIO | None = None, *, tells: bool = False) -> None:
        self.folders, self.tells = folders, tells
        self.metadata: dict[str, str] = {}
        self.workflow: Workflow = {}
        self.timings: list[NodeTime] = []
        self._stream = stream or sys.stderr
        self._is_tty = self._stream.isatty()
        self._last, self._written_at = "", -math.inf

    def generations(self) -> list[tuple[ModelRef, Settings]]:
        """Return models and settings of the running workflow's samplers."""
        return list_generations(self.workflow, self.folders, HEADLESS_NODES)

    def text(self, message: str) -> None:
        """Print a line of status. If output is not a terminal, print at most one progress line every 30 s."""
        message = printable(message)
        kind, now = _NUMBER.sub("", message), time.monotonic()
        is_progress = _OF.search(message) is not None
        if not self._is_tty and is_progress and kind == self._last and now - self._written_at < LINE_INTERVAL_S:
            return
        self._last, self._written_at = kind, now
        self._clear()
        self._stream.write(f"  {message}\n")
        self._stream.flush()

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        """Overwrite the status line; do nothing if output is not a terminal."""
        if self._is_tty:
            self._clear()
            self._stream.write(f"  {unit} {done}/{total}")
            self._stream.flush()

    def check_cancelled(self) -> None:
        """Do nothing: Ctrl-C arrives as KeyboardInterrupt."""

    @contextmanager
    def time_node(self, title: str) -> Iterator[None]:
        """Print `title`, and record how long the block took if it succeeds."""
        self._stream.write(f"{title}\n")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._clear()
        self.timings.append(NodeTime(title=title, elapsed_s=time.perf_counter() - start))

    def _clear(self) -> None:
        if self._is_tty:
            self._stream.write("\r\x1b[K")


def run_workflow(workflow: Workflow, host: TimedContext, table: Table = HEADLESS_NODES) -> dict[str, tuple[Value, ...]]:
    """Run the output nodes and all nodes they need; return the outputs of the output nodes by node id.

    workflow: in API format.
    host: gets progress and node times.
    table: the known declarations.
    Everything is checked before the first node runs; ValueError lists all problems.
    """
    if problems := validate_workflow(workflow, table):
        raise ValueError("\n".join(problems))
    for node in workflow.values():
        constants = {name: value for name, value in node["inputs"].items() if not is_link(value)}
        table[node["class_type"]].validate_constants(host.folders, constants, set(node["inputs"]) - set(constants))
    host.workflow, graph = workflow, expand(workflow, table)
    order = execution_order(graph, table)
    api.announce_generations(plan_generations(workflow, host.folders, table), progress=host)
    results: dict[str, tuple[Value, ...]] = {}
    notes: dict[str, provenance.Notes] = {}
    for node_id in order:
        node = _node(graph, node_id, table)
        if host.tells and node.is_output:
            host.metadata = provenance.build_metadata(workflow, notes, table)
        with host.time_node(_title(node, node_id, graph)), api.record_stages() as notes[node_id]:
            results[node_id] = node.run(host, **node.values(_resolve_links(graph[node_id]["inputs"], results)))
    return {node_id: results[node_id] for node_id in order if _node(graph, node_id, table).is_output}


def execution_order(graph: Workflow, table: Table) -> list[str]:
    """Return the ids of the output nodes and of all nodes they depend on, dependencies first.

    Raises ValueError without an output node, and for a cycle.
    """
    done: dict[str, None] = {}

    def visit(first: str) -> None:
        """Append a node after its dependencies. Not recursive: a chain may be longer than Python's stack."""
        path = {first: _sources(graph, first)}
        while path:
            node_id, sources = next(reversed(path.items()))
            source = next((name for name in sources if name not in done), None)
            if source is None:
                path.popitem()
                done[node_id] = None
            elif source in path:
                names = list(path)
                circle = " -> ".join([*names[names.index(source) :], source])
                raise ValueError(f"The workflow's links form a circle: {circle}.")
            else:
                path[source] = _sources(graph, source)

    outputs = [node_id for node_id in graph if _node(graph, node_id, table).is_output]
    if not outputs:
        raise ValueError("The workflow has no output node, such as SaveVideo: nothing would come of running it.")
    for node_id in outputs:
        if node_id not in done:
            visit(node_id)
    return list(done)


def _sources(graph: Workflow, node_id: str) -> Iterator[str]:
    """Return the nodes that a node's links come from."""
    return (value[0] for value in graph[node_id]["inputs"].values() if is_link(value))


def _resolve_links(inputs: Values, results: Mapping[str, tuple[Value, ...]]) -> dict[str, Value]:
    return {name: results[value[0]][value[1]] if is_link(value) else value for name, value in inputs.items()}


def _node(graph: Workflow, node_id: str, table: Table) -> Node:
    """Return the declaration of a node of an expanded graph, in which all nodes have bodies."""
    node = table[graph[node_id]["class_type"]]
    assert isinstance(node, Node)
    return node


def _title(node: Node, node_id: str, graph: Workflow) -> str:
    """Return the node's title, with its id if the workflow has several of its type."""
    same = [other for other in graph.values() if other["class_type"] == node.id]
    return node.title if len(same) == 1 else node_label(node_id, {"class_type": node.title})
