"""Write `examples/core`: ComfyUI's official templates of the supported families, with this pack's loaders.

A template is written if all its loaders are swapped by the names of their files, none of its nodes is refused, and no
comparison with ComfyUI's torch has another verdict than "equal" (`benchmarks/templates.json`). Of templates with one
recipe, only the most used is written: they have the same denoisers and the same nodes, apart from notes, values,
switches, texts and outputs. Names of LoRAs, images and prompts do not count. A template of more than 100 kB repeats one
recipe many times and is left out. Each gets a note with its title. The templates' copyright is Comfy Org's, under the
MIT license (`examples/core/LICENSE`).

Run: python tools/core_examples.py [--templates FOLDER]
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from comfyui_tpu.nodes.graphs.loader_swap import swap_loaders
from comfyui_tpu.tools import official_templates
from comfyui_tpu.tools.official_templates import Template

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "core"
TABLE = ROOT / "benchmarks" / "templates.json"
# The record of the folder: from which package, and the hash of each template as it is there.
RECORD = ROOT / "tools" / "core_examples.json"
NOTE = {"type": "MarkdownNote", "title": "How to use this", "color": "#432", "bgcolor": "#321"}
# Lines of each note; their translations are in `tools/translations`.
LINES = (
    "- This is a template of ComfyUI (Comfy Org, MIT license) with loaders for the TPU. The other nodes are ComfyUI's.",
    "- The first run of a size compiles for minutes.",
    "- `Use ComfyUI's own loaders again` in the TPU menu restores the template.",
)
# Nodes that are refused on the TPU, with the key of the message. Their own tests are in docs/core_nodes.md.
REFUSED = {"FluxKVCache": "comfyui.a_patch_of_blocks", "TextEncodeQwenImageEdit": "comfyui.prompt_too_long"}
MOST_CHARACTERS = 100_000
_NOT_COMPUTING = frozenset((
    "BatchImagesNode", "ComfyMathExpression", "ComfySwitchNode", "CreateVideo", "ImageCompare", "MarkdownNote", "Note",
    "PreviewAny", "PreviewImage", "Reroute", "ResolutionSelector", "SaveAnimatedWEBP", "SaveImage",
    "SaveImageAdvanced", "SaveVideo", "StringConcatenate",
))  # fmt: skip
_NOTE_SIZE, _GAP = (420, 200), 60


def choose_templates(templates: Iterable[Template], failing: Iterable[str] = ()) -> list[Template]:
    """Return the templates that are written, one for each recipe.

    templates: most used first.
    failing: names of templates that do not equal ComfyUI's torch.
    """
    chosen: dict[object, Template] = {}
    names = set(failing)
    for template in templates:
        is_small = len(format_document(template.document)) <= MOST_CHARACTERS
        if template.name not in names and is_small and not list_problems(template):
            chosen.setdefault(read_recipe(template.document), template)
    return list(chosen.values())


def list_problems(template: Template) -> set[str]:
    """Return the keys of the messages about a template: about refused nodes, and about loaders that stay.

    Loaders are judged by the names of their files. Muted nodes do not count.
    """
    nodes = official_templates.list_running(template.document)
    stays = [change for change in swap_loaders({"nodes": nodes}, ())[1] if change.key == "workflow.loader_stays"]
    refused = {REFUSED[node["type"]] for node in nodes if node["type"] in REFUSED}
    return refused | {change.parameters["problem"].key for change in stays}


def read_recipe(document: Mapping[str, Any]) -> object:
    """Return what two templates of one recipe have in common: denoisers, and types of nodes that are not muted."""
    kinds = {node["type"] for node in official_templates.list_running(document)} - _NOT_COMPUTING
    computing = frozenset(kind for kind in kinds if not kind.startswith("Primitive"))
    return frozenset(official_templates.list_denoisers(document)), computing


def make_example(template: Template) -> dict[str, Any]:
    """Return a template with swapped loaders and a note to the left of its nodes."""
    document = swap_loaders(template.document, ())[0]
    top = min(node["pos"][1] for node in document["nodes"])
    left = min(node["pos"][0] for node in document["nodes"]) - _NOTE_SIZE[0] - _GAP
    note_id = 1 + max([document["last_node_id"], *(n["id"] for n in document["nodes"] if isinstance(n["id"], int))])
    note = {
        "id": note_id, **NOTE, "pos": [left, top], "size": list(_NOTE_SIZE), "flags": {}, "order": 0, "mode": 0,
        "inputs": [], "outputs": [], "properties": {},
        "widgets_values": ["\n".join((f"**{template.title}**", "", *LINES))],
    }  # fmt: skip
    return {**document, "last_node_id": note_id, "nodes": [note, *document["nodes"]]}


def hash_document(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def files(folder: Path) -> dict[Path, str]:
    """Return the content of each file of `examples/core`, and of the record, by path.

    folder: of the package's templates.
    """
    table = json.loads(TABLE.read_text("utf-8"))
    failing = [row["template"] for row in table["templates"] if row["verdict"] != "equal"]
    chosen = choose_templates(official_templates.list_templates(folder), failing)
    record = {
        "package": official_templates.find_version(folder),
        "templates": {one.name: hash_document(one.document) for one in chosen},
    }
    examples = {FOLDER / f"{one.name}.json": format_document(make_example(one)) for one in chosen}
    return {**examples, RECORD: json.dumps(record, indent=1) + "\n"}


def format_document(document: Mapping[str, Any]) -> str:
    """Return JSON with a line for each node, which is a third smaller than the package's own form."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).replace('},{"id":', '},\n{"id":') + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--templates", type=Path, default=None, help="folder of index.json; default: of the package")
    folder = parser.parse_args().templates or official_templates.find_folder()
    written = files(folder)
    for path in FOLDER.glob("*.json"):
        if path not in written:
            path.unlink()
    for path, text in written.items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
