"""Where the examples are: the page's are named by their titles, the others by their names."""

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
    """The page's file of the example `name`."""
    return _BY_NAME[name]


def twin(path: Path) -> Path:
    """The same example in API form, of the page's file or that of the pipeline node."""
    name = path.stem if path in PIPELINES else next(name for name, one in _BY_NAME.items() if one == path)
    return FOLDER / "api" / f"{name}.json"
