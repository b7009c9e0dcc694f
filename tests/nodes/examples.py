"""Paths of the examples: the page's files are named by title, the others by name."""

import json
import uuid
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples"
PAGES = sorted(FOLDER.glob("*.json"))
PIPELINES = sorted((FOLDER / "pipeline").glob("*.json"))
API = sorted((FOLDER / "api").glob("*.json"))


def _id(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"comfyui-tpu/examples/{name}"))


_NAMES = {_id(path.stem): path.stem for path in API}
_BY_NAME = {_NAMES[json.loads(path.read_text("utf-8"))["id"]]: path for path in PAGES}


def page(name: str) -> Path:
    """Return the page's file of the example `name`."""
    return _BY_NAME[name]


def twin(path: Path) -> Path:
    """Return the file in API format of an example's page or pipeline file."""
    name = path.stem if path in PIPELINES else next(name for name, one in _BY_NAME.items() if one == path)
    return FOLDER / "api" / f"{name}.json"
