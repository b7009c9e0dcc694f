"""Find ComfyUI's official templates of the families that run here, in the package comfyui-workflow-templates."""

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Names of the denoisers of the families that run here, as the templates spell them.
_OURS = re.compile(
    r"z_image|wan2\.[12]_(t2v|i2v|ti2v|flf2v)|qwen_image_(?!2\.1|layered)|flux-?2|hunyuanvideo1\.5", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A template, with its entry in the package's index."""

    name: str
    title: str
    uses: int
    document: Mapping[str, Any]


def find_folder() -> Path:
    """Return the folder of the installed templates. Raises SystemExit without one."""
    for name in ("comfyui_workflow_templates_json", "comfyui_workflow_templates"):
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).parent / "templates" if spec and spec.origin else None
        if folder and (folder / "index.json").is_file():
            return folder
    raise SystemExit("The templates are not installed: give their folder with --templates.")


def find_version(folder: Path) -> str:
    """Return the version of the package of a folder of templates; "" if its metadata are not beside it."""
    found = importlib.metadata.distributions(path=[str(folder.parents[1])])
    return next((one.version for one in found if re.fullmatch("comfyui.workflow.templates", one.name)), "")


def list_templates(folder: Path) -> Iterator[Template]:
    """Yield the templates of the families that run here, most used first."""
    index = json.loads((folder / "index.json").read_text("utf-8"))
    entries = [entry for category in index for entry in category["templates"] if entry.get("openSource") is not False]
    for entry in sorted(entries, key=lambda entry: -(entry.get("usage") or 0)):
        path = folder / f"{entry['name']}.json"
        if path.is_file() and any(map(_OURS.match, list_denoisers(document := json.loads(path.read_text("utf-8"))))):
            title = str(entry.get("title") or entry["name"])
            yield Template(name=entry["name"], title=title, uses=entry.get("usage") or 0, document=document)


def list_nodes(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of a template, those of its subgraphs included."""
    graphs = [document, *(document.get("definitions") or {}).get("subgraphs", [])]
    return [node for graph in graphs for node in graph["nodes"]]


def list_running(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes that are neither muted, bypassed nor subgraphs; those of muted subgraphs are included."""
    ids = {graph["id"] for graph in (document.get("definitions") or {}).get("subgraphs", [])}
    return [node for node in list_nodes(document) if node.get("mode") not in (2, 4) and node["type"] not in ids]


def list_denoisers(document: Mapping[str, Any]) -> list[str]:
    """Return the names of the denoisers' files, also of muted nodes."""
    nodes = [node for node in list_nodes(document) if node["type"] == "UNETLoader"]
    return [str(values[0]) for node in nodes if isinstance(values := node.get("widgets_values"), list) and values]
