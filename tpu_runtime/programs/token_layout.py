"""Layout of a denoiser's tokens on the mesh: padding, sharding, attention over them, weights gathered per block.

If a model's weights stay split on `tp`, its tokens may be *spread* between a block's products: each chip of `tp` has
some of them. Products gather tokens and scatter their sums. This sends half of an all-reduce's bytes on each side of
the norms, and no chip repeats another's norms (sequence parallelism, https://arxiv.org/abs/2205.05198).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from ...attention.api import Placement, attention, joint_attention
from ...attention.policy import AttentionPolicy
from ...attention.prologue import NO_PROLOGUE, Prologue
from ...attention.tiles import SlidingTileMask, Tiling
from ...kernels import residual_norm
from ...kernels.hardware import INT8_ROWS, PACKED_ROWS
from ...kernels.linear_int8 import (
    Activation,
    GatedResidual,
    Int8Tokens,
    Int8Weight,
    linear_int8,
    quantize_tokens,
    rotation_block,
)
from ...sharding.rules import Layout
from .upstream_network import LAYER, layer_index

ROW_MULTIPLES = {
    "exact": PACKED_ROWS,
    "int8": INT8_ROWS,
}  # of a register, by the scores: int8 keys are exchanged as int8
# Leading layers that stay dense with tiles: the first sees noise, in which no neighbours are related yet (as in Radial
# Attention).
DENSE_LAYERS = 1


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Layout of latent tokens on the axis `sp` of a mesh. Padding goes last and is masked exactly."""

    mesh: Mesh
    num_tokens: int  # without padding
    policy: AttentionPolicy
    layouts: Mapping[str, Layout]  # of the weights, by name
    frame_tokens: int = 0  # leading tokens that belong to the first latent frame
    tiles: Tiling | None = None  # tile order of the tokens; None: row by row
    is_sparse: Bool[Array, ""] | None = None  # with tiles: whether tokens attend to the nearest tiles only
    rounds: bool = False  # whether norms of spread tokens are gathered as int8, because all their products are int8

    def constrain(self, x: Array, *axes: str | tuple[str, ...] | None) -> Array:
        """Return `x` `[...]` with a sharding constraint: mesh axes of its leading dimensions, None: not sharded.

        `[...]` as `x`.
        """
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

    def pad_tokens(self, x: Array, parts: int = 1) -> Array:
        """Return `x` `[batch, tokens, ...]` with zeros after the last token: whole rows of registers on each chip.

        This holds for each of `parts` equal parts, so that exchanged parts are joined without being moved.
        """
        chips = self.mesh.shape["sp"] * self.mesh.shape["tp"]
        padding = -x.shape[1] % (parts * chips * ROW_MULTIPLES[self.policy.scores]) if chips * parts > 1 else 0
        widths = [(0, padding) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return jnp.pad(x, widths) if padding else x

    def place_tokens(self, x: Float[Array, "rows tokens *_"]) -> Float[Array, "rows padded *_"]:
        """Return latent tokens as they are between the blocks: in tile order, padded and sharded.

        One row applies to all.
        """
        x = x if self.tiles is None else x[:, self.tiles.row_tokens]
        rows = "dp" if len(x) > 1 else None
        return self.constrain(self.pad_tokens(x), rows, "sp", *[None] * (x.ndim - 2))

    def remove_padding(self, x: Float[Array, "rows padded *_"]) -> Float[Array, "rows tokens *_"]:
        """Return `placed` tokens without their padding; tokens in tiles are unchanged."""
        return x[:, : self.num_tokens] if self.tiles is None else x

    def remove_tiling(self, x: Float[Array, "rows padded *_"]) -> Float[Array, "rows tokens *_"]:
        """Return tokens out of tile order.

        Each chip gathers all, so they should have few lanes. Without tiles, unchanged.
        """
        return x if self.tiles is None else x[:, self.tiles.token_rows]

    def spread_tokens(
        self, hidden: Float[Array, "batch tokens dim"], placement: Placement = "sharded"
    ) -> Float[Array, "batch padded dim"]:
        """Return `hidden`, padded and sharded by tokens over `tp` too. placement: on `sp`."""
        return self.constrain(self.pad_tokens(hidden), *self._tokens(placement, spread=True))

    def halves(self, x: Array) -> list[Array]:
        """Return `x` `[batch, tokens, ...]`, padded, in two parts of equal length."""
        return jnp.split(self.pad_tokens(x, 2), 2, axis=1)

    def half_lengths(self, half: int) -> list[int]:
        """Return how many tokens of each of the `halves`, which have `half` tokens, are not padding."""
        return [min(self.num_tokens, half), max(self.num_tokens - half, 0)]

    def _tokens(self, placement: Placement, *, spread: bool = False) -> P:
        """Return the spec of `[batch, tokens, dim]`. spread: sharded over `tp` too; else replicated there."""
        axes = ("sp",) if placement == "sharded" else ()
        return P("dp", (*axes, "tp") if spread else axes or None, None)

    def _nearby(self) -> SlidingTileMask | None:
        """Return the attention mask of the layer that is being traced; None without tiles."""
        if self.tiles is None:
            return None
        assert self.is_sparse is not None
        return SlidingTileMask(tiles=self.tiles, is_sparse=self.is_sparse & (layer_index() >= DENSE_LAYERS))

    def self_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Int[Array, " batch"] | None = None,
        *,
        prologue: Prologue = NO_PROLOGUE,
    ) -> Array:
        """Return the attention of padded tokens to each other, of the shape of `q`, `k` and `v` `[batch, tokens, ...]`.

        length: valid tokens of each row; None: all. prologue: preparation of queries and keys.
        """
        assert self.tiles is None or length is None
        real = self.num_tokens if length is None else length
        return attention(
            q, k, v, kv_length=real, mesh=self.mesh, keys="sharded", prologue=prologue, policy=self.policy,
            nearby=self._nearby(),
        )  # fmt: skip

    def cross_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        text_length: Int[Array, " batch"] | None = None,
        *,
        prologue: Prologue = NO_PROLOGUE,
    ) -> Array:
        """Return the attention of latent tokens to a replicated text, `[batch, tokens, heads, head_dim]` like `q`.

        k, v: of the text. text_length: valid tokens of each row of it; None: all. prologue: preparation of queries and
          keys.
        """
        return attention(
            q, k, v, kv_length=text_length, mesh=self.mesh, keys="replicated", prologue=prologue, policy=self.policy
        )

    def joint_attention(
        self,
        latent: tuple[Array, Array, Array],
        text: tuple[Array, Array, Array],
        text_length: Int[Array, " batch"] | None = None,
        *,
        prologues: tuple[Prologue, Prologue] = (NO_PROLOGUE, NO_PROLOGUE),
    ) -> tuple[Array, Array]:
        """Return the attention of padded latent tokens and of a text, each to all valid tokens of both.

        latent, text: query, key and value, `[batch, tokens, heads, head_dim]` each.
        text_length: valid tokens of each row of the text; None: all. prologues: of latents and text.
        """
        length = text[0].shape[1] if text_length is None else text_length
        out, text_out = joint_attention(
            latent, text, lengths=(self.num_tokens, length), placements=("sharded", "replicated"), mesh=self.mesh,
            prologues=prologues, policy=self.policy, nearby=self._nearby(),
        )  # fmt: skip
        return out, text_out

    def streams_attention(
        self,
        *streams: tuple[Array, Array, Array],
        lengths: Sequence[int | Int[Array, " batch"]],
        prologues: Sequence[Prologue],
    ) -> tuple[Array, ...]:
        """Return the attention of two padded sequences, and of a text if one follows, each to all valid tokens.

        streams: query, key and value of each, `[batch, tokens, heads, head_dim]`.
        lengths: valid tokens of each, in all rows or per row. prologues: of each.
        """
        placements: tuple[Placement, ...] = "sharded", "sharded", "replicated"
        return joint_attention(
            *streams, lengths=lengths, placements=placements[: len(streams)], mesh=self.mesh,
            prologues=prologues, policy=self.policy,
        )  # fmt: skip

    def residual_norm(
        self,
        hidden: Array,
        update: Array | None,
        gate: Array | None,
        scale: Array,
        shift: Array,
        *,
        eps: float,
        placement: Placement = "sharded",
        spread: bool = False,
    ) -> tuple[Array, Array | Int8Tokens]:
        """Return `hidden + gate * update`, and its layer norm `* scale + shift`, `[batch, tokens, dim]` each.

        hidden, update: `[batch, tokens, dim]`; update None: the sum is `hidden`.
        gate, scale, shift: `[..., dim]` for every row or for all, or a pair `[rows, 2, 1, dim]`, whose first vector is
          for the first latent frame's tokens; gate None: 1.
        eps: of the norm. placement: of tokens on `sp`.
        spread: whether tokens are spread; the norm is then gathered, and quantized before if `rounds`.
        """
        platform = self.mesh.devices.flat[0].platform
        options: Any = {"kernel": self.policy.uses_kernels(platform), "interpret": platform != "tpu"}
        run = functools.partial(residual_norm.residual_norm, eps=eps, **options)
        gate, scale, shift = jax.tree.map(
            lambda v: v.reshape(-1, *[2] * (v.ndim == 4), v.shape[-1]), (gate, scale, shift)
        )
        has_pairs = any(v.ndim == 3 for v in jax.tree.leaves((gate, scale, shift)))
        assert not has_pairs or (placement == "sharded" and not spread)
        tokens = self._tokens(placement, spread=spread)
        args = (hidden, update), (gate, scale, shift)
        specs = (
            jax.tree.map(lambda _: tokens, args[0]),
            jax.tree.map(lambda v: P("dp" if len(v) > 1 else None, *[None] * (v.ndim - 1)), args[1]),
        )

        def gather(normed: Array) -> Array | Int8Tokens:
            if not self.rounds:
                return _each_row(jax.lax.all_gather, normed)
            block = rotation_block(normed.shape[2], chips=self.mesh.shape["tp"])
            rounded = quantize_tokens(normed, block=block, **options)
            return jax.tree.map(functools.partial(_each_row, jax.lax.all_gather), rounded)

        def fuse(arrays: tuple, vectors: tuple) -> tuple[Array, Array | Int8Tokens]:
            start = jax.lax.axis_index("sp") * arrays[0].shape[1] if has_pairs else 0
            leading = {"num_leading": self.frame_tokens - start} if has_pairs else {}
            hidden, normed = run(*arrays, *vectors, **leading)
            return hidden, gather(normed) if spread else normed

        out_specs = tokens, self._tokens(placement)
        mapped = jax.shard_map(fuse, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(*args)

    def int8_linear(
        self,
        weights: Sequence[Int8Weight],
        *parts: Float[Array, "batch tokens _"] | Int8Tokens,
        activation: Activation | None = None,
        turned: bool = False,
        placement: Placement = "sharded",
        split: Literal["outs", "ins"] | None = None,
        layer: Int[Array, ""] | None = None,
        onto: GatedResidual | None = None,
    ) -> list[Array]:
        """Return the lanes of all `parts` times each of `weights`, `[batch, tokens, outs]`: see `linear_int8`.

        parts: `[batch, tokens, lanes]` each. placement: of tokens on `sp`. activation, turned, layer, onto: see
          `linear_int8`.
        split: dimension of the weights that is split over `tp`. "outs": results are split, too. "ins": partial sums,
          `[tp, batch, tokens, outs]`, see `partial_sums`. None: not split.
        """
        platform = self.mesh.devices.flat[0].platform
        run = functools.partial(
            linear_int8, block=rotation_block(*(part.shape[-1] for part in parts), chips=self.mesh.shape["tp"]),
            activation=activation, turned=turned, kernel=self.policy.uses_kernels(platform),
            interpret=platform != "tpu",
        )  # fmt: skip
        tokens, outs, ins = self._tokens(placement), *("tp" if split == dim else None for dim in ("outs", "ins"))
        matrix = P(*[None] * (layer is not None), *((ins, outs) if turned else (outs, ins)))
        specs = [Int8Weight(matrix, P(outs), None if weight.bias is None else P(outs)) for weight in weights]
        results = P(*tokens[:2], outs) if ins is None else P("tp", *tokens)

        def products(
            weights: Sequence[Int8Weight], parts: Sequence[Any], layer: Array | None, onto: GatedResidual | None
        ) -> list[Array]:
            results = run(parts, weights, layer=layer, onto=onto)
            return results if ins is None else [result[None] for result in results]

        assert onto is None or split is None
        added = None if onto is None else GatedResidual(tokens, P("dp" if len(onto.gate) > 1 else None, None))
        in_specs = specs, (P(*tokens[:2], ins),) * len(parts), None if layer is None else P(), added
        mapped = jax.shard_map(products, mesh=self.mesh, in_specs=in_specs, out_specs=results, check_vma=False)
        return mapped(list(weights), parts, layer, onto)

    def partial_sums(
        self,
        weight: Float[Array, "lanes dim"],
        *parts: Float[Array, "batch tokens _"],
        placement: Placement = "sharded",
    ) -> Float[Array, "tp batch tokens dim"]:
        """Return the concatenated lanes of all `parts` times `weight`, not summed over `tp`: one addend per chip.

        Each chip multiplies its own lanes by its rows of the weight. placement: of tokens on `sp`.
        """
        tokens = self._tokens(placement)

        def product(weight: Array, parts: tuple[Array, ...]) -> Array:
            return (jnp.concatenate(parts, axis=-1) @ weight)[None]

        specs, out_specs = (P("tp", None), (P(*tokens[:2], "tp"),) * len(parts)), P("tp", *tokens)
        mapped = jax.shard_map(product, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(weight, parts)

    def zero_partial_sums(self, hidden: Float[Array, "batch tokens dim"]) -> Float[Array, "tp batch tokens dim"]:
        """Return zero partial sums for tokens like `hidden`."""
        zeros = jnp.zeros((self.mesh.shape["tp"], *hidden.shape), hidden.dtype)
        return self.constrain(zeros, "tp", *self._tokens("sharded"))

    def scatter(
        self, sums: Float[Array, "tp batch tokens dim"], placement: Placement = "sharded"
    ) -> Float[Array, "batch tokens dim"]:
        """Return `partial_sums` summed over chips and spread. placement: of tokens on `sp`."""

        def reduce(sums: Array) -> Array:
            return _each_row(jax.lax.psum_scatter, sums[0])

        specs, out_specs = P("tp", *self._tokens(placement)), self._tokens(placement, spread=True)
        return jax.shard_map(reduce, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(sums)

    def merge_groups(self, name: str, stack: Num[Array, "layers groups size ..."]) -> Num[Array, "layers rows ..."]:
        """Return a stack whose `size` is on `tp` with each chip's pieces of all groups together: a view, not a copy."""
        layers, groups, size, *inner = self.layouts[name].at_rest or (None,) * stack.ndim

        def merge(stack: Array) -> Array:
            return stack.reshape(len(stack), -1, *stack.shape[3:])

        specs, out_specs = P(layers, groups, size, *inner), P(layers, size, *inner)
        return jax.shard_map(merge, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(stack)

    def gather_block_weights(self, path: str, weights: dict[str, Array]) -> dict[str, Array]:
        """Return one layer's weights `[...]`, by name, gathered if they are only split at rest. path: of the blocks."""
        prefix = f"{path}.{LAYER}."
        # The last dimensions: groups may have been merged.
        return {name: self.constrain(x, *self.layouts[prefix + name].in_use[-x.ndim :]) for name, x in weights.items()}

    def is_read_from_stack(self, path: str, name: str, stack: Array) -> bool:
        """Return whether a kernel reads a layer from its stack `[layers, ...]`: int8 that is not gathered for use.

        A slice of the stack would be a copy. path: of the blocks. name: of the weight in a block.
        """
        layout = self.layouts[f"{path}.{LAYER}.{name}"]
        return stack.dtype == jnp.int8 and layout.at_rest == layout.in_use

    def gather_other_weights(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """Return all weights `[...]`, by name; those outside scanned blocks are gathered for use."""
        return {
            name: x if f".{LAYER}." in name else self.constrain(x, *self.layouts[name].in_use)
            for name, x in weights.items()
        }


def _each_row(collective: Callable[..., Array], x: Num[Array, "batch tokens dim"]) -> Array:
    """Return an all-gather or reduce-scatter of `x` over `tp`, row by row: XLA would transpose a batch."""
    options = {"scatter_dimension": 0} if collective is jax.lax.psum_scatter else {"axis": 0}
    return jnp.stack([collective(row, "tp", tiled=True, **options) for row in x])
