"""The residual sum and the norm after it as one, against torch."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.kernels.residual_norm import residual_norm
from comfyui_tpu.tests.support.closeness import OPERATION, ROUNDING

EPS = 1e-5


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(shape).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize(("update", "gate"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("rows", [1, 2], ids=["one modulation", "one for each row"])
def test_residual_norm_matches_torch(update: bool, gate: bool, rows: int, kernel: bool, compare: Callable):
    x, scale, shift = random_tensor(2, 139, 384) + 3, random_tensor(rows, 384), random_tensor(rows, 384) / 2
    added = random_tensor(2, 139, 384) * 2 if update else None
    gates = random_tensor(rows, 384) / 3 if gate else None
    expected = x if added is None else x + added * (1 if gates is None else gates[:, None])
    normed = torch.nn.functional.layer_norm(expected, (384,), eps=EPS) * scale[:, None] + shift[:, None]
    arrays = [None if v is None else jnp.asarray(v.numpy()) for v in (x, added, gates, scale, shift)]
    ours = residual_norm(*arrays, eps=EPS, kernel=kernel, interpret=True)
    compare("sum", np.asarray(ours[0]), expected.numpy(), error=OPERATION)
    compare("norm", np.asarray(ours[1]), normed.numpy(), error=OPERATION)


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("num_leading", [-5, 130, 139])
def test_residual_norm_leading_tokens_use_own_vectors(num_leading: int, kernel: bool, compare: Callable):
    x, added, gates, scale = (
        random_tensor(2, 139, 384),
        random_tensor(2, 139, 384),
        random_tensor(2, 2, 384),
        random_tensor(1, 384),
    )
    shift = random_tensor(2, 2, 384) / 2
    arrays = [jnp.asarray(v.numpy()) for v in (x, added, gates, scale, shift)]
    ours = residual_norm(*arrays, eps=EPS, kernel=kernel, interpret=True, num_leading=jnp.array(num_leading))
    for at, (first, last) in enumerate([(0, max(num_leading, 0)), (max(num_leading, 0), 139)]):
        gate, moved, one = gates[:, at, None], shift[:, at, None], slice(first, last)
        expected = x[:, one] + added[:, one] * gate
        normed = torch.nn.functional.layer_norm(expected, (384,), eps=EPS) * scale + moved
        if first < last:
            compare("sum", np.asarray(ours[0])[:, one], expected.numpy(), error=OPERATION)
            compare("norm", np.asarray(ours[1])[:, one], normed.numpy(), error=OPERATION)


def test_residual_norm_large_mean_keeps_precision(compare: Callable):
    """Two passes: a mean of squares less a squared mean would leave nothing of a deviation of 0.1 at 1000."""
    x = random_tensor(1, 130, 256) / 10 + 1000
    normed = torch.nn.functional.layer_norm(x, (256,), eps=EPS).numpy()
    one, zero = jnp.ones((1, 256)), jnp.zeros((1, 256))
    ours = residual_norm(jnp.asarray(x.numpy()), None, None, one, zero, eps=EPS, kernel=True, interpret=True)[1]
    # What is left after the mean is taken away is a ten-thousandth of it, so its rounding counts ten thousand times.
    compare("norm", ours, normed, error=4 * 1e4 * ROUNDING)


def test_residual_norm_bfloat16_rounds_only_results():
    x, update, gate = (random_tensor(1, 64, 256).bfloat16().float() for _ in range(3))
    gate = gate[0, :1]
    arrays = [jnp.asarray(v.numpy(), jnp.bfloat16) for v in (x, update)]
    ours, _ = residual_norm(
        *arrays, jnp.asarray(gate.numpy()), jnp.ones((1, 256)), jnp.zeros((1, 256)),
        eps=EPS, kernel=True, interpret=True,
    )  # fmt: skip
    expected = (x + update * gate).bfloat16().float().numpy()
    np.testing.assert_array_equal(np.asarray(ours, np.float32), expected)
