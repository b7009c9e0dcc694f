"""Linear layers with int8 products against float64 of what int8 makes of tokens and weights, written out here."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.kernels import hardware, linear_int8
from comfyui_tpu.kernels.linear_int8 import Int8Weight, Tiles
from comfyui_tpu.kernels.number_formats import LINEAR_CHIPS
from comfyui_tpu.tests.support.closeness import OPERATION, difference

pytestmark = pytest.mark.slow

# What lies in the middle between two whole numbers may go either way.
HALVES = 2e-3


def random_array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def round_to_int8(x: np.ndarray, axis: int) -> np.ndarray:
    unit = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.round(x / unit) * unit


def rotate_blocks(x: np.ndarray, block: int, axis: int = -1) -> np.ndarray:
    """Blocks of lanes by an orthogonal matrix, in float64."""
    x = np.moveaxis(x.astype(np.float64), axis, -1)
    found = x.reshape(*x.shape[:-1], -1, block) @ linear_int8.rotation_matrix(block) / math.sqrt(block)
    return np.moveaxis(found.reshape(x.shape), -1, axis)


def weights(
    ins: int, outs: list[int], block: int, *, turned: bool, bias: bool
) -> tuple[list[np.ndarray], list[Int8Weight]]:
    """`[outs, ins]` as they are, and in int8."""
    plain = [random_array(size, ins, seed=index) for index, size in enumerate(outs)]
    found = []
    for index, each in enumerate(plain):
        axis = 0 if turned else 1
        factor = linear_int8.rotate_weight(jnp.asarray(each.T if turned else each), axis, block)
        numbers, worth = linear_int8.quantize(factor, (axis,))
        found.append(Int8Weight(numbers, worth, jnp.asarray(random_array(len(each), seed=9 + index)) if bias else None))
    return plain, found


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def reference_product(
    parts: list[np.ndarray], plain: list[np.ndarray], given: list[Int8Weight], activation: Any, block: int
) -> list[Any]:
    x = round_to_int8(rotate_blocks(np.concatenate(parts, axis=2), block), 2)
    found = [x @ round_to_int8(rotate_blocks(each, block), 1).T for each in plain]
    found = [y if one.bias is None else y + np.asarray(one.bias) for y, one in zip(found, given, strict=True)]
    if activation == "silu":
        return [found[0] / (1 + np.exp(-found[0])) * found[1]]
    return [gelu(y) if activation else y for y in found]


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("turned", [False, True], ids=["outs first", "ins first"])
@pytest.mark.parametrize(
    ("outs", "activation", "bias"),
    [([384], None, True), ([128, 256], None, False), ([256], "gelu", True), ([256, 256], "silu", False)],
    ids=["one", "two", "gelu", "pair"],
)
def test_linear_int8_matches_product_of_rounded_values(
    outs: list[int], activation: Any, bias: bool, turned: bool, kernel: bool, compare: Callable
):
    """Two parts of lanes side by side, and more tokens than a grid step takes."""
    parts = [random_array(2, 139, 128), random_array(2, 139, 256, seed=1) * 3]
    plain, given = weights(384, outs, 128, turned=turned, bias=bias)
    arrays = [jnp.asarray(part) for part in parts]
    run = linear_int8.linear_int8
    found = run(arrays, given, block=128, activation=activation, turned=turned, kernel=kernel, interpret=True)
    exact = [np.concatenate(parts, axis=2) @ each.T for each in plain]
    for ours, wanted in zip(found, reference_product(parts, plain, given, activation, 128), strict=True):
        compare("product", ours, wanted, error=HALVES)
    if activation is None and not bias:
        assert OPERATION < difference(found[0], exact[0]) < 2e-2


@pytest.mark.parametrize("groups", [1, 2])
def test_linear_int8_weight_groups_match_reference(groups: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_int8, "choose_tiles", lambda *_: Tiles(128, groups))
    plain, given = weights(256, [256, 512], 256, turned=False, bias=True)
    x = random_array(1, 300, 256)
    found = linear_int8.linear_int8_kernel(
        [jnp.asarray(x)], given, block=256, activation=None, turned=False, interpret=True
    )
    for ours, wanted in zip(found, reference_product([x], plain, given, None, 256), strict=True):
        assert difference(ours, wanted) <= HALVES


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("gates", [1, 2])
def test_linear_int8_gated_residual_is_added_unrounded(gates: int, dtype: Any, kernel: bool):
    """A gate of each row, whose tokens end within a block, or of all rows; a product is not rounded before."""
    (plain,), given = weights(256, [384], 256, turned=False, bias=True)
    x, tokens, gate = random_array(2, 139, 256), random_array(2, 139, 384, seed=3), random_array(gates, 384, seed=4)
    x, tokens = (np.asarray(jnp.asarray(each, dtype), np.float32) for each in (x, tokens))
    onto = linear_int8.GatedResidual(jnp.asarray(tokens, dtype), jnp.asarray(gate))
    run = functools.partial(linear_int8.linear_int8, block=256, kernel=kernel, interpret=True, onto=onto)
    (found,) = run([jnp.asarray(x, dtype)], given)
    (product,) = reference_product([x], [plain], given, None, 256)
    assert found.dtype == dtype
    step = 0 if dtype == jnp.float32 else 2**-7  # of bfloat16's numbers
    assert difference(np.asarray(found, np.float32), tokens + gate[:, None] * product) <= HALVES + step


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_linear_int8_quantized_tokens_give_identical_result(dtype: Any, kernel: bool):
    """Bit by bit, of a pair and of one, in the format that the tokens had."""
    given = weights(256, [256, 256], 128, turned=False, bias=True)[1]
    x = jnp.asarray(random_array(2, 139, 256), dtype)
    how: Any = {"block": 128, "kernel": kernel, "interpret": True}
    before = linear_int8.quantize_tokens(x, **how)
    assert before.numbers.dtype == jnp.int8 and before.worth.shape == (2, 139, 1)
    for activation, count in (("silu", 2), (None, 1)):
        found = linear_int8.linear_int8([before], given[:count], activation=activation, **how)
        wanted = linear_int8.linear_int8([x], given[:count], activation=activation, **how)
        assert found[0].dtype == dtype and np.array_equal(found[0], wanted[0])


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("turned", [False, True], ids=["outs first", "ins first"])
def test_linear_int8_layer_of_stack_matches_single_layer(turned: bool, kernel: bool):
    each = [weights(256, [128], 64, turned=turned, bias=True)[1][0] for _ in range(2)]
    other = linear_int8.quantize(jnp.asarray(random_array(*each[0].numbers.shape, seed=5)), (0 if turned else 1,))[0]
    stack = each[0]._replace(numbers=jnp.stack([other, each[0].numbers, other]))
    x = jnp.asarray(random_array(1, 40, 256))
    how = {"block": 64, "turned": turned, "kernel": kernel, "interpret": True}
    (found,) = jax.jit(lambda layer: linear_int8.linear_int8([x], [stack], layer=layer, **how))(1)
    (wanted,) = linear_int8.linear_int8([x], each[:1], **how)
    assert difference(found, wanted) <= OPERATION


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_linear_int8_nan_stays_in_its_token(kernel: bool):
    """A step's check for it must not be deceived: no whole number is NaN. Other tokens are as they were."""
    _, given = weights(256, [128], 256, turned=False, bias=False)
    for value in (np.nan, np.inf):
        x = random_array(1, 40, 256)
        x[0, 7, 200] = value
        (found,) = linear_int8.linear_int8([jnp.asarray(x)], given, block=256, kernel=kernel, interpret=True)
        assert np.isnan(np.asarray(found[0, 7])).all()
        assert np.isfinite(np.delete(np.asarray(found[0]), 7, axis=0)).all()


