"""Changes to a workflow before it runs: a file's content, single inputs as `--set` names them."""

from pathlib import Path
from typing import Any

from ...tpu_runtime.pipeline import parse_json
from ..declare import Input
from ..graphs.graph import Workflow, declaration_of
from .runner import HEADLESS


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None


def assign(workflow: Workflow, assignment: str) -> None:
    """Applies one NODE.INPUT=VALUE; NODE is an id, or a class or title that only one node has."""
    target, equals, text = assignment.partition("=")
    if not equals or "." not in target:
        raise ValueError(f"--set {assignment}: it must look like NODE.INPUT=VALUE, such as 2.seed=7.")
    inputs, declared = _find_input(workflow, target, f"--set {assignment}")
    inputs[declared.name] = _value(declared, text)


def set_input(workflow: Workflow, target: str, value: Any) -> None:
    """Sets the input `NODE.INPUT` to a value of JSON; a socket cannot be set."""
    if "." not in target:
        raise ValueError(f'{target}: a name must look like NODE.INPUT, such as "2.seed".')
    inputs, declared = _find_input(workflow, target, target)
    if not declared.is_widget:
        raise ValueError(f"{target}: it takes a link to a node that gives {declared.type}, which no value replaces.")
    if not isinstance(value, str | int | float):
        raise ValueError(f"{target} is {value!r}; it must be text, a number, true or false.")
    inputs[declared.name] = value


def _find_input(workflow: Workflow, target: str, said: str) -> tuple[dict[str, Any], Input]:
    """The inputs of the node that `NODE.INPUT` names, and that input's declaration; errors begin with `said`."""
    node_name, _, input_name = target.rpartition(".")
    node_id = _find_node(workflow, node_name, said)
    node = workflow[node_id]
    names = {i.name: i for i in declaration_of(HEADLESS, node_id, node["class_type"]).inputs}
    if input_name not in names:
        raise ValueError(f"{said}: {node_name} has no input {input_name}; it has {', '.join(names)}.")
    return node["inputs"], names[input_name]


def _value(declared: Input, text: str) -> Any:
    """`text` as JSON, or as it stands where the input takes text or it is not JSON."""
    if declared.type in ("STRING", "COMBO"):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


def _find_node(workflow: Workflow, name: str, said: str) -> str:
    if name in workflow:
        return name
    titles = {node_id: node.get("_meta", {}).get("title") for node_id, node in workflow.items()}
    found = [node_id for node_id, node in workflow.items() if name in (node["class_type"], titles[node_id])]
    if len(found) == 1:
        return found[0]
    listing = ", ".join(f"{node_id} ({node['class_type']})" for node_id, node in workflow.items())
    count = "no node" if not found else f"{len(found)} nodes"
    raise ValueError(f"{said}: {count} called {name!r} in this workflow; its nodes are {listing}.")
