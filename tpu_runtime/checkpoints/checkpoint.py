"""Location of a checkpoint in diffusers layout, and checks of its index, configs and headers before any weight is read.

A model id is a Hub id, a folder, a folder under ComfyUI's `models/diffusers`, or the built-in `tiny/<family>`. Every
problem raises a `CheckpointError` with a remedy.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache.store import signature
from ..files import CheckpointError, TensorFile, read_json
from ..formats import key_map, quantization, quantization_detect, single_file, tokenizer_files
from ..formats.single_file import FileContents, NetworkFile
from ..formats.tensor_views import CroppedView, ReshapedView, UnsqueezedView, view
from ..messages import compose, compose_list
from ..model_spec import Component, Json, KeyTable, ModelSpec
from ..models import LAYOUTS
from ..progress import Progress, SilentProgress
from . import compatibility, file_resolution, hub, tiny, virtual_folder
from .weight_names import key_by_module_name, layer_index, list_weight_names

if TYPE_CHECKING:
    from ..programs.upstream_network import Network, Weight
    from .downloads import WeightFile

INDEX = hub.INDEX
CONFIG = "config.json"
SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
# Files that are downloaded from a folder on the Hub next to weights: configs, indices, tokenizers. Never code.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A located checkpoint."""

    spec: ModelSpec
    model_id: str
    root: Path | None  # local folder; None on the Hub and for the built-in one, which is made on first use
    to: Path | None = None  # folder for downloads of a Hub model; None for the Hub's cache
    rest: "Checkpoint | None" = None  # checkpoint with the components that are not in single files
    is_partial: bool = False  # whether components may be missing
    # Cached location of a Hub model: finding it takes a request, and stages ask at every chunk.
    located: list[hub.Snapshot] = field(default_factory=list, repr=False, compare=False)

    def home(self, progress: Progress) -> Path:
        """Return the checkpoint's local folder.

        For a Hub model this downloads the newest commit's index, which is checked first, and all small files. Weights
        are downloaded by `fetch_weights`.
        """
        if self.root is not None:
            return self.root
        if self.model_id in self.spec.miniature.ids:
            return tiny.find_folder(self.spec, self.model_id)
        return self._snapshot(progress).root

    def _snapshot(self, progress: Progress) -> hub.Snapshot:
        if not self.located:
            read = self.spec.parts
            snapshot = hub.resolve_snapshot(self.model_id, progress, self.to)
            _check_index(self.spec, self.model_id, read_json(snapshot.root / INDEX))
            small = [f"{part}/{pattern}" for part in read for pattern in SMALL_FILES]
            configs = dict.fromkeys(f"{component.folder}/{CONFIG}" for component in self.spec.components)
            hub.fetch(snapshot, [*configs, SCHEDULER_CONFIG, *small], progress, "configuration")
            self.located.append(snapshot)
        return self.located[0]

    def folder(self, name: str, progress: Progress) -> Path:
        """Return the local folder of a component or tokenizer."""
        if (rest := self._other_checkpoint(name)) is None:
            return self._folder(self.home(progress), name)
        try:
            return rest.folder(name, progress)
        except hub.HubError as error:
            tokenizers = {text.tokenizer_folder for text in self.spec.text_encoders}
            if name not in tokenizers or rest.model_id != self.spec.published.hub_id:
                raise
            raise hub.HubError(compose(
                "checkpoint.no_tokenizer_in_files", model_id=self.model_id,
                error=str(error).partition(". ")[0], separator=file_resolution.SEPARATOR, index=INDEX, name=name,
            )) from error  # fmt: skip

    def _other_checkpoint(self, folder: str) -> "Checkpoint | None":
        """Return the checkpoint with a component that is in no single file, or None."""
        return None if self.rest is None or self.root is None or (self.root / folder).is_dir() else self.rest

    def _folder(self, root: Path, name: str) -> Path:
        if not (root / name).is_dir():
            raise CheckpointError(
                compose("checkpoint.folder_missing", model_id=self.model_id, name=repr(name), root=root)
            )
        return root / name

    def fetch_weights(self, component: Component, progress: Progress) -> Path:
        """Return a component's folder after downloading the files that hold a used tensor."""
        if (rest := self._other_checkpoint(component.folder)) is not None:
            return rest.fetch_weights(component, progress)
        folder = self.folder(component.folder, progress)
        if self._is_on_hub:
            snapshot = self._snapshot(progress)
            hub.fetch(snapshot, self._weights(component, folder), progress, component.folder)
        return folder

    def weights_on_hub(self, component: Component, progress: Progress) -> "list[WeightFile]":
        """Return the files that `fetch_weights` would download, with sizes and the bytes that are local already."""
        folder = self.folder(component.folder, progress)
        return self._snapshot(progress).weights(self._weights(component, folder), component.folder)

    def all_weights_on_hub(self, progress: Progress) -> "dict[str, list[WeightFile]]":
        """Return `weights_on_hub` of all components by folder, which several components may share."""
        by_folder: dict[str, dict[str, WeightFile]] = {}
        for component in self.spec.components:
            files = by_folder.setdefault(component.folder, {})
            files.update((file.name, file) for file in self.weights_on_hub(component, progress))
        return {folder: list(files.values()) for folder, files in by_folder.items()}

    def _weights(self, component: Component, folder: Path) -> list[str]:
        return [f"{component.folder}/{name}" for name in list_weight_names(folder, component)]

    def local_weight_files(self, component: Component) -> list[Path]:
        """Return a component's weight files if all are on this machine, else []. Makes no request."""
        if (rest := self._other_checkpoint(component.folder)) is not None:
            return rest.local_weight_files(component)
        is_unknown = self._is_on_hub and not self.located
        root = hub.find_cached(self.model_id) if is_unknown else self.home(SilentProgress())
        try:
            return [] if root is None else list_weight_files(self._folder(root, component.folder), component)
        except CheckpointError:
            return []

    def identity(self, folder: str, progress: Progress) -> str:
        """Return a digest that differs between checkpoints, and between states of one checkpoint's folder."""
        if (rest := self._other_checkpoint(folder)) is not None:
            return rest.identity(folder, progress)
        home = self.home(progress)
        # A commit does not change, but files of it may still be missing here.
        return signature(self.model_id, home.name, folder) if self._is_on_hub else fingerprint(home / folder)

    @property
    def _is_on_hub(self) -> bool:
        return self.root is None and self.model_id not in self.spec.miniature.ids

    def index(self, progress: Progress) -> Json:
        """Return the checkpoint's `model_index.json`."""
        return read_json(self.home(progress) / INDEX)

    def check(self) -> None:
        """Raise `CheckpointError` for problems of index, configs and headers. Makes no request and reads no weights.

        For a Hub model only local files are checked.
        """
        root = hub.find_cached(self.model_id) if self._is_on_hub else self.root
        if root is None:
            return
        if self._is_on_hub:
            _check_index(self.spec, self.model_id, read_json(root / INDEX))
        is_partial = self._is_on_hub or self.rest is not None
        local = [part for part in self.spec.components if not is_partial or (root / part.folder / CONFIG).is_file()]
        self._check_sizes({part.name: self._config(part, root) for part in local})
        if self.root is not None:
            for component in local:
                read_headers(root / component.folder, component)

    def configs(self, progress: Progress) -> dict[str, Json]:
        """Return every component's own `config.json` by name, downloaded if need be. Reads no weights.

        Raises `CheckpointError` if the model cannot run one, or if they contradict each other.
        """
        parts = [part for part in self.spec.components if self._has(part)]
        rests = {part.name: self._other_checkpoint(part.folder) for part in parts}
        homes = {name: (rest or self).home(progress) for name, rest in rests.items()}
        return self._check_sizes({part.name: self._config(part, homes[part.name]) for part in parts})

    def _has(self, component: Component) -> bool:
        return not self.is_partial or self.root is None or (self.root / component.folder).is_dir()

    def _check_sizes(self, configs: dict[str, Json]) -> dict[str, Json]:
        if problem := compatibility.sizes_problem(self.spec, self.model_id, configs):
            raise CheckpointError(problem)
        return configs

    def config(self, component: Component, progress: Progress) -> Json:
        """Return a component's own `config.json`. Raises `CheckpointError` if the model cannot run it."""
        return self._config(component, (self._other_checkpoint(component.folder) or self).home(progress))

    def _config(self, component: Component, root: Path) -> Json:
        config = compatibility.select_config(component, read_json(self._folder(root, component.folder) / CONFIG))
        if problem := compatibility.config_problem(self.spec, component, self.model_id, config):
            raise CheckpointError(problem)
        return config


