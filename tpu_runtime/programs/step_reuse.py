"""Denoising with a step cache: one program that keeps features on the devices, one that starts from them. Features are
DeepCache's, of a model's own, or MagCache's, the residual of all blocks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..model_spec import Denoiser, Forward, MagCache, StepCache, StepReuse
from .denoiser_run import DenoiserRun
from .executables import Executable
from .program import Program

Features = dict[str, jax.Array]
RESIDUAL = "residual"
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def full_steps(policy: StepCache | MagCache | None, experts: Sequence[str]) -> tuple[bool, ...]:
    """For each step, by the expert that runs it, whether it is a full one; all are without a `policy`."""
    return (True,) * len(experts) if policy is None else policy.full_steps(experts)


@dataclass(frozen=True, kw_only=True)
class AroundBlocks(DenoiserRun):
    """Keeps what all blocks together add to the latent tokens in `kept`, or where that is there adds it in their place.
    Other streams, such as the text, are not used after the blocks.
    """

    kept: dict[str, Any]

    def scan(self, blocks: Any, carry: Any, body: Callable[[Any, Any], Any], **how: Any) -> Any:
        tokens, *others = carry if isinstance(carry, tuple) else (carry,)
        if RESIDUAL in self.kept:
            found = (tokens + self.kept[RESIDUAL], *others)
        else:
            ended = super().scan(blocks, carry, body, **how)
            found = ended if isinstance(carry, tuple) else (ended,)
            self.kept[RESIDUAL] = found[0] - tokens
        return found if isinstance(carry, tuple) else found[0]


def of_residual(forward: Forward) -> StepReuse:
    """MagCache of a denoiser that runs one stack of blocks: a step that reuses another runs none of them."""

    def keep(denoiser: Any, run: DenoiserRun, *asked: Any) -> tuple[Any, Any]:
        kept: dict[str, Any] = {}
        return forward(denoiser, AroundBlocks(layout=run.layout, kept=kept), *asked), kept

    def reuse(denoiser: Any, run: DenoiserRun, features: dict[str, Any], *asked: Any) -> Any:
        return forward(denoiser, AroundBlocks(layout=run.layout, kept=features), *asked)

    return StepReuse(keep=keep, reuse=reuse, tokens=(RESIDUAL,))


def of_policy(denoiser: Denoiser, policy: StepCache | MagCache | None) -> StepReuse | None:
    """What steps of a denoiser start from."""
    return of_residual(denoiser.forward) if isinstance(policy, MagCache) else denoiser.step_reuse


def shardings(reuse: StepReuse, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where features stay between steps: rows on `dp`, and what is for each latent token on `sp`."""
    tokens = dict.fromkeys(reuse.tokens, NamedSharding(mesh, P("dp", "sp")))
    return {**tokens, **dict.fromkeys(reuse.whole, NamedSharding(mesh, P("dp")))}


def kept_shapes(reuse: StepReuse, full: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """The features that a program which keeps them returns, placed as it leaves them."""
    _, features = full.results()
    where = shardings(reuse, full.mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name]) for name, x in features.items()}


@dataclass(kw_only=True)
class CachedDenoiser:
    """Stands for the denoiser's program, called once for each step in order; `is_full` says which steps are full.

    Without a program for the others it measures: `ratios` get a row for each step behind the first, a number for each
    branch (see `Curve`).
    """

    full: Executable
    cached: Executable | None
    is_full: Sequence[bool]
    num_tokens: int
    index: int = 0
    kept: Features | None = None
    ratios: list[jax.Array] = field(default_factory=list)

    @property
    def program(self) -> Program:
        return self.full.program

    @property
    def parts(self) -> tuple[Executable, ...]:
        return (*self.full.parts, *(self.cached.parts if self.cached else ()))

    @property
    def workspace_bytes(self) -> int:
        """Features are among the results of the one program and the arguments of the other."""
        return max(part.workspace_bytes for part in (self.full, self.cached) if part)

    def __call__(self, weights: Any, *args: Any) -> Any:
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
    """Of `[rows, tokens, dim]` before and now: the mean over the tokens, without padding, of how their length grew."""

    def ratio(before: jax.Array, now: jax.Array) -> jax.Array:
        old, new = (jnp.linalg.norm(x[:, :num_tokens].astype(jnp.float32), axis=-1) for x in (before, now))
        return (new / (old + 1e-8)).mean(axis=1)

    return jax.jit(ratio, out_shardings=NamedSharding(mesh, P()))


# What is called for a network or a step: one compiled program, or several that take turns.
Runnable = Executable | CachedDenoiser
