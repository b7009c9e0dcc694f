"""Programs on random weights and inputs, made where they are placed: nothing is read, nothing crosses the host."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from ..tpu_runtime.pipeline import ModelSpec, Program


def miniature(spec: "ModelSpec") -> "ModelSpec":
    """The model at its miniature's sizes."""
    return replace(spec, components=tuple(replace(part, config=part.tiny) for part in spec.components))


def timed(executable: Any, weights: Any, make: Callable[[], Any], runs: int) -> tuple[Any, list[float]]:
    """The last result, and the seconds of each run, after one that does not count. What a run may overwrite is created
    again before it.
    """
    import jax

    result, seconds = None, []
    for _ in range(1 + runs):
        args = jax.block_until_ready(make())
        started = time.perf_counter()
        result = jax.block_until_ready(executable(weights, *args))
        seconds.append(time.perf_counter() - started)
    return result, seconds[1:]


def arguments(program: "Program") -> tuple[Any, ...]:
    """Random numbers of deviation 1; lengths of texts are the longest; other integers are 1."""
    import jax

    from ..tpu_runtime.pipeline import StepArgs

    args = jax.tree.map(lambda want: random(want, 1.0), program.args)
    if isinstance(args, StepArgs):
        lengths = {f"{name}_length": value.shape[1] for name, value in args.inputs.items() if value.ndim == 3}
        inputs = {name: value * lengths.get(name, 1) for name, value in args.inputs.items()}
        args = args._replace(inputs=inputs)
    return tuple(args)


def random(want: Any, deviation: float, seed: int = 0) -> "jax.Array":
    """An array as `want` describes it, made where it is placed."""
    return _maker(want.shape, want.dtype, want.sharding)(deviation, seed)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def make(deviation: Any, seed: Any) -> Any:
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.ones(shape, dtype)
        # XLA's own generator: the usual one takes longer than the programs.
        key = jax.random.key(seed, impl="unsafe_rbg")
        return (deviation * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
