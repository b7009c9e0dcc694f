"""A workflow in API format as a graph of our nodes: what it consists of, and which generations it will run.

API format: `{node id: {"class_type": ..., "inputs": {name: value or [node id, output index]}}}`.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from ...tpu_runtime.pipeline import (
    QUALITIES,
    SIZE,
    STAGES,
    Expected,
    ModelRef,
    Settings,
    Silent,
    choose_model,
    is_of_files,
    spec_for_family,
    variant,
    without_zero_sizes,
)
from ..declare import Declaration, Expansion, Folders, Link, Ref
from ..model import chosen_id

Workflow = dict[str, dict[str, Any]]
Table = Mapping[str, Declaration]
# Numbers that no program depends on.
PROGRAMLESS = frozenset({"seed", "fps", "add_noise", "return_with_leftover_noise"})


def is_link(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def node_label(node_id: str, node: Mapping[str, Any]) -> str:
    return f"{node.get('class_type')} (node {node_id})"


def expand(workflow: Workflow, table: Table) -> Workflow:
    """The workflow with every Expansion replaced by its stages, named `<node id>.<stage>`."""
    expanded, results = {}, {}
    for node_id, node in workflow.items():
        declaration = declaration_of(table, node_id, node["class_type"])
        if not isinstance(declaration, Expansion):
            expanded[node_id] = node
            continue
        given = {i.name: node["inputs"].get(i.name, i.default) for i in declaration.inputs}
        for stage in declaration.stages_for(given):
            inputs = {name: _stage_value(node_id, given, value) for name, value in stage.inputs.items()}
            inputs = {name: value for name, value in inputs.items() if value is not None}
            expanded[f"{node_id}.{stage.name}"] = {"class_type": stage.node_id, "inputs": inputs}
        results[node_id] = [[f"{node_id}.{link.stage}", link.output] for link in declaration.results]
    return {
        node_id: {**node, "inputs": {name: _replaced(value, results) for name, value in node["inputs"].items()}}
        for node_id, node in expanded.items()
    }


def _stage_value(node_id: str, given: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, Link):
        return [f"{node_id}.{value.stage}", value.output]
    return given[value.input] if isinstance(value, Ref) else value


def _replaced(value: Any, results: Mapping[str, list]) -> Any:
    return results[value[0]][value[1]] if is_link(value) and value[0] in results else value


def declaration_of(table: Table, node_id: str, class_type: str) -> Declaration:
    if class_type not in table:
        raise ValueError(
            f"Node {node_id} is a {class_type}, which does not run without ComfyUI: queue this workflow there. "
            f"Known here: {', '.join(sorted(table))}."
        )
    return table[class_type]


def generations(workflow: Workflow, folders: Folders, table: Table) -> list[tuple[ModelRef, Settings]]:
    """The models and settings of a workflow's samplers and pipelines, as its widgets have them.

    Links count as the input's default; only models, and the size of an encoded picture, are followed to their nodes.
    Raises ValueError where there is no sampler, and for bad values.
    """
    graph = _ours(workflow, table)
    found = [_generation(graph, node_id, folders, table) for node_id in _samplers(graph, table)]
    if not found:
        raise ValueError("The workflow has no sampler or pipeline of this pack: there is nothing to compile.")
    return found


def expected(workflow: Workflow, folders: Folders, table: Table) -> list[Expected]:
    """What the runtime may prepare for, see `Expected`; a generation that cannot be known yet is left out."""
    graph, found = _ours(workflow, table), []
    for node_id in _samplers(graph, table):
        try:
            model, settings = _generation(graph, node_id, folders, table)
        except ValueError:
            continue  # its node says what is wrong when it runs
        nodes = [node for node in graph.values() if table[node["class_type"]].family == model.spec.family]
        changing = set(model.spec.inputs) - PROGRAMLESS
        is_known = not any(
            is_link(value) and name in changing for node in nodes for name, value in node["inputs"].items()
        )
        stages = _stages(model, {table[node["class_type"]].stage for node in nodes})
        found.append(Expected(model=model, stages=stages, settings=settings if is_known else None))
    return found


def _stages(model: ModelRef, present: Collection[str]) -> tuple[str, ...]:
    """Which of a workflow's stages of a model's family can be prepared for behind the text encoder.

    Where pictures are references, programs depend on their number and sizes, which only the sampler sees.
    """
    unknown = {"encode"} | (
        {"image", "denoise"} if "image" in present and model.spec.pictures.are_references else set()
    )
    return tuple(stage for stage in STAGES if stage in present and stage not in unknown)


def _ours(workflow: Workflow, table: Table) -> Workflow:
    """The nodes that are known, expanded; a pipeline has one of ComfyUI's own among its stages."""
    graph = expand({node_id: node for node_id, node in workflow.items() if node["class_type"] in table}, table)
    return {node_id: node for node_id, node in graph.items() if node["class_type"] in table}


