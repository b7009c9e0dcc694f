"""Interprets a workflow of ComfyUI's own nodes before it runs: each node's outputs, as far as they are known.

Rules by node type compute outputs from inputs. A rule is a generator: it yields the names of the inputs that it needs,
gets their values, and returns the outputs. So an input that a node does not need may be unknown. Each node is evaluated
at most once and without recursion: a prompt may be a chain of thousands of nodes, or a circle.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from ..declare import Value
from .graph import GraphNode, Workflow, is_link
from .known import MAX_SIDE, UNKNOWN, Facts, Guider, Known, LoaderOutput, NotKnown, Outputs

T = TypeVar("T")
# Steps of a rule, which return a value of type `T`.
Steps: TypeAlias = Generator[str, Known, T]
Rule: TypeAlias = "Callable[[RunningNode], Steps[Outputs]]"


class RunningNode:
    """A node that is being evaluated: its inputs, and how rules ask for them."""

    def __init__(self, node_id: str, node: GraphNode, facts: Facts, note: Callable[[Any], None]) -> None:
        self.node_id, self.kind, self.facts, self.note = node_id, str(node.get("class_type")), facts, note
        inputs = node.get("inputs")
        self.inputs: Mapping[str, Value] = inputs if isinstance(inputs, dict) else {}

    def has(self, name: str) -> bool:
        """Return whether an input is linked."""
        return is_link(self.inputs.get(name))

    def get(self, name: str, kind: type[T]) -> Steps[T]:
        """Return an input of class `kind`; NotKnown if it is unknown or of another."""
        value = yield name
        if not isinstance(value, kind):
            raise NotKnown
        return value

    def number(self, name: str, default: float | None = None) -> Steps[float]:
        """Return an input's number; `default` if it is absent, and NotKnown if that is None."""
        value = yield name
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 2**63:
            raise NotKnown
        return value

    def integer(self, name: str, default: int | None = None) -> Steps[int]:
        """Return an input's number as an integer."""
        return int((yield from self.number(name, default)))

    def side(self, name: str, default: int | None = None) -> Steps[int]:
        """Return a side, a length or a batch."""
        return check_side((yield from self.integer(name, default)))


def check_side(value: float) -> int:
    """Return a side as an integer; NotKnown for one that no image has."""
    if not 1 <= value <= MAX_SIDE:
        raise NotKnown
    return int(value)


@dataclass
class _Frame:
    node: RunningNode
    steps: Steps[Outputs]
    wanted: str = ""  # the input that is being evaluated
    saw_unknown: bool = False
    sent: Known = None


@dataclass
class Interpreter:
    """The evaluation of one workflow."""

    workflow: Workflow
    rules: Mapping[str, Rule]  # by node type
    facts: Facts
    finished: Mapping[str, Outputs] = field(default_factory=dict)  # outputs of nodes that have run, by node id
    notes: list[Any] = field(default_factory=list)  # calls that nodes will make, in the order in which they will run
    outputs: dict[str, Outputs] = field(default_factory=dict)  # of all evaluated nodes
    waiting: set[str] = field(default_factory=set)  # nodes whose own outputs are known only once they have run

    def evaluate(self, node_id: str) -> Outputs:
        """Return a node's outputs. In a circle the node at which it closes is unknown."""
        stack, active = [], set()
        result: Outputs = ()
        if node_id not in self.outputs:
            stack.append(self._begin(node_id))
            active.add(node_id)
        while stack:
            frame = stack[-1]
            try:
                frame.wanted = frame.steps.send(frame.sent)
            except StopIteration as stop:
                result = stop.value
            except (NotKnown, ArithmeticError, KeyError, TypeError, ValueError):
                result = ()
                if not frame.saw_unknown:
                    self.waiting.add(frame.node.node_id)
            else:
                link = frame.node.inputs.get(frame.wanted)
                if not is_link(link):
                    frame.sent = link if isinstance(link, bool | int | float | str) else None
                elif link[0] in self.outputs:
                    self._send(frame, self.outputs[link[0]], link[1])
                elif link[0] in active or link[0] not in self.workflow:
                    self._send(frame, (), 0)
                else:
                    stack.append(self._begin(link[0]))
                    active.add(link[0])
                continue
            stack.pop()
            active.discard(frame.node.node_id)
            self.outputs[frame.node.node_id] = result = self._merge(frame.node.node_id, result)
            if stack:
                self._send(stack[-1], result, stack[-1].node.inputs[stack[-1].wanted][1])
        return self.outputs[node_id]

    def value(self, link: Value) -> Known:
        """Return the value of an input, a link or a literal."""
        if not is_link(link):
            return link if isinstance(link, bool | int | float | str) else None
        if link[0] not in self.workflow:
            return UNKNOWN
        return _output(self.evaluate(link[0]), link[1])

    def _begin(self, node_id: str) -> _Frame:
        node = RunningNode(node_id, self.workflow[node_id], self.facts, self.notes.append)
        return _Frame(node, self.rules.get(node.kind, _give_up)(node))

    def _send(self, frame: _Frame, outputs: Outputs, index: int) -> None:
        frame.sent = _output(outputs, index)
        frame.saw_unknown = frame.saw_unknown or frame.sent is UNKNOWN

    def _merge(self, node_id: str, predicted: Outputs) -> Outputs:
        """Return a node's outputs as it has returned them; as predicted where that is more."""
        actual = self.finished.get(node_id, ())
        merged = []
        for number in range(max(len(actual), len(predicted))):
            own, other = _output(predicted, number), _output(actual, number)
            merged.append(own if other is UNKNOWN or isinstance(own, LoaderOutput | Guider) else other)
        return tuple(merged)


def _output(outputs: Outputs, index: int) -> Known:
    return outputs[index] if 0 <= index < len(outputs) else UNKNOWN


def _give_up(node: RunningNode) -> Steps[Outputs]:
    """Evaluate a node of a type without a rule."""
    raise NotKnown
    yield ""


def get_loaded(node: RunningNode, name: str) -> Steps[LoaderOutput]:
    """Return a MODEL, CLIP or VAE."""
    return node.get(name, LoaderOutput)
