"""What the mesh adds to a denoiser's forward, for its torch code: placed tokens, attention over them, one scan."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import torch

from ...attention.api import Placement
from ...attention.prologue import NO_PROLOGUE, Prologue
from ...kernels.linear_int8 import Activation, Residual, Rounded
from . import torch_bridge, weights
from .modules import LAYER, ScannedBlocks, layer_index, scan_layers
from .token_layout import TokenLayout

Heads = Sequence[torch.Tensor]  # query, key and value
# What tokens are multiplied by, in int8 where its weight is: a linear module, or a module and the name of a weight.
Factor = Any


@dataclass(frozen=True, kw_only=True)
class DenoiserRun:
    """A denoiser's forward on the mesh. Tensors are torch views of arrays being traced, with a row for each branch.

    Between `tokens` and `unpadded` a sequence has padding, at its end or in tiles, which attention masks exactly: all
    else there works token by token. Queries, keys and values are `[rows, tokens, heads, head_dim]`, and so is what
    comes of them; a prologue is what queries and keys go through before (see `layers.prologue`).

    `layout` does the same for JAX arrays; `torch_bridge.call_jax(run.layout.name, ...)` calls what is not here.
    """

    layout: TokenLayout

    def where(self, is_sparse: jax.Array) -> "DenoiserRun":
        """This run of a step that `is_sparse`, or is not, where tokens are in tiles."""
        return replace(self, layout=replace(self.layout, is_sparse=is_sparse)) if self.layout.tiles else self

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, ...]`, padded, and sharded by tokens. One row stands for all, as in rotary tables."""
        return torch_bridge.call_jax(self.layout.placed, x)

    def replicated(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, ...]`, on every chip of a branch: a text, or a vector whose weights are sharded."""
        return torch_bridge.call_jax(lambda x: self.layout.constrain(x, "dp", *[None] * (x.ndim - 1)), x)

    def vector(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, dim]`, a product of one vector for each row and weights sharded over all chips along `dim`: each
        chip computes its part of all rows, and then every chip has them.
        """

        def gathered(x: jax.Array) -> jax.Array:
            mesh = self.layout.mesh
            parts = mesh.axis_names if x.shape[1] % mesh.size == 0 else None
            return self.layout.constrain(self.layout.constrain(x, None, parts), None, None)

        return torch_bridge.call_jax(gathered, x)

    def unpadded(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, ...]` without the padding of `tokens`, but that of tiles, which `untiled` takes away."""
        return torch_bridge.call_jax(self.layout.unpadded, x)

    def untiled(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, lanes]` of few lanes, out of their tiles where they are in any."""
        return torch_bridge.call_jax(self.layout.untiled, x)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, ...]` with the padding of `spread`."""
        return torch_bridge.call_jax(self.layout.pad_tokens, x)

    def of_length(self, num_tokens: int) -> "DenoiserRun":
        """This run for a sequence of another length, such as that of latents and text together."""
        return replace(self, layout=replace(self.layout, num_tokens=num_tokens))

    def scan(
        self,
        blocks: Any,
        carry: Any,
        body: Callable[[Any, Any], Any],
        *,
        layers: slice | None = None,
        merged: tuple[str, ...] = (),
    ) -> Any:
        """`carry = body(block, carry)` for each of `blocks` in turn, traced once; `layers` are some of them.

        `blocks` is a list of the component's `blocks`; `block` is upstream's module with one layer's weights, gathered
        for use. `carry` is a tree of tensors that keep shape and format; what is the same for all layers `body` closes
        over. The groups of the `merged` weights become one dimension (see `TokenLayout.merge_groups`).
        """
        assert isinstance(blocks, ScannedBlocks)

        def stack(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            prefix, worths = f"{blocks.path}.{LAYER}.", [name + weights.WORTH for name in merged]
            names = [*merged, *(name for name in worths if name in given and given[name].ndim > 2)]
            return given | {name: self.layout.merge_groups(prefix + name, given[name]) for name in names}

        whole_stack = layers is None and self.layout.tiles is None  # with tiles attention asks for a layer's number
        part = None if whole_stack else range(blocks.num_layers)[layers or slice(None)]
        use = functools.partial(self.layout.use_in_block, blocks.path)
        whole = functools.partial(self.layout.stays_whole, blocks.path)
        return scan_layers(blocks, carry, body, part, stack=stack, use=use, whole=whole)[0]

    def self_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prologue: Prologue = NO_PROLOGUE,
        length: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sharded tokens attending to each other, of each row to its first `length` `[rows]`, by default to all."""
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
        """Sharded tokens attending to the first `text_length` `[rows]` of a replicated text, by default to all."""
        attend = functools.partial(self.layout.cross_attention, prologue=prologue)
        return torch_bridge.call_jax(attend, q, k, v, text_length)

    def joint_attention(
        self,
        latent: Heads,
        text: Heads,
        text_length: torch.Tensor | None = None,
        prologues: tuple[Prologue, Prologue] = (NO_PROLOGUE, NO_PROLOGUE),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sharded tokens and a replicated text, each attending to all real tokens of both."""
        attend = functools.partial(self.layout.joint_attention, prologues=prologues)
        return torch_bridge.call_jax(attend, latent, text, text_length)

    def streams_attention(
        self, *streams: Heads, lengths: Sequence[int | torch.Tensor], prologues: Sequence[Prologue]
    ) -> tuple[torch.Tensor, ...]:
        """Two padded sequences, and a replicated text if one follows, each attending to the first `lengths` of all, of
        every row or `[rows]`.
        """

        def attend(lengths: Any, *streams: Any) -> tuple[jax.Array, ...]:
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
        """What each of `factors` makes of `[rows, tokens, dim]`. With "gelu" each result is activated; with "silu" the
        first is, and multiplies the second. `split`: the weights' results are split over `tp`.
        """
        modules, names = zip(*map(_factor, factors), strict=True)
        if all(map(weights.is_rounded, modules, names)):
            rounded = [*map(weights.rounded_of, modules, names)]
            run = functools.partial(
                self.layout.int8_products, activation=activation, placement=placement, split=split,
                layer=_layer_of(rounded[0]),
            )  # fmt: skip
            yield from torch_bridge.call_jax(run, rounded, x)
            return
        functional = torch.nn.functional
        found = (
            functional.linear(x, getattr(module, name), weights.bias_of(module, name))
            for module, name in zip(modules, names, strict=True)
        )
        if activation == "silu":
            first, second = functional.silu(next(found)), next(found)
            yield first * second
            return
        for each in found:
            yield functional.gelu(each, approximate="tanh") if activation else each

    def add_product(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor,
        factor: Factor,
        gate: torch.Tensor,
        placement: Placement = "sharded",
    ) -> torch.Tensor:
        """`x + gate * product` of `hidden` and `factor`: as `add_gated`, where weights are in int8 in one pass."""
        module, name = _factor(factor)
        if gate.ndim == 4 or not weights.is_rounded(module, name):
            (update,) = self.products(hidden, factor, placement=placement)
            return self.add_gated(x, update, gate)
        rounded = weights.rounded_of(module, name)
        run = functools.partial(self.layout.int8_products, placement=placement, layer=_layer_of(rounded))
        onto = Residual(x, gate.flatten(end_dim=-2))
        return torch_bridge.call_jax(lambda *given: run(*given[:2], onto=given[2]), [rounded], hidden, onto)[0]

    def add_feed_forward(
        self, x: torch.Tensor, ff: Any, normed: torch.Tensor, gate: torch.Tensor, placement: Placement = "sharded"
    ) -> torch.Tensor:
        """`x + gate * ff(normed)`, of diffusers' `FeedForward` with its GELU by tanh."""
        (hidden,) = self.products(normed, ff.net[0].proj, activation="gelu", placement=placement)
        return self.add_product(x, hidden, ff.net[2], gate, placement)

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
        """`x + gate * update`, and its layer norm `* scale + shift`, in one pass: see `TokenLayout.residual_norm`. Of
        `spread` tokens the norm is for `products` alone, for it may be `RoundedTokens`.
        """
        fused = functools.partial(self.layout.residual_norm, eps=eps, placement=placement, spread=spread)
        return torch_bridge.call_jax(fused, x, update, gate, scale, shift)

    def add_gated(self, x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x + gate * update` in float32. The gate is a vector of each row, or a pair, as in `residual_norm`."""
        if gate.ndim < 4:
            by_token = gate.reshape(-1, 1, gate.shape[-1])
        else:
            is_first = torch.arange(x.shape[1], device=x.device)[:, None] < self.layout.frame_tokens
            by_token = torch.where(is_first, gate[:, 0], gate[:, 1])
        return (x.float() + by_token * update.float()).type_as(x)

    # Of models whose weights stay split over `tp`: see `token_layout`.

    def halves(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`[rows, tokens, ...]`, padded, in two parts of equal length."""
        return torch_bridge.call_jax(self.layout.halves, x)

    def spread(self, x: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """`[rows, tokens, dim]`, padded: each chip of `tp` has some of the tokens."""
        return torch_bridge.call_jax(functools.partial(self.layout.spread_tokens, placement=placement), x)

    def partial_sums(self, factor: Factor, *parts: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """The lanes of all `parts` times a weight: of each chip its sums, `[tp, rows, tokens, dim]`. The weight is a
        linear module's, without its bias, or a named one, `[lanes, dim]`.
        """
        module, name = _factor(factor)
        is_turned = name != "weight"
        if weights.is_rounded(module, name):
            rounded = weights.rounded_of(module, name)._replace(bias=None)
            run = functools.partial(
                self.layout.int8_products, placement=placement, turned=is_turned, split="ins",
                layer=_layer_of(rounded),
            )  # fmt: skip
            return torch_bridge.call_jax(run, [rounded], *parts)[0]
        weight = getattr(module, name)
        run = functools.partial(self.layout.partial_sums, placement=placement)
        return torch_bridge.call_jax(run, weight if is_turned else weight.T, *parts)

    def no_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums of nothing, for tokens like `x`."""
        return torch_bridge.call_jax(self.layout.no_sums, x)

    def scatter(self, sums: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """Partial sums, summed over chips and spread."""
        return torch_bridge.call_jax(functools.partial(self.layout.scatter, placement=placement), sums)

    def summed(self, factor: Factor, *parts: torch.Tensor, placement: Placement = "sharded") -> torch.Tensor:
        """As `partial_sums`, summed over chips and spread."""
        return self.scatter(self.partial_sums(factor, *parts, placement=placement), placement)


def _layer_of(rounded: Rounded) -> jax.Array | None:
    """Which of all layers a weight is used in; None of one layer's."""
    return layer_index() if rounded.numbers.ndim == 3 else None


def _factor(factor: Factor) -> tuple[Any, str]:
    return factor if isinstance(factor, tuple) else (factor, "weight")
