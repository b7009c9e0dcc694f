"""Tiles of a video's tokens, and attention to the nearest tiles alone.

Source: Sliding Tile Attention, https://arxiv.org/abs/2502.04507. Tiles follow from the video's size, not from data.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from ..kernels.attention_reference import BLOCKS_PER_TURN, BlockSparsity, Keys, keys_in_blocks

Sizes = tuple[int, int, int]  # of frames, rows and columns of tokens

# Share of all tiles that a query attends to, in whole turns of the kernel's loop, and the minimum after rounding. Half
# is nearly lossless for Wan and HunyuanVideo without training, as Sliding Tile and Radial Attention report.
KEEP_FRACTION, MIN_KEEP_FRACTION = 0.5, 0.45
TILE_ROWS_MULTIPLE = 256  # a tile has a multiple of this many rows: keys of a step of the kernel
MAX_TILES = 160  # tiles: their lists are in the scalar memory of a chip


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiling of a video of `sizes` tokens: tiles of neighbours, each with as many tokens as `tile` has, or a few less.

    Tiles are cut from a curve that winds through all tokens, so that padding is equally small for every size. The curve
    follows the columns of a bundle of about as many frames and rows as `tile` has, returns along the bundle below it,
    and so goes up and down through the frames. A tile that is not a box of that shape contains a turn of the curve.

    In tile order, the tokens of a tile are consecutive and fill `rows` rows. Rows after the last token are padding:
    copies of the tile's first token.
    """

    sizes: Sizes  # frames, rows and columns of the video
    tile: Sizes  # frames, rows and columns of a tile

    @property
    def rows(self) -> int:
        return -(-math.prod(self.tile) // TILE_ROWS_MULTIPLE) * TILE_ROWS_MULTIPLE

    @property
    def count(self) -> int:
        return -(-math.prod(self.sizes) // math.prod(self.tile))

    @cached_property
    def places(self) -> Int[np.ndarray, "tokens 3"]:
        """Return the frame, row and column of each token."""
        return np.stack(np.unravel_index(np.arange(math.prod(self.sizes)), self.sizes), axis=1)

    @cached_property
    def line(self) -> Int[np.ndarray, " tokens"]:
        """Return the tokens in the order of the curve."""
        frames, rows, columns = self.places.T
        num_across = [max(1, round(size / length)) for size, length in zip(self.sizes, self.tile, strict=True)]
        slab, strip = frames * num_across[0] // self.sizes[0], rows * num_across[1] // self.sizes[1]
        strip = np.where(slab % 2 == 0, strip, num_across[1] - 1 - strip)
        bundle = slab * num_across[1] + strip
        along = np.where(bundle % 2 == 0, columns, self.sizes[2] - 1 - columns)
        return np.lexsort((rows, frames, along, bundle))

    @cached_property
    def token_tiles(self) -> Int[np.ndarray, " tokens"]:
        """Return the tile of each token."""
        tiles = np.empty_like(self.line)
        tiles[self.line] = np.arange(len(self.line)) * self.count // len(self.line)
        return tiles

    @cached_property
    def real(self) -> Int[np.ndarray, " tiles"]:
        """Return the number of tokens of each tile."""
        return np.bincount(self.token_tiles, minlength=self.count).astype(np.int32)

    @cached_property
    def token_rows(self) -> Int[np.ndarray, " tokens"]:
        """Return the row of each token in tile order."""
        rows = np.empty_like(self.line)
        inside = np.arange(len(self.line)) - np.repeat(np.cumsum(self.real) - self.real, self.real)
        rows[self.line] = self.token_tiles[self.line] * self.rows + inside
        return rows

    @cached_property
    def row_tokens(self) -> Int[np.ndarray, " rows"]:
        """Return the token of each row in tile order."""
        first = np.full(self.count * self.rows, -1)
        first[self.token_rows] = np.arange(len(self.token_rows))
        return np.where(first < 0, np.repeat(first[:: self.rows], self.rows), first)

    @cached_property
    def left_out(self) -> int:
        """Return the number of tiles that a sparse call skips for each block of queries."""
        dropped = math.ceil((1 - KEEP_FRACTION) * self.count / BLOCKS_PER_TURN) * BLOCKS_PER_TURN
        return dropped if self.count - dropped >= MIN_KEEP_FRACTION * self.count else dropped - BLOCKS_PER_TURN

    def blocks(self, is_sparse: Bool[Array, ""] | None) -> BlockSparsity:
        """Return the block sparsity: for each tile the list of all tiles, itself first, then by distance.

        The distance is between the tiles' centres in space and time, in units of `tile`. is_sparse_step: see `Blocks`.
        """
        sums = [np.bincount(self.token_tiles, along, self.count) for along in self.places.T]
        centres = np.stack(sums, axis=1) / self.real[:, None] / self.tile
        squares = np.sum((centres[:, None] - centres) ** 2, axis=2).round(6)  # so that ties are ties on every machine
        np.fill_diagonal(squares, -1)  # two tiles with turns may have the same centre
        order = np.argsort(squares, axis=1, kind="stable").astype(np.int32)
        return BlockSparsity(size=self.rows, real=self.real, kept=order, left_out=self.left_out, is_sparse=is_sparse)


@dataclass(frozen=True, kw_only=True)
class SlidingTileMask:
    """Attention mask of tokens in tile order."""

    tiles: Tiling
    is_sparse: Bool[Array, ""]  # whether tokens attend to the nearest tiles only, else to all; known at run time

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
        """Return the attention of queries `q` `[batch, tokens, lanes]` to keys in tiles and to all `others`.

        attend: attention of one chip. tiled: keys and values in tile order, `[batch, rows, lanes]` each.
        is_sparse: as the field, as an array of the traced function. is_own: whether queries are in tiles; others attend
          to all.
        """
        blocks = self.tiles.blocks(is_sparse)
        if not is_own:
            blocks = replace(blocks, kept=blocks.kept[:1], left_out=0, is_sparse=None)
        return attend(q, [keys_in_blocks(*tiled, blocks), *others], log_sums=False)[0]
