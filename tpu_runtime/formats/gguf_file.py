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

from ..files import CheckpointError, Index, TensorFile
from .stored import Read, full

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
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


@dataclass(frozen=True, kw_only=True)
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


def read_header(path: Path) -> tuple[dict[str, TensorFile], Mapping[str, Any]]:
    """The tensors of a GGUF file by name, and its fields by theirs; reads no weights.

    Raises `CheckpointError` where it is no whole GGUF file, or holds a format that is not decoded.
    """
    stat = os.stat(path)
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read_header(path: Path, size: int, modified: int) -> tuple[dict[str, TensorFile], Mapping[str, Any]]:
    from gguf import GGML_QUANT_SIZES, GGUFReader

    try:
        found = GGUFReader(path)
        fields = found.fields
        tensors = {tensor.name: (tensor, tensor.tensor_type.name) for tensor in found.tensors}
    except Exception as error:  # whatever the package makes of bytes that may be anything
        raise CheckpointError(
            f"{path} is not a whole GGUF file ({type(error).__name__}: {str(error)[:200]}); it was probably cut off "
            "while downloading. Get it again."
        ) from error
    if strange := next(((name, kind) for name, (_, kind) in tensors.items() if kind not in FORMATS), None):
        raise CheckpointError(
            f"{path}: {strange[0]} is {strange[1]}, which is not decoded here; what is: {', '.join(FORMATS)}. Use the "
            "model in one of these."
        )
    files = {}
    stored = {
        name: tuple(int(each) for each in reversed(tensor.shape.tolist())) for name, (tensor, _) in tensors.items()
    }
    for name, (tensor, kind) in tensors.items():
        shape = _shape(path, name, _split(name, stored), fields)
        block, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
        made = Packed(path=path, offset=int(tensor.data_offset), kind=kind, shape=shape, block=block, size=block_bytes)
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


def _shape(path: Path, name: str, shape: tuple[int, ...], fields: Mapping[str, Any]) -> tuple[int, ...]:
    """A tensor's own shape, where the file notes another than it could hold."""
    field = fields.get(_ORIGINAL_SHAPE + name)
    if field is None:
        return shape
    own = tuple(int(field.parts[part][0]) for part in field.data)
    if math.prod(own) != math.prod(shape) or any(size < 1 for size in own):
        raise CheckpointError(f"{path}: {name} has {math.prod(shape)} elements, and is noted as {own}. Get it again.")
    return own


def text_of(fields: Mapping[str, Any], name: str) -> str | None:
    """A field that holds a text."""
    field = fields.get(name)
    found = None if field is None else field.contents()
    return found if isinstance(found, str) else None


def metadata_of(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """What a file says of its model as text, by name: titles, and numbers by the key of a config; `CheckpointError` for
    a number that no model has.
    """
    found = {name: text for name in TITLES if (text := text_of(fields, name))}
    architecture = text_of(fields, "general.architecture") or ""
    for ending, key in NUMBERS.items():
        title = f"{architecture}.{ending}"
        if (field := fields.get(title)) is None:
            continue
        number, (low, high) = field.contents(), _BOUNDS[key]
        if not isinstance(number, int | float) or not low <= number <= high:
            raise CheckpointError(
                f"{path}: {title} is {str(number)[:40]}, and must be from {low} to {high}; the file is damaged. Get it "
                "again."
            )
        # The format has float32: 1e-06 is 9.99999997e-07 there.
        found[key] = f"{number:.6g}"
    return found