def locate(
    spec: ModelSpec, model_id: str, folders: Sequence[str] = (), *, is_partial: bool = False, only: str = ""
) -> Checkpoint:
    """Return the checkpoint for a model id. Reads only its `model_index.json`, if it is local.

    spec, model_id: the model, and where its files are.
    folders: searched for the id.
    is_partial: whether components may be missing in single files.
    only: class of the networks that count of single files; "" for all.
    """
    model_id = model_id.strip()
    if not model_id:
        raise CheckpointError(
            compose("checkpoint.model_id_empty", title=spec.title, hub_id=spec.published.hub_id, id=spec.miniature.id)
        )
    if file_resolution.names_single_files(model_id):
        return _locate_files(spec, model_id, folders, is_partial=is_partial, only=only)
    if model_id.startswith("tiny/"):
        if model_id not in spec.miniature.ids:
            raise CheckpointError(
                compose("checkpoint.model_id_not_built_in", title=spec.title, model_id=model_id, id=spec.miniature.id)
            )
        return Checkpoint(spec=spec, model_id=model_id, root=None)
    if (folder := find_local_folder(model_id, folders)) is not None:
        if not (folder / INDEX).is_file():
            raise CheckpointError(
                compose("checkpoint.no_model_index", title=spec.title, model_id=model_id, index=INDEX)
            )
        _check_index(spec, model_id, read_json(folder / INDEX))
        return Checkpoint(spec=spec, model_id=model_id, root=folder)
    if not hub.is_hub_id(model_id):
        searched = compose_list([compose("checkpoint.the_path_itself"), *folders])
        raise CheckpointError(compose(
            "checkpoint.model_id_not_found", title=spec.title, model_id=model_id, searched=searched,
            hub_id=spec.published.hub_id,
        ))  # fmt: skip
    return Checkpoint(spec=spec, model_id=model_id, root=None)


