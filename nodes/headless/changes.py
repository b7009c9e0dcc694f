"""Changes to a workflow before it runs: a file's content, single inputs as `--set` names them, the miniature models."""

from pathlib import Path
from typing import Any

from ...tpu_runtime.pipeline import SPECS, is_of_files, parse_json, spec_for_family, tiny, variant, without_zero_sizes
from ..declare import Input
from ..graphs.graph import Workflow, declaration_of, is_link
from ..model import AUTO, PARTS
from .runner import HEADLESS

# What the examples of image to video start from.
EXAMPLES_PICTURE = "wan_i2v_input.jpg"


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None


def make_tiny(workflow: Workflow) -> None:
    """Gives every model node its family's built-in miniature and what fits it: sizes, and if it was trained prompts and
    a picture.

    LoRAs, which are made for the real sizes, are left out.
    """
    for node_id in [name for name, node in workflow.items() if node["class_type"] == "TPULoraLoader"]:
        model = workflow.pop(node_id)["inputs"].get("model")
        for node in workflow.values():
            node["inputs"] = {k: model if v == [node_id, 0] else v for k, v in node["inputs"].items()}
    for node in workflow.values():
        declaration = HEADLESS.get(node["class_type"])
        family = declaration and (declaration.family or node["inputs"].get("family"))
        if not declaration or not isinstance(family, str) or family not in {one.family for one in SPECS}:
            continue
        named = node["inputs"].get("model")
        source = workflow.get(named[0], node) if is_link(named) else node  # a loader, in place of the widget
        defaults = {i.name: i.default for i in HEADLESS.get(source["class_type"], declaration).inputs}
        model_id = (defaults | source["inputs"]).get("model_id")
        # A wrong type is an error of the workflow's own, said when all of it is checked.
        known = isinstance(model_id, str) and not is_of_files(model_id)
        spec = variant(spec_for_family(family), model_id if known else "")
        texts = tiny.texts(spec, spec.miniature.id)
        wanted = {"model_id": spec.miniature.id, **spec.miniature.inputs, **texts}
        wanted |= {name: AUTO for name in PARTS if name in node["inputs"]}
        given = {i.name: node["inputs"].get(i.name, i.default) for i in declaration.inputs if i.name in wanted}
        if "condition" in node["inputs"]:
            given = without_zero_sizes(given)  # they stay the picture's
        node["inputs"] |= {name: wanted[name] for name in given}
        shown = node["inputs"].get("image")
        loader = workflow.get(shown[0]) if is_link(shown) else None
        if texts and spec.miniature.picture and loader and loader["class_type"] == "LoadImage":
            if loader["inputs"].get("image") == EXAMPLES_PICTURE:  # one's own stays
                loader["inputs"]["image"] = spec.miniature.picture


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
