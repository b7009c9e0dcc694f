"""Arithmetic of quantised weights: decodes one shard of a layer's codes and scales to float32.

Formulas and layouts are those of ComfyUI (`comfy/quant_ops.py`, `QUANTIZATION.md`) and its `comfy-kitchen`, of
bitsandbytes and of transformers' block-wise fp8. A product is computed in float32 and rounded once, where it is stored.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..files import Index, TensorFile
from .tensor_views import ReadTensor, index_bounds, slice_bounds

if TYPE_CHECKING:
    import torch

GROUP_MXFP8, GROUP_NVFP4 = 32, 16
# NVFP4's numbers by code. Codes with the highest bit set are their negatives.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_float32(codes: "torch.Tensor", dtype: str) -> "torch.Tensor":
    """Return 8-bit numbers `[...]` in float32.

    In uint8 they are the bytes of fp8, which `dtype` names as safetensors does.
    """
    import torch

    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e5m2 if dtype == "F8_E5M2" else torch.float8_e4m3fn)
    return codes.float()


@dataclass(frozen=True, kw_only=True)
class ScaledCodes:
    """Codes times a scale."""

    weight: TensorFile
    scale: TensorFile  # one, `[rows]`, `[rows, blocks of columns, 1]`, or with `tile` `[rows / tile, columns / tile]`
    dtype: str  # of the codes, as safetensors names it
    tile: tuple[int, int] | None = None  # rows and columns that share a scale
    times: float = 1.0  # multiplies all scales

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        index = index or (slice(None),) * len(self.weight.shape)
        codes = to_float32(read(self.weight, index), self.dtype)
        scale = read(self.scale, ()).float() * self.times
        return codes * self._broadcast_scales(scale, index)

    def _broadcast_scales(self, scale: "torch.Tensor", index: Index) -> "torch.Tensor":
        """Return the scales of a shard, in a shape that broadcasts to it."""
        if scale.numel() == 1:
            return scale.reshape(())
        rows = slice_bounds(index[0], self.weight.shape[0])
        if self.tile is not None or (scale.ndim == 3 and scale.shape[1] > 1):
            columns = slice_bounds(index[1], self.weight.shape[1])
            tile = self.tile or (1, self.weight.shape[1] // scale.shape[1])
            return _spread(_spread(scale.reshape(scale.shape[:2]), 0, tile[0], rows), 1, tile[1], columns)
        return scale.reshape(-1, *[1] * (len(index) - 1))[slice(*rows)]


def _spread(scale: "torch.Tensor", dim: int, size: int, wanted: tuple[int, int]) -> "torch.Tensor":
    """Repeat each scale `size` times along `dim`, and return the elements from `wanted[0]` to `wanted[1]`."""
    first = wanted[0] // size
    scales = scale.narrow(dim, first, min(-(-wanted[1] // size), scale.shape[dim]) - first)
    return scales.repeat_interleave(size, dim).narrow(dim, wanted[0] - first * size, wanted[1] - wanted[0])


def unswizzle(scales: "torch.Tensor", rows: int, columns: int) -> "torch.Tensor":
    """Return block scales `[rows, columns]` from the layout of NVIDIA's tensor cores, tiles of 128 x 4.

    scales: `[...]` with the tiles' elements in order.
    rows, columns: of the result, without padding.
    """
    high, wide = math.ceil(rows / 128), math.ceil(columns / 4)
    tiles = scales.reshape(-1, 32, 16).reshape(-1, 32, 4, 4).transpose(1, 2).reshape(high, wide, 128, 4)
    return tiles.permute(0, 2, 1, 3).reshape(high * 128, wide * 4)[:rows, :columns]


@dataclass(frozen=True, kw_only=True)
class Mxfp8:
    """fp8 in groups of 32 columns that share a power of two, whose exponent is a byte. Padded to whole groups."""

    weight: TensorFile
    scale: TensorFile
    multiple = GROUP_MXFP8

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        import torch

        rows, columns = index_bounds(index, self.weight.shape)
        codes = to_float32(read(self.weight, (slice(*rows), slice(*columns))), "F8_E4M3")
        exponents = unswizzle(
            read(self.scale, ()).view(torch.uint8), self.weight.shape[0], self.weight.shape[1] // GROUP_MXFP8
        )
        exponents = _spread(exponents[slice(*rows)], 1, GROUP_MXFP8, columns).int()
        return torch.where(exponents == 0, 0.0, torch.ldexp(codes, exponents - 127))


@dataclass(frozen=True, kw_only=True)
class Nvfp4:
    """Two 4-bit numbers a byte, the even column in the high half, in groups of 16 columns that share an fp8 scale."""

    weight: TensorFile  # `[rows, columns / 2]`
    scale: TensorFile
    scale_2: TensorFile  # one number that multiplies all
    input_scale: TensorFile | None = None  # `[columns]`: multiplies the layer's input; None without it
    multiple = GROUP_NVFP4

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], 2 * self.weight.shape[1]

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        import torch

        rows, (start, stop) = index_bounds(index, self.shape)
        packed = read(self.weight, (slice(*rows), slice(start // 2, -(-stop // 2)))).view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)[:, start % 2 :][:, : stop - start]
        values = torch.tensor([*_FP4, *(-value for value in _FP4)])[codes.int()]
        scales = unswizzle(read(self.scale, ()), self.shape[0], self.shape[1] // GROUP_NVFP4)
        scales = to_float32(scales[slice(*rows)], "F8_E4M3") * read(self.scale_2, ()).float()
        values = values * _spread(scales, 1, GROUP_NVFP4, (start, stop))
        if self.input_scale is not None:
            values = values * read(self.input_scale, ()).float().flatten()[start:stop]
        return values


def hadamard_matrix(size: int) -> "torch.Tensor":
    """Return ConvRot's regular Hadamard matrix `[size, size]` with rows of length 1; `size` is a power of 4."""
    import torch

    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix / math.sqrt(size)