def _locate_files(spec: ModelSpec, model_id: str, folders: Sequence[str], *, is_partial: bool, only: str) -> Checkpoint:
    """Return the checkpoint of single files. Tokenizers that are in no file come from the family's repository."""
    resolved = file_resolution.resolve(model_id, [spec], folders, needs_all=not is_partial, only=only)
    root = virtual_folder.ensure_folder(resolved.spec, resolved.parts, resolved.configs)
    if is_partial:
        return Checkpoint(spec=resolved.spec, model_id=model_id, root=root, is_partial=True)
    rest = locate(spec, resolved.rest or spec.published.hub_id, folders)
    return Checkpoint(spec=resolved.spec, model_id=model_id, root=root, rest=rest)


def find_index(model_id: str, folders: Sequence[str] = (), *, progress: Progress | None = None) -> Json | None:
    """Return the `model_index.json` of a model id, or None.

    model_id: a Hub id, a folder, or a tiny checkpoint.
    folders: searched for the id.
    progress: for downloading the index of a Hub model; None to look only at local files.
    """
    model_id = model_id.strip()
    folder = find_local_folder(model_id, folders)
    if folder is None and hub.is_hub_id(model_id) and not model_id.startswith("tiny/"):
        folder = hub.find_cached(model_id) if progress is None else hub.resolve_snapshot(model_id, progress).root
    if folder is None or not (folder / INDEX).is_file():
        return None
    return read_json(folder / INDEX)


def read_local_configs(model_id: str, names: Iterable[str], folders: Sequence[str] = ()) -> dict[str, Json]:
    """Return the `config.json` of each folder in `names` of a model that is on this machine.

    model_id, folders: as for `locate`.
    """
    model_id = model_id.strip()
    root = find_local_folder(model_id, folders) or (hub.find_cached(model_id) if hub.is_hub_id(model_id) else None)
    paths = {name: root / name / CONFIG for name in names} if root else {}
    return {part: read_json(path) for part, path in paths.items() if path.is_file()}


def find_local_folder(model_id: str, folders: Sequence[str]) -> Path | None:
    """Return the folder whose path is `model_id`, or whose name in one of `folders`; None without one."""
    if not model_id or "\0" in model_id:
        return None
    # Unlike `Path`, `os.path` accepts unknown users and names that no file can have.
    path = os.path.expanduser(model_id)
    paths = (path, *(os.path.join(parent, model_id) for parent in folders))
    return next((Path(folder) for folder in paths if os.path.isdir(folder)), None)


def _check_index(spec: ModelSpec, model_id: str, index: Json) -> None:
    if problem := compatibility.index_problem(spec, model_id, index):
        raise CheckpointError(problem)


