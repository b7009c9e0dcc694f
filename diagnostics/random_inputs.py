"""Random weights and inputs for programs, created on the chips: nothing is read or transferred."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import jax
    import numpy as np

    from ..tpu_runtime.model_spec import ModelSpec
    from ..tpu_runtime.programs.program import Program

# A pytree of arrays, or the description of one array: a `jax.ShapeDtypeStruct` with a sharding.
Tree: TypeAlias = Any
Result = TypeVar("Result")


def tiny_spec(spec: "ModelSpec") -> "ModelSpec":
    """Return the model with its tiny model's sizes."""
    return replace(spec, components=tuple(replace(part, config=part.tiny) for part in spec.components))


def time_runs(
    executable: Callable[..., Result], weights: Tree, make: Callable[[], Tree], runs: int
) -> tuple[Result, list[float]]:
    """Run an executable; return its last result and the seconds of each run, without a first one that is not counted.

    weights: its first argument. make: returns the others, again before each run, because it may overwrite them. runs:
        to count.
    """
    import jax

    result, seconds = jax.block_until_ready(executable(weights, *make())), []
    for _ in range(runs):
        args = jax.block_until_ready(make())
        started = time.perf_counter()
        result = jax.block_until_ready(executable(weights, *args))
        seconds.append(time.perf_counter() - started)
    return result, seconds


def random_arguments(program: "Program") -> tuple[Tree, ...]:
    """Return random arguments of deviation 1; lengths of texts are maximal, other integers are 1."""
    import jax

    from ..tpu_runtime.programs.denoise_step import StepArgs

    args = jax.tree.map(lambda want: random_array(want, 1.0), program.args)
    if isinstance(args, StepArgs):
        lengths = {f"{name}_length": value.shape[1] for name, value in args.inputs.items() if value.ndim == 3}
        inputs = {name: value * lengths.get(name, 1) for name, value in args.inputs.items()}
        args = args._replace(inputs=inputs)
    return tuple(args)


def random_array(want: Tree, deviation: float, seed: int = 0) -> "jax.Array":
    """Return an array as `want` describes it, created where it is placed.

    want: shape, dtype and sharding. deviation: of floating-point values; others are 1. seed: of the generator.
    """
    return _maker(want.shape, want.dtype, want.sharding)(deviation, seed)


@functools.cache
def _maker(
    shape: tuple[int, ...], dtype: "np.dtype", sharding: "jax.sharding.Sharding"
) -> "Callable[[float, int], jax.Array]":
    import jax
    import jax.numpy as jnp

    def make(deviation: "jax.Array", seed: "jax.Array") -> "jax.Array":
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.ones(shape, dtype)
        # XLA's own generator: JAX's default one takes longer than the programs.
        key = jax.random.key(seed, impl="unsafe_rbg")
        return (deviation * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
