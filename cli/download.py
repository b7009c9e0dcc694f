"""`comfyui-tpu download`: the files of a model that the nodes load, into the Hub's cache or a folder.

What is taken, and how, is what the nodes do at a first run (`tpu_runtime/checkpoints/hub.py`); here it is said before.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..nodes.declare import Folders
from ..nodes.headless.runner import LINE_S, TerminalHost
from ..tpu_runtime.pipeline import (
    MIB,
    NAME_HELP,
    SEPARATOR,
    SPECS,
    Checkpoint,
    ModelSpec,
    Progress,
    WeightFile,
    checkpoint,
    hub,
    published,
    readable,
    spec_by_name,
    variant,
)
from . import doctor

BAR_WIDTH = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{NAME_HELP}; or a Hub id")
    parser.add_argument(
        "--to", type=Path, metavar="DIR",
        help="into this folder, such as ComfyUI/models/diffusers/NAME, which model_id then names; "
        "default: the Hub's cache, where the nodes find it by its id",
    )  # fmt: skip
    parser.add_argument(
        "--files", metavar="FORMAT",
        help="single files in this format (fp8, fp16 or bf16) instead, as ComfyUI's templates name them, into the "
        "folders of the ComfyUI of this machine, or below --to",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Runs the command. Errors of the user, the disk and the Hub are `ValueError`."""
    host = BarHost()
    to = Path(os.path.expanduser(options.to)).absolute() if options.to else None
    if options.files:
        return _run_files(options.model, options.files, to or doctor.comfyui_folder() / "models", host)
    try:
        spec, model_id = find(options.model, host)
        found = Checkpoint(spec=spec, model_id=model_id, root=None, to=to)
        found.configs(host)
        _announce(found, to or hub.cache_folder(), host)
        for component in spec.components:
            found.fetch_weights(component, host)
            checkpoint.read_headers(found.folder(component.folder, host), component)
    finally:
        host.clear()
    print(f"complete: {spec.title}; model_id is {to or model_id}")
    return 0


def _run_files(model: str, kind: str, place: Path, host: "BarHost") -> int:
    """Downloads a model as single files, below a folder as ComfyUI's `models` is."""
    spec = next((spec for spec in SPECS if model in (spec.name, spec.published.hub_id)), None)
    wanted = published.files(model if spec is None else spec.name, kind)
    found: list[WeightFile] = []
    try:
        for repository in dict.fromkeys(file.repository for file in wanted):
            own = [file for file in wanted if file.repository == repository]
            targets = {file.path: place / file.folder / file.name for file in own}
            found += hub.single_files(repository, targets, host, place)
        rows = [("file", "size", "here")]
        rows += [(str(file.target), readable(file.size_bytes), readable(file.here_bytes)) for file in found]
        host.clear()
        _say_what(rows, found, place, model)
        hub.fetch_single(found, host, place)
    finally:
        host.clear()
    denoisers = [file.name for file in wanted if file.folder == "diffusion_models"]
    print(f"complete: model_id is {SEPARATOR.join(denoisers)}")
    return 0


def find(model: str, host: Progress) -> tuple[ModelSpec, str]:
    """The model and the Hub id that a name or an id stands for."""
    named = next((spec for spec in SPECS if model in (spec.name, spec.published.hub_id)), None)
    if named is not None:
        return named, named.published.hub_id
    if model.startswith("tiny/"):
        raise ValueError(f"{model} is built in: nothing has to be downloaded.")
    if not hub.is_hub_id(model):
        try:
            spec_by_name(model)
        except ValueError as error:
            raise ValueError(f"{error} Or give a Hub id of such a model (owner/name).") from None
    return variant(None, model, progress=host), model


def _announce(found: Checkpoint, place: Path, host: "BarHost") -> None:
    """Says what will be downloaded; ValueError where that does not fit on the disk."""

    parts = found.all_weights_on_hub(host)
    files = [file for part in parts.values() for file in part]
    rows = [("part", "files", "size", "here")]
    for name, part in [*parts.items(), ("all weights", files)]:
        size, here = sum(file.size_bytes for file in part), sum(file.here_bytes for file in part)
        rows.append((name, str(len(part)), readable(size), readable(here)))
    host.clear()
    print(f"{found.spec.title}: {found.model_id}, to {place}")
    _say_what(rows, files, place, found.model_id)


def _say_what(rows: Sequence[Sequence[str]], files: Sequence[WeightFile], place: Path, what: str) -> None:
    """Prints a table, and how much of `files` is missing; ValueError where that does not fit on the disk."""
    from ..tpu_runtime.pipeline import plan_report as report

    for line in report.table(rows):
        print(f"  {line}")
    needed, free = sum(file.size_bytes - file.here_bytes for file in files), hub.free_bytes(place)
    print(f"to download: {readable(needed)}; free on the disk: {'not known' if free is None else readable(free)}")
    hub.check_room(files, place, what)


class BarHost(TerminalHost):
    """A terminal that shows the bytes of a download as a bar, with the speed and the time that is left."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Folders(), **options)
        self._start = (0.0, 0)  # when, and how much there was
        self._said_s, self._said = 0.0, ""

    def text(self, message: str) -> None:
        self._start = (0.0, 0)
        if message != self._said:
            super().text(message)
        self._said = message

    def clear(self) -> None:
        """Removes the bar."""
        self._clear()
        self._stream.flush()

    def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
        now = time.monotonic()
        if not self._start[0]:
            self._start, self._said_s = (now, done), now
        if not self._is_tty and now - self._said_s < LINE_S:
            return
        self._said_s = now
        self._clear()
        self._stream.write(f"  {bar(done, total, done - self._start[1], now - self._start[0])}")
        self._stream.write("" if self._is_tty else "\n")
        self._stream.flush()


def bar(done: int, total: int, came: int, elapsed_s: float) -> str:
    """`done` of `total` MiB as a line; `came` MiB of them in `elapsed_s`."""
    filled = BAR_WIDTH * done // total
    line = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {readable(done * MIB)} of {readable(total * MIB)}"
    if came <= 0 or elapsed_s <= 0:
        return line
    minutes, seconds = divmod(int((total - done) * elapsed_s / came), 60)
    return f"{line}, {came / elapsed_s:.0f} MiB/s, {minutes}:{seconds:02} left"
