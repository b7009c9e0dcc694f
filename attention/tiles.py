"""Tokens of a video in tiles of neighbours, and attention to the nearest tiles alone (Sliding Tile Attention,
https://arxiv.org/abs/2502.04507). Which these are follows from the video's size: nothing depends on data.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from ..kernels.attention_reference import TOGETHER, Blocks, Keys, in_blocks

Sizes = tuple[int, int, int]  # of frames, rows and columns of tokens

# Of all tiles those that a query attends to, in whole turns of the kernel's loop, and no fewer than the second share.
# Half is what Sliding Tile Attention and Radial Attention publish as nearly without loss for Wan and HunyuanVideo,
# untrained.
KEPT, FEWEST = 0.5, 0.45
ROWS = 256  # of which a tile fills a whole number: the kernel goes through it in steps of these
MOST = 160  # tiles: their lists are in the scalar memory of a chip


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A video of `sizes` tokens in tiles of at most `tile` tokens along each axis, of nearly equal sizes.

    In tile order a tile's tokens follow each other in `rows` rows. Those behind its last are padding: its first token,
    again.
    """

    sizes: Sizes
    tile: Sizes

    @classmethod
    def like(cls, sizes: Sizes, wanted: Sizes) -> "Tiling":
        """Of tiles with no more rows than the `wanted` one has, and about its shape: those with the least padding
        of which there are no more than `MOST`.
        """
        most = cls(sizes=wanted, tile=wanted).rows

        def options(size: int, length: int) -> list[int]:
            """From two thirds to three halves of a length; tiles of equal number are equal."""
            counts = {-(-size // at) for at in range(-(-2 * length // 3), 3 * length // 2 + 1)}
            return [-(-size // count) for count in sorted(counts)]

        along = [options(size, length) for size, length in zip(sizes, wanted, strict=True)]
        found = [cls(sizes=sizes, tile=tile) for tile in itertools.product(along[0], along[1], along[2])]
        return min(
            (each for each in found if each.rows <= most),
            key=lambda each: (each.count > MOST, each.count * each.rows, math.dist(each.tile, wanted)),
        )

    @property
    def rows(self) -> int:
        return -(-math.prod(self.tile) // ROWS) * ROWS

    @cached_property
    def counts(self) -> Sizes:
        """How many tiles along each axis."""
        frames, rows, columns = (-(-size // length) for size, length in zip(self.sizes, self.tile, strict=True))
        return frames, rows, columns

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def tile_of(self) -> Int[np.ndarray, " tokens"]:
        """The tile of each token."""
        axes = [np.arange(size) * count // size for size, count in zip(self.sizes, self.counts, strict=True)]
        return np.ravel_multi_index(np.meshgrid(*axes, indexing="ij"), self.counts).ravel()

    @cached_property
    def real(self) -> Int[np.ndarray, " tiles"]:
        """How many tokens a tile has."""
        return np.bincount(self.tile_of, minlength=self.count).astype(np.int32)

    @cached_property
    def row_of(self) -> Int[np.ndarray, " tokens"]:
        """The row of each token."""
        order = np.argsort(self.tile_of, kind="stable")
        inside = np.arange(len(order)) - np.repeat(np.cumsum(self.real) - self.real, self.real)
        rows = np.empty_like(order)
        rows[order] = self.tile_of[order] * self.rows + inside
        return rows

    @cached_property
    def token_of(self) -> Int[np.ndarray, " rows"]:
        """The token of each row."""
        first = np.full(self.count * self.rows, -1)
        first[self.row_of] = np.arange(len(self.row_of))
        return np.where(first < 0, np.repeat(first[:: self.rows], self.rows), first)

    @cached_property
    def left_out(self) -> int:
        """How many of a tile's list are left out."""
        found = math.ceil((1 - KEPT) * self.count / TOGETHER) * TOGETHER
        return found if self.count - found >= FEWEST * self.count else found - TOGETHER

    def blocks(self, is_sparse: Bool[Array, ""] | None) -> Blocks:
        """For each tile all, itself first and the nearest in space and time, in tiles' lengths, before others."""
        places = np.stack(np.unravel_index(np.arange(self.count), self.counts), axis=1)
        squares = np.sum((places[:, None] - places) ** 2, axis=2)
        order = np.argsort(squares, axis=1, kind="stable").astype(np.int32)
        return Blocks(size=self.rows, real=self.real, kept=order, left_out=self.left_out, is_sparse=is_sparse)


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """Tokens in the order of `tiles`. Where `is_sparse`, which the program knows when it runs, each attends to the
    nearest tiles, else to all.
    """

    tiles: Tiling
    is_sparse: Bool[Array, ""]

    def attend(
        self,
        attend: Callable[..., Any],
        q: Array,
        tiled: tuple[Any, Array],
        others: Sequence[Keys],
        is_sparse: Array,
        *,
        is_own: bool,
    ) -> Array:
        """Attention to keys and values in tiles, and to all `others`: of the tokens in tiles, where `is_own`, or of
        others, which attend to all.
        """
        blocks = self.tiles.blocks(is_sparse)
        if not is_own:
            blocks = replace(blocks, kept=blocks.kept[:1], left_out=0, is_sparse=None)
        return attend(q, [in_blocks(*tiled, blocks), *others], log_sums=False)[0]
