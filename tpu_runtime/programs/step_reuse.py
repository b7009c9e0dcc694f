"""Denoising with a step cache: one program that keeps features on the devices, one that starts from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..model_spec import StepCache, StepReuse
from .executables import Executable
from .program import TRACING, Program

Features = dict[str, jax.Array]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def full_steps(policy: StepCache | None, experts: Sequence[str]) -> tuple[bool, ...]:
    """For each step, by the expert that runs it, whether it is a full one; all are without a `policy`.

    The features of one expert mean nothing to another: its first step is full.
    """
    return tuple(
        policy is None or policy.is_full(index) or index == 0 or expert != experts[index - 1]
        for index, expert in enumerate(experts)
    )


def shardings(reuse: StepReuse, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where features stay between steps: rows on `dp`, and what is for each latent token on `sp`."""
    tokens = dict.fromkeys(reuse.tokens, NamedSharding(mesh, P("dp", "sp")))
    return {**tokens, **dict.fromkeys(reuse.whole, NamedSharding(mesh, P("dp")))}


def kept_shapes(reuse: StepReuse, full: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """The features that a program which keeps them returns, placed as it leaves them."""
    with TRACING:
        _, features = jax.eval_shape(full.fn, *full.arguments)
    where = shardings(reuse, full.mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name]) for name, x in features.items()}


@dataclass(kw_only=True)
class CachedDenoiser:
    """Stands for the denoiser's program, called once for each step in order; `is_full` says which steps are full."""

    full: Executable
    cached: Executable
    is_full: Sequence[bool]
    index: int = 0
    kept: Features | None = None

    @property
    def program(self) -> Program:
        return self.full.program

    @property
    def parts(self) -> tuple[Executable, ...]:
        return (*self.full.parts, *self.cached.parts)

    @property
    def workspace_bytes(self) -> int:
        """Features are among the results of the one program and the arguments of the other."""
        return max(self.full.workspace_bytes, self.cached.workspace_bytes)

    def __call__(self, weights: Any, *args: Any) -> Any:
        if self.is_full[self.index]:
            self.kept = None  # its memory is free before the step needs the same again
            state, self.kept = self.full(weights, *args)
        else:
            state = self.cached(weights, *args[:-1], self.kept)
        self.index += 1
        return state


# What is called for a network or a step: one compiled program, or several that take turns.
Runnable = Executable | CachedDenoiser
