"""Finding a checkpoint in diffusers layout and reading what it says of itself, before any weight is read.

A model id is a Hub id, a folder, a folder under ComfyUI's `models/diffusers`, or the built-in `tiny/<family>`.
Everything that can be wrong ends in a `CheckpointError` that says what to do.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compatibility, hub, tiny
from .cache import signature
from .progress import Progress, Silent
from .redact import redact
from .spec import Component, ModelSpec

if TYPE_CHECKING:
    from .modules import Network, Weight

INDEX = "model_index.json"
SCHEDULER_CONFIG = "scheduler/scheduler_config.json"


class CheckpointError(ValueError):
    """A model id that cannot be used, in a sentence for the user."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """Where a tensor is: the safetensors file, its name and its shape there."""

    path: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A located checkpoint. `root` is None for one on the Hub and for the built-in one, which is made on first use."""

    spec: ModelSpec
    model_id: str
    root: Path | None
    # Where parts of a Hub model are: asking the Hub takes a request, and stages ask at every chunk.
    located: dict[str, Path] = field(default_factory=dict, repr=False, compare=False)

    def folder(self, name: str, progress: Progress) -> Path:
        """The local folder of one part of the checkpoint; downloads that part alone if need be."""
        folder = self._local_root(name, progress) / name
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.model_id}: there is no folder {name!r} in {folder.parent}; the checkpoint is incomplete."
            )
        return folder

    def _local_root(self, name: str, progress: Progress) -> Path:
        if self.root is not None:
            return self.root
        if self.model_id == self.spec.tiny_id:
            return tiny.ensure(self.spec)
        if name not in self.located:
            self.located[name] = hub.download(self.model_id, name, progress)
        return self.located[name]

    def index(self, progress: Progress) -> Mapping[str, Any]:
        """The checkpoint's `model_index.json`."""
        return read_json(self._local_root("scheduler", progress) / INDEX)

    def check(self) -> None:
        """Raises `CheckpointError` for what can be seen without reading weights: files, configs, headers."""
        if self.root is None:
            return
        self.check_configs(Silent())
        for component in self.spec.components:
            read_headers(self.root / component.folder)

    def check_configs(self, progress: Progress) -> None:
        """Whether the parts fit the model, and each other."""
        configs = {component.name: self.config(component, progress) for component in self.spec.components}
        if problem := compatibility.sizes_problem(self.spec, self.model_id, configs):
            raise CheckpointError(problem)

    def config(self, component: Component, progress: Progress) -> Mapping[str, Any]:
        """A component's own `config.json`, one that the model can run."""
        config = read_json(self.folder(component.folder, progress) / "config.json")
        if problem := compatibility.config_problem(self.spec, component, self.model_id, config):
            raise CheckpointError(problem)
        return config


def locate(spec: ModelSpec, model_id: str, folders: Sequence[str] = ()) -> Checkpoint:
    """The checkpoint for a model id. Reads its `model_index.json` when it is local, and nothing else."""
    model_id = model_id.strip()
    if not model_id:
        raise CheckpointError(
            f"{spec.title}: model_id is empty. Enter a Hugging Face id such as {spec.hub_id}, a folder in diffusers "
            f"layout, or {spec.tiny_id}."
        )
    if model_id.startswith("tiny/"):
        if model_id != spec.tiny_id:
            raise CheckpointError(f"{spec.title}: model_id is {model_id}; its built-in checkpoint is {spec.tiny_id}.")
        return Checkpoint(spec=spec, model_id=model_id, root=None)
    # Unlike `Path.expanduser` this takes the name of a user that there is not.
    for folder in (Path(os.path.expanduser(model_id)), *(Path(parent) / model_id for parent in folders)):
        if folder.is_dir():
            _check_index(spec, model_id, folder)
            return Checkpoint(spec=spec, model_id=model_id, root=folder)
    if not hub.is_hub_id(model_id):
        searched = ", ".join(["the path itself", *folders])
        raise CheckpointError(
            f"{spec.title}: model_id is {model_id}; there is no such folder (looked at {searched}) and it is not a "
            f"Hugging Face id (owner/name) such as {spec.hub_id}."
        )
    return Checkpoint(spec=spec, model_id=model_id, root=None)


