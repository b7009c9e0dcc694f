"""Replaces a workflow's models by built-in tiny models, to try it without weights or a TPU."""

import copy

from ...tpu_runtime.checkpoints import tiny
from ...tpu_runtime.checkpoints.file_resolution import names_single_files
from ...tpu_runtime.checkpoints.model_ref import resolve_variant
from ...tpu_runtime.messages import compose
from ...tpu_runtime.model_spec import drop_zero_sizes
from ...tpu_runtime.models import SPECS, spec_for_family
from .. import DECLARATIONS
from ..declare import Json, Value
from ..model import AUTO, PART_WIDGETS
from .graph import Workflow, is_link

# The start image of the image-to-video examples.
EXAMPLE_IMAGE = "wan_i2v_input.jpg"
# Large workflows have hundreds of nodes.
MAX_NODES = 5000


def describe_tiny_changes(document: Json) -> dict[str, Json]:
    """Return the changes that `make_tiny` makes to a prompt as the page queues it.

    `values`: new values by node and input. `without`: the nodes that are left out. Raises ValueError if `document` is
        not a prompt.
    """
    if not isinstance(document, dict) or not all(map(_is_node, document.values())):
        raise ValueError(compose("workflow.not_api_format"))
    if len(document) > MAX_NODES:
        raise ValueError(compose("workflow.too_many_nodes", count=len(document), max_nodes=MAX_NODES))
    tiny_workflow = copy.deepcopy(document)
    make_tiny(tiny_workflow)
    values = {
        node_id: {k: v for k, v in node["inputs"].items() if not is_link(v) and document[node_id]["inputs"].get(k) != v}
        for node_id, node in tiny_workflow.items()
    }
    return {
        "values": {node_id: new for node_id, new in values.items() if new},
        "without": [node_id for node_id in document if node_id not in tiny_workflow],
    }


def _is_node(node: Json) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)


def make_tiny(workflow: Workflow) -> None:
    """Give every model node its family's built-in tiny model, with matching sizes, in place.

    A trained tiny model also gets a matching prompt and image. LoRAs are left out: they only fit the real sizes.
    """
    _leave_loras_out(workflow)
    for node in workflow.values():
        declaration = DECLARATIONS.get(node["class_type"])
        family = declaration and (declaration.family or node["inputs"].get("family"))
        if not declaration or not isinstance(family, str) or family not in {spec.family for spec in SPECS}:
            continue
        model_link = node["inputs"].get("model")
        source = workflow.get(model_link[0], node) if is_link(model_link) else node  # a loader overrides the widget
        defaults = {i.name: i.default for i in DECLARATIONS.get(source["class_type"], declaration).inputs}
        model_id = (defaults | source["inputs"]).get("model_id")
        # A wrong type is reported later, when the whole workflow is checked.
        known = isinstance(model_id, str) and not names_single_files(model_id)
        spec = resolve_variant(spec_for_family(family), model_id if known else "")
        texts = tiny.find_trained_texts(spec, spec.miniature.id)
        replacements = {"model_id": spec.miniature.id, **spec.miniature.inputs, **texts}
        replacements |= {name: AUTO for name in PART_WIDGETS if name in node["inputs"]}
        defaults_by_name = {
            i.name: node["inputs"].get(i.name, i.default) for i in declaration.inputs if i.name in replacements
        }
        if "condition" in node["inputs"]:
            defaults_by_name = drop_zero_sizes(defaults_by_name)  # they stay the image's
        node["inputs"] |= {name: replacements[name] for name in defaults_by_name}
        image_link = node["inputs"].get("image")
        loader = workflow.get(image_link[0]) if is_link(image_link) else None
        if texts and spec.miniature.picture and loader and loader["class_type"] == "LoadImage":
            if loader["inputs"].get("image") == EXAMPLE_IMAGE:  # the user's own image stays
                loader["inputs"]["image"] = spec.miniature.picture


def _leave_loras_out(workflow: Workflow) -> None:
    """Link the users of LoRA loaders to the loaders' models, through chains of any length and order."""
    loaders = [name for name, node in workflow.items() if node["class_type"] == "TPULoraLoader"]
    models = {name: workflow.pop(name)["inputs"].get("model") for name in loaders}

    def source(link: Value) -> Value:
        passed = set()
        while is_link(link) and link[0] in models and link[1] == 0:
            passed.add(link[0])
            link = models[link[0]]
            link = None if is_link(link) and link[0] in passed else link  # a circle
        models.update(dict.fromkeys(passed, link))
        return link

    for node in workflow.values() if models else ():
        node["inputs"] = {name: source(value) for name, value in node["inputs"].items()}
