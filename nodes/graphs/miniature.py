"""A workflow with built-in miniatures in the place of its models, to be tried without weights or a TPU."""

import copy
from typing import Any

from ...tpu_runtime.pipeline import SPECS, is_of_files, spec_for_family, tiny, variant, without_zero_sizes
from .. import DECLARATIONS
from ..model import AUTO, PARTS
from .graph import Workflow, is_link

# What the examples of image to video start from.
EXAMPLES_PICTURE = "wan_i2v_input.jpg"
# Large ones have hundreds.
MOST_NODES = 5000


def changes(document: Any) -> dict[str, Any]:
    """What `make_tiny` does to a prompt as the page queues it: `values`, by node and input, and `without`, the nodes
    that are left out. ValueError for what is no prompt.
    """
    if not isinstance(document, dict) or not all(map(_is_node, document.values())):
        raise ValueError("The body is not a workflow in API format.")
    if len(document) > MOST_NODES:
        raise ValueError(f"The workflow has {len(document)} nodes; at most {MOST_NODES} are looked at.")
    found = copy.deepcopy(document)
    make_tiny(found)
    values = {
        node_id: {k: v for k, v in node["inputs"].items() if not is_link(v) and document[node_id]["inputs"].get(k) != v}
        for node_id, node in found.items()
    }
    return {
        "values": {node_id: new for node_id, new in values.items() if new},
        "without": [node_id for node_id in document if node_id not in found],
    }


def _is_node(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)


def make_tiny(workflow: Workflow) -> None:
    """Gives every model node its family's built-in miniature and what fits it: sizes, and if it was trained prompts and
    a picture.

    LoRAs, which are made for the real sizes, are left out.
    """
    _leave_loras_out(workflow)
    for node in workflow.values():
        declaration = DECLARATIONS.get(node["class_type"])
        family = declaration and (declaration.family or node["inputs"].get("family"))
        if not declaration or not isinstance(family, str) or family not in {one.family for one in SPECS}:
            continue
        named = node["inputs"].get("model")
        source = workflow.get(named[0], node) if is_link(named) else node  # a loader, in place of the widget
        defaults = {i.name: i.default for i in DECLARATIONS.get(source["class_type"], declaration).inputs}
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


def _leave_loras_out(workflow: Workflow) -> None:
    """What hangs on a LoRA's loader hangs on that one's model then, through chains of any length and order."""
    loaders = [name for name, node in workflow.items() if node["class_type"] == "TPULoraLoader"]
    models = {name: workflow.pop(name)["inputs"].get("model") for name in loaders}

    def source(link: Any) -> Any:
        passed = set()
        while is_link(link) and link[0] in models and link[1] == 0:
            passed.add(link[0])
            link = models[link[0]]
            link = None if is_link(link) and link[0] in passed else link  # a circle
        models.update(dict.fromkeys(passed, link))
        return link

    for node in workflow.values() if models else ():
        node["inputs"] = {name: source(value) for name, value in node["inputs"].items()}
