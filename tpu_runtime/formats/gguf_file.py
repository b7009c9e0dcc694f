"""GGUF files: tensors in llama.cpp's formats, decoded by the `gguf` package row by row.

A tensor has at most four dimensions there, the last first. ComfyUI-GGUF stores the shape of one with more as a field.
stable-diffusion.cpp joins the first two dimensions of a convolution over frames; the first is as long as the bias.
"""

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import CheckpointError, Index, TensorFile, check_names
from ..messages import compose
from . import gguf_header
from .gguf_header import Fields, HeaderError
from .tensor_views import ReadTensor, index_bounds

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_MOST_DIMENSIONS = 8  # of a shape in the metadata
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# Supported formats; those with fewer than four bits are refused by name.
FORMATS = (
    *_PLAIN, "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
# Fields that name the model.
TITLES = ("general.name", "general.basename", "general.finetune")
# Config keys of a language model that do not follow from shapes, by the ending of the field's name.
CONFIG_NUMBERS = {"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
# Their bounds.
_BOUNDS = {"rope_theta": (1.0, 1e10), "rms_norm_eps": (1e-10, 1e-2)}
# Elements decoded at a time, because decoding makes several copies.
_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """A tensor in blocks, in the order of its elements."""

    path: Path
    offset: int  # of the first block in the file, in bytes
    kind: str  # format
    shape: tuple[int, ...]  # decoded
    block: int  # elements per block
    size: int  # bytes per block

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        import torch

        (start, stop), *_ = index_bounds(index, self.shape) if self.shape else [(0, 1)]
        width = math.prod(self.shape[1:])
        values = torch.empty((stop - start) * width)
        first, step = start * width, max(self.block, _AT_ONCE // self.block * self.block)
        for begin in range(first, stop * width, step):
            end = min(begin + step, stop * width)
            values[begin - first : end - first] = torch.from_numpy(self._elements(begin, end))
        values = values.reshape(stop - start, *self.shape[1:]) if self.shape else values.reshape(())
        return values[(slice(None), *index[1:])] if index else values

    def _elements(self, start: int, stop: int) -> np.ndarray:
        first, last = start // self.block, -(-stop // self.block)
        with self.path.open("rb") as file:
            file.seek(self.offset + first * self.size)
            data = np.frombuffer(file.read((last - first) * self.size), np.uint8)
        if len(data) != (last - first) * self.size:
            raise CheckpointError(compose("file.ends_early", path=self.path))
        values = data.view(_PLAIN[self.kind]).astype(np.float32) if self.kind in _PLAIN else self._dequantize(data)
        skipped = start - first * self.block
        return values[skipped : skipped + stop - start]

    def _dequantize(self, data: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[self.kind]
        return quants.dequantize(data.reshape(1, -1), kind).reshape(-1)


def read_gguf(path: Path) -> tuple[dict[str, TensorFile], Fields]:
    """Return the tensors of a GGUF file by name, and its fields. Reads no weights.

    Raises `CheckpointError` for an incomplete file or an unsupported format.
    """
    stat = os.stat(path)
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_header(path: Path, size: int, modified: int) -> tuple[dict[str, TensorFile], Fields]:
    try:
        fields, tensors, data = gguf_header.read_gguf_header(path)
    except HeaderError as error:
        raise CheckpointError(compose("file.gguf_unreadable", path=path, error=error)) from None
    check_names(path, tensors)
    files = {}
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        kind, block, block_bytes = _format(path, name, tensor.kind)
        shape, begin = _split(name, stored), data + tensor.offset
        if (shape[-1] if shape else 1) % block:
            raise CheckpointError(
                compose("file.rows_not_in_blocks", path=path, name=name, shape=shape[-1], kind=kind, block=block)
            )
        if (end := begin + math.prod(shape) // block * block_bytes) > size:
            raise CheckpointError(compose("file.gguf_cut_off", path=path, name=name, end=end, size=size))
        shape = _shape(path, name, shape, fields)
        made = GgufTensor(path=path, offset=begin, kind=kind, shape=shape, block=block, size=block_bytes)
        files[name] = TensorFile(path=path, name=name, shape=shape, dtype="F32", made=made)
    return files, fields


def _split(name: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return a tensor's shape, with the joined first two dimensions of a convolution over frames separated.

    A convolution over pixels has a first dimension as long as the bias.
    """
    shape = stored[name]
    layer, _, leaf = name.rpartition(".")
    bias = stored.get(f"{layer}.bias", ())
    is_joined = leaf == "weight" and len(shape) == 4 and len(bias) == 1 and 0 < bias[0] < shape[0]
    return (bias[0], shape[0] // bias[0], *shape[1:]) if is_joined and shape[0] % bias[0] == 0 else shape


def _format(path: Path, name: str, number: int) -> tuple[str, int, int]:
    """Return the format of a number in the file: name, elements and bytes per block."""
    from gguf import GGML_QUANT_SIZES

    known = {kind.value: kind for kind in GGML_QUANT_SIZES}.get(number)
    if known is None or known.name not in FORMATS:
        raise CheckpointError(compose(
            "file.format_unsupported", path=path, tensor_name=name,
            format=known.name if known else f"in format {number}", formats=", ".join(FORMATS),
        ))  # fmt: skip
    return (known.name, *GGML_QUANT_SIZES[known])


def _shape(path: Path, name: str, shape: tuple[int, ...], fields: Fields) -> tuple[int, ...]:
    """Return a tensor's original shape, from a field of the file if there is one."""
    noted = _ORIGINAL_SHAPE + name
    if noted not in fields:
        return shape
    noted_shape = fields[noted] if fields.length(noted) <= _MOST_DIMENSIONS else ()
    noted_shape = tuple(noted_shape) if isinstance(noted_shape, list | tuple) else (noted_shape,)
    if any(not isinstance(size, int) or size < 1 for size in noted_shape) or math.prod(noted_shape) != math.prod(shape):
        raise CheckpointError(compose(
            "file.element_count_wrong", path=path, name=name, shape=math.prod(shape),
            noted_shape=str(noted_shape)[:80], most_dimensions=_MOST_DIMENSIONS,
        ))  # fmt: skip
    return noted_shape


def get_text(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a field if it is a text, else None."""
    value = fields.get(name)
    return value if isinstance(value, str) else None


def _title(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a title; None if its bytes are not UTF-8: a model runs without a title."""
    try:
        return get_text(fields, name)
    except CheckpointError:
        return None


def read_metadata(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the file's metadata of its model as text: titles by name, and numbers by config key.

    path: for messages.
    Raises `CheckpointError` for a number out of bounds.
    """
    metadata = {name: text for name in TITLES if (text := _title(fields, name))}
    architecture = get_text(fields, "general.architecture") or ""
    for ending, key in CONFIG_NUMBERS.items():
        title = f"{architecture}.{ending}"
        if (number := fields.get(title)) is None:
            continue
        low, high = _BOUNDS[key]
        if not isinstance(number, int | float) or not low <= number <= high:
            raise CheckpointError(
                compose("file.number_outside", path=path, title=title, number=str(number)[:40], low=low, high=high)
            )
        # The format has float32: 1e-06 is 9.99999997e-07 there.
        metadata[key] = f"{number:.6g}"
    return metadata
