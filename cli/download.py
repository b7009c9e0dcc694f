"""`comfyui-tpu download`: downloads a model's files that the nodes load, into the Hub's cache or a folder.

The files are those that the nodes download at a first run (`tpu_runtime/checkpoints/hub.py`); here their sizes are
printed first.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..nodes.declare import Folders
from ..nodes.headless.runner import LINE_INTERVAL_S, TerminalContext
from ..tpu_runtime.checkpoints import checkpoint, hub
from ..tpu_runtime.checkpoints.checkpoint import Checkpoint
from ..tpu_runtime.checkpoints.downloads import WeightFile
from ..tpu_runtime.checkpoints.file_resolution import SEPARATOR
from ..tpu_runtime.checkpoints.model_ref import resolve_variant
from ..tpu_runtime.model_spec import ModelSpec
from ..tpu_runtime.models import NAME_HELP, SPECS, lookup_spec, published
from ..tpu_runtime.progress import Progress
from ..tpu_runtime.units import MIB, format_size
from . import doctor

BAR_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help=f"{NAME_HELP}; or a Hub id")
    parser.add_argument(
        "--to", type=Path, metavar="DIR",
        help="target folder, such as ComfyUI/models/diffusers/NAME, for use as model_id; "
        "default: the Hub's cache, where the nodes find the model by its id",
    )  # fmt: skip
    parser.add_argument(
        "--files", metavar="FORMAT",
        help="download single files in this format (fp8, fp16 or bf16), named as in ComfyUI's templates, into the "
        "folders of this machine's ComfyUI, or below --to",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises ValueError for errors of the user, the disk and the Hub."""
    host = BarContext()
    to = Path(os.path.expanduser(options.to)).absolute() if options.to else None
    if options.files:
        return _run_files(options.model, options.files, to or doctor.comfyui_folder() / "models", host)
    try:
        spec, model_id = find_model(options.model, host)
        remote = Checkpoint(spec=spec, model_id=model_id, root=None, to=to)
        remote.configs(host)
        _announce(remote, to or hub.cache_folder(), host)
        for component in spec.components:
            remote.fetch_weights(component, host)
            checkpoint.read_headers(remote.folder(component.folder, host), component)
    finally:
        host.clear()
    print(f"complete: {spec.title}; model_id is {to or model_id}")
    return 0


def _run_files(model: str, kind: str, place: Path, host: "BarContext") -> int:
    """Download a model as single files, below a folder with ComfyUI's `models` layout."""
    spec = next((spec for spec in SPECS if model in (spec.name, spec.published.hub_id)), None)
    downloads = published.list_files(model if spec is None else spec.name, kind)
    files: list[WeightFile] = []
    try:
        for repository in dict.fromkeys(file.repository for file in downloads):
            targets = {
                file.path: place / file.folder / file.name for file in downloads if file.repository == repository
            }
            files += hub.find_single_files(repository, targets, host, place)
        rows = [("file", "size", "here")]
        rows += [(str(file.target), format_size(file.size_bytes), format_size(file.local_bytes)) for file in files]
        host.clear()
        _print_sizes(rows, files, place, model)
        hub.fetch_single_files(files, host, place)
    finally:
        host.clear()
    denoisers = [file.name for file in downloads if file.folder == "diffusion_models"]
    print(f"complete: model_id is {SEPARATOR.join(denoisers)}")
    return 0


def find_model(model: str, host: Progress) -> tuple[ModelSpec, str]:
    """Return the model and the Hub id that a name or an id stands for."""
    named = next((spec for spec in SPECS if model in (spec.name, spec.published.hub_id)), None)
    if named is not None:
        return named, named.published.hub_id
    if model.startswith("tiny/"):
        raise ValueError(f"{model} is built in: nothing has to be downloaded.")
    if not hub.is_hub_id(model):
        try:
            lookup_spec(model)
        except ValueError as error:
            raise ValueError(f"{error} Or give a Hub id of such a model (owner/name).") from None
    return resolve_variant(None, model, progress=host), model


def _announce(found: Checkpoint, place: Path, host: "BarContext") -> None:
    """Print the sizes of the download; ValueError if it does not fit on the disk."""
    parts = found.all_weights_on_hub(host)
    files = [file for part in parts.values() for file in part]
    rows = [("part", "files", "size", "here")]
    for name, part in [*parts.items(), ("all weights", files)]:
        size, here = sum(file.size_bytes for file in part), sum(file.local_bytes for file in part)
        rows.append((name, str(len(part)), format_size(size), format_size(here)))
    host.clear()
    print(f"{found.spec.title}: {found.model_id}, to {place}")
    _print_sizes(rows, files, place, found.model_id)


def _print_sizes(rows: Sequence[Sequence[str]], files: Sequence[WeightFile], place: Path, what: str) -> None:
    """Print a table, and the missing bytes of `files`; ValueError if they do not fit on the disk."""
    from ..tpu_runtime.plan import report

    for line in report.format_table(rows):
        print(f"  {line}")
    needed, free = sum(file.size_bytes - file.local_bytes for file in files), hub.free_bytes(place)
    print(f"to download: {format_size(needed)}; free on the disk: {'not known' if free is None else format_size(free)}")
    hub.check_free_space(files, place, what)


class BarContext(TerminalContext):
    """A terminal that shows a download as a bar, with speed and remaining time."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(Folders(), stream)
        self._start = (0.0, 0)  # time, and MiB at that time
        self._printed_s, self._printed = 0.0, ""

    def text(self, message: str) -> None:
        """Print a line of status once."""
        self._start = (0.0, 0)
        if message != self._printed:
            super().text(message)
        self._printed = message

    def clear(self) -> None:
        """Remove the bar."""
        self._clear()
        self._stream.flush()

    def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
        """Redraw the bar; without a terminal print it twice a minute."""
        now = time.monotonic()
        if not self._start[0]:
            self._start, self._printed_s = (now, done), now
        if not self._is_tty and now - self._printed_s < LINE_INTERVAL_S:
            return
        self._printed_s = now
        self._clear()
        self._stream.write(f"  {format_bar(done, total, done - self._start[1], now - self._start[0])}")
        self._stream.write("" if self._is_tty else "\n")
        self._stream.flush()


def format_bar(done: int, total: int, came: int, elapsed_s: float) -> str:
    """Return a line for a download.

    done, total: in MiB. came: MiB that arrived in `elapsed_s` seconds.
    """
    filled = BAR_WIDTH * done // total
    line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {format_size(done * MIB)} of {format_size(total * MIB)}"
    if came <= 0 or elapsed_s <= 0:
        return line
    minutes, seconds = divmod(int((total - done) * elapsed_s / came), 60)
    return f"{line}, {came / elapsed_s:.0f} MiB/s, {minutes}:{seconds:02} left"
