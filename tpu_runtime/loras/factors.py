"""Conversion of the tensors of one change to small factors of its difference, in the shape of the changed weight.

The same code runs on tensors of the meta device, to check shapes. Formulas: LoRA, arXiv:2106.09685; LoHa and LoKr,
LyCORIS, arXiv:2309.14859; DoRA, arXiv:2402.09353.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..model_spec import RowSlice
from ..programs.upstream_network import WeightSlice

Tensors = Mapping[str, torch.Tensor]
Shape = tuple[int, ...]
# The parts of a product. Each factor of a LoKr is a full matrix, or itself a product.
LORA = ("down", "up")
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
LOKRS = tuple(
    (*first, *second)
    for first in (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
    for second in (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))
)


class ShapeMismatch(ValueError):
    """Tensors that cannot be a change of this weight; the text is the shape that they are for."""


@dataclass(frozen=True, kw_only=True)
class DeltaFactors:
    """A difference of a weight `[*out, *in]`: the element-wise product of `up @ down` of all pairs, or `dense`."""

    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # `up` [*out, rank] and `down` [rank, *in]
    dense: torch.Tensor | None = None  # of the weight's shape; None with pairs
    # DoRA: norms that weight plus difference is scaled to, broadcast to the weight's shape
    magnitude: torch.Tensor | None = None
    rank: int | None = None  # divisor of alpha; None without one

    def take_slice(self, cut: WeightSlice | None) -> "DeltaFactors":
        """Return the factors for a parameter that is a slice of the weight; `cut` is None for the weight itself."""
        if cut is None:
            return self
        return DeltaFactors(
            pairs=tuple(_cut_pair(cut, *pair) for pair in self.pairs),
            dense=None if self.dense is None else cut.take(self.dense),
            magnitude=None if self.magnitude is None else _cut_magnitude(cut, self.magnitude),
            rank=self.rank,
        )


def _part(cut: WeightSlice, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the groups of `cut` in a factor or vector `[...]` whose dimension `dim` is cut."""
    dims = range(tensor.ndim + isinstance(cut.taken, slice))
    return replace(cut, shape=tuple(tensor.shape), dim=dim, order=tuple(dims)).take(tensor)


