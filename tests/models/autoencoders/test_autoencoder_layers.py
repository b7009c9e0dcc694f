"""Layers of autoencoders are torch's, also where a picture's columns are split over chips."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import torch
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import OPERATION
from comfyui_tpu.tpu_runtime.models.common import conv_layers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def split(x: torch.Tensor, chips: int) -> jax.Array:
    mesh = make_mesh(jax.devices()[:chips], MeshShape(sp=chips))
    return jax.device_put(jnp.asarray(x.numpy()), NamedSharding(mesh, P(*[None] * (x.ndim - 1), "sp")))


@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3), (3, 1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("edges", ["zero", "replicate"])
@pytest.mark.parametrize("chips", [1, 8])
def test_convolution_matches_torch(
    kernel: tuple[int, int, int], edges: conv_layers.Edges, chips: int, compare: Callable
):
    torch.manual_seed(0)
    _, rows, columns = kernel
    mode = "constant" if edges == "zero" else "replicate"
    with torch.no_grad():
        conv, x = torch.nn.Conv3d(5, 7, kernel), torch.randn(1, 5, 4, 6, 24)
        wanted = conv(torch.nn.functional.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2, 0, 0), mode))
        weight, bias = (jnp.asarray(value.numpy()) for value in (conv.weight, conv.bias))
    found = jax.jit(conv_layers.convolution, static_argnames="edges")(split(x, chips), weight, bias, edges=edges)
    compare("convolution", found, wanted.numpy(), error=OPERATION)


@pytest.mark.parametrize("shape", [(1, 6, 3, 4, 16), (1, 6, 4, 16)], ids=["video", "picture"])
@pytest.mark.parametrize("chips", [1, 8])
def test_group_norm_matches_torch(shape: tuple[int, ...], chips: int, compare: Callable):
    torch.manual_seed(0)
    x = 3 * torch.randn(shape) + 20 * torch.randn(1, 6, *[1] * (len(shape) - 2))  # means far from zero
    weight, bias = torch.randn(2, 6)
    wanted = torch.nn.functional.group_norm(x, 3, weight, bias, eps=1e-6)
    values = (jnp.asarray(value.numpy()) for value in (weight, bias))
    found = jax.jit(conv_layers.group_norm, static_argnames=("groups", "eps"))(
        split(x, chips), *values, groups=3, eps=1e-6
    )
    compare("group norm", found, wanted.numpy(), error=OPERATION)


@pytest.mark.parametrize("at", [(0, 0), (48, 5)], ids=["the row that sums are relative to", "another"])
def test_group_norm_outlier_pixel_keeps_precision(at: tuple[int, int], compare: Callable):
    torch.manual_seed(0)
    x = torch.randn(1, 6, 96, 128)
    x[..., *at] = 1000.0
    wanted = torch.nn.functional.group_norm(x, 3, eps=1e-6)
    found = conv_layers.group_norm(jnp.asarray(x.numpy()), jnp.ones(6), jnp.zeros(6), groups=3, eps=1e-6)
    compare("group norm", found, wanted.numpy(), error=OPERATION)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("counted", [[False, True, True], [True, False, False]], ids=["not the first", "the first"])
def test_group_moments_ignore_uncounted_frames(poison: float, counted: list[bool], compare: Callable):
    torch.manual_seed(0)
    x, which = torch.randn(1, 6, 3, 4, 16), torch.tensor(counted)
    wanted = conv_layers.group_moments(jnp.asarray(x[:, :, which].numpy()), groups=3, eps=1e-6)
    x[:, :, ~which] = poison
    found = conv_layers.group_moments(jnp.asarray(x.numpy()), jnp.asarray(counted), groups=3, eps=1e-6)
    for one, other in zip(found, wanted, strict=True):
        compare("moments", one, other, error=OPERATION)
