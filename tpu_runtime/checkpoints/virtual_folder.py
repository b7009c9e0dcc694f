"""Folders in diffusers layout for models of single files.

Configs, scheduler and index are written; weights stay in the files.

A component's folder names the file with its weights in `source.json`. The folder is in the cache, under a digest of the
files' names, sizes and times. Components that are in no file come from another checkpoint (see `Checkpoint.rest`).
"""

import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import models
from ..cache import folders
from ..cache.store import signature
from ..files import CheckpointError, TensorFile, read_json
from ..formats import key_map, single_file, tokenizer_files
from ..formats.file_signature import TensorShapes
from ..formats.single_file import NetworkFile
from ..formats.tokenizer_files import TokenizerFile
from ..messages import compose
from ..model_spec import Component, Json, ModelSpec
from ..models import LAYOUTS
from . import identification, tiny

SOURCE_FILE = "source.json"
# Part of the digest. Increase it when the written files change.
VERSION = 2


def collect_original_keys(class_name: str) -> dict[str, Any]:
    """Return the original names of the modules of a class, merged from all models that have it."""
    parts = (part for spec in models.SPECS for part in spec.components if part.class_name == class_name)
    return {theirs: name for part in parts for theirs, name in part.original_keys.items()}


def translate_tensors(held: NetworkFile) -> dict[str, TensorFile]:
    """Return the tensors of a network in a file by the names of diffusers and transformers."""
    return dict(_own_tensors(held.path, os.stat(held.path).st_mtime_ns, held.prefix))


@functools.lru_cache(maxsize=32)
def _own_tensors(path: Path, modified: int, prefix: str) -> Mapping[str, TensorFile]:
    network = next(network for network in single_file.find_networks(path, LAYOUTS) if network.prefix == prefix)
    table = (
        collect_original_keys(network.layout.class_name)
        if network.layout.table is None
        else network.layout.table(network.tensors)
    )
    tensors = {name: tensor for name, tensor in network.tensors.items() if not name.startswith(network.layout.ignored)}
    return key_map.to_diffusers(tensors, table)


def build_folder_config(
    held: NetworkFile, spec: ModelSpec, folder: str, known: identification.DeclaredFlags = identification.NO_FLAGS
) -> dict[str, Any]:
    """Return the config of the virtual folder of a file: the network's own, or the parent model's for partial networks.

    held, spec, folder: the file, the model, and the folder's name in it.
    known: values that the user gives by naming models (see `identification.DeclaredFlags`).
    """
    first, *others = spec.list_components(folder)
    config = build_config(held, first, known)
    if (parent := first.whole(others)) == first.class_name:
        return config
    file_config = held.contents.config
    others_configs = {part.config_part: file_config.get(part.config_part, dict(part.config)) for part in others}
    return {"architectures": [parent], first.config_part: config, **others_configs}


def build_config(
    held: NetworkFile, component: Component, known: identification.DeclaredFlags = identification.NO_FLAGS
) -> dict[str, Any]:
    """Return a network's config.

    This is the file's own if it has one, or else the published one updated from the tensors' shapes.

    held, component: the file, and the network that it holds.
    Flags that tensors do not determine come from marks, metadata, the user (`known`) and the file's name.
    """
    file_config = held.contents.config
    file_config = file_config.get(component.name, file_config.get(component.folder, file_config))
    file_config = file_config if isinstance(file_config, dict) else {}
    published = identification.read_head_counts(held, component.config)
    base = {**published, **file_config}
    try:
        derived = held.layout.config(TensorShapes(translate_tensors(held)), base)
    except (ValueError, ZeroDivisionError, TypeError, KeyError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            compose("checkpoint.tensor_sizes_wrong", path=held.path, class_name=component.class_name)
        ) from error
    flags = {
        key: identification.read_flag(held, component, key, known)
        for key in held.layout.flags.keys() - file_config.keys()
    }
    # A file's config with all keys that tensors determine is complete; missing keys are upstream's defaults then.
    is_complete = derived.keys() <= file_config.keys()
    config = {**file_config, **flags} if is_complete else {**published, **derived, **flags, **file_config}
    kind = {"_class_name": component.class_name} if component.library == "diffusers" else {}
    return {**config, **(kind or {"architectures": [component.class_name]})}


def read_source(folder: Path) -> NetworkFile | None:
    """Return the network that a component's folder stands for; None for a folder that has weights of its own."""
    path = folder / SOURCE_FILE
    if not path.is_file():
        return None
    source = read_json(path)
    networks = single_file.find_networks(Path(source["file"]), LAYOUTS)
    network = next((network for network in networks if network.prefix == source["prefix"]), None)
    if network is None:
        raise CheckpointError(compose("checkpoint.file_changed", file=source["file"]))
    return network


def stat_signature(held: NetworkFile) -> str:
    """Return a digest that changes when the file of a network does."""
    stat = held.path.stat()
    return signature(str(held.path), stat.st_size, stat.st_mtime_ns, held.prefix)


def ensure_folder(spec: ModelSpec, parts: Mapping[str, NetworkFile], configs: Mapping[str, Json]) -> Path:
    """Return the virtual folder of a model, created if need be.

    spec: the model.
    parts: the networks in files, by folder of the model.
    configs: of these folders.
    """
    states = [(folder, stat_signature(network)) for folder, network in sorted(parts.items())]
    name = f"{spec.name}-{signature(VERSION, spec.name, states, json.dumps(configs, sort_keys=True))[:16]}"
    return folders.ensure_cached_folder("parts", name, lambda scratch: _write(spec, parts, configs, scratch))


def _write(spec: ModelSpec, parts: Mapping[str, NetworkFile], configs: Mapping[str, Json], folder: Path) -> None:
    tiny.write_description(spec, folder)
    for text in spec.text_encoders:
        network = parts.get(spec.component(text.component).folder)
        tokenizer_file = (
            None
            if network is None
            else tokenizer_files.find_tokenizer(network.path, network.contents.tensors, network.prefix)
        )
        if network is not None and tokenizer_file is not None:
            config = configs[spec.component(text.component).folder]
            (folder / text.tokenizer_folder).symlink_to(
                _ensure_tokenizer(network, tokenizer_file, _embedding_rows(config))
            )
    for name, network in parts.items():
        tiny.write_json(folder / name / "config.json", configs[name])
        tiny.write_json(folder / name / SOURCE_FILE, {"file": str(network.path.absolute()), "prefix": network.prefix})


def _embedding_rows(config: Json) -> float:
    """Return how many token embeddings an encoder has; infinity if its untrusted config does not have the number."""
    text = config.get("text_config", config)
    rows = text.get("vocab_size") if isinstance(text, Mapping) else None
    return rows if isinstance(rows, int) else math.inf


def _ensure_tokenizer(held: NetworkFile, carried: TokenizerFile, rows: float) -> Path:
    """Return the folder of the tokenizer in a file, shared by all models of that file.

    rows: token embeddings of the encoder. Raises `CheckpointError` if the tokenizer has more tokens.
    """

    def make(scratch: Path) -> None:
        size = tokenizer_files.write_tokenizer(carried, scratch, held.layout.chat_template)
        if size > rows:
            raise CheckpointError(
                compose("checkpoint.tokenizer_of_another_model", path=held.path, size=size, rows=rows)
            )

    return folders.ensure_cached_folder("parts", f"tokenizer-{signature(VERSION, stat_signature(held))[:16]}", make)
