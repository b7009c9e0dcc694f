"""The bridge leaves torch as it was, and mends what it must."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.programs import torch_bridge


def test_call_leaves_torch_state_unchanged():
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch_bridge.call(lambda x: x + 1, jnp.ones(3))
    tensor = torch.ones(2) * 3
    assert type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


def test_call_works_in_inference_mode():
    with torch.inference_mode():
        out = torch_bridge.call(lambda x: torch.nn.functional.silu(x), jnp.ones(3))
        assert torch.is_inference_mode_enabled()
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-1.0)) * np.ones(3), rtol=1e-6)


def test_type_as_casts_a_copy():
    x = jnp.ones(3, jnp.float32)

    def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = x.type_as(x.to(torch.bfloat16))
        assert half.dtype is torch.bfloat16 and x.dtype is torch.float32
        return x, half

    same, half = torch_bridge.call(cast, x)
    assert same.dtype == jnp.float32 and half.dtype == jnp.bfloat16


def test_call_functional_uses_given_weights_only():
    module = torch.nn.Linear(3, 2)
    before = module.weight.detach().clone()
    weights = {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(2)}
    out = torch_bridge.call_functional(module, weights, lambda m, x: m(x), jnp.arange(3.0))
    np.testing.assert_allclose(out, [3.0, 3.0])
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_interpolate_nearest_matches_torch(mode: str):
    image = torch.randn(2, 3, 5, 7)
    wanted = torch.nn.functional.interpolate(image, scale_factor=(2.0, 3.0), mode=mode)
    for given in ({"scale_factor": (2.0, 3.0)}, {"size": (10, 21)}):
        out = torch_bridge.call(
            lambda x, k=given: torch.nn.functional.interpolate(x, mode=mode, **k), jnp.asarray(image)
        )
        np.testing.assert_array_equal(out, wanted)


def test_interpolate_fractional_factor_raises_not_implemented():
    with raises_message(NotImplementedError, "program.upsampling_not_whole", height=5, width=7, target="(8, 7)"):
        torch_bridge.call(lambda x: torch.nn.functional.interpolate(x, size=(8, 7)), jnp.ones((1, 1, 5, 7)))
