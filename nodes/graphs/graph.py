"""A workflow in API format as a graph of this pack's nodes: its models, and the generations it will run.

API format: `{node id: {"class_type": ..., "inputs": {name: value or [node id, output index]}}}`.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import TypeAlias, TypeGuard

from ...tpu_runtime.checkpoints.file_resolution import names_single_files
from ...tpu_runtime.checkpoints.model_ref import ModelRef, PlannedGeneration, choose_model, resolve_variant
from ...tpu_runtime.model_spec import SIZE_INPUTS, STAGES, Quality, Settings, drop_zero_sizes
from ...tpu_runtime.models import spec_for_family
from ...tpu_runtime.progress import SilentProgress
from ..declare import Declaration, Expansion, Folders, Json, Link, Ref, Value, Values
from ..model import join_model_id

# A node of a workflow in API format, and a workflow: nodes by id.
GraphNode: TypeAlias = dict[str, Json]
Workflow: TypeAlias = dict[str, GraphNode]
# Declarations by node id.
Table: TypeAlias = Mapping[str, Declaration]
# Inputs that do not change a program.
WITHOUT_EFFECT_ON_PROGRAMS = frozenset({"seed", "fps", "add_noise", "return_with_leftover_noise"})


def is_link(value: Value) -> TypeGuard[list[Value]]:
    """Return whether an input's value is a link to another node's output."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def node_label(node_id: str, node: GraphNode) -> str:
    """Return a node's name in messages, from its type and id."""
    return f"{node.get('class_type')} (node {node_id})"


def expand(workflow: Workflow, table: Table) -> Workflow:
    """Replace every Expansion of a workflow by its stages, named `<node id>.<stage>`."""
    expanded, results = {}, {}
    for node_id, node in workflow.items():
        declaration = find_declaration(table, node_id, node["class_type"])
        if not isinstance(declaration, Expansion):
            expanded[node_id] = node
            continue
        values = {i.name: node["inputs"].get(i.name, i.default) for i in declaration.inputs}
        for stage in declaration.active_stages(values):
            inputs = {name: _stage_value(node_id, values, value) for name, value in stage.inputs.items()}
            inputs = {name: value for name, value in inputs.items() if value is not None}
            expanded[f"{node_id}.{stage.name}"] = {"class_type": stage.node_id, "inputs": inputs}
        results[node_id] = [[f"{node_id}.{link.stage}", link.output] for link in declaration.results]
    return {
        node_id: {**node, "inputs": {name: _replace_link(value, results) for name, value in node["inputs"].items()}}
        for node_id, node in expanded.items()
    }


def _stage_value(node_id: str, given: Values, value: Value) -> Value:
    if isinstance(value, Link):
        return [f"{node_id}.{value.stage}", value.output]
    return given[value.input] if isinstance(value, Ref) else value


def _replace_link(value: Value, results: Mapping[str, list]) -> Value:
    return results[value[0]][value[1]] if is_link(value) and value[0] in results else value


def find_declaration(table: Table, node_id: str, class_type: str) -> Declaration:
    """Return the declaration of a node's type; ValueError if the type is unknown.

    table: the known declarations.
    node_id: for the message. class_type: of the node.
    """
    if class_type not in table:
        raise ValueError(
            f"Node {node_id} is a {class_type}, which does not run without ComfyUI: queue this workflow there. "
            f"Known here: {', '.join(sorted(table))}."
        )
    return table[class_type]


def list_generations(workflow: Workflow, folders: Folders, table: Table) -> list[tuple[ModelRef, Settings]]:
    """Return models and settings of a workflow's samplers and pipelines, as their widgets have them.

    folders: of the host. table: the known declarations.
    A linked input counts as its default; only models, and the size of an encoded image, are followed to their nodes.
    Raises ValueError without a sampler, and for values that are not allowed.
    """
    graph = _ours(workflow, table)
    planned = [_generation(graph, node_id, folders, table) for node_id in _samplers(graph, table)]
    if not planned:
        raise ValueError("The workflow has no sampler or pipeline of this pack: there is nothing to compile.")
    return planned


