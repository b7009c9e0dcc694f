"""Swaps of loaders in a workflow: ComfyUI's own become those of the TPU, and back."""

import copy
from collections.abc import Sequence
from pathlib import PurePath

from ...tpu_runtime.checkpoints.controls import read_control
from ...tpu_runtime.checkpoints.file_resolution import find_file
from ...tpu_runtime.checkpoints.model_ref import choose_partial_model
from ...tpu_runtime.messages import Message, compose
from ...tpu_runtime.model_spec import Quality
from ...tpu_runtime.models import SPECS, published
from ..declare import Json, Values
from ..model import CLIP_TYPES, parse_quality
from .upgrade import list_dicts, list_graphs

# For each of core's loaders, our loader and the widgets that both have, in order.
LOADERS = {
    "UNETLoader": ("TPUUNETLoader", ("unet_name", "weight_dtype")),
    "CLIPLoader": ("TPUCLIPLoader", ("clip_name", "type", "device")),
    "DualCLIPLoader": ("TPUDualCLIPLoader", ("clip_name1", "clip_name2", "type", "device")),
    "VAELoader": ("TPUVAELoader", ("vae_name",)),
    "CheckpointLoaderSimple": ("TPUCheckpointLoader", ("ckpt_name",)),
    "CLIPVisionLoader": ("TPUCLIPVisionLoader", ("clip_name",)),
    "ModelPatchLoader": ("TPUModelPatchLoader", ("name",)),
    "ControlNetLoader": ("TPUControlNetLoader", ("control_net_name",)),
}
_BACK = {ours: (theirs, names) for theirs, (ours, names) in LOADERS.items()}
# Loaders of control networks.
_OF_CONTROLS = frozenset(("ModelPatchLoader", "ControlNetLoader"))
# The headers of further files are not read.
_MOST_LOADERS = 200


def swap_loaders(document: Json, folders: Sequence[str], *, back: bool = False) -> tuple[Json, list[str]]:
    """Return a workflow with loaders swapped, subgraphs included, and a sentence for each loader.

    Loaders that stay have a sentence too.

    document: the workflow, unchecked.
    folders: where files are looked for.
    back: swap ours for core's instead of core's for ours.
    Raises ValueError if `document` is not a workflow.
    """
    if not isinstance(document, dict):
        raise ValueError(compose("workflow.not_object"))
    try:
        result = copy.deepcopy(document)
    except RecursionError:
        raise ValueError(compose("workflow.too_deep")) from None
    is_of_page = isinstance(result.get("nodes"), list)
    nodes = (
        [node for graph in list_graphs(result) for node in list_dicts(graph.get("nodes"))]
        if is_of_page
        else result.values()
    )
    key, table = "type" if is_of_page else "class_type", _BACK if back else LOADERS
    loaders = [node for node in nodes if isinstance(node, dict) and str(node.get(key)) in table]
    changes, staying = [], []
    for node in loaders[:_MOST_LOADERS]:
        kind = node[key]
        other, names = table[kind]
        saved = node.get("widgets_values") if is_of_page else node.get("inputs")
        values = dict(zip(names, saved, strict=False)) if isinstance(saved, list) else saved
        values = values if isinstance(values, dict) else {}
        label = f"{kind} ({', '.join(str(values.get(name, '')) for name in names if 'name' in name)})"
        if not back and (problem := _why_not(kind, values, folders)):
            changes.append(compose("workflow.loader_stays", label=label, problem=problem))
            staying.append(label)
            continue
        node[key] = other
        if back and parse_quality(values.get("weight_dtype")) != Quality.EXACT:  # core's loader does not have it
            if isinstance(saved, list):
                saved[names.index("weight_dtype")] = "default"
            elif isinstance(saved, dict):
                saved["weight_dtype"] = "default"
        if is_of_page and isinstance(node.get("properties"), dict):
            # Drop the name of the node's pack: the new node is not in it.
            node["properties"] = {"Node name for S&R": other}
        changes.append(compose("workflow.loader_swapped", label=label, other=other))
    # Image encoders take only seconds on any processor.
    slow = [label for label in staying if not label.startswith("CLIPVision")]
    if slow and len(staying) < len(changes):
        changes.insert(0, compose("workflow.partly_on_cpu", loaders=", ".join(slow)))
    return result, changes


def describe_offer(change: str) -> str:
    """Return the sentence for a change of `swap_loaders` that is only offered."""
    if isinstance(change, Message) and change.key == "workflow.loader_swapped":
        label, other = change.parameters["label"], change.parameters["other"]
        return compose("workflow.loader_offered", label=label, other=other)
    return change


def _why_not(kind: str, values: Values, folders: Sequence[str]) -> str:
    """Return why the files of a core loader do not run here; "" if they do."""
    if "type" in LOADERS[kind][1]:
        known = ", ".join(CLIP_TYPES)
        return "" if values.get("type") in CLIP_TYPES else compose("workflow.type_unknown", known=known)
    name = str(values.get(LOADERS[kind][1][0], ""))
    known = published.CONTROLS if kind in _OF_CONTROLS else published.list_models()
    if PurePath(name).name in known:
        return ""
    unknown = compose("workflow.file_unknown")
    if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or name.startswith("~"):
        return unknown
    try:
        if kind in _OF_CONTROLS:
            read_control(str(find_file(name, folders)))
        else:
            choose_partial_model(SPECS, name, folders=tuple(folders))
    except (ValueError, OSError):
        return unknown
    return ""
