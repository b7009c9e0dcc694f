"""The convolution kernel, in interpret mode, is torch's convolution, also where a picture is split over chips."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.kernels import convolution, dispatch, hardware, registry
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import OPERATION
from comfyui_tpu.tests.support.patience import mostly
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.models.common import conv_layers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.slow

FRAMES, ROWS, INS = 4, 8, 5
ONE, EIGHT = MeshShape(), MeshShape(dp=4, sp=2)


def run_kernel(conv: torch.nn.Conv3d, x: torch.Tensor, shape: MeshShape, dtype: jnp.dtype, **how: object) -> np.ndarray:
    mesh = make_mesh(jax.devices()[: shape.dp * shape.sp], shape)
    placed = NamedSharding(mesh, P(None, None, None, "dp", "sp"))
    past_at = how.get("past_at")
    given = [x] if past_at is None else [torch.cat([x[:, :, :past_at], x[:, :, past_at + 2 :]], dim=2), x]
    video, *rest = (jax.device_put(jnp.asarray(each.numpy(), dtype), placed) for each in given)
    past = tuple(rest[0][:, :, at : at + 1] for at in (past_at, past_at + 1)) if rest else ()
    weight, bias = (jnp.asarray(value.detach().numpy(), dtype) for value in (conv.weight, conv.bias))
    with jax.set_mesh(mesh):
        run = jax.jit(lambda *arrays: convolution.convolution(*arrays[:3], past=arrays[3], interpret=True, **how))
        return np.asarray(run(video, weight, bias, past), np.float32)


def torch_convolution(conv: torch.nn.Conv3d, x: torch.Tensor, edges: conv_layers.Edges) -> np.ndarray:
    _, rows, columns = conv.kernel_size
    mode = "constant" if edges == "zero" else "replicate"
    with torch.no_grad():
        return conv(torch.nn.functional.pad(x, (columns // 2, columns // 2, rows // 2, rows // 2, 0, 0), mode)).numpy()


def random_convolution(kernel: tuple[int, int, int], outs: int, width: int) -> tuple[torch.nn.Conv3d, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Conv3d(INS, outs, kernel), torch.randn(1, INS, FRAMES, ROWS, width)


# A chip's columns: whole registers and a rest, less than one, or nothing but whole ones. Three channels go into the
# lanes of one register with their columns, 50 do not, 300 are blocks of their own.
@pytest.mark.parametrize(
    ("kernel", "outs", "width"), [((3, 3, 3), 50, 60), ((1, 3, 3), 3, 24), ((3, 1, 1), 300, 64)], ids=str
)
@pytest.mark.parametrize("edges", ["zero", "replicate"])
@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=["1 chip", "8 chips"])
def test_convolution_kernel_matches_torch(
    kernel: tuple[int, int, int], outs: int, width: int, edges: conv_layers.Edges, shape: MeshShape, compare: Callable
):
    conv, x = random_convolution(kernel, outs, width)
    found = run_kernel(conv, x, shape, jnp.float32, repeats=edges == "replicate")
    compare("convolution", found, torch_convolution(conv, x, edges), error=OPERATION)


@pytest.mark.parametrize("past_at", [0, 1])
@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=["1 chip", "8 chips"])
def test_convolution_kernel_past_frames_match_torch(past_at: int, shape: MeshShape, compare: Callable):
    conv, x = random_convolution((3, 3, 3), 7, 40)
    found = run_kernel(conv, x, shape, jnp.float32, repeats=False, past_at=past_at)
    compare("convolution", found, torch_convolution(conv, x, "zero"), error=OPERATION)


# Of a picture's three channels the columns are lanes of the result. Pixels of zeros, as edges are, stay zeros.
@pytest.mark.parametrize(
    ("is_shifted", "shape", "edges", "outs"),
    mostly(
        itertools.product([False, True], [ONE, EIGHT], ["zero", "replicate"], [7, 3, 300]),
        (False, ONE, "zero", 7), (False, EIGHT, "replicate", 7), (True, ONE, "replicate", 7), (True, EIGHT, "zero", 7),
        (False, EIGHT, "zero", 3), (True, ONE, "replicate", 3),
        (False, ONE, "replicate", 300), (True, EIGHT, "zero", 300),
    ),
    ids=str,
)  # fmt: skip
def test_convolution_kernel_fused_norm_and_add_match_torch(
    is_shifted: bool, shape: MeshShape, edges: conv_layers.Edges, outs: int, compare: Callable
):
    """By a norm of each pixel, or by a factor and a shift, which would make something of zeros beyond edges."""
    conv, x = random_convolution((3, 3, 3), outs, 40)
    x[..., 5] = 0.0
    x[:, :, :, 2] *= 1e-20
    gain, onto = torch.randn(INS), torch.randn(1, outs, FRAMES - 2, ROWS, 40)
    arrays = {"gain": jnp.asarray(gain.numpy()), "onto": jnp.asarray(onto.numpy())}
    normed = torch.nn.functional.normalize(x, dim=1) * gain[:, None, None, None]
    if is_shifted:
        shift = torch.randn(INS) + 2
        arrays["shift"] = jnp.asarray(shift.numpy())
        normed = x * gain[:, None, None, None] + shift[:, None, None, None]
    found = run_kernel(conv, x, shape, jnp.float32, repeats=edges == "replicate", past_at=0, **arrays)
    expected = torch_convolution(conv, torch.nn.functional.silu(normed), edges) + onto.numpy()
    compare("kernel", found, expected, error=OPERATION)
    weight, bias = (jnp.asarray(value.detach().numpy()) for value in (conv.weight, conv.bias))
    compare(
        "XLA's",
        conv_layers.convolution(jnp.asarray(x.numpy()), weight, bias, edges=edges, **arrays),
        expected,
        error=OPERATION,
    )


@pytest.mark.parametrize(
    ("shape", "kernel", "dtype"),
    mostly(
        itertools.product([ONE, EIGHT], [(1, 3, 3), (3, 1, 1)], [jnp.float32, jnp.bfloat16]),
        (ONE, (1, 3, 3), jnp.float32), (ONE, (3, 1, 1), jnp.bfloat16),
        (EIGHT, (1, 3, 3), jnp.bfloat16), (EIGHT, (3, 1, 1), jnp.float32),
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)  # fmt: skip
def test_convolution_kernel_doubled_pixels_match_torch(
    shape: MeshShape, kernel: tuple[int, int, int], dtype: jnp.dtype, compare: Callable
):
    conv, x = random_convolution(kernel, 7, 40)
    with torch.no_grad():
        x = x.bfloat16().float()
        conv.weight.copy_(conv.weight.bfloat16())
    found = run_kernel(conv, x, shape, dtype, repeats=False, doubled=True)
    large = x.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)
    compare(
        "convolution",
        found,
        torch_convolution(conv, large, "zero"),
        error=OPERATION if dtype == jnp.float32 else 1.2e-2,
    )


@pytest.mark.parametrize("shape", [ONE, EIGHT], ids=["1 chip", "8 chips"])
def test_convolution_kernel_halved_matches_torch_stride(shape: MeshShape, compare: Callable):
    conv, x = random_convolution((1, 3, 3), 7, 40)
    padded = torch.nn.functional.pad(x, (0, 1, 0, 1))
    strided = torch.nn.functional.conv3d(padded, conv.weight, conv.bias, stride=(1, 2, 2)).detach().numpy()
    compare("kernel", run_kernel(conv, x, shape, jnp.float32, repeats=False, halved=True), strided, error=OPERATION)
    weight, bias = (jnp.asarray(value.detach().numpy()) for value in (conv.weight, conv.bias))
    compare(
        "XLA's", conv_layers.convolution(jnp.asarray(x.numpy()), weight, bias, halved=True), strided, error=OPERATION
    )


def test_check_support_without_tpu_refuses_kernel():
    assert convolution.check_support(jnp.zeros((4, 4, 3, 3, 3))).reasons == (dispatch.NO_TPU,)


@pytest.mark.parametrize(
    ("mib", "channels", "lanes"),
    [(128, 1024, 256), (128, 384, 384), (128, 2048, 128), (64, 512, 256), (64, 1024, 128), (64, 2048, None)],
)
def test_convolution_weight_block_leaves_half_of_vmem(
    mib: int, channels: int, lanes: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(convolution, "vmem_mib", lambda: mib)
    weight, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((channels, channels, 3, 3, 3), (channels,)))
    limit = convolution._limit_mib()
    assert (convolution._apart(weight, limit) is None) == bool(convolution._weight_reasons(weight)) == (lanes is None)
    if lanes:
        kernel, _ = jax.eval_shape(lambda *arrays: convolution._arrange(*arrays, limit), weight, bias)
        assert kernel.shape == (3, 3, 3, channels, channels)
        assert 2 * 2 * kernel.size * lanes / channels < mib * hardware.MIB / 2


def test_convolution_traces_equal_calls_once(monkeypatch: pytest.MonkeyPatch):
    """A decoder repeats its convolutions. Another shape, form or machine's fallback has its own tiles."""
    traced = list[int]()

    def body(*refs: Any, form: convolution.ConvolutionConfig, **how: Any) -> None:
        traced.append(form.limit_mib)
        kernel_body(*refs, form=form, **how)

    kernel_body = convolution._body
    monkeypatch.setattr(convolution, "_body", body)
    mesh = make_mesh(chips.compile_devices(chips.topology("v6e:2x4")), EIGHT)
    spec = NamedSharding(mesh, P(None, None, None, "dp", "sp"))
    x = jax.ShapeDtypeStruct((1, 24, 3, 32, 64), jnp.bfloat16, sharding=spec)
    weight = jax.ShapeDtypeStruct((24, 24, 3, 3, 3), jnp.bfloat16, sharding=NamedSharding(mesh, P()))

    def texts(times: int, given: jax.ShapeDtypeStruct = x, **how: Any) -> str:
        def repeat(x: jax.Array, weight: jax.Array) -> list[jax.Array]:
            return [convolution.convolution(x + turn, weight, None, repeats=False, **how) for turn in range(times)]

        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(repeat).lower(given, weight).as_text()

    assert texts(3).count("tpu_custom_call") == 3
    whole = convolution.MIN_VMEM_MIB * 2 - hardware.RESERVED_MIB  # of a v6e's VMEM
    assert traced == [whole]
    texts(1, halved=True)
    texts(1, jax.ShapeDtypeStruct((1, 24, 3, 32, 128), jnp.bfloat16, sharding=spec))
    assert traced == [whole] * 3
    small = dispatch.KernelFallbacks(small=(registry.CONVOLUTION,))
    with dispatch.use_fallbacks(small):
        assert texts(2) != texts(1)
    assert traced == [whole] * 3 + [whole // 2]
    texts(2)
    assert len(traced) == 4
    convolution._convolve_on_mesh.clear_cache()