def plan_generations(workflow: Workflow, folders: Folders, table: Table) -> list[PlannedGeneration]:
    """Return the generations that the runtime can prepare for; those that are not known yet are left out.

    workflow: in API format.
    folders: of the host. table: the known declarations.
    """
    graph, planned = _ours(workflow, table), []
    for node_id in _samplers(graph, table):
        try:
            model, settings = _generation(graph, node_id, folders, table)
        except ValueError:
            continue  # its node raises the error when it runs
        nodes = [node for node in graph.values() if table[node["class_type"]].family == model.spec.family]
        changing = set(model.spec.inputs) - WITHOUT_EFFECT_ON_PROGRAMS
        is_known = not any(
            is_link(value) and name in changing for node in nodes for name, value in node["inputs"].items()
        )
        stages = _stages(model, {table[node["class_type"]].stage for node in nodes})
        planned.append(PlannedGeneration(model=model, stages=stages, settings=settings if is_known else None))
    return planned


def _stages(model: ModelRef, present: Collection[str]) -> tuple[str, ...]:
    """Return the stages of a workflow, those `present`, that can be prepared while the text encoder runs.

    With reference images, programs depend on their number and sizes, which only the sampler knows.
    """
    unknown = {"encode"} | (
        {"image", "denoise"} if "image" in present and model.spec.pictures.are_references else set()
    )
    return tuple(stage for stage in STAGES if stage in present and stage not in unknown)


def _ours(workflow: Workflow, table: Table) -> Workflow:
    """Return the known nodes, expanded, without ComfyUI's own nodes among a pipeline's stages."""
    graph = expand({node_id: node for node_id, node in workflow.items() if node["class_type"] in table}, table)
    return {node_id: node for node_id, node in graph.items() if node["class_type"] in table}


def _samplers(graph: Workflow, table: Table) -> list[str]:
    return [node_id for node_id, node in graph.items() if table[node["class_type"]].stage == "denoise"]


def list_models(workflow: Workflow, folders: Folders, table: Table) -> list[ModelRef]:
    """Return the models of a workflow's samplers, except those that are known only at run time.

    folders: of the host. table: the known declarations.
    """
    graph, chosen = _ours(workflow, table), []
    for node_id in _samplers(graph, table):
        with contextlib.suppress(ValueError):
            chosen.append(_model(graph, node_id, folders, table)[0])
    return chosen


def _model(graph: Workflow, node_id: str, folders: Folders, table: Table) -> tuple[ModelRef, Values]:
    """Return a sampler's model, and the widgets that choose it: its own or a loader's."""
    node = graph[node_id]
    is_loaded = is_link(node["inputs"].get("model"))
    choice = _origin(graph, node_id, "model", "model_id", table) if is_loaded else _widgets(graph, node_id, table)
    family = spec_for_family(table[node["class_type"]].family)
    named = {"model_id": join_model_id(choice), "precision": choice["precision"]}
    if "address" in choice:  # a remote model: its variant is guessed from the id
        spec = family if names_single_files(named["model_id"]) else resolve_variant(family, named["model_id"])
        return ModelRef(spec_name=spec.name, **named, address=choice["address"]), choice
    return choose_model(family, **named, folders=folders.models, progress=SilentProgress()), choice


def _generation(graph: Workflow, node_id: str, folders: Folders, table: Table) -> tuple[ModelRef, Settings]:
    model, choice = _model(graph, node_id, folders, table)
    node, spec, widgets = graph[node_id], model.spec, drop_zero_sizes(_widgets(graph, node_id, table))
    missing = [name for name in SIZE_INPUTS if name in spec.inputs and name not in widgets]
    if missing and (spec.needs_condition or is_link(node["inputs"].get("condition"))):
        widgets = {**_origin(graph, node_id, "condition", missing[0], table), **widgets}
    quality = str(choice.get("quality", Quality.EXACT))
    spec.check_input("quality", quality)  # a loader offers what any model has
    return model, spec.settings(**widgets).with_default_quality(quality)


def _widgets(graph: Workflow, node_id: str, table: Table) -> dict[str, Value]:
    """Return a node's values by name, in their own types; a linked input has its default."""
    node = graph[node_id]
    values = {name: value for name, value in node["inputs"].items() if not is_link(value)}
    declared = [declared for declared in table[node["class_type"]].inputs if declared.is_widget]
    return {i.name: i.parse(values[i.name]) if values.get(i.name) is not None else i.default for i in declared}


def _origin(graph: Workflow, node_id: str, socket: str, wanted: str, table: Table) -> dict[str, Value]:
    """Return the values of the node that a socket is linked to and that has the widget `wanted`.

    Follows nodes that only pass on their input. Raises ValueError without such a node: the value is then known only at
    run time.
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
        f"{label}: the node linked to {socket} has no {wanted} before it runs. Name model and size yourself: "
        "`comfyui-tpu warmup --model NAME --height ... --width ... --num-frames ...`."
    )
