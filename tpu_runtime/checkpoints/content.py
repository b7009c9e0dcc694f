"""What a model's files hold, as a short mark that is the same on every machine: no paths, no times.

Weights are too large to be read for it: of a large file the mark is made of its size and of evenly spread samples,
which differ wherever a model was trained further.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ..files import CheckpointError
from ..progress import Progress
from . import hub, tiny
from .checkpoint import local_folder

SAMPLES, SAMPLE_BYTES = 64, 16 * 1024
# What of a folder in diffusers layout decides what a model gives.
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")


def of_model(model_id: str, folders: Sequence[str], progress: Progress) -> str:
    """The mark of a model: of a Hub id the newest commit, which is asked for; of a folder that of its files."""
    model_id = model_id.strip()
    folder = tiny.trained(model_id) or local_folder(model_id, folders)
    if folder is None and model_id.startswith("tiny/"):
        return f"miniature {tiny.VERSION}"
    if folder is not None:
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in _SUFFIXES}
        # Names that begin with a dot are notes of download clients.
        marks = [(name, of_file(paths[name])) for name in sorted(paths) if f"/{name}".find("/.") < 0]
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
    if not hub.is_hub_id(model_id):
        raise CheckpointError(f"model_id is {model_id!r}; it is neither a folder nor a Hugging Face id (owner/name).")
    return hub.snapshot(model_id, progress).commit


def of_file(path: Path) -> str:
    """The mark of one file: of all of it where it is small."""
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
