"""Finding a checkpoint in diffusers layout and reading what it says of itself, before any weight is read.

A model id is a Hub id, a folder, a folder under ComfyUI's `models/diffusers`, or the built-in `tiny/<family>`.
Everything that can be wrong ends in a `CheckpointError` that says what to do.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.store import signature
from ..files import CheckpointError, TensorFile, read_json
from ..formats import codes, contents, names, quantized, tokenizer_files
from ..formats.contents import Contents, Held
from ..formats.stored import Cropped, Reshaped, Unsqueezed, made_of
from ..model_spec import Component, ModelSpec, Table
from ..models.layouts import LAYOUTS
from ..progress import Progress, Silent
from . import assembled, compatibility, hub, parts, tiny
from .weight_names import by_own_names, layer_of, weight_names

if TYPE_CHECKING:
    from ..programs.modules import Network, Weight
    from .weight_files import WeightFile

INDEX = hub.INDEX
CONFIG = "config.json"
SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
# What is fetched from a folder on the Hub next to weights: configs, indices, tokenizers. Never code.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A located checkpoint. `root` is None for one on the Hub and for the built-in one, which is made on first use.

    A Hub model's files go into the Hub's cache, or into the folder `to`. What is not in the folder of a model that is
    assembled of single files is in another checkpoint, its `rest`; of one that `is_partial` it is not there.
    """

    spec: ModelSpec
    model_id: str
    root: Path | None
    to: Path | None = None
    rest: "Checkpoint | None" = None
    is_partial: bool = False
    # Where a Hub model is, once it was looked for: that takes a request, and stages ask at every chunk.
    located: list[hub.Snapshot] = field(default_factory=list, repr=False, compare=False)

    def home(self, progress: Progress) -> Path:
        """The checkpoint's local folder. Of a Hub model it holds the newest commit's index, which is checked first, and
        all that is small; weights come with `fetch_weights`.
        """
        if self.root is not None:
            return self.root
        if self.model_id in self.spec.miniature.ids:
            return tiny.folder(self.spec, self.model_id)
        return self._snapshot(progress).root

    def _snapshot(self, progress: Progress) -> hub.Snapshot:
        if not self.located:
            read = self.spec.parts
            found = hub.snapshot(self.model_id, progress, self.to)
            _check_index(self.spec, self.model_id, read_json(found.root / INDEX))
            small = [f"{part}/{pattern}" for part in read for pattern in SMALL_FILES]
            configs = dict.fromkeys(f"{component.folder}/{CONFIG}" for component in self.spec.components)
            hub.fetch(found, [*configs, SCHEDULER_CONFIG, *small], progress, "configuration")
            self.located.append(found)
        return self.located[0]

    def folder(self, name: str, progress: Progress) -> Path:
        """The local folder of one part of the checkpoint."""
        if (rest := self._rest_for(name)) is None:
            return self._folder(self.home(progress), name)
        try:
            return rest.folder(name, progress)
        except hub.HubError as error:
            tokenizers = {text.tokenizer_folder for text in self.spec.text_encoders}
            if name not in tokenizers or rest.model_id != self.spec.published.hub_id:
                raise
            raise hub.HubError(
                f"{self.model_id}: none of its files carries the tokenizer along. {str(error).partition('. ')[0]}. "
                "With a network the next run fetches the tokenizer, a few MB and no weights. Without one, name a file "
                "of the text encoder that carries its tokenizer, such as a GGUF file, or "
                f"add{parts.SEPARATOR}a folder that has {INDEX} and {name}."
            ) from error

    def _rest_for(self, folder: str) -> "Checkpoint | None":
        """The checkpoint that has a part which is in no single file."""
        return None if self.rest is None or self.root is None or (self.root / folder).is_dir() else self.rest

    def _folder(self, root: Path, name: str) -> Path:
        if not (root / name).is_dir():
            raise CheckpointError(
                f"{self.model_id}: there is no folder {name!r} in {root}; the checkpoint is incomplete."
            )
        return root / name

    def fetch_weights(self, component: Component, progress: Progress) -> Path:
        """A component's folder with its weights in it: downloads the files that hold a tensor which is loaded."""
        if (rest := self._rest_for(component.folder)) is not None:
            return rest.fetch_weights(component, progress)
        folder = self.folder(component.folder, progress)
        if self._is_on_hub:
            found = self._snapshot(progress)
            hub.fetch(found, self._weights(component, folder), progress, component.folder)
        return folder

    def weights_on_hub(self, component: Component, progress: Progress) -> "list[WeightFile]":
        """What `fetch_weights` would make local, with sizes and how much of it is here."""
        folder = self.folder(component.folder, progress)
        return self._snapshot(progress).weights(self._weights(component, folder), component.folder)

    def all_weights_on_hub(self, progress: Progress) -> "dict[str, list[WeightFile]]":
        """`weights_on_hub` of all components, by folder: a network and its other half may be in one."""
        found: dict[str, dict[str, WeightFile]] = {}
        for component in self.spec.components:
            part = found.setdefault(component.folder, {})
            part.update((file.name, file) for file in self.weights_on_hub(component, progress))
        return {folder: list(part.values()) for folder, part in found.items()}

    def _weights(self, component: Component, folder: Path) -> list[str]:
        return [f"{component.folder}/{name}" for name in weight_names(folder, component)]

    def weights_here(self, component: Component) -> list[Path]:
        """A component's weight files if all are on this machine, else none. Asks no network, after `configs`."""
        if (rest := self._rest_for(component.folder)) is not None:
            return rest.weights_here(component)
        try:
            return weight_files(self._folder(self.home(Silent()), component.folder), component)
        except CheckpointError:
            return []

    def identity(self, folder: str, progress: Progress) -> str:
        """What tells a part from that of another checkpoint, and from an earlier state of the same."""
        if (rest := self._rest_for(folder)) is not None:
            return rest.identity(folder, progress)
        home = self.home(progress)
        # A commit does not change, but files of it may still be missing here.
        return signature(self.model_id, home.name, folder) if self._is_on_hub else fingerprint(home / folder)

    @property
    def _is_on_hub(self) -> bool:
        return self.root is None and self.model_id not in self.spec.miniature.ids

    def index(self, progress: Progress) -> Mapping[str, Any]:
        """The checkpoint's `model_index.json`."""
        return read_json(self.home(progress) / INDEX)

    def check(self) -> None:
        """Raises `CheckpointError` for what can be seen without weights or a network: index, configs, headers.

        Of a Hub model only what is on this machine is looked at.
        """
        root = hub.cached(self.model_id) if self._is_on_hub else self.root
        if root is None:
            return
        if self._is_on_hub:
            _check_index(self.spec, self.model_id, read_json(root / INDEX))
        is_partial = self._is_on_hub or self.rest is not None
        here = [part for part in self.spec.components if not is_partial or (root / part.folder / CONFIG).is_file()]
        self._checked({part.name: self._config(part, root) for part in here})
        if self.root is not None:
            for component in here:
                read_headers(root / component.folder, component)

    def configs(self, progress: Progress) -> dict[str, Mapping[str, Any]]:
        """Every component's own `config.json`, by its name, fetched where need be; `CheckpointError` where the model
        cannot run one, or where they do not fit each other. Looks at no weights.
        """
        parts = [part for part in self.spec.components if self._has(part)]
        rests = {part.name: self._rest_for(part.folder) for part in parts}
        homes = {name: (rest or self).home(progress) for name, rest in rests.items()}
        return self._checked({part.name: self._config(part, homes[part.name]) for part in parts})

    def _has(self, component: Component) -> bool:
        return not self.is_partial or self.root is None or (self.root / component.folder).is_dir()

    def _checked(self, configs: dict[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        if problem := compatibility.sizes_problem(self.spec, self.model_id, configs):
            raise CheckpointError(problem)
        return configs

    def config(self, component: Component, progress: Progress) -> Mapping[str, Any]:
        """A component's own `config.json`, one that the model can run."""
        return self._config(component, (self._rest_for(component.folder) or self).home(progress))

    def _config(self, component: Component, root: Path) -> Mapping[str, Any]:
        config = compatibility.own_config(component, read_json(self._folder(root, component.folder) / CONFIG))
        if problem := compatibility.config_problem(self.spec, component, self.model_id, config):
            raise CheckpointError(problem)
        return config


def locate(spec: ModelSpec, model_id: str, folders: Sequence[str] = (), *, is_partial: bool = False) -> Checkpoint:
    """The checkpoint for a model id. Reads its `model_index.json` when it is local, and nothing else."""
    model_id = model_id.strip()
    if not model_id:
        raise CheckpointError(
            f"{spec.title}: model_id is empty. Enter a Hugging Face id such as {spec.published.hub_id}, a folder in "
            f"diffusers layout, or {spec.miniature.id}."
        )
    if parts.is_of_files(model_id):
        return _of_files(spec, model_id, folders, is_partial=is_partial)
    if model_id.startswith("tiny/"):
        if model_id not in spec.miniature.ids:
            raise CheckpointError(
                f"{spec.title}: model_id is {model_id}; its built-in checkpoint is {spec.miniature.id}."
            )
        return Checkpoint(spec=spec, model_id=model_id, root=None)
    if (folder := local_folder(model_id, folders)) is not None:
        if not (folder / INDEX).is_file():
            raise CheckpointError(
                f"{spec.title}: the folder {model_id} has no {INDEX}; it is not a model in diffusers layout. Choose "
                f"the folder that holds {INDEX}, transformer/, vae/."
            )
        _check_index(spec, model_id, read_json(folder / INDEX))
        return Checkpoint(spec=spec, model_id=model_id, root=folder)
    if not hub.is_hub_id(model_id):
        searched = ", ".join(["the path itself", *folders])
        raise CheckpointError(
            f"{spec.title}: model_id is {model_id}; there is no such folder (looked at {searched}) and it is not a "
            f"Hugging Face id (owner/name) such as {spec.published.hub_id}."
        )
    return Checkpoint(spec=spec, model_id=model_id, root=None)


def _of_files(spec: ModelSpec, model_id: str, folders: Sequence[str], *, is_partial: bool) -> Checkpoint:
    """A model of single files. Tokenizers that are in none come from the family's repository."""
    found = parts.resolve(model_id, [spec], folders, needs_all=not is_partial)
    root = assembled.folder_of(found.spec, found.parts, found.configs)
    if is_partial:
        return Checkpoint(spec=found.spec, model_id=model_id, root=root, is_partial=True)
    rest = locate(spec, found.rest or spec.published.hub_id, folders)
    return Checkpoint(spec=found.spec, model_id=model_id, root=root, rest=rest)


def find_index(
    model_id: str, folders: Sequence[str] = (), *, progress: Progress | None = None
) -> Mapping[str, Any] | None:
    """The `model_index.json` that a model id stands for; None for an id without one.

    A Hub model's is read from this machine; with `progress` it is fetched, as `hub.snapshot` does it.
    """
    model_id = model_id.strip()
    folder = local_folder(model_id, folders)
    if folder is None and hub.is_hub_id(model_id) and not model_id.startswith("tiny/"):
        folder = hub.cached(model_id) if progress is None else hub.snapshot(model_id, progress).root
    if folder is None or not (folder / INDEX).is_file():
        return None
    return read_json(folder / INDEX)


def local_configs(model_id: str, names: Iterable[str], folders: Sequence[str] = ()) -> dict[str, Mapping[str, Any]]:
    """The `config.json` of each of a model's folders `names`, as far as they are on this machine."""
    model_id = model_id.strip()
    root = local_folder(model_id, folders) or (hub.cached(model_id) if hub.is_hub_id(model_id) else None)
    paths = {name: root / name / CONFIG for name in names} if root else {}
    return {part: read_json(path) for part, path in paths.items() if path.is_file()}


def local_folder(model_id: str, folders: Sequence[str]) -> Path | None:
    """The folder that an id is the path of, or the name of in one of `folders`."""
    if not model_id or "\0" in model_id:
        return None
    # Unlike those of `Path` these take the name of a user that there is not, and names that can be no file's.
    own = os.path.expanduser(model_id)
    found = (own, *(os.path.join(parent, model_id) for parent in folders))
    return next((Path(folder) for folder in found if os.path.isdir(folder)), None)


def _check_index(spec: ModelSpec, model_id: str, index: Mapping[str, Any]) -> None:
    if problem := compatibility.index_problem(spec, model_id, index):
        raise CheckpointError(problem)


def fingerprint(folder: Path) -> str:
    """What changes when a file of a checkpoint's folder does: names, sizes and times, without reading them."""
    if (held := assembled.source_of(folder)) is not None:
        return assembled.state_of(held)
    folder = folder.resolve() if folder.is_symlink() else folder
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return signature(str(folder), [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def weight_files(folder: Path, component: Component) -> list[Path]:
    """The weight files of a component that hold a tensor which is loaded; raises where one is missing."""
    if (held := assembled.source_of(folder)) is not None:
        return [held.path]
    names = weight_names(folder, component)
    missing = [name for name in names if not os.path.isfile(folder / name)]  # `Path` raises for names too long
    if missing and len(names) > 1:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing)}. Download the "
            "checkpoint again."
        )
    if missing:
        found = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none"
        raise CheckpointError(f"{folder}: expected one .safetensors file or an index, found {found}.")
    return [folder / name for name in names]


def read_headers(folder: Path, component: Component) -> dict[str, TensorFile]:
    """Every tensor by name in a component's weight files, from the files' headers alone, codes as what they stand for;
    `CheckpointError` where they are codes that are not decoded.
    """
    if (held := assembled.source_of(folder)) is not None:
        return assembled.own_tensors(held)
    headers = [contents.header(path) for path in weight_files(folder, component)]
    found = {name: tensor for each, _ in headers for name, tensor in each.items()}
    return codes.decoded(found, {name: text for _, said in headers for name, text in said.items()})


def match(network: "Network", tensors: Mapping[str, TensorFile], folder: Path) -> dict[str, tuple[TensorFile, ...]]:
    """The files of each weight of a network; checks names and shapes."""
    component, held = network.component, assembled.source_of(folder)
    folder = folder if held is None else held.path  # what is said of it is said of the file
    by_name = by_own_names(tensors, component.aliases)
    matched: dict[str, tuple[TensorFile, ...]] = {}
    for name, weight in network.weights.items():
        missing = [source for source in weight.sources if source not in by_name]
        if missing:
            raise CheckpointError(
                f"{folder}: the weight {missing[0]} is missing; the checkpoint is incomplete. Download it again, or "
                "choose another."
            )
        matched[name] = tuple(_fitted(by_name[source], weight.tensor_shape) for source in weight.sources)
        _check_shapes(weight, matched[name], folder, "" if held is None else component.class_name)
    used = {source for weight in network.weights.values() for source in weight.sources}
    # Of networks that are read in full. What is outside their blocks may be unused, such as tables of positions.
    blocks = component.blocks if component.library == "diffusers" and not (component.only or component.layers) else ()
    # A file in its makers' names has none that are left over.
    is_strict = bool(blocks) and held is not None
    more = (
        name for name in by_name.keys() - used if is_strict or any(layer_of(name, path) is not None for path in blocks)
    )
    if more := sorted(more):
        raise CheckpointError(
            f"{folder}: the weight {more[0]} is none of a {component.class_name}'s; without it the result would be "
            "wrong. Use a checkpoint of the network as it was published."
        )
    return matched


def _fitted(file: TensorFile, shape: tuple[int, ...]) -> TensorFile:
    """A tensor in the shape that a network wants, where that is the same but for dimensions of 1 at its end or its
    beginning, or where a format of blocks has filled it up.
    """
    found = file.shape
    if 0 < len(found) < len(shape) and shape == (*[1] * (len(shape) - len(found)), *found):
        return made_of(file, shape, Unsqueezed(file, shape))
    if len(found) > len(shape) and found == (*shape, *[1] * (len(found) - len(shape))):
        return made_of(file, shape, Reshaped(file, shape))
    if isinstance(file.made, codes.Nvfp4 | codes.Mxfp8) and len(shape) == 2 and found != shape:
        padded = tuple(-(-size // file.made.multiple) * file.made.multiple for size in shape)
        return made_of(file, shape, Cropped(file, shape)) if found == padded else file
    return file


def content(files: Mapping[str, tuple[TensorFile, ...]]) -> str:
    """What two copies of a checkpoint have in common, and other checkpoints do not: tensors, and the files' sizes."""
    tensors = [[(file.path.name, file.name, file.shape) for file in files[name]] for name in sorted(files)]
    paths = sorted({file.path for each in files.values() for file in each})
    return signature(tensors, [(path.name, path.stat().st_size) for path in paths])


def _check_shapes(weight: "Weight", files: tuple[TensorFile, ...], folder: Path, single: str) -> None:
    """`single` is the class of the network where `folder` is a single file, whose config its other tensors made."""
    expected = weight.tensor_shape
    for source, file in zip(weight.sources, files, strict=True):
        if file.dtype not in quantized.READ:
            raise CheckpointError(
                f"{folder}: {source} holds {file.dtype}, and weights are floating point numbers. {quantized.ADVICE}"
            )
        if file.shape != expected and single:
            raise CheckpointError(
                f"{folder}: {source} has shape {file.shape}, and by its other tensors a {single} has {expected}. The "
                "file is damaged, or of another model. Choose another."
            )
        if file.shape != expected:
            raise CheckpointError(
                f"{folder}: {source} has shape {file.shape}, but its config asks for {expected}. Download it again, or "
                "choose another."
            )


# --- as single files have it ------------------------------------------------------------------------------------------


def network(found: Checkpoint, name: str, progress: Progress) -> Held:
    """The component `name` of a checkpoint as a single file has it: its tensors by its makers' names. Its weights are
    fetched where need be; `CheckpointError` where the checkpoint's files do not hold it.
    """
    component = replace(found.spec.component(name), only=())
    if found.is_partial and found.root is not None and not (found.root / component.folder).is_dir():
        raise CheckpointError(
            f"{found.model_id} holds no {component.class_name}. Choose another file, or another loader."
        )
    folder = found.fetch_weights(component, progress)
    if (held := assembled.source_of(folder)) is not None:
        return held
    config = found.config(component, progress)
    layout = next(layout for layout in LAYOUTS if layout.class_name == component.class_name)
    own = by_own_names(read_headers(folder, component), component.aliases)
    tensors = names.originals(own, _table(component, own))
    first = next(iter(own.values()))
    flags = (flag.mark for key, flag in layout.flags.items() if config.get(key))
    tensors |= {name: TensorFile(path=first.path, name=name, shape=(0,)) for name in flags}
    return Held(contents=Contents(path=folder, tensors=tensors, metadata={}), prefix="", layout=layout, tensors=tensors)


def own_tensors(found: Checkpoint, name: str, progress: Progress) -> dict[str, TensorFile]:
    """All tensors in the files of the component `name`, by its module's own names, other networks' in them too."""
    component = replace(found.spec.component(name), only=())
    folder = found.fetch_weights(component, progress)
    return by_own_names(read_headers(folder, component), component.aliases)


def _table(component: Component, own: Mapping[str, TensorFile]) -> Table:
    tables = (one.table for one in LAYOUTS if one.class_name == component.class_name and one.table is not None)
    table = next(tables, None)
    return component.makers_names if table is None else table(own)


def tokenizers(found: Checkpoint, progress: Progress) -> dict[str, bytes]:
    """What tokenizers a checkpoint's files carry along, or its folders have in the form of these: their contents, by
    the tensor's name there.
    """
    carried: dict[str, bytes] = {}
    for text in found.spec.text_encoders:
        component = found.spec.component(text.component)
        if not found.is_partial or found.root is None or (found.root / component.folder).is_dir():
            held = assembled.source_of(found.folder(component.folder, progress))
            if held is not None:
                carried |= tokenizer_files.carried(held.path, held.contents.tensors, held.prefix)
        if not carried and not found.is_partial:
            carried |= tokenizer_files.of_folder(found.folder(text.tokenizer_folder, progress))
    return carried
