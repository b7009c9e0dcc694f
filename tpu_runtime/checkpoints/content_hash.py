"""Digests of the contents of a model's files, equal on every machine: no paths, no times.

Weights are too large to be read for it. A large file's digest covers its size and evenly spread samples, which differ
after any further training.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from .. import models
from ..files import CheckpointError
from ..messages import compose
from ..progress import Progress
from . import file_resolution, hub, tiny
from .checkpoint import find_local_folder

SAMPLES, SAMPLE_BYTES = 64, 16 * 1024
# The files of a folder in diffusers layout that determine a model's results.
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")


def hash_model(model_id: str, folders: Sequence[str], progress: Progress) -> str:
    """Return the digest of a model.

    This is the newest commit of a Hub id, or the digest of a folder's or single files' contents.

    model_id: a Hub id, a folder or single files.
    progress: for asking the Hub.
    folders: searched for the id.
    """
    model_id = model_id.strip()
    if file_resolution.names_single_files(model_id):
        resolved = file_resolution.resolve(model_id, models.SPECS, folders)
        files = [(name, network.prefix, hash_file(network.path)) for name, network in sorted(resolved.parts.items())]
        rest = hash_model(resolved.rest, folders, progress) if resolved.rest else ""
        return hashlib.sha256(repr((resolved.spec.name, files, rest)).encode()).hexdigest()[:16]
    folder = tiny.find_trained(model_id) or find_local_folder(model_id, folders)
    if folder is None and model_id.startswith("tiny/"):
        return f"miniature {tiny.VERSION}"
    if folder is not None:
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in _SUFFIXES}
        # Names that begin with a dot are files of download clients.
        digests = [(name, hash_file(paths[name])) for name in sorted(paths) if f"/{name}".find("/.") < 0]
        return hashlib.sha256(repr(digests).encode()).hexdigest()[:16]
    if not hub.is_hub_id(model_id):
        raise CheckpointError(compose("checkpoint.model_id_neither_folder_nor_hub_id", model_id=repr(model_id)))
    return hub.resolve_snapshot(model_id, progress).commit


def hash_file(path: Path) -> str:
    """Return the digest of a file: of all its bytes if it is small, else of samples."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
            return digest.hexdigest()[:16]
        for index in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * index // (SAMPLES - 1), os.SEEK_SET)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
