"""Resolution of one change under several names in a file.

Equal changes count once. Different changes count as ComfyUI's map of names selects them: the last in its order among
names for one module, and both for a fused module and its parts. If ComfyUI accepts none of the names the file is
refused.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..messages import compose
from .change import LoraError, WeightChange, shorten_value
from .factors import DeltaFactors, Shape

# Names of one weight at most; published files have two. Each is compared with the others.
_MOST = 16
# Relative RMS difference of the same factors after rounding to another format.
_ROUNDING = 2**-7
# Rows of two products that are compared at once.
_ROWS = 1024

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class NamedChange:
    """A change under one name."""

    module: str  # in the file
    adapter: str  # name of PEFT's adapter, or ""
    pair: str  # of matrices
    target: Hashable  # differs between changes that ComfyUI adds up
    change: WeightChange
    order: tuple[int, int] | None = None  # rank among the names that ComfyUI accepts for a module; None for other names

    def is_other_adapter(self, other: "NamedChange") -> bool:
        """Return whether these are two adapters of one module, which both count."""
        return bool(self.adapter and other.adapter) and self.adapter != other.adapter


def resolve_spellings(
    path: Path, weight: str, shape: Shape, found: Sequence[NamedChange], read: Read
) -> tuple[list[NamedChange], list[NamedChange]]:
    """Return the changes in `found` that count for a weight, and those that repeat one of them.

    path: of the file, for messages.
    weight, shape: of the weight.
    read: returns the tensor of a name.
    Raises `LoraError` if it is undetermined which count.
    """
    if len(found) > _MOST:
        raise LoraError(compose(
            "lora.too_many_spellings", path=path, count=len(found), module=shorten_value(found[0].module),
            weight=weight, most=_MOST,
        ))  # fmt: skip
    kept: list[NamedChange] = []
    repeated: list[NamedChange] = []
    for spelling in sorted(found, key=_rank, reverse=True):
        rivals = (other for other in kept if not spelling.is_other_adapter(other))
        is_new = not any(_are_equal(path, shape, spelling.change, other.change, read) for other in rivals)
        (kept if is_new else repeated).append(spelling)
    return list(_select(path, weight, kept)), repeated


def _rank(one: NamedChange) -> tuple[int, bool, tuple[int, int]]:
    """Return a sort key: more rows first, then names that ComfyUI accepts, later ones in its map first."""
    return -one.change.rows.squares, one.order is not None, one.order or (0, 0)


def _select(path: Path, weight: str, kept: Sequence[NamedChange]) -> Iterator[NamedChange]:
    """Yield the changes that count of different ones, which are in the order of `_rank`."""
    targets: set[Hashable] = set()
    for spelling in kept:
        rivals = [other for other in kept if other is not spelling and not spelling.is_other_adapter(other)]
        if not rivals:
            yield spelling
        elif spelling.order is not None:
            if spelling.target not in targets:
                yield spelling
            targets.add(spelling.target)
        elif all(other.order is None for other in rivals):
            names = " and ".join(shorten_value(name) for name in sorted({spelling.module, rivals[0].module}))
            raise LoraError(compose("lora.changes_contradict", path=path, names=names, weight=weight))


def _are_equal(path: Path, shape: Shape, one: WeightChange, other: WeightChange, read: Read) -> bool:
    """Return whether two changes are equal, on the rows that both have."""
    (first, first_scale), (second, second_scale) = (
        change.read(path, {part: read(name) for part, name in change.parts.items()}, shape) for change in (one, other)
    )
    if (first.magnitude is None) != (second.magnitude is None):
        return False
    if first.magnitude is not None and second.magnitude is not None:
        if first.magnitude.shape != second.magnitude.shape or not _are_close([(first.magnitude, second.magnitude)]):
            return False
    if first_scale == second_scale and _have_same_numbers(first, second):
        return True
    rows = min((change.rows.squares * shape[-1] or shape[0] for change in (one, other)), default=shape[0])
    return _are_close(
        (first_scale * mine, second_scale * theirs)
        for mine, theirs in zip(_blocks(first, rows), _blocks(second, rows), strict=True)
    )


def _have_same_numbers(one: DeltaFactors, other: DeltaFactors) -> bool:
    """Return whether two changes have equal tensors."""
    if one.dense is not None and other.dense is not None:
        return torch.equal(one.dense, other.dense)
    mine, theirs = (list(itertools.chain.from_iterable(factors.pairs)) for factors in (one, other))
    return bool(mine) and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def _blocks(factors: DeltaFactors, rows: int) -> Iterator[torch.Tensor]:
    """Yield the first `rows` of a difference in blocks, each as a vector `[size]`."""
    for start in range(0, rows, _ROWS):
        block = slice(start, min(start + _ROWS, rows))
        if factors.dense is not None:
            yield factors.dense[block].flatten()
            continue
        difference: torch.Tensor | None = None
        for up, down in factors.pairs:
            product = (up[block].flatten(0, -2) @ down.flatten(1)).flatten()
            difference = product if difference is None else difference * product
        assert difference is not None
        yield difference


def _are_close(
    blocks: "Iterator[tuple[torch.Tensor, torch.Tensor]] | Sequence[tuple[torch.Tensor, torch.Tensor]]",
) -> bool:
    """Return whether pairs of vectors `[size]` differ by rounding only."""
    off = size = 0.0
    for mine, theirs in blocks:
        off += (mine - theirs).square().sum().item()
        size += max(mine.square().sum().item(), theirs.square().sum().item())
    return off <= _ROUNDING**2 * size
