"""The picture that examples start from, in ComfyUI's input folder: so they run as they open, however the pack came."""

import logging
import shutil
from pathlib import Path

import folder_paths

log = logging.getLogger(__name__)

_PICTURE = Path(__file__).parents[2] / "examples" / "wan_i2v_input.jpg"


def install() -> None:
    """Copies it there if no file has its name. A folder that cannot be written costs only the picture."""
    target = Path(folder_paths.get_input_directory()) / _PICTURE.name
    if target.exists():
        return
    part = target.with_suffix(".part")  # a disk that fills up leaves no half picture under the name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_PICTURE, part)
        part.replace(target)
    except OSError as error:
        log.warning("ComfyUI-TPU: the examples' picture could not be copied: %s. It is %s.", error, _PICTURE)
        return
    log.info("ComfyUI-TPU: the examples' picture is %s.", target)
