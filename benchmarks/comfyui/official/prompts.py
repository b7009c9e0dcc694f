"""A template's prompt at a small size, and the nodes that keep its results."""

import copy
import re
from collections.abc import Mapping
from typing import Any

from comfyui_tpu.nodes.graphs.graph import Workflow, is_link

DIVISOR = 16  # of widths and heights
STEPS, LENGTH = 4, 5
MEGAPIXELS = {"ResolutionSelector": 0.1, "ImageScaleToTotalPixels": 0.01, "ResizeImageMaskNode": 0.01}
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced", "SamplerCustom")
# In place of the prompts, all of one length, so that templates share programs.
PROMPTS = ("a cat on a red mat", "a dog in a big car", "a man by a tall tree", "a bird on a green roof")
_ENCODERS = {"CLIPTextEncode": "text", "TextEncodeQwenImageEditPlus": "prompt", "TextEncodeQwenImageEdit": "prompt"}
DECODERS = ("VAEDecode", "VAEDecodeTiled")
_TEXTS = ("CameraAngle",)
_SIZES = ("width", "height", "largest_size")
# Nodes whose output is one of their inputs, with the names of these.
_PASSING: Mapping[str, tuple[str, ...]] = {
    "PrimitiveInt": ("value",), "PrimitiveFloat": ("value",), "PrimitiveString": ("value",),
    "PrimitiveStringMultiline": ("value",), "ComfySwitchNode": ("on_false", "on_true"),
}  # fmt: skip


def class_table(object_info: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes of a server's answer to /object_info, of which only the inputs are known."""
    return {
        name: type(name, (), {"INPUT_TYPES": classmethod(lambda cls, inputs=info["input"]: inputs)})
        for name, info in object_info.items()
    }


def missing_nodes(prompt: Workflow, classes: Mapping[str, Any]) -> list[str]:
    return sorted({node["class_type"] for node in prompt.values()} - classes.keys())


def replace_texts(prompt: Workflow, classes: Mapping[str, Any]) -> tuple[Workflow, list[str]]:
    """Return a prompt with a text in place of newer nodes that only make a prompt's text, and the types of these."""
    replaced = {node_id: node["class_type"] for node_id, node in prompt.items() if node["class_type"] in _TEXTS}
    replaced = {node_id: kind for node_id, kind in replaced.items() if kind not in classes}
    text = {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "from the left, from above"}}
    changed = copy.deepcopy(prompt) | {node_id: copy.deepcopy(text) for node_id in replaced}
    for node in changed.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and is_link(value) and value[0] in replaced:
                node["inputs"][name] = [value[0], 0]
    return changed, sorted(set(replaced.values()))


def make_small(prompt: Workflow) -> Workflow:
    """Return a prompt with few pixels, frames and steps, and short texts. Aspect ratios and the parts of steps stay.

    Literals are made smaller, and the literals of the primitives and switches that lead to an input.
    """
    small, texts = copy.deepcopy(prompt), {text: text for text in ("", *PROMPTS)}

    def shorten(text: str) -> str:
        return texts.setdefault(text, PROMPTS[(len(texts) - 5) % len(PROMPTS)])

    for node in small.values():
        kind, inputs = node["class_type"], node["inputs"]
        if kind in _PASSING:
            continue
        for name in inputs:
            change = shorten if name == _ENCODERS.get(kind) else _change(kind, name)
            if change is not None:
                _replace(small, node, name, change, set())
    return small


def _change(kind: str, name: str) -> Any:
    if name in _SIZES:
        return lambda value: max(32, round(value / DIVISOR / 16) * 16) if value > 256 else value
    if name == "length":
        return lambda value: min(value, LENGTH)
    if name == "steps":
        return lambda value: min(value, STEPS)
    if name in ("start_at_step", "end_at_step"):
        return lambda value: min(value, STEPS // 2) if value < 1000 else value
    if name.rpartition(".")[2] == "megapixels" and kind in MEGAPIXELS:
        return lambda value: MEGAPIXELS[kind]
    return None


def _replace(prompt: Workflow, node: Mapping[str, Any], name: str, change: Any, seen: set[str]) -> None:
    value = node["inputs"][name]
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        node["inputs"][name] = change(value)
    elif isinstance(value, list) and is_link(value) and value[0] in prompt and value[0] not in seen:
        source = prompt[value[0]]
        if source["class_type"] == "ComfyMathExpression" and name == "length":
            source["inputs"]["expression"] = str(LENGTH)
        for passed in _PASSING.get(source["class_type"], ()):
            if passed in source["inputs"]:
                _replace(prompt, source, passed, change, {*seen, value[0]})


def keep_results(prompt: Workflow, prefix: str) -> tuple[Workflow, dict[str, str]]:
    """Return a prompt that keeps all latents and images, and the names under which it does, by node id."""
    keeping, names = dict(prompt), {}
    for number, (node_id, node) in enumerate(prompt.items()):
        kind, name = node["class_type"], f"{prefix}_{number}"
        if kind in SAMPLERS:
            keeping[name] = {"class_type": "KeepSamples", "inputs": {"samples": [node_id, 0], "name": name}}
        elif kind in DECODERS:
            keeping[name] = {"class_type": "Keep", "inputs": {"images": [node_id, 0], "name": name}}
        else:
            continue
        names[node_id] = name
    return keeping, names


def family_of(prompt: Workflow) -> str:
    """Return a name by which templates of one family sort next to each other: of its first denoiser."""
    names = sorted(str(node["inputs"]["unet_name"]) for node in prompt.values() if "unet_name" in node["inputs"])
    return re.sub(r"[\d._-]+|fp8.*|bf16.*|int8.*", " ", names[0].lower()) if names else ""
