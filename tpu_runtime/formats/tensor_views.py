"""Views of tensors in files: each computes its values at an index from the stored tensors.

Nothing is read before a value is requested, and then only the part that is needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..files import Index, TensorFile, TensorView

if TYPE_CHECKING:
    import torch

# Reads part of a tensor in a file; the index () stands for all of it.
ReadTensor = Callable[[TensorFile, Index], "torch.Tensor"]


def slice_bounds(part: slice, size: int) -> tuple[int, int]:
    """Return start and end of a slice without a step."""
    start, stop, _ = part.indices(size)
    return start, max(start, stop)


def index_bounds(index: Index, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and end of an index in every dimension; () stands for all."""
    return [slice_bounds(part, size) for part, size in zip(index or [slice(None)] * len(shape), shape, strict=True)]


@dataclass(frozen=True)
class RowView:
    """The `groups`, in that order, of a tensor's rows, which form `of` equal groups."""

    source: TensorFile
    groups: tuple[int, ...]
    of: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *rest = self.source.shape
        return (rows // self.of * len(self.groups), *rest)

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        import torch

        size = self.source.shape[0] // self.of
        (start, stop), *_ = index_bounds(index, self.shape)
        pieces = []
        for place, group in enumerate(self.groups):
            first, last = max(start - place * size, 0), min(stop - place * size, size)
            if first < last or (place == 0 and start == stop):
                rows = slice(group * size + first, group * size + max(first, last))
                pieces.append(read(self.source, (rows, *index[1:]) if index else (rows, *self._all())))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _all(self) -> list[slice]:
        return [slice(None)] * (len(self.source.shape) - 1)


@dataclass(frozen=True)
class ReshapedView:
    """A tensor in another `shape` with the same rows, such as a 1 x 1 convolution as a linear layer."""

    source: TensorFile
    shape: tuple[int, ...]

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        (start, stop), *_ = index_bounds(index, self.shape)
        rest = [slice(None)] * (len(self.source.shape) - 1)
        rows = read(self.source, (slice(start, stop), *rest)).reshape(stop - start, *self.shape[1:])
        return rows[(slice(None), *index[1:])] if index else rows


@dataclass(frozen=True)
class UnsqueezedView:
    """A tensor with leading dimensions of 1 that GGUF's writers omit; `shape` includes them."""

    source: TensorFile
    shape: tuple[int, ...]

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        leading = len(self.shape) - len(self.source.shape)
        expanded = read(self.source, index[leading:]).reshape(*[1] * leading, *self._inner(index, leading))
        return expanded[(*index[:leading], *[slice(None)] * len(self.source.shape))] if index else expanded

    def _inner(self, index: Index, leading: int) -> list[int]:
        return [stop - start for start, stop in index_bounds(index[leading:], self.source.shape)]


@dataclass(frozen=True)
class CroppedView:
    """The first rows and columns of a tensor that a format has padded to whole blocks."""

    source: TensorFile
    shape: tuple[int, ...]

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        return read(self.source, tuple(slice(*part) for part in index_bounds(index, self.shape)))


@dataclass(frozen=True)
class HeadView:
    """The rows of queries or keys in their original order.

    llama.cpp interleaves both halves of a head for its rotary embedding.
    """

    source: TensorFile
    heads: int

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        rows = read(self.source, ())
        rows = rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return rows[index] if index else rows


@dataclass(frozen=True)
class ConcatenatedView:
    """The concatenated rows of several tensors."""

    sources: tuple[TensorFile, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])

    def read(self, index: Index, read: ReadTensor) -> "torch.Tensor":
        import torch

        (start, stop), *rest = index_bounds(index, self.shape)
        pieces, before = [], 0
        for source in self.sources:
            size = source.shape[0]
            first, last = max(start - before, 0), min(stop - before, size)
            pieces.append(read(source, (slice(first, max(first, last)), *(slice(*part) for part in rest))))
            before += size
        return torch.cat(pieces)


def row_view(source: TensorFile, groups: tuple[int, ...], of: int) -> TensorFile:
    """Return groups of rows of a tensor as a view; the tensor itself if they are all of it.

    source: the tensor.
    groups, of: see `RowView`.
    """
    if (groups, of) == ((0,), 1):
        return source
    made = RowView(source, groups, of)
    return view(source, made.shape, made)


def view(source: TensorFile, shape: tuple[int, ...], made: TensorView) -> TensorFile:
    """Return a tensor's location with the `shape` and values of a view.

    source: the tensor, for path, name and dtype.
    made: the view.
    """
    return TensorFile(path=source.path, name=source.name, shape=shape, dtype=source.dtype, made=made)