def _check_index(spec: ModelSpec, model_id: str, folder: Path) -> None:
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(
            f"{spec.title}: the folder {model_id} has no {INDEX}; it is not a model in diffusers layout. Choose the "
            f"folder that holds {INDEX}, transformer/, vae/."
        )
    if problem := compatibility.index_problem(spec, model_id, read_json(path)):
        raise CheckpointError(problem)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}.") from error


def fingerprint(folder: Path) -> str:
    """What changes when a file of a checkpoint's folder does: names, sizes and times, without reading them."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return signature(str(folder), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component: those of its index, or the single one."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        names = sorted(set(read_json(indices[0]).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing)}. Download "
                "the checkpoint again."
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(f"{folder}: expected one .safetensors file or an index, found {found}.")
    return files


def read_headers(folder: Path) -> dict[str, TensorFile]:
    """Every tensor of a component by name, from the files' headers alone."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, TensorFile] = {}
    for path in weight_files(folder):
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    tensors[name] = TensorFile(path=path, name=name, shape=tuple(file.get_slice(name).get_shape()))
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file ({error}); it was probably cut off while downloading. Delete "
                "it and download it again."
            ) from error
    return tensors


def match(network: "Network", tensors: Mapping[str, TensorFile], folder: Path) -> dict[str, tuple[TensorFile, ...]]:
    """The files of each weight of a network; checks names and shapes."""
    by_name = by_own_names(tensors, network.component.aliases)
    matched: dict[str, tuple[TensorFile, ...]] = {}
    for name, weight in network.weights.items():
        missing = [source for source in weight.sources if source not in by_name]
        if missing:
            raise CheckpointError(f"{folder}: the weight {missing[0]} is missing; the checkpoint is incomplete.")
        matched[name] = tuple(by_name[source] for source in weight.sources)
        _check_shapes(weight, matched[name], folder)
    return matched


def own_name(name: str, aliases: Mapping[str, str]) -> str:
    """A checkpoint's name as the module has it (see `spec.Component`): first how it starts, then the whole of it."""
    prefix = max((part for part in aliases if part.endswith(".") and name.startswith(part)), key=len, default="")
    name = aliases.get(prefix, "") + name.removeprefix(prefix)
    return aliases.get(name, name)


def by_own_names(tensors: Mapping[str, TensorFile], aliases: Mapping[str, str]) -> dict[str, TensorFile]:
    """A checkpoint's tensors by the module's names. Where two names are one weight, the module's own wins."""
    pairs = [(own_name(name, aliases), name) for name in tensors]
    return {own: tensors[name] for own, name in sorted(pairs, key=lambda pair: pair[0] == pair[1])}


def folded_dimension(shape: tuple[int, ...], folded: tuple[int, ...]) -> int | None:
    """Which dimension of a file's `shape` is cut in two in `folded`; None if none is, or if they do not fit."""
    for dim, size in enumerate(shape if len(folded) == len(shape) + 1 else ()):
        if (*shape[:dim], *shape[dim + 1 :]) == (*folded[:dim], *folded[dim + 2 :]):
            if size == folded[dim] * folded[dim + 1]:
                return dim
    return None


def _check_shapes(weight: "Weight", files: tuple[TensorFile, ...], folder: Path) -> None:
    expected = weight.shape[1:] if weight.stacked else weight.shape
    for source, file in zip(weight.sources, files, strict=True):
        if file.shape != expected and folded_dimension(file.shape, expected) is None:
            raise CheckpointError(f"{folder}: {source} has shape {file.shape}, but its config asks for {expected}.")
