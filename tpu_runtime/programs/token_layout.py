"""How a denoiser's tokens lie on the mesh: padding, sharding, attention over them, weights gathered per block."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from ...attention import residual_norm
from ...attention.api import attention, joint_attention
from ...attention.policy import AttentionPolicy
from ...attention.prologue import NO_PROLOGUE, Prologue
from ...sharding.rules import Layout
from .modules import LAYER, Scan, Values

ROWS = 16  # of a register of bfloat16


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """`num_tokens` latent tokens, on the axis `sp` of `mesh`; padding goes last and is masked exactly."""

    mesh: Mesh
    num_tokens: int
    policy: AttentionPolicy
    layouts: Mapping[str, Layout]

    def constrain(self, x: Array, *axes: str | tuple[str, ...] | None) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))

    def pad_tokens(self, x: Array) -> Array:
        """`[batch, tokens, ...]` with zeros after the last token, so that every chip has whole rows of registers.

        Then what chips exchange joins without being moved.
        """
        chips = self.mesh.shape["sp"]
        padding = -x.shape[1] % (chips * ROWS) if chips > 1 else 0
        widths = [(0, padding) if axis == 1 else (0, 0) for axis in range(x.ndim)]
        return jnp.pad(x, widths) if padding else x

    def shard_tokens(self, hidden: Float[Array, "batch tokens dim"]) -> Float[Array, "batch padded dim"]:
        return self.constrain(self.pad_tokens(hidden), "dp", "sp", None)

    def self_attention(
        self, q: Array, k: Array, v: Array, num_tokens: int | None = None, *, prologue: Prologue = NO_PROLOGUE
    ) -> Array:
        """One padded sequence of `num_tokens` real tokens (the latent tokens by default) attending to itself."""
        length = self.num_tokens if num_tokens is None else num_tokens
        return attention(
            q, k, v, kv_length=length, mesh=self.mesh, keys="sharded", prologue=prologue, policy=self.policy
        )

    def cross_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        text_length: Int[Array, " batch"] | None = None,
        *,
        prologue: Prologue = NO_PROLOGUE,
    ) -> Array:
        """Latent tokens attending to a text that is whole on every chip, to all of it by default."""
        return attention(
            q, k, v, kv_length=text_length, mesh=self.mesh, keys="whole", prologue=prologue, policy=self.policy
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
        return joint_attention(
            latent, text, num_tokens=self.num_tokens, text_length=text_length, mesh=self.mesh,
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
        lies: Literal["sharded", "whole"] = "sharded",
    ) -> tuple[Array, Array]:
        """`hidden + gate * update`, and its layer norm `* scale + shift`: see `residual_norm`. Vectors `[..., dim]`, of
        every row or of all; tokens lie on `sp` or are whole on every chip.
        """
        platform = self.mesh.devices.flat[0].platform
        run = functools.partial(
            residual_norm.residual_norm, eps=eps, kernel=self.policy.takes_kernel(platform), interpret=platform != "tpu"
        )
        gate, scale, shift = jax.tree.map(lambda v: v.reshape(-1, v.shape[-1]), (gate, scale, shift))
        tokens = P("dp", "sp" if lies == "sharded" else None, None)
        args = (hidden, update), (gate, scale, shift)
        specs = (
            jax.tree.map(lambda _: tokens, args[0]),
            jax.tree.map(lambda v: P("dp" if len(v) > 1 else None, None), args[1]),
        )

        def fused(arrays: tuple, vectors: tuple) -> tuple[Array, Array]:
            return run(*arrays, *vectors)

        mapped = jax.shard_map(fused, mesh=self.mesh, in_specs=specs, out_specs=(tokens, tokens), check_vma=False)
        return mapped(*args)

    def use_in_block(self, path: str, weights: dict[str, Array]) -> dict[str, Array]:
        """One layer's weights, gathered where they are only split at rest."""
        prefix = f"{path}.{LAYER}."
        return {name: self.constrain(x, *self.layouts[prefix + name].in_use[1:]) for name, x in weights.items()}

    def use_outside_blocks(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """All weights, those outside scanned blocks gathered for use."""
        return {
            name: x if f".{LAYER}." in name else self.constrain(x, *self.layouts[name].in_use)
            for name, x in weights.items()
        }

    def scan(self, path: str, enter: Callable[[Values], Values], carried: tuple[str, ...] = ("hidden_states",)) -> Scan:
        """The surroundings of the blocks at `path`: tokens are padded by `enter` and cut on the way out."""

        def leave(after: Values, before: Values) -> Values:
            return {name: hidden[:, : before[name].shape[1]] for name, hidden in after.items()}

        return Scan(carried=carried, enter=enter, leave=leave, use=functools.partial(self.use_in_block, path))