@pytest.mark.parametrize("block", [1, 2, 16, 128, 256])
def test_rotation_matrix_is_orthogonal_and_balanced(block: int):
    """Neither of one wide channel nor of what is the same in all: of these a quarter or less may be lost where a block
    is no power of four.
    """
    matrix = linear_int8.rotation_matrix(block)
    assert np.array_equal(matrix @ matrix.T, block * np.eye(block))
    same = np.abs(matrix.sum(axis=0))
    assert same.max() <= math.sqrt(2 * block) and (same > 0).mean() >= 0.5


def test_rotation_block_divides_lanes_of_each_chip():
    assert linear_int8.rotation_block(5120, chips=1) == 256
    assert linear_int8.rotation_block(6144, 18432, chips=8) == linear_int8.rotation_block(6144, chips=8) == 256
    assert linear_int8.rotation_block(3072, chips=8) == 128
    assert linear_int8.rotation_block(144, chips=1) == linear_int8.rotation_block(144, chips=5) == 16
    assert linear_int8.rotation_block(75, chips=2) == 1


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_linear_int8_outlier_channels_keep_accuracy(dtype: Any, kernel: bool):
    x = random_array(1, 96, 512)
    x[..., ::128] *= 20
    x = jnp.asarray(x, dtype)
    (plain,), given = weights(512, [128], 256, turned=False, bias=False)
    how = {"kernel": kernel, "interpret": True}
    exact = np.asarray(x, np.float64) @ plain.T
    (found,) = linear_int8.linear_int8([x], given, block=256, **how)
    assert difference(found, exact) <= 1.5e-2
    as_they_are = Int8Weight(*linear_int8.quantize(jnp.asarray(plain), (1,)))
    (unturned,) = linear_int8.linear_int8([x], [as_they_are], block=1, kernel=False)
    assert difference(unturned, exact) > 3e-2


def test_quantize_nan_weight_gives_nan_scale():
    numbers, worth = linear_int8.quantize(jnp.array([[1.0, jnp.nan], [0.0, 0.0], [-3.0, 1.0]]), (1,))
    assert numbers.dtype == jnp.int8
    assert np.isnan(worth[0]) and np.isfinite(worth[1:]).all()
    assert np.array_equal(np.asarray(numbers[1:]), [[0, 0], [-127, 42]])


def test_check_support_partial_registers_are_refused():
    assert str(linear_int8.check_support([144], [256])) == (
        "The kernel linear_int8 does not compute this call: 144 lanes are not a multiple of 128."
    )
    assert not linear_int8.check_support([128], [256])


@pytest.mark.parametrize("kind", LINEAR_CHIPS["int8"])
@pytest.mark.parametrize(
    ("ins", "outs", "most_groups"),
    [(5120, [5120] * 3, 1), (13824, [5120], 1), (3072, [9216, 9216], 1), (6144, [18432, 18432], 4)],
    ids=["Wan's heads", "Wan's second", "klein", "FLUX.2 on one chip"],
)
def test_choose_tiles_reads_model_weights_once_when_they_fit(
    ins: int, outs: list[int], most_groups: int, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(linear_int8, "device_kind", lambda: kind)
    tiles = linear_int8.choose_tiles(ins, outs)
    assert tiles is not None and tiles.groups <= most_groups
    held = ins * sum(outs) // tiles.groups + 2 * 2 * tiles.tokens * (ins + sum(outs) // tiles.groups)
    assert held < hardware.VMEM_MIB[kind] * hardware.MIB
