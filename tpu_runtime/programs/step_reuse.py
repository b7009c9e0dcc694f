"""Denoising with a step cache: one program that keeps features on the devices, one that starts from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..spec import ModelSpec, StepReuse
from . import torch_bridge
from .program import Program
from .token_layout import TokenLayout as Tokens

Features = dict[str, jax.Array]
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def shardings(reuse: StepReuse, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where features stay between steps: rows on `dp`, and what is for each latent token on `sp`."""
    tokens = dict.fromkeys(reuse.tokens, NamedSharding(mesh, P("dp", "sp")))
    return {**tokens, **dict.fromkeys(reuse.whole, NamedSharding(mesh, P("dp")))}


def predictor(
    spec: ModelSpec, tokens: Tokens, kept: Features | None = None, *, keeps: bool
) -> Callable[..., tuple[Any, Any]]:
    """`spec.forward`, or a call that `keeps` features or starts from `kept`. All give `(prediction, features)`."""
    reuse = spec.step_reuse

    def plain(denoiser: Any, *args: Any) -> tuple[Any, Any]:
        return spec.forward(denoiser, *args), ()

    def keep(denoiser: Any, *args: Any) -> tuple[Any, Any]:
        output, features = reuse.keep(denoiser, *args)
        placed = {name: torch_bridge.call_jax(tokens.shard_tokens, features[name]) for name in reuse.tokens}
        return output, {**features, **placed}

    def start_from_kept(denoiser: Any, *args: Any) -> tuple[Any, Any]:
        cut = {name: kept[name][:, : tokens.num_tokens] for name in reuse.tokens}
        return reuse.reuse(denoiser, torch_bridge.to_torch({**kept, **cut}), *args), ()

    if reuse is None or not (keeps or kept):
        return plain
    return keep if keeps else start_from_kept


def kept_shapes(reuse: StepReuse, full: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """The features that a program which keeps them gives, placed as it leaves them."""
    _, features = jax.eval_shape(full.fn, *full.args)
    where = shardings(reuse, full.mesh)
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[name]) for name, x in features.items()}


class Runnable(Protocol):
    """A compiled program (see `executables.Executable`)."""

    @property
    def program(self) -> Program: ...

    @property
    def parts(self) -> "tuple[Runnable, ...]": ...

    @property
    def workspace_bytes(self) -> int: ...

    def __call__(self, weights: Any, *args: Any) -> Any: ...


@dataclass(kw_only=True)
class CachedDenoiser:
    """Stands for the denoiser's program, called once for each step in order; `is_full` says which steps are full."""

    full: Runnable
    cached: Runnable
    is_full: Sequence[bool]
    index: int = 0
    kept: Features | None = None

    @property
    def program(self) -> Program:
        return self.full.program

    @property
    def parts(self) -> tuple[Runnable, ...]:
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
            state = self.cached(weights, *args, self.kept)
        self.index += 1
        return state
