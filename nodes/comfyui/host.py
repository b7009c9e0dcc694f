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

from ...tpu_runtime.checkpoints.file_resolution import list_weight_paths
from ...tpu_runtime.checkpoints.model_ref import ModelRef
from ...tpu_runtime.files import open_atomic
from ...tpu_runtime.messages import compose, find_messages, transform
from ...tpu_runtime.model_spec import Settings
from ...tpu_runtime.progress import DURATION_PREFIX, Preview
from ...tpu_runtime.redact import escape_for_page
from .. import DECLARATIONS
from ..declare import Folders
from ..graphs import graph
from ..graphs.graph import Workflow
from . import previews

log = logging.getLogger(__name__)

# ComfyUI's folders in which a model id is looked up, and those whose files it may name without others.
_MODELS = (
    "diffusers", "diffusion_models", "checkpoints", "text_encoders", "vae", "vae_approx", "clip_vision",
    "model_patches", "controlnet",
)  # fmt: skip
DENOISERS = ("diffusion_models", "checkpoints")
# A space between a number and its unit, at which the page must not break the line.
_UNITS = re.compile(r"(?<=\d) (?=(?:s|[KMG]i?B)\b)")
# Start images of the examples: for the models, and for their tiny models.
_EXAMPLES = Path(__file__).parents[2] / "examples"
_IMAGES = ("wan_i2v_input.jpg", "wan_i2v_shapes.png")


class ComfyContext:
    """The running node's view of ComfyUI: a bar and a line of text on the node, and the Cancel button."""

    def __init__(self, prompt: Workflow | None = None) -> None:
        context = get_executing_context()
        self._node_id = context.node_id if context else None
        self._bar = self._unit = None
        self._began, self._text = time.monotonic(), ""
        self._previewer = previews.Previewer()
        self.folders = comfyui_folders()
        self._prompt = prompt or {}

    def generations(self) -> list[tuple[ModelRef, Settings]]:
        """Return models and settings of the running workflow's samplers."""
        return graph.list_generations(self._prompt, self.folders, DECLARATIONS)

    def text(self, message: str) -> None:
        """Show a line of status on the node."""
        self._text = message
        if self._node_id is not None:
            shown = transform(message, lambda text: _UNITS.sub("\N{NO-BREAK SPACE}", escape_for_page(text)))
            send_messages(shown)
            PromptServer.instance.send_progress_text(shown, self._node_id)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        """Move the node's bar, and show a preview if there is one."""
        if self._bar is None or unit != self._unit:
            # One node reports loaded MiB, steps and chunks, one after another.
            self._bar, self._unit = comfy.utils.ProgressBar(total, node_id=self._node_id), unit
        self._bar.update_absolute(done, total, self._previewer.image(preview) if preview else None)

    def show_duration(self) -> None:
        """Replace the last status of a node by its duration, unless a stage has already done so."""
        if self._text and not self._text.startswith(DURATION_PREFIX):
            self.text(compose("took.total", total_s=f"{time.monotonic() - self._began:.1f}"))

    def check_cancelled(self) -> None:
        """Raise ComfyUI's exception if the user cancelled."""
        comfy.model_management.throw_exception_if_processing_interrupted()


def send_messages(value: object, client: str | None = None) -> None:
    """Send key and parameters of the messages in `value` to a client, before ComfyUI sends their text alone.

    client: its id; None for all, as for a line of status.
    """
    if found := find_messages(value):
        PromptServer.instance.send_sync("comfyui-tpu.messages", found, client)


def comfyui_folders() -> Folders:
    """Return ComfyUI's folders."""
    return Folders(
        models=tuple(path for name in _MODELS for path in folder_paths.get_folder_paths(name)),
        loras=tuple(folder_paths.get_folder_paths("loras")),
        input=Path(folder_paths.get_input_directory()),
        output=Path(folder_paths.get_output_directory()),
        confined=True,
    )


# Prefixes of light video decoders in `vae_approx`, and of the image decoders among them.
_LIGHT = ("tae", "lighttae"), ("taesd", "taef")


def list_weight_files(*names: str) -> list[str]:
    """Return the weight files in ComfyUI's folders of these names, GGUF included, which ComfyUI's own lists leave out.

    For "vae" also light decoders, as in core.
    """
    paths = dict.fromkeys(path for name in names for path in folder_paths.get_folder_paths(name))
    files = dict.fromkeys(name for folder in paths for name in list_weight_paths(folder))
    if "vae" in names:
        light = [name for name in list_weight_files("vae_approx") if name.startswith(_LIGHT[0])]
        files |= dict.fromkeys(name for name in light if not name.startswith(_LIGHT[1]))
    return list(files)


def resolve_path(folder: str, name: str) -> str:
    """Return the path of a file that a widget names; only below ComfyUI's folders, as in core."""
    if folder == "vae" and folder_paths.get_full_path(folder, name) is None:
        folder = "vae_approx"
    return folder_paths.get_full_path_or_raise(folder, name)


def install_example_images() -> None:
    """Copy the examples' images into ComfyUI's input folder, unless files of these names exist.

    So the examples run without further steps. Only the images are missing if the folder cannot be written.
    """
    for name in _IMAGES:
        _install(_EXAMPLES / name)


def _install(image: Path) -> None:
    target = Path(folder_paths.get_input_directory()) / image.name
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(target) as scratch:
            shutil.copyfile(image, scratch)
    except OSError as error:
        log.warning("ComfyUI-TPU: the examples' image could not be copied: %s. It is %s.", error, image)
        return
    log.info("ComfyUI-TPU: the examples' image is %s.", target)
