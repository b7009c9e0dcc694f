"""Predicts the calls that ComfyUI's own nodes in a workflow will make to models, as far as they are known.

A node that is not known stops only what depends on it. Once it has run, the workflow is interpreted again with its
outputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from . import image_rules, sampling_rules
from .graph import Workflow, is_link
from .interpreter import Interpreter, Rule, RunningNode
from .known import Facts, NoFacts, NotKnown, Outputs
from .sampling_rules import CALLERS, Call, DecoderCall, EncoderCall, ImageCall, SamplerCall

RULES: Mapping[str, Rule] = {**image_rules.RULES, **sampling_rules.RULES}
_SWITCHES = frozenset(("ComfySwitchNode", "ComfySoftSwitchNode"))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The known calls and outputs of a workflow."""

    calls: tuple[Call, ...]  # in the order in which they will run
    callers: frozenset[str]  # nodes that will call models, known or not, by id
    outputs: Mapping[str, Outputs]  # of nodes, by id
    waiting: frozenset[str]  # nodes that have to run before more is known, by id

    @property
    def samplings(self) -> list[SamplerCall]:
        return [call for call in self.calls if isinstance(call, SamplerCall)]

    @property
    def decodings(self) -> list[DecoderCall]:
        return [call for call in self.calls if isinstance(call, DecoderCall)]

    @property
    def images(self) -> list[ImageCall]:
        return [call for call in self.calls if isinstance(call, ImageCall)]

    @property
    def encodings(self) -> list[EncoderCall]:
        return [call for call in self.calls if isinstance(call, EncoderCall)]


def predict(
    workflow: Workflow, facts: Facts | None = None, finished: Mapping[str, Outputs] | None = None
) -> Prediction:
    """Return the calls of the nodes that something in the workflow needs.

    facts: about files that the workflow names.
    finished: outputs of nodes that have run, by node id.
    """
    nodes = {node_id: node for node_id, node in workflow.items() if isinstance(node, dict)}
    interpreter = Interpreter(nodes, RULES, facts or NoFacts(), finished or {})
    needed = [node_id for node_id in _find_needed(interpreter) if str(nodes[node_id].get("class_type")) in CALLERS]
    for node_id in needed:
        interpreter.evaluate(node_id)
    return Prediction(
        calls=tuple(interpreter.notes),
        callers=frozenset(needed),
        outputs=interpreter.outputs,
        waiting=frozenset(interpreter.waiting),
    )


def _find_needed(interpreter: Interpreter) -> list[str]:
    """Return the nodes that run: those that no other node uses, and what they need, in the workflow's order.

    Of a switch's branches only the chosen one; none while the choice is not known.
    """
    nodes = interpreter.workflow
    used = {link[0] for node in nodes.values() for link in _links(node)}
    reached = {node_id for node_id in nodes if node_id not in used}
    pending = list(reached)
    while pending:
        node_id = pending.pop()
        node = nodes[node_id]
        if str(node.get("class_type")) in _SWITCHES:
            links = _chosen_links(interpreter, node_id)
        else:
            links = list(_links(node))
        for link in links:
            if link[0] in nodes and link[0] not in reached:
                reached.add(link[0])
                pending.append(link[0])
    return [node_id for node_id in nodes if node_id in reached]


def _links(node: Mapping) -> Iterator[list]:
    inputs = node.get("inputs")
    yield from (value for value in inputs.values() if is_link(value)) if isinstance(inputs, dict) else ()


def _chosen_links(interpreter: Interpreter, node_id: str) -> list[list]:
    """Return the links that a switch needs."""
    inputs = interpreter.workflow[node_id].get("inputs") or {}
    links = [inputs["switch"]] if is_link(inputs.get("switch")) else []
    node = RunningNode(node_id, interpreter.workflow[node_id], interpreter.facts, lambda call: None)
    steps = image_rules.chosen_input(node)
    try:
        name = next(steps)
        steps.send(interpreter.value(inputs.get(name)))
    except StopIteration as chosen:
        links += [inputs[chosen.value]] if is_link(inputs.get(chosen.value)) else []
    except NotKnown:
        pass
    return links