@dataclass(frozen=True, kw_only=True)
class RotatedCodes:
    """Weights whose columns were rotated in groups of `size` before quantisation."""

    codes: ScaledCodes
    size: int

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        rows, columns = index_bounds(index, self.codes.weight.shape)
        rotated = self.codes.read((slice(*rows), slice(None)), read)
        values = (rotated.unflatten(1, (-1, self.size)) @ hadamard_matrix(self.size).T).flatten(1)
        return values[:, slice(*columns)]


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes4:
    """The 4-bit codes of bitsandbytes, in blocks of `block` elements of the flat tensor.

    A byte has two codes, the first in the high half.
    """

    weight: TensorFile
    shape: tuple[int, ...]
    block: int
    values: TensorFile  # `[16]`: the number of each code
    scale: TensorFile  # one per block: a number, or a code if the next two are set
    scale_values: TensorFile | None = None  # the number of each scale's code
    scale_scale: TensorFile | None = None  # one per `scale_block` scales
    scale_block: int = 1
    offset: float = 0.0  # added to decoded scales

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        import torch

        (start, stop), *_ = index_bounds(index, self.shape)
        size = math.prod(self.shape[1:])
        first, last = start * size, stop * size
        packed = read(self.weight, (slice(first // 2, -(-last // 2)), slice(None))).flatten().view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[first % 2 :][: last - first]
        scales = _spread(self._scales(read), 0, self.block, (first, last))
        elements = (read(self.values, ()).float()[codes.int()] * scales).reshape(stop - start, *self.shape[1:])
        return elements[(slice(None), *index[1:])] if index else elements

    def _scales(self, read: ReadTensor) -> "torch.Tensor":
        scales = read(self.scale, ())
        if self.scale_values is None or self.scale_scale is None:
            return scales.float()
        values, factors = read(self.scale_values, ()).float(), read(self.scale_scale, ()).float()
        return values[scales.int()] * _spread(factors, 0, self.scale_block, (0, len(scales))) + self.offset
