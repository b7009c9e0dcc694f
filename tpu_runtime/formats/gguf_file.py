"""GGUF files: tensors in llama.cpp's formats, decoded by the `gguf` package row by row.

A tensor has at most four dimensions there, the last first; ComfyUI-GGUF notes the shape of one that had more.
stable-diffusion.cpp joins the first two of a convolution over frames, whose bias then tells the first.
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
from . import gguf_header
from .gguf_header import Fields, HeaderError
from .stored import Read, full

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_MOST_DIMENSIONS = 8  # of a shape that is noted
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
# The formats that are decoded; fewer bits than four are refused by name.
FORMATS = (
    *_PLAIN, "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
# Fields that name the model.
TITLES = ("general.name", "general.basename", "general.finetune")
# Numbers of a language model that no shape tells, by what their fields' names end with: keys of its config.
NUMBERS = {"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
# What they may be.
_BOUNDS = {"rope_theta": (1.0, 1e10), "rms_norm_eps": (1e-10, 1e-2)}
# Elements that are decoded at a time: the arithmetic has several copies of them.
_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A tensor of `shape` in blocks of `block` elements and `size` bytes each, in the order of its elements."""

    path: Path
    offset: int
    kind: str
    shape: tuple[int, ...]
    block: int
    size: int

    def read(self, index: Index, read: Read) -> "torch.Tensor":
        import torch

        (start, stop), *_ = full(index, self.shape) if self.shape else [(0, 1)]
        width = math.prod(self.shape[1:])
        found = torch.empty((stop - start) * width)
        first, step = start * width, max(self.block, _AT_ONCE // self.block * self.block)
        for begin in range(first, stop * width, step):
            end = min(begin + step, stop * width)
            found[begin - first : end - first] = torch.from_numpy(self._elements(begin, end))
        found = found.reshape(stop - start, *self.shape[1:]) if self.shape else found.reshape(())
        return found[(slice(None), *index[1:])] if index else found

    def _elements(self, start: int, stop: int) -> np.ndarray:
        first, last = start // self.block, -(-stop // self.block)
        with self.path.open("rb") as file:
            file.seek(self.offset + first * self.size)
            data = np.frombuffer(file.read((last - first) * self.size), np.uint8)
        if len(data) != (last - first) * self.size:
            raise CheckpointError(f"{self.path} ends early; it was probably cut off while downloading. Get it again.")
        values = data.view(_PLAIN[self.kind]).astype(np.float32) if self.kind in _PLAIN else self._decoded(data)
        skipped = start - first * self.block
        return values[skipped : skipped + stop - start]

    def _decoded(self, data: np.ndarray) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[self.kind]
        return quants.dequantize(data.reshape(1, -1), kind).reshape(-1)


def read_header(path: Path) -> tuple[dict[str, TensorFile], Fields]:
    """The tensors of a GGUF file by name, and its fields by theirs; reads no weights.

    Raises `CheckpointError` where it is no whole GGUF file, or holds a format that is not decoded.
    """
    stat = os.stat(path)
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_header(path: Path, size: int, modified: int) -> tuple[dict[str, TensorFile], Fields]:
    try:
        fields, tensors, data = gguf_header.read(path)
    except HeaderError as error:
        raise CheckpointError(f"{path} is not a whole GGUF file that is read here ({error}). Get it again.") from None
    check_names(path, tensors)
    files = {}
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        kind, block, block_bytes = _format(path, name, tensor.kind)
        shape, begin = _split(name, stored), data + tensor.offset
        if (shape[-1] if shape else 1) % block:
            raise CheckpointError(
                f"{path}: {name} has rows of {shape[-1]} elements, and {kind} has blocks of {block}. Get it again."
            )
        if (end := begin + math.prod(shape) // block * block_bytes) > size:
            raise CheckpointError(
                f"{path} is not a whole GGUF file ({name} ends at byte {end} of {size}); it was probably cut off while "
                "downloading. Get it again."
            )
        shape = _shape(path, name, shape, fields)
        made = Packed(path=path, offset=begin, kind=kind, shape=shape, block=block, size=block_bytes)
        files[name] = TensorFile(path=path, name=name, shape=shape, dtype="F32", made=made)
    return files, fields


def _split(name: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """A tensor's shape, with the first two dimensions of a convolution over frames apart: of one over pixels the first
    alone is as long as the bias.
    """
    shape = stored[name]
    layer, _, own = name.rpartition(".")
    bias = stored.get(f"{layer}.bias", ())
    is_joined = own == "weight" and len(shape) == 4 and len(bias) == 1 and 0 < bias[0] < shape[0]
    return (bias[0], shape[0] // bias[0], *shape[1:]) if is_joined and shape[0] % bias[0] == 0 else shape


def _format(path: Path, name: str, number: int) -> tuple[str, int, int]:
    """A tensor's format by its number in the file: its name, the elements and the bytes of its blocks."""
    from gguf import GGML_QUANT_SIZES

    known = {one.value: one for one in GGML_QUANT_SIZES}.get(number)
    if known is None or known.name not in FORMATS:
        raise CheckpointError(
            f"{path}: {name} is {known.name if known else f'in format {number}'}, which is not decoded here; what is: "
            f"{', '.join(FORMATS)}. Use the model in one of these."
        )
    return (known.name, *GGML_QUANT_SIZES[known])


def _shape(path: Path, name: str, shape: tuple[int, ...], fields: Fields) -> tuple[int, ...]:
    """A tensor's own shape, where the file notes another than it could hold."""
    noted = _ORIGINAL_SHAPE + name
    if noted not in fields:
        return shape
    own = fields[noted] if fields.length(noted) <= _MOST_DIMENSIONS else ()
    own = tuple(own) if isinstance(own, list | tuple) else (own,)
    if any(not isinstance(size, int) or size < 1 for size in own) or math.prod(own) != math.prod(shape):
        raise CheckpointError(
            f"{path}: {name} has {math.prod(shape)} elements, and is noted as {str(own)[:80]}; both must be the same, "
            f"in {_MOST_DIMENSIONS} dimensions at most. Get it again."
        )
    return own


def text_of(fields: Mapping[str, Any], name: str) -> str | None:
    """A field that holds a text."""
    found = fields.get(name)
    return found if isinstance(found, str) else None


def _title(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a title, None where its bytes are no text: a model runs without one."""
    try:
        return text_of(fields, name)
    except CheckpointError:
        return None


def metadata_of(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """What a file says of its model as text, by name: titles, and numbers by the key of a config; `CheckpointError` for
    a number that no model has.
    """
    found = {name: text for name in TITLES if (text := _title(fields, name))}
    architecture = text_of(fields, "general.architecture") or ""
    for ending, key in NUMBERS.items():
        title = f"{architecture}.{ending}"
        if (number := fields.get(title)) is None:
            continue
        low, high = _BOUNDS[key]
        if not isinstance(number, int | float) or not low <= number <= high:
            raise CheckpointError(
                f"{path}: {title} is {str(number)[:40]}, and must be from {low} to {high}; the file is damaged. Get it "
                "again."
            )
        # The format has float32: 1e-06 is 9.99999997e-07 there.
        found[key] = f"{number:.6g}"
    return found
