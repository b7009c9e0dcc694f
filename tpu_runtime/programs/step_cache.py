"""Denoising with a step cache: one program keeps features on the devices, another starts from them.

Features are those of DeepCache, defined by a model, or those of MagCache: the residual of all blocks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..model_spec import DenoiserSpec, FeatureReuse, Forward, MagCache, StepCache
from .executables import Executable
from .program import Program
from .sharded_ops import ShardedOps

Features = dict[str, jax.Array]
RESIDUAL = "residual"  # name of MagCache's feature
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def full_steps(policy: StepCache | MagCache | None, experts: Sequence[str]) -> tuple[bool, ...]:
    """Return for each step whether it is a full one; all are without a `policy`. experts: the denoiser of each step."""
    return (True,) * len(experts) if policy is None else policy.full_steps(experts)


@dataclass(frozen=True, kw_only=True)
class BlockResidualCapture(ShardedOps):
    """Mesh operations of a denoiser that capture the residual of all blocks, or reuse a captured one.

    Other streams, such as the text, are not used after the blocks.
    """

    # Gets the residual, `[rows, tokens, dim]`; if it has one, that is added instead of running the blocks
    kept: dict[str, torch.Tensor]

    def scan(
        self, blocks: torch.nn.Module, carry: PyTree, body: Callable[[Any, PyTree], PyTree], **options: Any
    ) -> PyTree:
        tokens, *others = carry if isinstance(carry, tuple) else (carry,)
        if RESIDUAL in self.kept:
            result = (tokens + self.kept[RESIDUAL], *others)
        else:
            last = super().scan(blocks, carry, body, **options)
            result = last if isinstance(carry, tuple) else (last,)
            self.kept[RESIDUAL] = result[0] - tokens
        return result if isinstance(carry, tuple) else result[0]


def _capture(run: ShardedOps, kept: dict[str, torch.Tensor]) -> BlockResidualCapture:
    """Return the operations `run` with a place for the residual, `kept`."""
    return BlockResidualCapture(**{field.name: getattr(run, field.name) for field in fields(run)}, kept=kept)


def block_residual_reuse(forward: Forward) -> FeatureReuse:
    """Return MagCache for a denoiser with one stack of blocks: reusing steps run none of them."""

    def keep(
        denoiser: torch.nn.Module, run: ShardedOps, *asked: PyTree
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        kept: dict[str, torch.Tensor] = {}
        return forward(denoiser, _capture(run, kept), *asked), kept

    def reuse(
        denoiser: torch.nn.Module, run: ShardedOps, features: dict[str, torch.Tensor], *asked: PyTree
    ) -> torch.Tensor:
        return forward(denoiser, _capture(run, features), *asked)

    return FeatureReuse(keep=keep, reuse=reuse, tokens=(RESIDUAL,))


def choose_reuse(denoiser: DenoiserSpec, policy: StepCache | MagCache | None) -> FeatureReuse | None:
    """Return how steps of a denoiser keep and reuse features; None without a step cache."""
    return block_residual_reuse(denoiser.forward) if isinstance(policy, MagCache) else denoiser.step_reuse


def feature_shardings(reuse: FeatureReuse, mesh: Mesh) -> dict[str, NamedSharding]:
    """Return the shardings of features between steps: rows on `dp`, and features per latent token on `sp`."""
    tokens = dict.fromkeys(reuse.tokens, NamedSharding(mesh, P("dp", "sp")))
    return {**tokens, **dict.fromkeys(reuse.whole, NamedSharding(mesh, P("dp")))}


def feature_shapes(reuse: FeatureReuse, full: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the features that the program `full` returns, with their shardings."""
    _, features = full.results()
    where = feature_shardings(reuse, full.mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name]) for name, x in features.items()}


@dataclass(kw_only=True)
class CachedDenoiser:
    """Drop-in replacement for the denoiser's program; call it once per step, in order."""

    full: Executable  # keeps features
    cached: Executable | None  # starts from features; None: measure `ratios` instead, with full steps only
    is_full: Sequence[bool]  # for each step
    num_tokens: int  # latent tokens without padding
    index: int = 0  # of the next step
    kept: Features | None = None  # features of the last full step
    ratios: list[jax.Array] = field(
        default_factory=list
    )  # `[branches]` for each step after the first (see `MagCacheCurve`)

    @property
    def program(self) -> Program:
        return self.full.program

    @property
    def parts(self) -> tuple[Executable, ...]:
        return (*self.full.parts, *(self.cached.parts if self.cached else ()))

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes on one chip while it runs.

        Features are results of one program and arguments of the other.
        """
        return max(part.workspace_bytes for part in (self.full, self.cached) if part)

    def __call__(self, weights: dict[str, jax.Array], *args: PyTree) -> PyTree:
        if self.cached is None:
            before = self.kept
            state, now = self.full(weights, *args)
            if before is not None:
                self.ratios.append(_ratio(self.program.mesh, self.num_tokens)(before[RESIDUAL], now[RESIDUAL]))
            self.kept = now
        elif self.is_full[self.index]:
            self.kept = None  # its memory is free before the step needs the same again
            state, self.kept = self.full(weights, *args)
        else:
            state = self.cached(weights, *args[:-1], self.kept)
        self.index += 1
        if self.index == len(self.is_full):
            self.kept = None
        return state


@functools.cache
def _ratio(mesh: Mesh, num_tokens: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a program of features `[rows, tokens, dim]` before and now: the mean ratio of token norms, `[rows]`."""

    def ratio(before: jax.Array, now: jax.Array) -> jax.Array:
        old, new = (jnp.linalg.norm(x[:, :num_tokens].astype(jnp.float32), axis=-1) for x in (before, now))
        return (new / (old + 1e-8)).mean(axis=1)

    return jax.jit(ratio, out_shardings=NamedSharding(mesh, P()))


# A compiled program, or several that alternate.
Runnable = Executable | CachedDenoiser
