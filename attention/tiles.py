"""Tokens of a video in tiles of neighbours, and attention to the nearest tiles alone (Sliding Tile Attention,
https://arxiv.org/abs/2502.04507). Which these are follows from the video's size: nothing depends on data.
"""

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
    """A video of `sizes` tokens in tiles of neighbours: as many tokens in each as there are in `tile`, or a few less.

    Tiles are cut from a line that winds through all tokens, so that no size leaves more padding than another: along the
    columns of a bundle of about as many frames and rows as `tile` has, back along those of the bundle below it, and so
    up and down through the frames. A tile that is no box of that shape has a bend in it.

    In tile order a tile's tokens follow each other in `rows` rows. Those behind its last are padding: its first token,
    again.
    """

    sizes: Sizes
    tile: Sizes

    @property
    def rows(self) -> int:
        return -(-math.prod(self.tile) // ROWS) * ROWS

    @property
    def count(self) -> int:
        return -(-math.prod(self.sizes) // math.prod(self.tile))

    @cached_property
    def places(self) -> Int[np.ndarray, "tokens 3"]:
        """The frame, row and column of each token."""
        return np.stack(np.unravel_index(np.arange(math.prod(self.sizes)), self.sizes), axis=1)

    @cached_property
    def line(self) -> Int[np.ndarray, " tokens"]:
        """Tokens in the order in which the line meets them."""
        frames, rows, columns = self.places.T
        num_across = [max(1, round(size / length)) for size, length in zip(self.sizes, self.tile, strict=True)]
        slab, strip = frames * num_across[0] // self.sizes[0], rows * num_across[1] // self.sizes[1]
        strip = np.where(slab % 2 == 0, strip, num_across[1] - 1 - strip)
        bundle = slab * num_across[1] + strip
        along = np.where(bundle % 2 == 0, columns, self.sizes[2] - 1 - columns)
        return np.lexsort((rows, frames, along, bundle))

    @cached_property
    def tile_of(self) -> Int[np.ndarray, " tokens"]:
        """The tile of each token."""
        found = np.empty_like(self.line)
        found[self.line] = np.arange(len(self.line)) * self.count // len(self.line)
        return found

    @cached_property
    def real(self) -> Int[np.ndarray, " tiles"]:
        """How many tokens a tile has."""
        return np.bincount(self.tile_of, minlength=self.count).astype(np.int32)

    @cached_property
    def row_of(self) -> Int[np.ndarray, " tokens"]:
        """The row of each token."""
        found = np.empty_like(self.line)
        inside = np.arange(len(self.line)) - np.repeat(np.cumsum(self.real) - self.real, self.real)
        found[self.line] = self.tile_of[self.line] * self.rows + inside
        return found

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
        """For each tile all, itself first and the nearest before others: by their centres in space and time, in the
        lengths of `tile`.
        """
        sums = [np.bincount(self.tile_of, along, self.count) for along in self.places.T]
        centres = np.stack(sums, axis=1) / self.real[:, None] / self.tile
        squares = np.sum((centres[:, None] - centres) ** 2, axis=2).round(6)  # equal ones are so on every machine
        np.fill_diagonal(squares, -1)  # two tiles with bends may have the same centre
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
