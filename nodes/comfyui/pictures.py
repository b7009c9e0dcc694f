"""The pictures that examples start from, in ComfyUI's input folder: so they run as they open, however the pack came."""

import logging
import shutil
from pathlib import Path

import folder_paths

log = logging.getLogger(__name__)

_EXAMPLES = Path(__file__).parents[2] / "examples"
# Of the models, and of their miniatures.
_PICTURES = ("wan_i2v_input.jpg", "wan_i2v_shapes.png")


def install() -> None:
    """Copies them there if no file has their name. A folder that cannot be written costs only the pictures."""
    for name in _PICTURES:
        _install(_EXAMPLES / name)


def _install(picture: Path) -> None:
    target = Path(folder_paths.get_input_directory()) / picture.name
    if target.exists():
        return
    part = target.with_suffix(".part")  # a disk that fills up leaves no half picture under the name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, part)
        part.replace(target)
    except OSError as error:
        log.warning("ComfyUI-TPU: the examples' picture could not be copied: %s. It is %s.", error, picture)
        return
    log.info("ComfyUI-TPU: the examples' picture is %s.", target)
