"""One change under several names of a file: which of them counts.

Equal ones count once. Of different ones those count that ComfyUI's map of names takes, as it takes them: of names for
one module the last in its order, of a fused module and its parts both. Where it takes none the file is refused.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .change import Change, LoraError, short
from .factors import Factors, Shape

# Published files have two; each is compared with the others.
_MOST = 16
# As far as rounding another format of the same factors goes, of the root of the squares' sum.
_ROUNDING = 2**-7
# So many rows of two products are compared at once.
_ROWS = 1024

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """A change by its `module` in the file, the `adapter` of PEFT, if it has one, and the `pair` of matrices.

    `order` is its place among the names that ComfyUI takes for a module, None where it takes no such name; `target`
    tells apart what ComfyUI adds up.
    """

    module: str
    adapter: str
    pair: str
    target: Hashable
    change: Change
    order: tuple[int, int] | None = None

    def is_another(self, other: "Spelling") -> bool:
        """Whether these are two adapters of one module, which are both meant."""
        return bool(self.adapter and other.adapter) and self.adapter != other.adapter


def settled(
    path: Path, weight: str, shape: Shape, found: Sequence[Spelling], read: Read
) -> tuple[list[Spelling], list[Spelling]]:
    """Those of `found` that count for a weight, and those that repeat one of them; `read` reads a tensor.

    Raises `LoraError` where it is open which count.
    """
    if len(found) > _MOST:
        raise LoraError(
            f"The LoRA {path}: {len(found)} of its names, such as {short(found[0].module)}, are {weight}; at most "
            f"{_MOST} may be. Choose one that has each change once."
        )
    kept: list[Spelling] = []
    repeated: list[Spelling] = []
    for one in sorted(found, key=_rank, reverse=True):
        rivals = (other for other in kept if not one.is_another(other))
        is_new = not any(_equal(path, shape, one.change, other.change, read) for other in rivals)
        (kept if is_new else repeated).append(one)
    return list(_counting(path, weight, kept)), repeated


def _rank(one: Spelling) -> tuple[int, bool, tuple[int, int]]:
    """Those of more rows first, then those that count in ComfyUI, the later ones of its map first."""
    return -one.change.rows.squares, one.order is not None, one.order or (0, 0)


def _counting(path: Path, weight: str, kept: Sequence[Spelling]) -> Iterator[Spelling]:
    """Of different spellings, in the order of `_rank`."""
    targets: set[Hashable] = set()
    for one in kept:
        rivals = [other for other in kept if other is not one and not one.is_another(other)]
        if not rivals:
            yield one
        elif one.order is not None:
            if one.target not in targets:
                yield one
            targets.add(one.target)
        elif all(other.order is None for other in rivals):
            names = " and ".join(short(name) for name in sorted({one.module, rivals[0].module}))
            raise LoraError(
                f"The LoRA {path}: {names} are both {weight}, and hold different changes; taken is one change of a "
                "weight. Choose one that has each change once, or take one of them out of the file."
            )


def _equal(path: Path, shape: Shape, one: Change, other: Change, read: Read) -> bool:
    """Whether two changes are the same, as far as both are of the same rows."""
    (first, first_scale), (second, second_scale) = (
        change.read(path, {part: read(name) for part, name in change.parts.items()}, shape) for change in (one, other)
    )
    if (first.magnitude is None) != (second.magnitude is None):
        return False
    if first.magnitude is not None and second.magnitude is not None:
        if first.magnitude.shape != second.magnitude.shape or not _near([(first.magnitude, second.magnitude)]):
            return False
    if first_scale == second_scale and _same(first, second):
        return True
    rows = min((change.rows.squares * shape[-1] or shape[0] for change in (one, other)), default=shape[0])
    return _near(
        (first_scale * mine, second_scale * theirs)
        for mine, theirs in zip(_blocks(first, rows), _blocks(second, rows), strict=True)
    )


def _same(one: Factors, other: Factors) -> bool:
    """Whether two changes are of the same numbers."""
    if one.dense is not None and other.dense is not None:
        return torch.equal(one.dense, other.dense)
    mine, theirs = (list(itertools.chain.from_iterable(factors.pairs)) for factors in (one, other))
    return bool(mine) and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def _blocks(factors: Factors, rows: int) -> Iterator[torch.Tensor]:
    """The first rows of a difference, some at a time, each as a vector."""
    for start in range(0, rows, _ROWS):
        part = slice(start, min(start + _ROWS, rows))
        if factors.dense is not None:
            yield factors.dense[part].flatten()
            continue
        found: torch.Tensor | None = None
        for up, down in factors.pairs:
            product = (up[part].flatten(0, -2) @ down.flatten(1)).flatten()
            found = product if found is None else found * product
        assert found is not None
        yield found


def _near(blocks: "Iterator[tuple[torch.Tensor, torch.Tensor]] | Sequence[tuple[torch.Tensor, torch.Tensor]]") -> bool:
    off = size = 0.0
    for mine, theirs in blocks:
        off += (mine - theirs).square().sum().item()
        size += max(mine.square().sum().item(), theirs.square().sum().item())
    return off <= _ROUNDING**2 * size
