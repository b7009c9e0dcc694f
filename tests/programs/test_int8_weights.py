"""Weights in int8: which, where they lie, and how they come from a checkpoint's files and its LoRAs."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.kernels import registry
from comfyui_tpu.kernels.dispatch import KernelFallbacks
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora
from comfyui_tpu.tpu_runtime.loras import apply
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

NO_RUNGS = KernelFallbacks()


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MIN_QUANTIZED_LANES", 0)


def network(spec: ModelSpec) -> upstream_network.Network:
    component = spec.component(spec.denoiser.experts[0])
    return upstream_network.build_network(component, component.tiny)


def load_weights(
    spec: ModelSpec, shape: MeshShape, axes: weights.Axes, loras: tuple[Lora, ...] = ()
) -> dict[str, jax.Array]:
    own = network(spec)
    mesh = CompileTarget(devices=tuple(jax.devices()[: shape.dp * shape.sp * shape.tp]), precision="bfloat16").mesh(
        shape
    )
    folder = tiny.ensure_random(spec) / "transformer"
    files = checkpoint.match_weights(own, checkpoint.read_headers(folder, own.component), folder)
    changes = apply.make_merge(loras, own) if loras else None
    wanted = weights.abstract_weights(own, mesh, "bfloat16", axes, "int8")
    found = weight_loader.load_weights(own, files, wanted, "test", SilentProgress(), changes)
    assert {name: (x.shape, x.dtype, x.sharding) for name, x in found.items()} == {
        name: (x.shape, x.dtype, x.sharding) for name, x in wanted.items()
    }
    return found


def rotate_and_round(exact: jax.Array, over: tuple[int, ...], chips: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of lanes rotated by Hadamard's matrix, by recursion, behind Rudin and Shapiro's signs."""
    x = np.moveaxis(np.asarray(exact, np.float64), over[-1], -1)
    block = math.gcd(256, x.shape[-1] if x.shape[-1] % chips else x.shape[-1] // chips)
    signs = np.ones(1)
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        half = len(signs) // 2
        signs = np.concatenate([signs, signs[:half], -signs[half:]]) if half else np.ones(2)
    blocks = x.reshape(*x.shape[:-1], -1, block) * signs @ matrix / block
    x = np.moveaxis(blocks.reshape(x.shape), -1, over[-1])
    worth = (np.abs(x).max(axis=over, keepdims=True) + 1e-30) / 127
    return np.round(x / worth), worth.squeeze(over)


def assert_rounded(found: dict[str, jax.Array], exact: dict[str, jax.Array], axes: weights.Axes, chips: int) -> None:
    for name, over in axes.items():
        numbers, worth = rotate_and_round(exact[name], over, chips)
        # What lies in the middle between two whole numbers may go either way.
        assert np.isin(np.abs(np.asarray(found[name], np.float32) - numbers), (0, 1)).all(), name
        assert np.mean(np.asarray(found[name]) != numbers) < 1e-2, name
        np.testing.assert_allclose(np.asarray(found[name + weights.SCALE_SUFFIX]), worth, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("wan2.1-t2v-1.3b", MeshShape(dp=2, sp=3)), ("flux2-klein-4b", MeshShape(tp=2)), ("flux2-klein-4b", MeshShape())],
    ids=str,
)
@pytest.mark.usefixtures("few_are_many")
def test_int8_weights_with_lora_match_rotated_rounding_on_every_mesh(name: str, shape: MeshShape, tmp_path: Path):
    """One scale an output, also where chips have parts of what a product sums over."""
    spec = lookup_spec(name)
    own = network(spec)
    axes = weights.find_quantizable_weights(own)
    assert axes
    changed = next(one for one in axes if own.weights[one].cut is None)
    source, size = own.weights[changed].sources[0], own.weights[changed].layer_shape
    path, module = tmp_path / "lora.safetensors", source.removesuffix(".weight")
    random = torch.Generator().manual_seed(1)
    parts = {"lora_A": (2, size[1]), "lora_B": (size[0], 2)}
    save_file({f"{module}.{part}.weight": torch.randn(of, generator=random) for part, of in parts.items()}, path)
    loras = (Lora(path=str(path), strength=0.5),)
    exact = load_weights(spec, shape, weights.NO_AXES, loras)
    assert_rounded(load_weights(spec, shape, axes, loras), exact, axes, shape.tp)
    plain = load_weights(spec, shape, axes)
    assert_rounded(plain, load_weights(spec, shape, weights.NO_AXES), axes, shape.tp)
    assert not np.array_equal(
        plain[changed + weights.SCALE_SUFFIX], rotate_and_round(exact[changed], axes[changed], shape.tp)[1]
    )


@pytest.mark.parametrize("kind", ["TPU v4", "TPU7x"])
def test_add_scale_parameters_without_int8_hardware_is_empty(kind: str):
    class Device:
        platform, device_kind = "tpu", kind

    own = network(SPECS[0])
    assert weights.add_scale_parameters(own, Device(), NO_RUNGS, "int8") == {}  # type: ignore[arg-type]


@pytest.mark.usefixtures("few_are_many")
def test_add_scale_parameters_without_int8_kernel_is_empty():
    own, device = network(SPECS[0]), jax.devices()[0]
    assert weights.add_scale_parameters(own, device, KernelFallbacks(off=(registry.LINEAR_INT8,)), "int8") == {}
    assert weights.add_scale_parameters(own, device, NO_RUNGS, "int8")


def test_find_quantizable_weights_skips_small_products():
    assert weights.find_quantizable_weights(network(SPECS[0])) == {}
