"""How a denoiser's tokens lie on the mesh: padding, sharding, attention over them, weights gathered per block.

Between a block's products, tokens of a model whose weights stay split on `tp` may be *spread*: each chip of `tp` has
some of them. Products gather them and scatter their sums, which is half of what an all-reduce sends on each side of the
norms, and no chip repeats another's norms (sequence parallelism, https://arxiv.org/abs/2205.05198).
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
from ...attention.tiles import Nearby, Tiling
from ...kernels import residual_norm
from ...kernels.chip import INT8_ROWS, PACKED_ROWS
from ...kernels.linear_int8 import Activation, Residual, Rounded, RoundedTokens, block_of, linear_int8, round_tokens
from ...sharding.rules import Layout
from .modules import LAYER, layer_index

ROWS = {"exact": PACKED_ROWS, "int8": INT8_ROWS}  # of a register, by the scores: int8's keys are exchanged as int8
# Of the layers with tiles those that attend to all: the first sees noise, and not yet what belongs together (as in
# Radial Attention).
DENSE_LAYERS = 1


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """`num_tokens` latent tokens, on the axis `sp` of `mesh`; padding goes last and is masked exactly. The first
    `frame_tokens` are the first latent frame's.

    With `tiles` tokens are in their order, and attend to the nearest alone where a step `is_sparse`. Norms of spread
    tokens are gathered as int8 where all that multiply them are (`rounds`).
    """

    mesh: Mesh
    num_tokens: int
    policy: AttentionPolicy
    layouts: Mapping[str, Layout]
    frame_tokens: int = 0
    tiles: Tiling | None = None
    is_sparse: Bool[Array, ""] | None = None
    rounds: bool = False

    def constrain(self, x: Array, *axes: str | tuple[str, ...] | None) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

    def pad_tokens(self, x: Array, parts: int = 1) -> Array:
        """`[batch, tokens, ...]` with zeros after the last token, so that every chip has whole rows of registers, of
        each of so many equal `parts`.

        Then what chips exchange joins without being moved.
        """
        chips = self.mesh.shape["sp"] * self.mesh.shape["tp"]
        padding = -x.shape[1] % (parts * chips * ROWS[self.policy.scores]) if chips * parts > 1 else 0
        widths = [(0, padding) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return jnp.pad(x, widths) if padding else x

    def placed(self, x: Float[Array, "rows tokens *_"]) -> Float[Array, "rows padded *_"]:
        """All latent tokens as they lie between the blocks, of every row or one for all: in their order, padded."""
        x = x if self.tiles is None else x[:, self.tiles.token_of]
        rows = "dp" if len(x) > 1 else None
        return self.constrain(self.pad_tokens(x), rows, "sp", *[None] * (x.ndim - 2))

    def unpadded(self, x: Float[Array, "rows padded *_"]) -> Float[Array, "rows tokens *_"]:
        """What is left of `placed` tokens without their padding; in tiles they stay."""
        return x[:, : self.num_tokens] if self.tiles is None else x

    def untiled(self, x: Float[Array, "rows padded *_"]) -> Float[Array, "rows tokens *_"]:
        """Tokens out of their tiles, if they are in any. Each chip gathers all, so they are to have few lanes."""
        return x if self.tiles is None else x[:, self.tiles.row_of]

    def spread_tokens(
        self, hidden: Float[Array, "batch tokens dim"], placement: Placement = "sharded"
    ) -> Float[Array, "batch padded dim"]:
        return self.constrain(self.pad_tokens(hidden), *self._tokens(placement, spread=True))

    def halves(self, x: Array) -> list[Array]:
        """`[batch, tokens, ...]` in two parts of equal length."""
        return jnp.split(self.pad_tokens(x, 2), 2, axis=1)

    def lengths_of_halves(self, half: int) -> list[int]:
        """How many tokens of each of the `halves`, which have `half` tokens, are no padding."""
        return [min(self.num_tokens, half), max(self.num_tokens - half, 0)]

    def _tokens(self, placement: Placement, *, spread: bool = False) -> P:
        """Of `[batch, tokens, dim]`, where every chip of `tp` has all of its `sp`'s tokens, or they are spread."""
        axes = ("sp",) if placement == "sharded" else ()
        return P("dp", (*axes, "tp") if spread else axes or None, None)

    def _nearby(self) -> Nearby | None:
        """What of the video the tokens of the layer that is being traced attend to; None: all of it."""
        if self.tiles is None:
            return None
        assert self.is_sparse is not None
        return Nearby(tiles=self.tiles, is_sparse=self.is_sparse & (layer_index() >= DENSE_LAYERS))

    def self_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        length: Int[Array, " batch"] | None = None,
        *,
        prologue: Prologue = NO_PROLOGUE,
    ) -> Array:
        """Padded tokens attending to each other, of each row to its first `length`, by default to all."""
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
        """Latent tokens attending to a replicated text, to all of it by default."""
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
        """Query, key and value of padded latent tokens and of a text: every token attends to all real ones of both."""
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
        """Of two sequences of padded tokens, and of a text where one follows, the first `lengths` of each: every token
        attends to all of these.
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
    ) -> tuple[Array, Array | RoundedTokens]:
        """`hidden + gate * update`, and its layer norm `* scale + shift`: see `residual_norm`. Vectors `[..., dim]`, of
        every row or of all; tokens are sharded on `sp` or replicated. Of spread tokens the norm is gathered, rounded
        before if it `rounds`.

        A vector may be a pair, `[rows, 2, 1, dim]`: the first latent frame's tokens have the first.
        """
        platform = self.mesh.devices.flat[0].platform
        how: Any = {"kernel": self.policy.takes_kernel(platform), "interpret": platform != "tpu"}
        run = functools.partial(residual_norm.residual_norm, eps=eps, **how)
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

        def gathered(normed: Array) -> Array | RoundedTokens:
            if not self.rounds:
                return _each_row(jax.lax.all_gather, normed)
            block = block_of(normed.shape[2], chips=self.mesh.shape["tp"])
            rounded = round_tokens(normed, block=block, **how)
            return jax.tree.map(functools.partial(_each_row, jax.lax.all_gather), rounded)

        def fused(arrays: tuple, vectors: tuple) -> tuple[Array, Array | RoundedTokens]:
            start = jax.lax.axis_index("sp") * arrays[0].shape[1] if has_pairs else 0
            leading = {"num_leading": self.frame_tokens - start} if has_pairs else {}
            hidden, normed = run(*arrays, *vectors, **leading)
            return hidden, gathered(normed) if spread else normed

        out_specs = tokens, self._tokens(placement)
        mapped = jax.shard_map(fused, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(*args)

    def int8_products(
        self,
        weights: Sequence[Rounded],
        *parts: Float[Array, "batch tokens _"] | RoundedTokens,
        activation: Activation | None = None,
        turned: bool = False,
        placement: Placement = "sharded",
        split: Literal["outs", "ins"] | None = None,
        layer: Int[Array, ""] | None = None,
        onto: Residual | None = None,
    ) -> list[Array]:
        """The lanes of all `parts` times each of `weights`: see `linear_int8`. `split` is what of the weights lies over
        `tp`: their results, which then do too, or what they sum over; then of each chip its sums, as `partial_sums`.
        """
        platform = self.mesh.devices.flat[0].platform
        run = functools.partial(
            linear_int8, block=block_of(*(part.shape[-1] for part in parts), chips=self.mesh.shape["tp"]),
            activation=activation, turned=turned, kernel=self.policy.takes_kernel(platform),
            interpret=platform != "tpu",
        )  # fmt: skip
        tokens, outs, ins = self._tokens(placement), *("tp" if split == each else None for each in ("outs", "ins"))
        matrix = P(*[None] * (layer is not None), *((ins, outs) if turned else (outs, ins)))
        specs = [Rounded(matrix, P(outs), None if each.bias is None else P(outs)) for each in weights]
        results = P(*tokens[:2], outs) if ins is None else P("tp", *tokens)

        def products(
            weights: Sequence[Rounded], parts: Sequence[Any], layer: Array | None, onto: Residual | None
        ) -> list[Array]:
            found = run(parts, weights, layer=layer, onto=onto)
            return found if ins is None else [each[None] for each in found]

        assert onto is None or split is None
        added = None if onto is None else Residual(tokens, P("dp" if len(onto.gate) > 1 else None, None))
        in_specs = specs, (P(*tokens[:2], ins),) * len(parts), None if layer is None else P(), added
        mapped = jax.shard_map(products, mesh=self.mesh, in_specs=in_specs, out_specs=results, check_vma=False)
        return mapped(list(weights), parts, layer, onto)

    def partial_sums(
        self,
        weight: Float[Array, "lanes dim"],
        *parts: Float[Array, "batch tokens _"],
        placement: Placement = "sharded",
    ) -> Float[Array, "tp batch tokens dim"]:
        """The lanes of all `parts` times `weight`, not yet summed over the chips of `tp`: each multiplies its own
        lanes, side by side, by its rows.
        """
        tokens = self._tokens(placement)

        def product(weight: Array, parts: tuple[Array, ...]) -> Array:
            return (jnp.concatenate(parts, axis=-1) @ weight)[None]

        specs, out_specs = (P("tp", None), (P(*tokens[:2], "tp"),) * len(parts)), P("tp", *tokens)
        mapped = jax.shard_map(product, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(weight, parts)

    def no_sums(self, hidden: Float[Array, "batch tokens dim"]) -> Float[Array, "tp batch tokens dim"]:
        """Partial sums of nothing, for tokens like `hidden`."""
        zeros = jnp.zeros((self.mesh.shape["tp"], *hidden.shape), hidden.dtype)
        return self.constrain(zeros, "tp", *self._tokens("sharded"))

    def scatter(
        self, sums: Float[Array, "tp batch tokens dim"], placement: Placement = "sharded"
    ) -> Float[Array, "batch tokens dim"]:
        """`partial_sums`, summed over chips and spread."""

        def scattered(sums: Array) -> Array:
            return _each_row(jax.lax.psum_scatter, sums[0])

        specs, out_specs = P("tp", *self._tokens(placement)), self._tokens(placement, spread=True)
        return jax.shard_map(scattered, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(sums)

    def merge_groups(self, name: str, stack: Num[Array, "layers groups size ..."]) -> Num[Array, "layers rows ..."]:
        """A stack whose `size` is on `tp`, each chip's pieces of all groups together: another view, not a copy."""
        layers, groups, size, *inner = self.layouts[name].at_rest or (None,) * stack.ndim

        def merged(stack: Array) -> Array:
            return stack.reshape(len(stack), -1, *stack.shape[3:])

        specs, out_specs = P(layers, groups, size, *inner), P(layers, size, *inner)
        return jax.shard_map(merged, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(stack)

    def use_in_block(self, path: str, weights: dict[str, Array]) -> dict[str, Array]:
        """One layer's weights, gathered where they are only split at rest."""
        prefix = f"{path}.{LAYER}."
        # The last dimensions: groups may have been merged.
        return {name: self.constrain(x, *self.layouts[prefix + name].in_use[-x.ndim :]) for name, x in weights.items()}

    def stays_whole(self, path: str, name: str, stack: Array) -> bool:
        """Whether a kernel takes a layer's weight out of its stack: one in int8 that is not gathered for use, of which
        a slice would be a copy.
        """
        layout = self.layouts[f"{path}.{LAYER}.{name}"]
        return stack.dtype == jnp.int8 and layout.at_rest == layout.in_use

    def use_outside_blocks(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """All weights, those outside scanned blocks gathered for use."""
        return {
            name: x if f".{LAYER}." in name else self.constrain(x, *self.layouts[name].in_use)
            for name, x in weights.items()
        }


def _each_row(collective: Callable[..., Array], x: Num[Array, "batch tokens dim"]) -> Array:
    """An all-gather or a reduce-scatter of tokens over `tp`: row by row, for in front of them a batch is transposed."""
    how = {"scatter_dimension": 0} if collective is jax.lax.psum_scatter else {"axis": 0}
    return jnp.stack([collective(row, "tp", tiled=True, **how) for row in x])
