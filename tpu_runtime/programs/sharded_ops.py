"""Sharded operations of a denoiser's forward: token placement, attention over tokens, products and the layer scan.

If a model's weights stay split on `tp`, its tokens may be *spread* between a block's products: each chip of `tp` has
some of them. Products gather tokens and scatter their sums. This sends half of an all-reduce's bytes on each side of
the norms, and no chip repeats another's norms (sequence parallelism, https://arxiv.org/abs/2205.05198).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num, PyTree

from ...attention.api import Placement, attention, joint_attention
from ...attention.policy import AttentionPolicy
from ...attention.prologue import NO_PROLOGUE, Prologue
from ...attention.tiles import SlidingTileMask, Tiling
from ...kernels import residual_norm
from ...kernels.hardware import PACKED_ROWS
from ...kernels.linear_int8 import Activation, GatedResidual, Int8Tokens, Int8Weight, rotation_block
from ...kernels.number_formats import EXACT, SCORES
from ...sharding.rules import Layout
from . import sharded_linear, torch_bridge, weights
from .upstream_network import LAYER, ScannedBlocks, layer_index, scan_layers

Heads = tuple[Array, Array, Array]  # query, key and value, `[rows, tokens, heads, head_dim]` each
# A linear module, or a module and the name of a weight. The product is quantized if the weight is.
Factor = torch.nn.Module | tuple[torch.nn.Module, str]
# Rows of a register, by the scores: quantized keys are exchanged as they are.
ROW_MULTIPLES = {EXACT: PACKED_ROWS, **{name: row.row_multiple for name, row in SCORES.items()}}
# Leading layers that stay dense with tiles: the first sees noise, in which no neighbours are related yet (as in Radial
# Attention).
DENSE_LAYERS = 1


def accept_tensors(method: Callable[..., PyTree]) -> Callable[..., Any]:
    """Return a method of JAX arrays that also takes torch views of traced arrays, and then returns such views."""

    @functools.wraps(method)
    def run(self: "ShardedOps", *args: PyTree, **options: PyTree) -> PyTree:
        if not any(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves((args, options))):
            return method(self, *args, **options)
        args, options = torch_bridge.to_jax((args, options))
        return torch_bridge.to_torch(method(self, *args, **options))

    return run


@dataclass(frozen=True, kw_only=True)
class ShardedOps:
    """Operations of a denoiser's forward on the mesh, with latent tokens on its axis `sp` and a row for each branch.

    Arguments and results are JAX arrays, or torch views of them (see `accept_tensors`).
    Between `tokens` and `remove_padding` a sequence has padding, at its end or in tiles. Attention masks it exactly;
    all other operations work token by token. A prologue is the preparation of queries and keys (see
    `layers.make_prologue`).
    """

    mesh: Mesh
    num_tokens: int  # without padding
    policy: AttentionPolicy
    layouts: Mapping[str, Layout]  # of the weights, by name
    frame_tokens: int = 0  # leading tokens that belong to the first latent frame
    tiles: Tiling | None = None  # tile order of the tokens; None: row by row
    is_sparse: Bool[Array, ""] | None = None  # with tiles: whether tokens attend to the nearest tiles only
    # Quantizes norms of spread tokens before they are gathered, because all their products are quantized; None: no.
    quantize_tokens: Callable[..., Int8Tokens] | None = None

    def where(self, is_sparse: jax.Array) -> "ShardedOps":
        """Return these operations with `is_sparse`, a bool scalar array `[]`; without tiles, unchanged."""
        return replace(self, is_sparse=is_sparse) if self.tiles else self

    def with_length(self, num_tokens: int) -> "ShardedOps":
        """Return the operations of a sequence of `num_tokens`, such as that of latents and text together."""
        return replace(self, num_tokens=num_tokens)

    # -- placement of tokens -------------------------------------------------------------------------------------------

    def constrain(self, x: Array, *axes: str | tuple[str, ...] | None) -> Array:
        """Return `x` `[...]` with a sharding constraint: mesh axes of its leading dimensions, None: not sharded."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

    @accept_tensors
    def pad(self, x: Array, parts: int = 1) -> Array:
        """Return `x` `[batch, tokens, ...]` with zeros after the last token: whole rows of registers on each chip.

        This holds for each of `parts` equal parts, so that exchanged parts are joined without being moved.
        """
        chips = self.mesh.shape["sp"] * self.mesh.shape["tp"]
        padding = -x.shape[1] % (parts * chips * ROW_MULTIPLES[self.policy.scores]) if chips * parts > 1 else 0
        widths = [(0, padding) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return jnp.pad(x, widths) if padding else x

    @accept_tensors
    def tokens(self, x: Float[Array, "rows tokens *_"]) -> Float[Array, "rows padded *_"]:
        """Return latent tokens as they are between the blocks: in tile order, padded and sharded.

        One row applies to all.
        """
        x = x if self.tiles is None else x[:, self.tiles.row_tokens]
        rows = "dp" if len(x) > 1 else None
        return self.constrain(self.pad(x), rows, "sp", *[None] * (x.ndim - 2))

    @accept_tensors
    def remove_padding(self, x: Float[Array, "rows padded *_"]) -> Float[Array, "rows tokens *_"]:
        """Return `tokens` without their padding; tokens in tiles are unchanged."""
        return x[:, : self.num_tokens] if self.tiles is None else x

    @accept_tensors
    def remove_tiling(self, x: Float[Array, "rows padded *_"]) -> Float[Array, "rows tokens *_"]:
        """Return tokens out of tile order.

        Each chip gathers all, so they should have few lanes. Without tiles, unchanged.
        """
        return x if self.tiles is None else x[:, self.tiles.token_rows]

    @accept_tensors
    def replicate(self, x: Array) -> Array:
        """Return `x` `[rows, ...]` on every chip of a branch: a text, or a vector whose weights are sharded."""
        return self.constrain(x, "dp", *[None] * (x.ndim - 1))

    @accept_tensors
    def gather_vector(self, x: Float[Array, "rows dim"]) -> Float[Array, "rows dim"]:
        """Return `x` on every chip: a product of one vector per row and weights sharded along `dim`.

        Each chip computes its part of all rows; then every chip gets all.
        """
        parts = self.mesh.axis_names if x.shape[1] % self.mesh.size == 0 else None
        return self.constrain(self.constrain(x, None, parts), None, None)

    @accept_tensors
    def spread(
        self, hidden: Float[Array, "batch tokens dim"], placement: Placement = "sharded"
    ) -> Float[Array, "batch padded dim"]:
        """Return `hidden`, padded and sharded by tokens over `tp` too. placement: on `sp`."""
        return self.constrain(self.pad(hidden), *self.token_spec(placement, spread=True))

    @accept_tensors
    def halves(self, x: Array) -> list[Array]:
        """Return `x` `[batch, tokens, ...]`, padded, in two parts of equal length."""
        return jnp.split(self.pad(x, 2), 2, axis=1)

    def half_lengths(self, half: int) -> list[int]:
        """Return how many tokens of each of the `halves`, which have `half` tokens, are not padding."""
        return [min(self.num_tokens, half), max(self.num_tokens - half, 0)]

    def token_spec(self, placement: Placement, *, spread: bool = False) -> P:
        """Return the spec of `[batch, tokens, dim]`. spread: sharded over `tp` too; else replicated there."""
        axes = ("sp",) if placement == "sharded" else ()
        return P("dp", (*axes, "tp") if spread else axes or None, None)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _tile_mask(self) -> SlidingTileMask | None:
        """Return the attention mask of the layer that is being traced; None without tiles."""
        if self.tiles is None:
            return None
        assert self.is_sparse is not None
        return SlidingTileMask(tiles=self.tiles, is_sparse=self.is_sparse & (layer_index() >= DENSE_LAYERS))

    @accept_tensors
    def self_attention(
        self, q: Array, k: Array, v: Array, prologue: Prologue = NO_PROLOGUE, length: Int[Array, " batch"] | None = None
    ) -> Array:
        """Return the attention of sharded tokens to each other, `[batch, tokens, heads, head_dim]` like `q`.

        prologue: preparation of queries and keys. length: valid tokens of each row; None: all.
        """
        assert self.tiles is None or length is None
        real = self.num_tokens if length is None else length
        (out,) = joint_attention(
            (q, k, v), lengths=(real,), placements=("sharded",), mesh=self.mesh, prologues=(prologue,),
            policy=self.policy, nearby=self._tile_mask(),
        )  # fmt: skip
        return out

    @accept_tensors
    def cross_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        text_length: Int[Array, " batch"] | None = None,
        prologue: Prologue = NO_PROLOGUE,
    ) -> Array:
        """Return the attention of latent tokens to a replicated text, `[batch, tokens, heads, head_dim]` like `q`.

        k, v: of the text. text_length: valid tokens of each row of it; None: all. prologue: preparation of queries and
          keys.
        """
        return attention(
            q, k, v, kv_length=text_length, mesh=self.mesh, keys="replicated", prologue=prologue, policy=self.policy
        )

    @accept_tensors
    def joint_attention(
        self,
        latent: tuple[Array, Array, Array],
        text: tuple[Array, Array, Array],
        text_length: Int[Array, " batch"] | None = None,
        prologues: tuple[Prologue, Prologue] = (NO_PROLOGUE, NO_PROLOGUE),
    ) -> tuple[Array, Array]:
        """Return the attention of padded latent tokens and of a text, each to all valid tokens of both.

        latent, text: query, key and value, `[batch, tokens, heads, head_dim]` each.
        text_length: valid tokens of each row of the text; None: all. prologues: of latents and text.
        """
        length = text[0].shape[1] if text_length is None else text_length
        out, text_out = joint_attention(
            latent, text, lengths=(self.num_tokens, length), placements=("sharded", "replicated"), mesh=self.mesh,
            prologues=prologues, policy=self.policy, nearby=self._tile_mask(),
        )  # fmt: skip
        return out, text_out

    @accept_tensors
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

    # -- norms, sums and products --------------------------------------------------------------------------------------

    @accept_tensors
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
        spread: whether tokens are spread; the norm is then gathered, and quantized before by `quantize_tokens`.
        """
        platform = self.mesh.devices.flat[0].platform
        options: Any = {"kernel": self.policy.uses_kernels(platform), "interpret": platform != "tpu"}
        run = functools.partial(residual_norm.residual_norm, eps=eps, **options)
        gate, scale, shift = jax.tree.map(
            lambda v: v.reshape(-1, *[2] * (v.ndim == 4), v.shape[-1]), (gate, scale, shift)
        )
        has_pairs = any(v.ndim == 3 for v in jax.tree.leaves((gate, scale, shift)))
        assert not has_pairs or (placement == "sharded" and not spread)
        tokens = self.token_spec(placement, spread=spread)
        args = (hidden, update), (gate, scale, shift)
        specs = (
            jax.tree.map(lambda _: tokens, args[0]),
            jax.tree.map(lambda v: P("dp" if len(v) > 1 else None, *[None] * (v.ndim - 1)), args[1]),
        )

        def gather(normed: Array) -> Array | Int8Tokens:
            if self.quantize_tokens is None:
                return _each_row(jax.lax.all_gather, normed)
            block = rotation_block(normed.shape[2], chips=self.mesh.shape["tp"])
            rounded = self.quantize_tokens(normed, block=block, **options)
            return jax.tree.map(functools.partial(_each_row, jax.lax.all_gather), rounded)

        def fuse(arrays: tuple, vectors: tuple) -> tuple[Array, Array | Int8Tokens]:
            start = jax.lax.axis_index("sp") * arrays[0].shape[1] if has_pairs else 0
            leading = {"num_leading": self.frame_tokens - start} if has_pairs else {}
            hidden, normed = run(*arrays, *vectors, **leading)
            return hidden, gather(normed) if spread else normed

        out_specs = tokens, self.token_spec(placement)
        mapped = jax.shard_map(fuse, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(*args)

    def add_gated(self, x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return `x + gate * update`, `[rows, tokens, dim]`, computed in float32.

        x, update: `[rows, tokens, dim]`. gate: a vector per row, `[rows, 1, dim]`, or a pair, as in `residual_norm`.
        """
        if gate.ndim < 4:
            by_token = gate.reshape(-1, 1, gate.shape[-1])
        else:
            is_first = torch.arange(x.shape[1], device=x.device)[:, None] < self.frame_tokens
            by_token = torch.where(is_first, gate[:, 0], gate[:, 1])
        return (x.float() + by_token * update.float()).type_as(x)

    def products(
        self,
        x: torch.Tensor | Int8Tokens,
        *factors: Factor,
        activation: Activation | None = None,
        placement: Placement = "sharded",
        split: Literal["outs"] | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield the product of `x` `[rows, tokens, dim]` and each of `factors`, `[rows, tokens, outs]`, plus its bias.

        activation: "gelu" is applied to each; "silu" to the first, which multiplies the second: one result.
        placement: of tokens on `sp`. split: "outs" if the weights' outputs are split over `tp`.
        """
        modules, names = zip(*map(_factor, factors), strict=True)
        if all(map(weights.is_quantized, modules, names)):
            rounded = [*map(weights.get_quantized_weight, modules, names)]
            run = self._quantized_linear(placement, rounded[0], activation=activation, split=split)
            yield from torch_bridge.call_jax(run, rounded, x)
            return
        assert isinstance(x, torch.Tensor)
        functional = torch.nn.functional
        results = (
            functional.linear(x, getattr(module, name), weights.get_bias(module, name))
            for module, name in zip(modules, names, strict=True)
        )
        if activation == "silu":
            first, second = functional.silu(next(results)), next(results)
            yield first * second
            return
        for result in results:
            yield functional.gelu(result, approximate="tanh") if activation else result

    def add_linear(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        factor: Factor,
        gate: torch.Tensor,
        placement: Placement = "sharded",
    ) -> torch.Tensor:
        """Return `x + gate * product` of `hidden` and `factor`, `[rows, tokens, dim]`, fused for quantized weights.

        x: `[rows, tokens, dim]`. hidden: `[rows, tokens, ins]`. gate: see `add_gated`. placement: of tokens on `sp`.
        """
        module, name = _factor(factor)
        if gate.ndim == 4 or not weights.is_quantized(module, name):
            (update,) = self.products(hidden, factor, placement=placement)
            return self.add_gated(x, update, gate)
        rounded = weights.get_quantized_weight(module, name)
        run = self._quantized_linear(placement, rounded)
        onto = GatedResidual(x, gate.flatten(end_dim=-2))
        return torch_bridge.call_jax(lambda *given: run(*given[:2], onto=given[2]), [rounded], hidden, onto)[0]

    def add_feed_forward(
        self, x: torch.Tensor, ff: Any, normed: torch.Tensor, gate: torch.Tensor, placement: Placement = "sharded"
    ) -> torch.Tensor:
        """Return `x + gate * ff(normed)`, `[rows, tokens, dim]`.

        ff: diffusers' `FeedForward` with GELU by tanh. x, normed: `[rows, tokens, dim]`. gate: see `add_gated`.
        placement: of tokens on `sp`.
        """
        (hidden,) = self.products(normed, ff.net[0].proj, activation="gelu", placement=placement)
        return self.add_linear(x, hidden, ff.net[2], gate, placement)

    def partial_sums(self, factor: Factor, *parts: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Return the lanes of all `parts` times a weight: one addend per chip of `tp`, `[tp, rows, tokens, dim]`.

        factor: a linear module, whose bias is not added, or a module and the name of a weight `[lanes, dim]`.
        parts: `[rows, tokens, lanes]` each. placement: of tokens on `sp`.
        """
        module, name = _factor(factor)
        is_turned = name != "weight"
        if weights.is_quantized(module, name):
            rounded = weights.get_quantized_weight(module, name)._replace(bias=None)
            run = self._quantized_linear(placement, rounded, turned=is_turned, split="ins")
            return torch_bridge.call_jax(run, [rounded], *parts)[0]
        weight = getattr(module, name)
        run = functools.partial(sharded_linear.partial_sums, self.mesh, self.token_spec(placement))
        return torch_bridge.call_jax(run, weight if is_turned else weight.T, *parts)

    def sum_products(self, factor: Factor, *parts: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Return `partial_sums` of `factor` and `parts`, summed over chips and spread, `[rows, tokens, dim]`.

        placement: of tokens on `sp`.
        """
        return self.scatter(self.partial_sums(factor, *parts, placement=placement), placement)

    @accept_tensors
    def zero_partial_sums(self, hidden: Float[Array, "batch tokens dim"]) -> Float[Array, "tp batch tokens dim"]:
        """Return zero partial sums for tokens like `hidden`."""
        zeros = jnp.zeros((self.mesh.shape["tp"], *hidden.shape), hidden.dtype)
        return self.constrain(zeros, "tp", *self.token_spec("sharded"))

    @accept_tensors
    def scatter(
        self, sums: Float[Array, "tp batch tokens dim"], placement: Placement = "sharded"
    ) -> Float[Array, "batch tokens dim"]:
        """Return `partial_sums` summed over chips and spread. placement: of tokens on `sp`."""

        def reduce(sums: Array) -> Array:
            return _each_row(jax.lax.psum_scatter, sums[0])

        specs, out_specs = P("tp", *self.token_spec(placement)), self.token_spec(placement, spread=True)
        return jax.shard_map(reduce, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(sums)

    # -- weights and layers --------------------------------------------------------------------------------------------

    def scan(
        self,
        blocks: torch.nn.Module,
        carry: PyTree,
        body: Callable[[Any, PyTree], PyTree],
        *,
        layers: slice | None = None,
        merged: tuple[str, ...] = (),
    ) -> PyTree:
        """Return the last carry of `carry = body(block, carry)` for each of `blocks` in turn, traced once.

        blocks: a list of the component's `blocks`. layers: the blocks to run; None: all.
        carry: a tree of tensors that keep shape and format. Values that are the same for all layers belong in `body`'s
          closure.
        body: its `block` is upstream's module with one layer's weights, gathered for use.
        merged: weights whose groups become one dimension (see `TokenLayout.merge_groups`).
        """
        return self._scan(blocks, carry, body, layers, merged)[0]

    def collect(
        self, blocks: torch.nn.Module, carry: PyTree, body: Callable[[Any, PyTree], PyTree]
    ) -> tuple[PyTree, PyTree]:
        """Return the last carry of `scan`, and the carry's first tensor after each block, `[blocks, ...]`.

        blocks, carry, body: see `scan`.
        """
        return self._scan(blocks, carry, body, None, (), collect=True)

    def _scan(
        self,
        blocks: torch.nn.Module,
        carry: PyTree,
        body: Callable[[Any, PyTree], PyTree],
        layers: slice | None,
        merged: tuple[str, ...],
        collect: bool = False,
    ) -> tuple[PyTree, PyTree]:
        assert isinstance(blocks, ScannedBlocks)

        prefix = f"{blocks.path}.{LAYER}."

        def stack(stacked: dict[str, jax.Array]) -> dict[str, jax.Array]:
            scales = [name + weights.SCALE_SUFFIX for name in merged]
            names = [*merged, *(name for name in scales if name in stacked and stacked[name].ndim > 2)]
            groups = {
                name: weights.merge_groups(self.mesh, self.layouts[prefix + name], stacked[name]) for name in names
            }
            return stacked | groups

        is_full_scan = layers is None and self.tiles is None  # with tiles attention reads the layer's index
        return scan_layers(
            blocks, carry, body, None if is_full_scan else range(blocks.num_layers)[layers or slice(None)],
            stack=stack, use=functools.partial(self.gather_weights, prefix=prefix),
            whole=lambda name, stack: weights.is_read_from_stack(self.layouts[prefix + name], stack), collect=collect,
        )  # fmt: skip

    def gather_weights(self, tensors: Mapping[str, jax.Array], prefix: str = "") -> dict[str, jax.Array]:
        """Return weights `[...]` by name, gathered if they are only split at rest, but those of scanned blocks.

        prefix: of all names; that of a layer's weights when a scan runs it.
        """
        return {
            name: x if f".{LAYER}." in name else weights.place_in_use(self.mesh, self.layouts[prefix + name], x)
            for name, x in tensors.items()
        }

    def _quantized_linear(self, placement: Placement, weight: Int8Weight, **options: Any) -> Callable[..., list[Array]]:
        """Return `sharded_linear.quantized_linear` of tokens in a placement, and of weights like `weight`."""
        layer = layer_index() if weight.numbers.ndim == 3 else None  # of a stack of all layers' weights
        tokens = self.token_spec(placement)
        return functools.partial(
            sharded_linear.quantized_linear, self.mesh, self.policy, tokens, layer=layer, **options
        )


def _each_row(collective: Callable[..., Array], x: Num[Array, "batch tokens dim"]) -> Array:
    """Return an all-gather or reduce-scatter of `x` over `tp`, row by row: XLA would transpose a batch."""
    options = {"scatter_dimension": 0} if collective is jax.lax.psum_scatter else {"axis": 0}
    return jnp.stack([collective(row, "tp", tiled=True, **options) for row in x])


def _factor(factor: Factor) -> tuple[torch.nn.Module, str]:
    """Return the module and the name of the weight of a factor."""
    return factor if isinstance(factor, tuple) else (factor, "weight")
