"""Runs a workflow without ComfyUI: the same declarations, in dependency order, with a terminal as the host."""

import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import ModelRef, Settings
from .. import DECLARATIONS
from ..declare import Folders, Node, by_id
from ..graphs import ran
from ..graphs.graph import Table, Workflow, expand, expected, generations, is_link, node_label
from . import core_nodes
from .workflow import validate_workflow

HEADLESS: Table = by_id((*DECLARATIONS.values(), *core_nodes.NODES))


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    title: str
    elapsed_s: float


class TimedHost(core_nodes.SavingHost, Protocol):
    """A host that is told which node of which workflow runs. One that `tells` has its files say what ran for them."""

    tells: bool
    workflow: Workflow

    def timed(self, title: str) -> AbstractContextManager[None]:
        """Entered while a node of this title runs."""
        ...


# Without a terminal that can overwrite a line, a new one after so many seconds.
LINE_S = 30.0
_OF = re.compile(r"\d+ of \d+")
_NUMBER = re.compile(r"\d+(\.\d+)?")


class TerminalHost:
    """Progress on a terminal: one line per node with its time; on a tty also a status line that is overwritten."""

    def __init__(self, folders: Folders, stream: TextIO | None = None, *, tells: bool = False) -> None:
        self.folders, self.tells = folders, tells
        self.metadata: dict[str, str] = {}
        self.workflow: Workflow = {}
        self.timings: list[NodeTime] = []
        self._stream = stream or sys.stderr
        self._is_tty = self._stream.isatty()
        self._last, self._said_at = "", -math.inf

    def generations(self) -> list[tuple[ModelRef, Settings]]:
        return generations(self.workflow, self.folders, HEADLESS)

    def text(self, message: str) -> None:
        """Of lines with so many of so many done, such as one for each step, a file gets one in half a minute."""
        message = pipeline.printable(message)
        kind, now = _NUMBER.sub("", message), time.monotonic()
        is_progress = _OF.search(message) is not None
        if not self._is_tty and is_progress and kind == self._last and now - self._said_at < LINE_S:
            return
        self._last, self._said_at = kind, now
        self._clear()
        self._stream.write(f"  {message}\n")
        self._stream.flush()

    def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
        if self._is_tty:
            self._clear()
            self._stream.write(f"  {unit} {done}/{total}")
            self._stream.flush()

    def check_cancelled(self) -> None:
        """Ctrl-C arrives as KeyboardInterrupt; nothing to ask."""

    @contextmanager
    def timed(self, title: str) -> Iterator[None]:
        """Announces `title`, and records how long the block took when it succeeds."""
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


def run_workflow(workflow: Workflow, host: TimedHost, table: Table = HEADLESS) -> dict[str, tuple[Any, ...]]:
    """Runs what the output nodes need and returns their outputs by node id.

    Everything is checked before the first node runs; ValueError lists all that is wrong.
    """
    if problems := validate_workflow(workflow, table):
        raise ValueError("\n".join(problems))
    for node in workflow.values():
        constants = {name: value for name, value in node["inputs"].items() if not is_link(value)}
        table[node["class_type"]].check_constants(host.folders, constants, set(node["inputs"]) - set(constants))
    host.workflow, graph = workflow, expand(workflow, table)
    order = execution_order(graph, table)
    pipeline.expect(expected(workflow, host.folders, table), progress=host)
    results: dict[str, tuple[Any, ...]] = {}
    notes: dict[str, ran.Notes] = {}
    for node_id in order:
        node = _node(graph, node_id, table)
        if host.tells and node.is_output:
            host.metadata = ran.metadata(workflow, notes, table)
        with host.timed(_title(node, node_id, graph)), pipeline.noted() as notes[node_id]:
            results[node_id] = node.run(host, **node.values(_given(graph[node_id]["inputs"], results)))
    return {node_id: results[node_id] for node_id in order if _node(graph, node_id, table).is_output}


def execution_order(graph: Workflow, table: Table) -> list[str]:
    """Ids of the output nodes and of all they depend on, dependencies first. ValueError for none, and for a cycle."""
    done: dict[str, None] = {}

    def visit(first: str) -> None:
        """Not by calling itself: a chain of nodes may be longer than Python's stack."""
        path = {first: _sources(graph, first)}
        while path:
            node_id, sources = next(reversed(path.items()))
            source = next((one for one in sources if one not in done), None)
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
    """The nodes that a node's links come from."""
    return (value[0] for value in graph[node_id]["inputs"].values() if is_link(value))


def _given(inputs: Mapping[str, Any], results: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: results[value[0]][value[1]] if is_link(value) else value for name, value in inputs.items()}


def _node(graph: Workflow, node_id: str, table: Table) -> Node:
    """The declaration of one node of a graph, which is expanded: all have bodies."""
    node = table[graph[node_id]["class_type"]]
    assert isinstance(node, Node)
    return node


def _title(node: Node, node_id: str, graph: Workflow) -> str:
    """The node's title, with its id where the workflow has several of the kind."""
    same = [other for other in graph.values() if other["class_type"] == node.id]
    return node.title if len(same) == 1 else node_label(node_id, {"class_type": node.title})
