"""The running node's view of ComfyUI: progress, previews, cancel and folders."""

import logging
import re
import shutil
import time
from pathlib import Path

import comfy.model_management
import comfy.utils
import folder_paths
from comfy_execution.utils import get_executing_context
from server import PromptServer

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import ModelRef, Preview, Settings
from .. import DECLARATIONS
from ..declare import Folders
from ..graphs import graph
from ..graphs.graph import Workflow
from . import previews

log = logging.getLogger(__name__)

# ComfyUI's folders that a model id is looked for in, and those with what it may name alone.
_MODELS = ("diffusers", "diffusion_models", "checkpoints", "text_encoders", "vae", "vae_approx", "clip_vision")
DENOISERS = ("diffusion_models", "checkpoints")
# A number is not parted from its unit where the page breaks the line.
_UNITS = re.compile(r"(?<=\d) (?=(?:s|[KMG]i?B)\b)")
# The images that examples start from: of the models, and of their miniatures.
_EXAMPLES = Path(__file__).parents[2] / "examples"
_PICTURES = ("wan_i2v_input.jpg", "wan_i2v_shapes.png")


class ComfyHost:
    """The running node's view of ComfyUI: a bar and a line of text on the node, and the Cancel button."""

    def __init__(self, prompt: Workflow | None = None) -> None:
        context = get_executing_context()
        self._node_id = context.node_id if context else None
        self._bar = self._unit = None
        self._began, self._said = time.monotonic(), ""
        self._previewer = previews.Previewer()
        self.folders = folders()
        self._prompt = prompt or {}

    def generations(self) -> list[tuple[ModelRef, Settings]]:
        return graph.generations(self._prompt, self.folders, DECLARATIONS)

    def text(self, message: str) -> None:
        self._said = message
        message = pipeline.for_page(message)
        if self._node_id is not None:
            PromptServer.instance.send_progress_text(_UNITS.sub("\N{NO-BREAK SPACE}", message), self._node_id)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if self._bar is None or unit != self._unit:
            # Loaded MiB, steps and chunks follow each other on the same node.
            self._bar, self._unit = comfy.utils.ProgressBar(total, node_id=self._node_id), unit
        self._bar.update_absolute(done, total, self._previewer.image(preview) if preview else None)

    def ended(self) -> None:
        """A node that said what it does says in the end how long that took: what it said last would stay on it. A stage
        has said it, with its parts.
        """
        if self._said and not self._said.startswith(pipeline.TOOK):
            self.text(f"Took {time.monotonic() - self._began:.1f} s")

    def check_cancelled(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()


def folders() -> Folders:
    return Folders(
        models=tuple(path for name in _MODELS for path in folder_paths.get_folder_paths(name)),
        loras=tuple(folder_paths.get_folder_paths("loras")),
        input=Path(folder_paths.get_input_directory()),
        output=Path(folder_paths.get_output_directory()),
        confined=True,
    )


# Light decoders of videos in `vae_approx` begin so; what else is there decodes pictures.
_LIGHT = ("tae", "lighttae"), ("taesd", "taef")


def weights(*names: str) -> list[str]:
    """The files of weights in ComfyUI's folders of these names; its own lists leave out GGUF. Light decoders are VAEs
    too, as in core.
    """
    places = dict.fromkeys(path for name in names for path in folder_paths.get_folder_paths(name))
    found = dict.fromkeys(name for folder in places for name in pipeline.files_in(folder))
    if "vae" in names:
        light = [name for name in weights("vae_approx") if name.startswith(_LIGHT[0])]
        found |= dict.fromkeys(name for name in light if not name.startswith(_LIGHT[1]))
    return list(found)


def path_of(folder: str, name: str) -> str:
    """The file that a widget names, as core finds it: below its own folders alone."""
    if folder == "vae" and folder_paths.get_full_path(folder, name) is None:
        folder = "vae_approx"
    return folder_paths.get_full_path_or_raise(folder, name)


def install_pictures() -> None:
    """Copies the images that examples start from into ComfyUI's input folder, if no file has their name: so they
    run as they open, however the pack came. A folder that cannot be written costs only the images.
    """
    for name in _PICTURES:
        _install(_EXAMPLES / name)


def _install(picture: Path) -> None:
    target = Path(folder_paths.get_input_directory()) / picture.name
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with pipeline.written_file(target) as scratch:
            shutil.copyfile(picture, scratch)
    except OSError as error:
        log.warning("ComfyUI-TPU: the examples' picture could not be copied: %s. It is %s.", error, picture)
        return
    log.info("ComfyUI-TPU: the examples' picture is %s.", target)