def fingerprint(folder: Path) -> str:
    """Return a digest of names, sizes and times in a checkpoint's folder, which changes when a file does."""
    if (network := virtual_folder.read_source(folder)) is not None:
        return virtual_folder.stat_signature(network)
    folder = folder.resolve() if folder.is_symlink() else folder
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return signature(str(folder), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def list_weight_files(folder: Path, component: Component) -> list[Path]:
    """Return the weight files of a component that hold a used tensor. Raises `CheckpointError` if one is missing."""
    if (network := virtual_folder.read_source(folder)) is not None:
        return [network.path]
    names = list_weight_names(folder, component)
    missing = [name for name in names if not os.path.isfile(folder / name)]  # `Path` raises for names too long
    if missing and len(names) > 1:
        raise CheckpointError(compose(
            "checkpoint.weight_files_missing", folder=folder, missing_count=len(missing), file_count=len(names),
            missing=", ".join(missing),
        ))  # fmt: skip
    if missing:
        present = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none"
        raise CheckpointError(compose("checkpoint.no_weights_or_index", folder=folder, present=present))
    return [folder / name for name in names]


def read_headers(folder: Path, component: Component) -> dict[str, TensorFile]:
    """Return every tensor in a component's weight files by name, from the headers alone. Quantized ones are views.

    Raises `CheckpointError` for codes in an unsupported format.
    """
    if (network := virtual_folder.read_source(folder)) is not None:
        return virtual_folder.translate_tensors(network)
    headers = [single_file.read_safetensors_header(path) for path in list_weight_files(folder, component)]
    tensors = {name: tensor for header, _ in headers for name, tensor in header.items()}
    return quantization.decode_tensors(
        tensors, {name: text for _, metadata in headers for name, text in metadata.items()}
    )


def match_weights(
    network: "Network", tensors: Mapping[str, TensorFile], folder: Path, network_file: NetworkFile | None = None
) -> dict[str, tuple[TensorFile, ...]]:
    """Return the files of each weight of a network, by name. Raises `CheckpointError` for wrong names or shapes.

    tensors: by name, of the component's files.
    folder: of the component, for messages.
    network_file: the single file of the network, if it has no folder.
    """
    component, network_file = network.component, network_file or virtual_folder.read_source(folder)
    folder = folder if network_file is None else network_file.path  # messages name the file
    by_name = key_by_module_name(tensors, component.aliases)
    matched: dict[str, tuple[TensorFile, ...]] = {}
    for name, weight in network.weights.items():
        missing = [source for source in weight.sources if source not in by_name]
        if missing:
            raise CheckpointError(compose("checkpoint.weight_missing", folder=folder, missing=missing[0]))
        matched[name] = tuple(_fit_shape(by_name[source], weight.tensor_shape) for source in weight.sources)
        _check_shapes(weight, matched[name], folder, "" if network_file is None else component.class_name)
    used = {source for weight in network.weights.values() for source in weight.sources}
    # Only for networks that are read in full. Weights outside of blocks may be unused, such as tables of positions.
    blocks = component.blocks if component.library == "diffusers" and not (component.only or component.layers) else ()
    # A file with original names has no unused weights.
    is_strict = bool(blocks) and network_file is not None
    more = (
        name
        for name in by_name.keys() - used
        if is_strict or any(layer_index(name, path) is not None for path in blocks)
    )
    if more := sorted(more):
        raise CheckpointError(compose(
            "checkpoint.weight_unexpected", folder=folder, more=more[0], class_name=component.class_name,
        ))  # fmt: skip
    return matched


def _fit_shape(file: TensorFile, shape: tuple[int, ...]) -> TensorFile:
    """Return a view of a tensor in the network's shape, or the tensor itself.

    A view is possible if the shapes differ only by dimensions of 1 at either end or by padding of the format.
    """
    file_shape = file.shape
    if 0 < len(file_shape) < len(shape) and shape == (*[1] * (len(shape) - len(file_shape)), *file_shape):
        return view(file, shape, UnsqueezedView(file, shape))
    if len(file_shape) > len(shape) and file_shape == (*shape, *[1] * (len(file_shape) - len(shape))):
        return view(file, shape, ReshapedView(file, shape))
    if isinstance(file.made, quantization.Nvfp4 | quantization.Mxfp8) and len(shape) == 2 and file_shape != shape:
        padded = tuple(-(-size // file.made.multiple) * file.made.multiple for size in shape)
        return view(file, shape, CroppedView(file, shape)) if file_shape == padded else file
    return file


def content_signature(files: Mapping[str, tuple[TensorFile, ...]]) -> str:
    """Return a digest of tensors and file sizes that is equal for two copies of a checkpoint."""
    tensors = [[(file.path.name, file.name, file.shape) for file in files[name]] for name in sorted(files)]
    paths = sorted({file.path for group in files.values() for file in group})
    return signature(tensors, [(path.name, path.stat().st_size) for path in paths])


def _check_shapes(weight: "Weight", files: tuple[TensorFile, ...], folder: Path, single: str) -> None:
    """Raise `CheckpointError` for tensors of another shape or dtype.

    `single` is the network's class for a single file, else "".
    """
    expected = weight.tensor_shape
    for source, file in zip(weight.sources, files, strict=True):
        if file.dtype not in quantization_detect.READABLE_DTYPES:
            raise CheckpointError(compose(
                "checkpoint.weight_not_floating_point", folder=folder, source=source, dtype=file.dtype,
                advice=quantization_detect.ADVICE,
            ))  # fmt: skip
        if file.shape != expected and single:
            raise CheckpointError(compose(
                "checkpoint.shape_contradicts_other_tensors", folder=folder, source=source, shape=file.shape,
                single=single, expected=expected,
            ))  # fmt: skip
        if file.shape != expected:
            raise CheckpointError(compose(
                "checkpoint.shape_contradicts_config", folder=folder, source=source, shape=file.shape,
                expected=expected,
            ))  # fmt: skip


# --- export in the form of single files -------------------------------------------------------------------------------


def export_network(found: Checkpoint, name: str, progress: Progress) -> NetworkFile:
    """Return the component `name` in the form of a single file: its tensors by original names.

    progress: for the download.
    Downloads its weights if need be. Raises `CheckpointError` if the checkpoint does not hold it.
    found: the checkpoint.
    """
    component = replace(found.spec.component(name), only=())
    if found.is_partial and found.root is not None and not (found.root / component.folder).is_dir():
        raise CheckpointError(compose(
            "checkpoint.class_not_in_file", model_id=found.model_id, class_name=component.class_name,
        ))  # fmt: skip
    folder = found.fetch_weights(component, progress)
    if (source := virtual_folder.read_source(folder)) is not None:
        return source
    config = found.config(component, progress)
    layout = next(layout for layout in LAYOUTS if layout.class_name == component.class_name)
    by_name = key_by_module_name(read_headers(folder, component), component.aliases)
    tensors = key_map.to_original(by_name, _table(component, by_name))
    first = next(iter(by_name.values()))
    flags = (flag.mark for key, flag in layout.flags.items() if config.get(key))
    tensors |= {name: TensorFile(path=first.path, name=name, shape=(0,)) for name in flags}
    return NetworkFile(
        contents=FileContents(path=folder, tensors=tensors, metadata={}), prefix="", layout=layout, tensors=tensors
    )


def read_own_tensors(found: Checkpoint, name: str, progress: Progress) -> dict[str, TensorFile]:
    """Return all tensors in the files of the component `name` by its module's names, including those of other networks.

    progress: for downloading these files.
    found: the checkpoint.
    """
    component = replace(found.spec.component(name), only=())
    folder = found.fetch_weights(component, progress)
    return key_by_module_name(read_headers(folder, component), component.aliases)


def _table(component: Component, own: Mapping[str, TensorFile]) -> KeyTable:
    tables = (
        layout.table for layout in LAYOUTS if layout.class_name == component.class_name and layout.table is not None
    )
    table = next(tables, None)
    return component.original_keys if table is None else table(own)


def export_tokenizers(found: Checkpoint, progress: Progress) -> dict[str, bytes]:
    """Return the contents of the tokenizers of a checkpoint, by their tensor names in single files."""
    carried: dict[str, bytes] = {}
    for text in found.spec.text_encoders:
        component = found.spec.component(text.component)
        if not found.is_partial or found.root is None or (found.root / component.folder).is_dir():
            network = virtual_folder.read_source(found.folder(component.folder, progress))
            if network is not None:
                carried |= tokenizer_files.read_tokenizers(network.path, network.contents.tensors, network.prefix)
        if not carried and not found.is_partial:
            carried |= tokenizer_files.read_folder_tokenizer(found.folder(text.tokenizer_folder, progress))
    return carried