def _cut_pair(cut: WeightSlice, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a slice of a matrix, which may have the matrix's columns first."""
    up, down = (_part(cut, up, 0), down) if cut.dim == 0 else (up, _part(cut, down, 1))
    rows = up.ndim - 1
    if cut.order[0] == 0:
        return up, down
    assert cut.order == (*range(rows, len(cut.order)), *range(rows)), cut
    return down.movedim(0, -1), up.movedim(-1, 0)


def _cut_magnitude(cut: WeightSlice, magnitude: torch.Tensor) -> torch.Tensor:
    """Return the norms of a slice's rows or columns, from those of the matrix."""
    along = 0 if magnitude.shape[1] == 1 else 1
    if along != cut.dim and cut.taken != slice(None):
        raise ShapeMismatch("a dora_scale whose norm other weights have a part in")
    vector, dims = magnitude.flatten(), len(cut.order)
    part = _part(cut, vector, 0) if along == cut.dim else vector
    ones = [1] * (dims - part.ndim)
    shape = (*part.shape, *ones) if along == 0 else (*ones, *part.shape)
    return part.reshape(shape).permute(cut.order)


def make_factors(tensors: Tensors, rows: RowSlice, shape: Shape) -> DeltaFactors:
    """Return the change of a weight of `shape` by `tensors`, which are `[rank, in]`, `[out, rank]` or full, by part.

    rows: of the weight that are changed.
    Raises `ShapeMismatch` if they do not match.
    """
    for part in ("diff", "diff_b", "up_bias"):
        if part in tensors:
            rank = tensors["down"].shape[0] if "down" in tensors else None
            return DeltaFactors(dense=_dense(tensors[part], rows, shape), rank=rank)
    pairs, rank = _pairs(tensors)
    out, inner = pairs[0][0].shape[0], pairs[0][1].shape[1]
    if any(up.shape[0] != out or down.shape[1] != inner or up.shape[1] != down.shape[0] for up, down in pairs):
        raise ShapeMismatch("matrices that do not match")
    if rows.squares:
        if out != rows.squares * inner or out > shape[0] or "magnitude" in tensors:
            raise ShapeMismatch(f"{out}x{inner}")
        pairs = [(torch.nn.functional.pad(up, (0, 0, 0, shape[0] - out)), down) for up, down in pairs]
        out = shape[0]
    cut = _cut(out * len(rows.groups) / rows.of, inner, shape)
    if cut is None:
        raise ShapeMismatch(f"{out}x{inner}")
    shaped = tuple(
        (_select_rows(up, rows).reshape(*shape[:cut], -1), down.reshape(-1, *shape[cut:])) for up, down in pairs
    )
    return DeltaFactors(pairs=shaped, magnitude=_magnitude(tensors, rows, shape, cut), rank=rank)


def _select_rows(tensor: torch.Tensor, rows: RowSlice) -> torch.Tensor:
    """Return the rows of a tensor that are selected."""
    if not tensor.ndim:
        raise ShapeMismatch("a single number")
    if tensor.shape[0] % rows.of:
        raise ShapeMismatch("x".join(map(str, tensor.shape)))
    return torch.cat([tensor.chunk(rows.of)[group] for group in rows.groups])


def _cut(out: float, inner: int, shape: Shape) -> int | None:
    """Return how many of a weight's first dimensions form the rows of a matrix `[out, inner]`, or None."""
    cuts = (cut for cut in range(1, len(shape)) if (math.prod(shape[:cut]), math.prod(shape[cut:])) == (out, inner))
    return next(cuts, None)


def _dense(tensor: torch.Tensor, rows: RowSlice, shape: Shape) -> torch.Tensor:
    chosen = _select_rows(tensor, rows) if rows.of > 1 else tensor
    shape_ = tuple(chosen.shape)
    if [size for size in shape_ if size > 1] != [size for size in shape if size > 1]:
        raise ShapeMismatch("x".join(map(str, shape_)))
    return chosen.reshape(shape)


def _magnitude(tensors: Tensors, rows: RowSlice, shape: Shape, cut: int) -> torch.Tensor | None:
    """Return the norms of rows or of columns, with ones for the other dimensions."""
    magnitude = tensors.get("magnitude")
    if magnitude is None:
        return None
    if magnitude.ndim > 1 and magnitude.shape[0] == 1:
        # The norm is over all rows, those of other modules too.
        if rows.of > 1 or magnitude.numel() != math.prod(shape[cut:]):
            raise ShapeMismatch("a dora_scale of columns")
        return magnitude.reshape(*[1] * cut, *shape[cut:])
    chosen = _select_rows(magnitude, rows)
    if chosen.numel() != math.prod(shape[:cut]):
        raise ShapeMismatch(f"a dora_scale of {chosen.numel()}")
    return chosen.reshape(*shape[:cut], *[1] * (len(shape) - cut))


def _pairs(tensors: Tensors) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int | None]:
    """Return matrices `[out, rank]` and `[rank, in]`, and the divisor of alpha, None without one."""
    if "up" in tensors:
        up, down = _matrix(tensors["up"]), _matrix(tensors["down"])
        return [(up, down)], down.shape[0]
    if "hada_w1_a" in tensors:
        first, second, third, fourth = (_matrix(tensors[name]) for name in LOHA)
        return [(first, second), (third, fourth)], second.shape[0]
    (a1, b1), rank1 = _factor(tensors, "lokr_w1")
    (a2, b2), rank2 = _factor(tensors, "lokr_w2")
    # kron(w1, w2)[o1 * O2 + o2, i1 * I2 + i2] = w1[o1, i1] * w2[o2, i2]
    first = a1.repeat_interleave(a2.shape[0], 0), b1.repeat_interleave(b2.shape[1], 1)
    second = a2.repeat(a1.shape[0], 1), b2.repeat(1, b1.shape[1])
    return [first, second], rank2 or rank1


def _factor(tensors: Tensors, name: str) -> tuple[tuple[torch.Tensor, torch.Tensor], int | None]:
    """Return a factor of a LoKr as a product; a full matrix is one with the smaller identity."""
    if name not in tensors:
        first, second = _matrix(tensors[f"{name}_a"]), _matrix(tensors[f"{name}_b"])
        return (first, second), second.shape[0]
    full = _matrix(tensors[name])
    identity = torch.eye(min(full.shape), dtype=full.dtype, device=full.device)
    return ((identity, full) if full.shape[0] < full.shape[1] else (full, identity)), None


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a matrix; a convolution's weight is one of its patches."""
    if tensor.ndim < 2:
        raise ShapeMismatch("a vector")
    return tensor.flatten(1)
