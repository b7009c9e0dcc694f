"""What chips of `tp` exchange around products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.attention.policy import AttentionPolicy
from comfyui_tpu.kernels import linear_int8
from comfyui_tpu.kernels.linear_int8 import Int8Weight
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.programs.sharded_linear import quantized_linear
from comfyui_tpu.tpu_runtime.programs.sharded_ops import ShardedOps

DIM, TOKENS = 256, 128


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_norms_that_are_rounded_before_they_are_gathered_are_multiplied_as_others(kernel: bool):
    """By weights whose results are split: bit by bit, and what is gathered is int8 with a number for each token."""
    mesh = make_mesh(jax.devices()[:4], MeshShape(dp=1, sp=1, tp=4))
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.bfloat16)

    tokens, update, vectors = drawn(2, TOKENS, DIM), drawn(2, TOKENS, DIM), [drawn(2, DIM) for _ in range(3)]
    block = linear_int8.rotation_block(DIM, chips=4)
    weight = Int8Weight(*linear_int8.quantize(linear_int8.rotate_weight(drawn(512, DIM), 1, block), (1,)))

    def run(quantize: Any) -> Any:
        policy = AttentionPolicy(kernel="pallas" if kernel else "reference")
        ops = ShardedOps(mesh=mesh, num_tokens=TOKENS, policy=policy, layouts={}, quantize_tokens=quantize)

        def both(tokens: jax.Array, update: jax.Array) -> Any:
            summed, normed = ops.residual_norm(ops.spread(tokens), update, *vectors, eps=1e-6, spread=True)
            products = quantized_linear(mesh, policy, ops.token_spec("sharded"), [weight], normed, split="outs")
            return summed, normed, products

        return jax.jit(both)(tokens, update)

    (summed, normed, products), (plain_sum, plain, wanted) = run(linear_int8.quantize_tokens), run(None)
    assert plain.dtype == jnp.bfloat16 and (normed.numbers.dtype, normed.worth.shape) == (jnp.int8, (2, TOKENS, 1))
    assert normed.numbers.shape == plain.shape and normed.numbers.sharding.is_fully_replicated
    assert np.array_equal(summed, plain_sum) and np.array_equal(products[0], wanted[0])
