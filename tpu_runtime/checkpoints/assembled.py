"""A model of single files as a folder in diffusers layout: configs, scheduler and index are made, weights stay where
they are.

A part's folder names the file with its weights in `source.json`. The folder is in the cache, under a digest of the
files' names, sizes and times; parts that are in no file are those of another checkpoint (see `Checkpoint.rest`).
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
from ..formats import contents, names, tokenizer_files
from ..formats.contents import Held
from ..formats.layout import Shapes
from ..formats.tokenizer_files import TokenizerFile
from ..model_spec import Component, ModelSpec
from ..models.layouts import LAYOUTS, told
from . import tiny

SOURCE = "source.json"
# Part of the digest: increase it when what is written changes.
VERSION = 2


def table_of(class_name: str) -> dict[str, Any]:
    """What makers call the modules of a class, in all models that have it."""
    parts = (part for spec in models.SPECS for part in spec.components if part.class_name == class_name)
    return {theirs: own for part in parts for theirs, own in part.makers_names.items()}


def own_tensors(held: Held) -> dict[str, TensorFile]:
    """The tensors of a network in a file by the names of diffusers and transformers."""
    return dict(_own_tensors(held.path, os.stat(held.path).st_mtime_ns, held.prefix))


@functools.lru_cache(maxsize=32)
def _own_tensors(path: Path, modified: int, prefix: str) -> Mapping[str, TensorFile]:
    held = next(held for held in contents.networks(path, LAYOUTS) if held.prefix == prefix)
    table = table_of(held.layout.class_name) if held.layout.table is None else held.layout.table(held.tensors)
    kept = {name: tensor for name, tensor in held.tensors.items() if not name.startswith(held.layout.ignored)}
    return names.translated(kept, table)


def folder_config(held: Held, spec: ModelSpec, folder: str, known: told.Said = told.NOTHING) -> dict[str, Any]:
    """The config of a folder that a file stands for: its network's, or that of the whole of which there are parts."""
    first, *others = spec.parts_of(folder)
    own = config_of(held, first, known)
    if (whole := first.whole(others)) == first.class_name:
        return own
    said = held.contents.config
    more = {part.config_part: said.get(part.config_part, dict(part.config)) for part in others}
    return {"architectures": [whole], first.config_part: own, **more}


def config_of(held: Held, component: Component, known: told.Said = told.NOTHING) -> dict[str, Any]:
    """A network's config: the file's own, where it has one, or else the published one with what the tensors say, and
    what its marks, its metadata, the user and its name tell, where tensors do not.
    """
    said = held.contents.config
    said = said.get(component.name, said.get(component.folder, said))
    said = said if isinstance(said, dict) else {}
    published = told.numbered(held, component.config)
    base = {**published, **said}
    try:
        derived = held.layout.config(Shapes(own_tensors(held)), base)
    except (ValueError, ZeroDivisionError, TypeError, KeyError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{held.path}: the sizes of its tensors are not those of a {component.class_name}; it is damaged. "
            "Download it again."
        ) from error
    flags = {key: told.flag(held, component, key, known) for key in held.layout.flags.keys() - said.keys()}
    # One that has all that tensors say is whole; what it leaves out is upstream's default then.
    whole = derived.keys() <= said.keys()
    config = {**said, **flags} if whole else {**published, **derived, **flags, **said}
    kind = {"_class_name": component.class_name} if component.library == "diffusers" else {}
    return {**config, **(kind or {"architectures": [component.class_name]})}


def source_of(folder: Path) -> Held | None:
    """The network that a part's folder stands for; None for a folder that has weights of its own."""
    path = folder / SOURCE
    if not path.is_file():
        return None
    said = read_json(path)
    found = contents.networks(Path(said["file"]), LAYOUTS)
    held = next((held for held in found if held.prefix == said["prefix"]), None)
    if held is None:
        raise CheckpointError(f"{said['file']} has changed; choose the model again.")
    return held


def state_of(held: Held) -> str:
    """What changes when the file of a network does."""
    stat = held.path.stat()
    return signature(str(held.path), stat.st_size, stat.st_mtime_ns, held.prefix)


def folder_of(spec: ModelSpec, parts: Mapping[str, Held], configs: Mapping[str, Mapping[str, Any]]) -> Path:
    """The folder of a model whose folders `parts` are in single files, with these configs; made if it is not there."""
    states = [(folder, state_of(held)) for folder, held in sorted(parts.items())]
    name = f"{spec.name}-{signature(VERSION, spec.name, states, json.dumps(configs, sort_keys=True))[:16]}"
    return folders.kept("parts", name, lambda scratch: _write(spec, parts, configs, scratch))


def _write(spec: ModelSpec, parts: Mapping[str, Held], configs: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    tiny.write_description(spec, folder)
    for text in spec.text_encoders:
        held = parts.get(spec.component(text.component).folder)
        carried = None if held is None else tokenizer_files.embedded(held.path, held.contents.tensors, held.prefix)
        if held is not None and carried is not None:
            config = configs[spec.component(text.component).folder]
            (folder / text.tokenizer_folder).symlink_to(_tokenizer(held, carried, _vocabulary(config)))
    for name, held in parts.items():
        tiny.write_json(folder / name / "config.json", configs[name])
        tiny.write_json(folder / name / SOURCE, {"file": str(held.path.absolute()), "prefix": held.prefix})


def _vocabulary(config: Mapping[str, Any]) -> float:
    """How many tokens an encoder has embeddings of; no bound where its config, which may hold anything, has none."""
    text = config.get("text_config", config)
    found = text.get("vocab_size") if isinstance(text, Mapping) else None
    return found if isinstance(found, int) else math.inf


def _tokenizer(held: Held, carried: TokenizerFile, rows: float) -> Path:
    """The folder of the tokenizer that a file carries along: one for all models that are made with the file, whose
    encoder has embeddings of so many tokens.
    """

    def make(scratch: Path) -> None:
        size = tokenizer_files.write(carried, scratch, held.layout.chat_template)
        if size > rows:
            raise CheckpointError(
                f"{held.path} carries a tokenizer of {size} tokens along, and has embeddings of {rows}; one of "
                "them is another model's. Download the file again."
            )

    return folders.kept("parts", f"tokenizer-{signature(VERSION, state_of(held))[:16]}", make)