def _samplers(graph: Workflow, table: Table) -> list[str]:
    return [node_id for node_id, node in graph.items() if table[node["class_type"]].stage == "denoise"]


def models(workflow: Workflow, folders: Folders, table: Table) -> list[ModelRef]:
    """What its samplers run, but for what is known only when it runs."""
    graph, found = _ours(workflow, table), []
    for node_id in _samplers(graph, table):
        with contextlib.suppress(ValueError):
            found.append(_model(graph, node_id, folders, table)[0])
    return found


def _model(graph: Workflow, node_id: str, folders: Folders, table: Table) -> tuple[ModelRef, Mapping[str, Any]]:
    """A sampler's model, and the widgets that choose it, its own or a loader's."""
    node = graph[node_id]
    is_loaded = is_link(node["inputs"].get("model"))
    choice = _origin(graph, node_id, "model", "model_id", table) if is_loaded else _widgets(graph, node_id, table)
    family = spec_for_family(table[node["class_type"]].family)
    named = {"model_id": chosen_id(choice), "precision": choice["precision"]}
    if "address" in choice:  # what its id is there, as far as that is known here
        spec = family if is_of_files(named["model_id"]) else variant(family, named["model_id"])
        return ModelRef(spec_name=spec.name, **named, address=choice["address"]), choice
    return choose_model(family, **named, folders=folders.models, progress=Silent()), choice


def _generation(graph: Workflow, node_id: str, folders: Folders, table: Table) -> tuple[ModelRef, Settings]:
    model, choice = _model(graph, node_id, folders, table)
    node, spec, widgets = graph[node_id], model.spec, without_zero_sizes(_widgets(graph, node_id, table))
    missing = [name for name in SIZE if name in spec.inputs and name not in widgets]
    if missing and (spec.needs_condition or is_link(node["inputs"].get("condition"))):
        widgets = {**_origin(graph, node_id, "condition", missing[0], table), **widgets}
    quality = str(choice.get("quality", QUALITIES[0]))
    spec.check_input("quality", quality)  # a loader offers what any model has
    return model, spec.settings(**widgets).in_quality(quality)


def _widgets(graph: Workflow, node_id: str, table: Table) -> dict[str, Any]:
    """A node's own values by name, in their own types; what is linked counts as its default."""
    node = graph[node_id]
    own = {name: value for name, value in node["inputs"].items() if not is_link(value)}
    declared = [declared for declared in table[node["class_type"]].inputs if declared.is_widget]
    return {i.name: i.parse(own[i.name]) if own.get(i.name) is not None else i.default for i in declared}


def _origin(graph: Workflow, node_id: str, socket: str, wanted: str, table: Table) -> dict[str, Any]:
    """The values of the node that a socket is linked to and that has the widget `wanted`, through nodes that only pass
    on what they get. ValueError where there is none: what it returns is then known only when it runs.
    """
    label = node_label(node_id, graph[node_id])
    name = socket
    for _ in graph:
        link = graph[node_id]["inputs"].get(name)
        if not is_link(link) or link[0] not in graph:
            break
        node_id, output = link
        if wanted in (widgets := _widgets(graph, node_id, table)):
            return widgets
        name = table[graph[node_id]["class_type"]].outputs[output].name
    raise ValueError(
        f"{label}: what is linked to {socket} does not say its {wanted} before it runs. Name model and size yourself: "
        "`comfyui-tpu warmup --model NAME --height ... --width ... --num-frames ...`."
    )
