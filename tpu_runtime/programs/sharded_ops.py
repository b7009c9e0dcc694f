"""Mesh operations of a denoiser's torch code: token placement, attention, sharded products and one scan."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import torch
from jaxtyping import PyTree

from ...attention.api import Placement
from ...attention.prologue import NO_PROLOGUE, Prologue
from ...kernels.linear_int8 import Activation, GatedResidual, Int8Weight
from . import torch_bridge, weights
from .token_layout import TokenLayout
from .upstream_network import LAYER, ScannedBlocks, layer_index, scan_layers

Heads = Sequence[torch.Tensor]  # query, key and value, `[rows, tokens, heads, head_dim]` each
# A linear module, or a module and the name of a weight. The product is int8 if the weight is.
Factor = torch.nn.Module | tuple[torch.nn.Module, str]


@dataclass(frozen=True, kw_only=True)
class ShardedOps:
    """Mesh operations of a denoiser's forward. Tensors are torch views of traced arrays, with a row for each branch.

    Between `tokens` and `unpadded` a sequence has padding, at its end or in tiles. Attention masks it exactly; all
    other operations work token by token. Queries, keys, values and results of attention are `[rows, tokens, heads,
    head_dim]`. A prologue is the preparation of queries and keys (see `layers.make_prologue`).

    `layout` does the same for JAX arrays. Use `torch_bridge.call_jax(run.layout.name, ...)` for methods that are
    missing here.
    """

    layout: TokenLayout

    def where(self, is_sparse: jax.Array) -> "ShardedOps":
        """Return this run with `is_sparse_step`, a bool scalar array `[]`; without tiles, unchanged."""
        return replace(self, layout=replace(self.layout, is_sparse=is_sparse)) if self.layout.tiles else self

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[rows, tokens, ...]` padded and sharded by tokens.

        One row, as of rotary tables, applies to all.
        """
        return torch_bridge.call_jax(self.layout.place_tokens, x)

    def replicate(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[rows, ...]` on every chip of a branch: a text, or a vector whose weights are sharded."""
        return torch_bridge.call_jax(lambda x: self.layout.constrain(x, "dp", *[None] * (x.ndim - 1)), x)

    def gather_vector(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[rows, dim]` on every chip: a product of one vector per row and weights sharded along `dim`.

        Each chip computes its part of all rows; then every chip gets all.
        """

        def gather(x: jax.Array) -> jax.Array:
            mesh = self.layout.mesh
            parts = mesh.axis_names if x.shape[1] % mesh.size == 0 else None
            return self.layout.constrain(self.layout.constrain(x, None, parts), None, None)

        return torch_bridge.call_jax(gather, x)

    def remove_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[rows, tokens, ...]` without the padding of `tokens`; `remove_tiling` removes that of tiles."""
        return torch_bridge.call_jax(self.layout.remove_padding, x)

    def remove_tiling(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[rows, tokens, lanes]` out of tile order, if tokens are in tiles. It should have few lanes."""
        return torch_bridge.call_jax(self.layout.remove_tiling, x)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[rows, tokens, ...]` with the padding of `spread`."""
        return torch_bridge.call_jax(self.layout.pad_tokens, x)

    def with_length(self, num_tokens: int) -> "ShardedOps":
        """Return this run for a sequence of `num_tokens`, such as that of latents and text together."""
        return replace(self, layout=replace(self.layout, num_tokens=num_tokens))

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
        assert isinstance(blocks, ScannedBlocks)

        def stack(stacked: dict[str, jax.Array]) -> dict[str, jax.Array]:
            prefix, scales = f"{blocks.path}.{LAYER}.", [name + weights.SCALE_SUFFIX for name in merged]
            names = [*merged, *(name for name in scales if name in stacked and stacked[name].ndim > 2)]
            return stacked | {name: self.layout.merge_groups(prefix + name, stacked[name]) for name in names}

        is_full_scan = layers is None and self.layout.tiles is None  # with tiles attention reads the layer's index
        indices = None if is_full_scan else range(blocks.num_layers)[layers or slice(None)]
        use = functools.partial(self.layout.gather_block_weights, blocks.path)
        whole = functools.partial(self.layout.is_read_from_stack, blocks.path)
        return scan_layers(blocks, carry, body, indices, stack=stack, use=use, whole=whole)[0]

    def self_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prologue: Prologue = NO_PROLOGUE,
        length: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of sharded tokens to each other, of the shape of `q`, `k` and `v` `[rows, tokens, ...]`.

        prologue: preparation of queries and keys. length: valid tokens of each row, `[rows]`; None: all.
        """
        attend = functools.partial(self.layout.self_attention, prologue=prologue)
        return torch_bridge.call_jax(attend, q, k, v, length)

    def cross_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        text_length: torch.Tensor | None = None,
        prologue: Prologue = NO_PROLOGUE,
    ) -> torch.Tensor:
        """Return the attention of sharded tokens to a replicated text, `[rows, tokens, heads, head_dim]` like `q`.

        k, v: of the text. text_length: valid tokens of each row of it, `[rows]`; None: all.
        prologue: preparation of queries and keys.
        """
        attend = functools.partial(self.layout.cross_attention, prologue=prologue)
        return torch_bridge.call_jax(attend, q, k, v, text_length)

    def joint_attention(
        self,
        latent: Heads,
        text: Heads,
        text_length: torch.Tensor | None = None,
        prologues: tuple[Prologue, Prologue] = (NO_PROLOGUE, NO_PROLOGUE),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention of sharded tokens and of a replicated text, each to the valid tokens of both.

        latent, text: query, key and value, `[rows, tokens, heads, head_dim]` each.
        text_length: valid tokens of each row of the text, `[rows]`; None: all. prologues: of latents and text.
        """
        attend = functools.partial(self.layout.joint_attention, prologues=prologues)
        return torch_bridge.call_jax(attend, latent, text, text_length)

    def streams_attention(
        self, *streams: Heads, lengths: Sequence[int | torch.Tensor], prologues: Sequence[Prologue]
    ) -> tuple[torch.Tensor, ...]:
        """Return the attention of two padded sequences, and of a text if one follows, each to all valid tokens.

        streams: query, key and value of each, `[rows, tokens, heads, head_dim]`.
        lengths: valid tokens of each, in every row or `[rows]`. prologues: of each.
        """

        def attend(lengths: PyTree, *streams: PyTree) -> tuple[jax.Array, ...]:
            return self.layout.streams_attention(*streams, lengths=lengths, prologues=prologues)

        return torch_bridge.call_jax(attend, tuple(lengths), *streams)

    def products(
        self,
        x: torch.Tensor,
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
        if all(map(weights.is_int8, modules, names)):
            rounded = [*map(weights.get_int8_weight, modules, names)]
            run = functools.partial(
                self.layout.int8_linear, activation=activation, placement=placement, split=split,
                layer=_find_layer(rounded[0]),
            )  # fmt: skip
            yield from torch_bridge.call_jax(run, rounded, x)
            return
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
        """Return `x + gate * product` of `hidden` and `factor`, `[rows, tokens, dim]`, fused for int8 weights.

        x: `[rows, tokens, dim]`. hidden: `[rows, tokens, ins]`. gate: see `add_gated`. placement: of tokens on `sp`.
        """
        module, name = _factor(factor)
        if gate.ndim == 4 or not weights.is_int8(module, name):
            (update,) = self.products(hidden, factor, placement=placement)
            return self.add_gated(x, update, gate)
        rounded = weights.get_int8_weight(module, name)
        run = functools.partial(self.layout.int8_linear, placement=placement, layer=_find_layer(rounded))
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

    def residual_norm(
        self,
        x: torch.Tensor,
        update: torch.Tensor | None,
        gate: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        *,
        eps: float,
        placement: Placement = "sharded",
        spread: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """Return `x + gate * update`, and its layer norm `* scale + shift`, `[rows, tokens, dim]` each, in one pass.

        update: None: the sum is `x`. gate: None: 1. gate, scale, shift: see `TokenLayout.residual_norm`.
        eps: of the norm. placement: of tokens on `sp`.
        spread: whether tokens are spread. The norm is then for `products` only, because it may be `Int8Tokens`.
        """
        fused = functools.partial(self.layout.residual_norm, eps=eps, placement=placement, spread=spread)
        return torch_bridge.call_jax(fused, x, update, gate, scale, shift)

    def add_gated(self, x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return `x + gate * update`, `[rows, tokens, dim]`, computed in float32.

        x, update: `[rows, tokens, dim]`. gate: a vector per row, `[rows, 1, dim]`, or a pair, as in `residual_norm`.
        """
        if gate.ndim < 4:
            by_token = gate.reshape(-1, 1, gate.shape[-1])
        else:
            is_first = torch.arange(x.shape[1], device=x.device)[:, None] < self.layout.frame_tokens
            by_token = torch.where(is_first, gate[:, 0], gate[:, 1])
        return (x.float() + by_token * update.float()).type_as(x)

    # For models whose weights stay split over `tp`: see `token_layout`.

    def halves(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return `x` `[rows, tokens, ...]`, padded, in two parts of equal length."""
        return torch_bridge.call_jax(self.layout.halves, x)

    def spread(self, x: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Return `x` `[rows, tokens, dim]`, padded and sharded by tokens over `tp` too. placement: on `sp`."""
        return torch_bridge.call_jax(functools.partial(self.layout.spread_tokens, placement=placement), x)

    def partial_sums(self, factor: Factor, *parts: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Return the lanes of all `parts` times a weight: one addend per chip of `tp`, `[tp, rows, tokens, dim]`.

        factor: a linear module, whose bias is not added, or a module and the name of a weight `[lanes, dim]`.
        parts: `[rows, tokens, lanes]` each. placement: of tokens on `sp`.
        """
        module, name = _factor(factor)
        is_turned = name != "weight"
        if weights.is_int8(module, name):
            rounded = weights.get_int8_weight(module, name)._replace(bias=None)
            run = functools.partial(
                self.layout.int8_linear, placement=placement, turned=is_turned, split="ins",
                layer=_find_layer(rounded),
            )  # fmt: skip
            return torch_bridge.call_jax(run, [rounded], *parts)[0]
        weight = getattr(module, name)
        run = functools.partial(self.layout.partial_sums, placement=placement)
        return torch_bridge.call_jax(run, weight if is_turned else weight.T, *parts)

    def zero_partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return zero partial sums, `[tp, rows, tokens, dim]`, for tokens like `x` `[rows, tokens, dim]`."""
        return torch_bridge.call_jax(self.layout.zero_partial_sums, x)

    def scatter(self, sums: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Return partial sums `[tp, rows, tokens, dim]` summed over chips and spread, `[rows, tokens, dim]`."""
        return torch_bridge.call_jax(functools.partial(self.layout.scatter, placement=placement), sums)

    def sum_products(self, factor: Factor, *parts: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Return `partial_sums` of `factor` and `parts`, summed over chips and spread, `[rows, tokens, dim]`.

        placement: of tokens on `sp`.
        """
        return self.scatter(self.partial_sums(factor, *parts, placement=placement), placement)


def _find_layer(rounded: Int8Weight) -> jax.Array | None:
    """Return the index of the layer that a weight of all layers is used in; None for a weight of one layer."""
    return layer_index() if rounded.numbers.ndim == 3 else None


def _factor(factor: Factor) -> tuple[torch.nn.Module, str]:
    """Return the module and the name of the weight of a factor."""
    return factor if isinstance(factor, tuple) else (factor, "weight")
