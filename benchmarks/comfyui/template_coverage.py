"""Compute how many uses of ComfyUI's official templates are compiled ahead.

For each template of the supported families, it checks whether all calls of samplers, text encoders and decoders are
known when the prompt is queued, or after a node has run.

Needs a real ComfyUI (COMFYUI_PATH, else ~/ComfyUI) and the package comfyui-workflow-templates, whose index has the
uses. Images that a template loads count as 1328 x 1000 pixels; model files are looked up by name only.

    python benchmarks/comfyui/template_coverage.py [--templates FOLDER] [--list]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyui_tpu.nodes.graphs import core_calls
from comfyui_tpu.nodes.graphs.graph import Workflow
from comfyui_tpu.nodes.graphs.known import Conditioning, ImageSize, Known, LatentSize, LoaderOutput, Outputs
from comfyui_tpu.nodes.graphs.loader_swap import LOADERS, swap_loaders
from comfyui_tpu.tools.official_templates import find_folder, list_templates

sys.path.insert(0, str(Path(__file__).parent))
from template_pages import import_comfyui, read_prompt

_STRIDES = (("ti2v", 16), ("wan2.2_vae", 16), ("hunyuan", 16), ("flux2", 16), ("flux-2", 16))
# Nodes that are refused on the TPU; their names in the report.
_REFUSED = {
    "TextEncodeQwenImageEdit": "the first edit encoder",
    "FluxKVCache": "cache of references",
    "PiDConditioning": "another model",
}
# What a node's output of a type may be once it has run.
_AFTER_RUN: Mapping[str, Known] = {
    "IMAGE": ImageSize(height=1024, width=1024),
    "MASK": ImageSize(height=1024, width=1024),
    "LATENT": LatentSize(height=1024, width=1024, stride=8),
    "CONDITIONING": Conditioning(),
    "INT": 1024,
    "FLOAT": 1.0,
    "BOOLEAN": True,
    "STRING": "",
}


class ByName:
    """Facts of files by their names."""

    def image_size(self, name: str) -> ImageSize | None:
        return ImageSize(width=1328, height=1000)

    def stride(self, loaded: LoaderOutput) -> int | None:
        names = " ".join(map(str, loaded.values.values())).lower()
        return next((stride for part, stride in _STRIDES if part in names), 8)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a template."""

    name: str
    uses: int
    when: str  # "queued", "after N nodes", "refused" or "never"
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=Path, default=None, help="folder of index.json; default: of the package")
    parser.add_argument("--list", action="store_true", help="print a line for each template")
    options = parser.parse_args()
    folder, classes = options.templates or find_folder(), import_comfyui()
    verdicts = [
        judge(one.name, one.uses, read_prompt(swapped(one.document), classes), classes)
        for one in list_templates(folder)
    ]
    if options.list:
        for verdict in verdicts:
            print(f"{verdict.uses:6} {verdict.name}: {verdict.when} {verdict.reason}".rstrip())
    total = sum(verdict.uses for verdict in verdicts)
    kinds = {"queued": [], "after": [], "refused": [], "never": []}  # type: dict[str, list[Verdict]]
    for verdict in verdicts:
        kinds[verdict.when.partition(" ")[0]].append(verdict)
    for kind, found in kinds.items():
        uses = sum(verdict.uses for verdict in found)
        print(json.dumps({"known": kind, "templates": len(found), "uses": uses, "share": round(uses / total, 4)}))
    print(json.dumps({"templates": len(verdicts), "uses": total}))


def swapped(document: Any) -> Any:
    """Return a template with its loaders swapped for ours, as the page's command does it."""
    return swap_loaders(document, ())[0]


def judge(name: str, uses: int, prompt: Workflow, classes: Mapping[str, Any]) -> Verdict:
    """Return when all calls of a prompt are known."""
    finished: dict[str, Outputs] = {}
    kinds = {str(node["class_type"]) for node in prompt.values()}
    prediction = core_calls.predict(prompt, ByName(), finished)
    for _ in prompt:
        prediction = core_calls.predict(prompt, ByName(), finished)
        called = {call.node_id for call in prediction.calls}
        missing = [node_id for node_id in prediction.callers - called if not _sees_images(prompt[node_id])]
        if not missing and all(_is_ours(call) for call in prediction.samplings):
            when = f"after {len(finished)} nodes" if finished else "queued"
            return Verdict(name=name, uses=uses, when=when, reason=_types(prompt, finished))
        waiting = [node_id for node_id in prediction.waiting if node_id not in finished]
        news = {
            node_id: found for node_id in waiting if (found := _after_run(classes.get(prompt[node_id]["class_type"])))
        }
        if not any(news.values()) or _REFUSED.keys() & kinds:
            break
        finished |= news
    refused = sorted({_REFUSED[kind] for kind in kinds & _REFUSED.keys()})
    foreign = sorted(kinds & LOADERS.keys() - {"CLIPVisionLoader"})
    reason = ", ".join(refused) or ", ".join(
        [*foreign, *sorted({str(prompt[one]["class_type"]) for one in prediction.waiting})]
    )
    return Verdict(name=name, uses=uses, when="refused" if refused else "never", reason=reason)


def _sees_images(node: Mapping[str, Any]) -> bool:
    """Return whether a node encodes a prompt with images, whose call is not predicted."""
    return node["class_type"] == "TextEncodeQwenImageEditPlus" and any(
        f"image{number}" in node["inputs"] for number in (1, 2, 3)
    )


def _is_ours(call: core_calls.SamplerCall) -> bool:
    """Return whether a network runs here. What ComfyUI's own VAE or text encoder does is not compiled."""
    return call.model.kind not in LOADERS


def _after_run(kind: type | None) -> Outputs:
    """Return what the outputs of a node of a class are known as once it has run."""
    types = getattr(kind, "RETURN_TYPES", ()) if kind else ("CONDITIONING", "IMAGE")
    known = tuple(_AFTER_RUN.get(str(type_)) for type_ in types or ())
    return tuple(value for value in known if value is not None) if all(value is not None for value in known) else ()


def _types(prompt: Workflow, finished: Mapping[str, Outputs]) -> str:
    return ", ".join(sorted({str(prompt[node_id]["class_type"]) for node_id in finished}))


if __name__ == "__main__":
    main()
