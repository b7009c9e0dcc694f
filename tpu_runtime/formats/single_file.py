"""Networks in a single file of weights, with their prefixes. Reads headers and few bytes more."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import CheckpointError, TensorFile, parse_json, read_header
from ..messages import compose
from . import gguf_file, gguf_header, quantization, unsupported_files
from .file_signature import FileLayout
from .tensor_views import HeadView, view

WEIGHT_SUFFIXES = (".safetensors", ".sft", gguf_file.SUFFIX)
# Prefixes of a network's names in a file of several networks, and prefixes that tools add in a file of one.
_IN_CHECKPOINTS = re.compile(
    r"(model\.diffusion_model\.|model\.model\.|net\.|vae\.|first_stage_model\.|text_encoders\.\w+\.transformer\."
    r"|text_encoders\.\w+\.)"
)
_ALONE = ("", "model.", "diffusion_model.", "transformer.", "module.")
# Architectures whose queries and keys llama.cpp interleaves for its rotary embedding.
_TURNED = {"llama": ("attn_q", "attn_k"), "mistral3": ("attn_q", "attn_k")}
_NAMES_IN_TEXT = 4
# Metadata that names the model (https://github.com/Stability-AI/ModelSpec).
_TITLES = ("modelspec.architecture", "modelspec.title")
_LONGEST_TITLE = 200
_MOST_NETWORKS = 16


@dataclass(frozen=True, kw_only=True)
class FileContents:
    """A file's tensors by name, quantised ones as views, and its metadata."""

    path: Path
    tensors: Mapping[str, TensorFile]
    metadata: Mapping[str, str]

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Config of the network in the file's metadata; {} if absent or invalid JSON.

        Raises `CheckpointError` if it is too long.
        """
        try:
            value = parse_json(quantization.check_metadata_length(self.metadata.get("config", "{}"), "config"))
        except CheckpointError:
            raise
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the model in the file's metadata, then the file's name."""
        entries = (self.metadata.get(key, "") for key in (*gguf_file.TITLES, *_TITLES))
        return tuple(title[:_LONGEST_TITLE] for title in (*entries, self.path.name) if title)


@dataclass(frozen=True, kw_only=True)
class NetworkFile:
    """A network in a file."""

    contents: FileContents
    prefix: str  # of its names in the file
    layout: FileLayout
    tensors: Mapping[str, TensorFile]  # by their names after the prefix

    @property
    def path(self) -> Path:
        return self.contents.path


def read_contents(path: Path) -> FileContents:
    """Return the contents of a file. Raises `CheckpointError` for other files and unsupported formats."""
    if path.suffix not in WEIGHT_SUFFIXES:
        raise CheckpointError(compose("file.suffix_unsupported", path=path, weight_suffixes=", ".join(WEIGHT_SUFFIXES)))
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(compose("file.unreadable", path=path, strerror=error.strerror)) from error
    return _read(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read(path: Path, size: int, modified: int) -> FileContents:
    if path.suffix == gguf_file.SUFFIX:
        tensors, fields = gguf_file.read_gguf(path)
        architecture = gguf_file.get_text(fields, "general.architecture") or ""
        split_fields = {name: fields[name] for name in unsupported_files.SPLIT if name in fields}
        numbers = {name: str(value) for name, value in split_fields.items() if isinstance(value, int)}
        metadata = {**(gguf_file.read_metadata(path, fields) or {}), **numbers}
        return FileContents(path=path, tensors=_deinterleave_heads(tensors, architecture, fields), metadata=metadata)
    tensors, metadata = read_safetensors_header(path)
    return FileContents(path=path, tensors=quantization.decode_tensors(tensors, metadata), metadata=metadata)


def read_safetensors_header(path: Path) -> tuple[dict[str, TensorFile], Mapping[str, str]]:
    """Return the stored tensors of a safetensors file and its metadata. Raises `CheckpointError` for other files."""
    from safetensors import SafetensorError

    try:
        return read_header(path)
    except SafetensorError as error:
        raise CheckpointError(compose("file.safetensors_cut_off", path=path, error=error)) from error


def _deinterleave_heads(
    tensors: Mapping[str, TensorFile], architecture: str, fields: gguf_header.Fields
) -> dict[str, TensorFile]:
    """Return the tensors with llama.cpp's interleaved queries and keys in their original order."""
    views = dict(tensors)
    counts = {
        kind: f"{architecture}.attention.head_count{'_kv' * (kind == 'attn_k')}"
        for kind in _TURNED.get(architecture, ())
    }
    heads_of = {kind: fields[name] if fields.length(name) == 1 else None for kind, name in counts.items()}
    for name, tensor in tensors.items():
        kind = name.split(".")[-2] if name.count(".") > 1 else ""
        if kind not in heads_of or not name.startswith("blk."):
            continue
        heads = heads_of[kind]  # one number for all layers
        if not isinstance(heads, int) or heads < 1 or not tensor.shape or tensor.shape[0] % (2 * heads):
            raise CheckpointError(
                compose("file.not_of_heads", path=tensor.path, name=name, shape=tensor.shape, heads=str(heads)[:80])
            )
        views[name] = view(tensor, tensor.shape, HeadView(tensor, heads))
    return views


def find_networks(path: Path, layouts: Sequence[FileLayout]) -> list[NetworkFile]:
    """Return the networks in a file. Raises `CheckpointError` if no layout matches."""
    contents = read_contents(path)
    unsupported_files.check_not_sharded(path, contents.metadata)
    matches = list(_networks(contents, layouts))
    if not matches:
        unsupported_files.check_not_partial(path, contents.tensors.keys())
        names = list(contents.tensors)
        shown = ", ".join(name[:80] for name in names[:_NAMES_IN_TEXT]) or "none"
        raise CheckpointError(compose("file.no_known_network", path=path, count=len(names), shown=shown))
    for match in matches:
        for start, what in match.layout.refused.items():
            pattern = re.compile(r"\d+".join(map(re.escape, start.split("*"))))
            if any(map(pattern.match, match.tensors)):
                raise CheckpointError(compose("file.network_unsupported", path=path, what=what, start=start))
    return matches


def _networks(contents: FileContents, layouts: Sequence[FileLayout]) -> Iterator[NetworkFile]:
    matches = (_IN_CHECKPOINTS.match(name) for name in contents.tensors)
    prefixes = dict.fromkeys(match.group() for match in matches if match)
    if len(prefixes) > _MOST_NETWORKS:
        raise CheckpointError(compose(
            "file.too_many_networks", path=contents.path, count=len(prefixes), most_networks=_MOST_NETWORKS,
        ))  # fmt: skip
    is_found = False
    for prefix in (*sorted(prefixes, key=len, reverse=True), *_ALONE):
        if is_found and prefix in _ALONE:
            return
        tensors = {name[len(prefix) :]: tensor for name, tensor in contents.tensors.items() if name.startswith(prefix)}
        layout = next((layout for layout in layouts if layout.matches(tensors)), None)
        if layout is not None:
            is_found = True
            yield NetworkFile(contents=contents, prefix=prefix, layout=layout, tensors=tensors)


def is_weights(name: str | os.PathLike[str]) -> bool:
    """Return whether a name has the ending of a supported file of weights."""
    return os.fspath(name).endswith(WEIGHT_SUFFIXES)
