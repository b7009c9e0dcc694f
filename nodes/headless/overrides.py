"""Changes to a workflow before it runs: reading its file, and setting inputs as `--set` does."""

from pathlib import Path

from ...tpu_runtime.files import parse_json
from ..declare import Input, Json, Value
from ..graphs.graph import Workflow, find_declaration
from .runner import HEADLESS_NODES


def read_json(path: Path) -> Json:
    """Read a JSON file. Raises ValueError if it does not exist, or is not JSON."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"the file {path} does not exist.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None


def apply_assignment(workflow: Workflow, assignment: str) -> None:
    """Apply one assignment NODE.INPUT=VALUE; NODE is an id, or a class or title that only one node has."""
    target, equals, text = assignment.partition("=")
    if not equals or "." not in target:
        raise ValueError(f"--set {assignment}: it must look like NODE.INPUT=VALUE, such as 2.seed=7.")
    inputs, declared = _find_input(workflow, target, f"--set {assignment}")
    inputs[declared.name] = _value(declared, text)


def set_input(workflow: Workflow, target: str, value: Json) -> None:
    """Set the input that `target`, NODE.INPUT, names to a JSON `value`, in `workflow`. A socket cannot be set."""
    if "." not in target:
        raise ValueError(f'{target}: a name must look like NODE.INPUT, such as "2.seed".')
    inputs, declared = _find_input(workflow, target, target)
    if not declared.is_widget:
        raise ValueError(f"{target} must be linked to a node that outputs {declared.type}; it cannot be set.")
    if not isinstance(value, str | int | float):
        raise ValueError(f"{target} is {value!r}; it must be text, a number, true or false.")
    inputs[declared.name] = value


def _find_input(workflow: Workflow, target: str, label: str) -> tuple[dict[str, Value], Input]:
    """Return the inputs of the node that `target`, NODE.INPUT, names, and that input's declaration.

    label: beginning of errors.
    """
    node_name, _, input_name = target.rpartition(".")
    node_id = _find_node(workflow, node_name, label)
    node = workflow[node_id]
    names = {i.name: i for i in find_declaration(HEADLESS_NODES, node_id, node["class_type"]).inputs}
    if input_name not in names:
        raise ValueError(f"{label}: {node_name} has no input {input_name}; it has {', '.join(names)}.")
    return node["inputs"], names[input_name]


def _value(declared: Input, text: str) -> Value:
    """Parse `text` as JSON; return it unchanged for an input of text, or if it is not JSON."""
    if declared.type in ("STRING", "COMBO"):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


def _find_node(workflow: Workflow, name: str, label: str) -> str:
    if name in workflow:
        return name
    titles = {node_id: node.get("_meta", {}).get("title") for node_id, node in workflow.items()}
    ids = [node_id for node_id, node in workflow.items() if name in (node["class_type"], titles[node_id])]
    if len(ids) == 1:
        return ids[0]
    listing = ", ".join(f"{node_id} ({node['class_type']})" for node_id, node in workflow.items())
    count = "no node" if not ids else f"{len(ids)} nodes"
    raise ValueError(f"{label}: {count} called {name!r} in this workflow; its nodes are {listing}.")
