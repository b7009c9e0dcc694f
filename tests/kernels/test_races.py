"""Every kernel under Pallas' TPU interpreter, which simulates cores, their memory and DMA: no races, and right.

Memory that nobody wrote is NaN; a copy takes place only where somebody waits for it; grid points of parallel dimensions
go to one core or two.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.kernels import (  # fmt: skip
    attention_reference,
    convolution,
    linear_int8,
    modulation,
    prologue,
    residual_norm,
)
from comfyui_tpu.kernels.attention import flat_attention
from comfyui_tpu.kernels.attention_config import AttentionConfig
from comfyui_tpu.kernels.prologue import Norm
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.patience import mostly, slower
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

pytestmark = pytest.mark.slow

CORES = pytest.mark.parametrize("cores", slower((1, 2), 1), ids=["1 core", "2 cores"])


@pytest.fixture(autouse=True)
def reset_interpreter() -> Iterator[None]:
    """The interpreter keeps its memory, and the races that it found, in the process."""
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


# JAX 0.12 ends at the first race unless it is asked to note it, as older ones do: `races` reads what was noted.
NOTED = {"on_race": "warn"} if hasattr(pltpu.InterpretParams, "on_race") else {}


def interpret_params(cores: int, **more: Any) -> Any:
    return pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait", num_cores_or_threads=cores,
        **NOTED, **more,
    )  # fmt: skip


def races() -> bool:
    state = interpret_pallas_call.races
    return state is not None and state.races_found


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_right(found: Any, wanted: Any, bound: float = 4e-6) -> None:
    found, wanted = jax.block_until_ready((found, wanted))
    assert not races()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert difference(one, other) <= bound


SMALL = {"block_q": 128, "step": 32, "online_step": 32}
FORMS = {
    "bounded": AttentionConfig(maximum="zero", **SMALL),
    "sampled": AttentionConfig(maximum="sampled", **SMALL),
    "computed again": AttentionConfig(maximum="sampled", **SMALL),
    "running": AttentionConfig(maximum="online", **SMALL),
    "keys in the grid": AttentionConfig(maximum="online", block_kv=128, **SMALL),
    "int8": AttentionConfig(scores="int8", **SMALL),
    "int8, keys in the grid": AttentionConfig(scores="int8", maximum="online", block_kv=128, **SMALL),
}


@CORES
@pytest.mark.parametrize("head_dim", slower((64, 128), 64))
@pytest.mark.parametrize("name", FORMS)
def test_attention_kernel_has_no_races_and_matches_reference(name: str, head_dim: int, cores: int):
    """Two blocks of queries of two heads; padding is NaN."""
    keys = 270 if name == "computed again" else 140 if "grid" in name else 80
    q, k, v = (random_array(1, rows, 2 * head_dim, seed=seed) for seed, rows in enumerate((135, keys, keys)))
    if name == "computed again":
        k = k.at[:, 256:].multiply(40)
    valid = jnp.arange(keys)[None, :, None] < keys - 7
    k, v = jnp.where(valid, k, jnp.nan), jnp.where(valid, v, jnp.nan)
    part = [attention_reference.keys_of_length(k, v, jnp.array([keys - 7]))]
    scale = head_dim**-0.5
    found, _ = flat_attention(
        q, part, head_dim=head_dim, form=FORMS[name], log_sums=False, scale=scale, interpret=interpret_params(cores)
    )
    clean = [attention_reference.keys_of_length(jnp.nan_to_num(k), jnp.nan_to_num(v), jnp.array([keys - 7]))]
    wanted, _ = attention_reference.flat_attention(q * scale * head_dim**0.5, clean, head_dim=head_dim, log_sums=False)
    # Scores near 200 move a weight by as many roundings; int8 is tested for closeness in tests/attention.
    bounds = {"computed again": 4e-5, "int8": 6e-2, "int8, keys in the grid": 6e-2}
    assert_right(found, wanted, bounds.get(name, 4e-6))


@CORES
@pytest.mark.parametrize("scores", ["exact", "int8"])
def test_block_attention_kernel_has_no_races_and_matches_reference(scores: Any, cores: int):
    """Three blocks of queries, each with a list of its own of six, of which the program leaves four out: [1, 2],
    [3, 4], [5, 0] are kept. Padding is NaN.
    """
    order = np.stack([np.roll(np.arange(6, dtype=np.int32), -own) for own in (1, 3, 5)])
    real = np.array([128, 1, 100, 128, 64, 127], np.int32)
    q, k, v = (random_array(1, rows * 128, 256, seed=seed) for seed, rows in enumerate((3, 6, 6)))
    is_real = (np.arange(128) < real[:, None]).reshape(1, -1, 1)
    blocks = attention_reference.BlockSparsity(size=128, real=real, kept=order, left_out=4, is_sparse=jnp.array(True))
    part = attention_reference.keys_in_blocks(jnp.where(is_real, k, jnp.nan), jnp.where(is_real, v, jnp.nan), blocks)
    form, how = (
        AttentionConfig(scores=scores, block_q=128, step=64, online_step=64),
        {"head_dim": 128, "log_sums": False},
    )
    found, _ = flat_attention(q, [part], form=form, scale=128**-0.5, interpret=interpret_params(cores), **how)
    wanted, _ = attention_reference.flat_attention(q, [part], **how)
    assert_right(found, wanted, 6e-2 if scores == "int8" else 4e-6)


@CORES
def test_prologue_kernels_have_no_races_and_match_reference(cores: int):
    """Several blocks of tokens, the last of which overshoots."""
    x, weight, angles = (
        random_array(1, 200, 512),
        random_array(64, seed=1),
        np.repeat(random_array(1, 200, 32, seed=2), 2, axis=2),
    )
    tables = jnp.cos(angles), jnp.sin(angles)
    norm = Norm(weight=weight, eps=1e-6)
    found = prologue.split_heads(x, 2, 2, norm, tables, head_dim=64, interpret=interpret_params(cores))
    wanted = prologue.split_heads_reference(x, 2, 2, norm, tables, head_dim=64)
    assert_right(found, wanted)
    pltpu.reset_tpu_interpret_mode_state()
    assert_right(
        prologue.merge_heads(wanted, interpret=interpret_params(cores)), prologue.merge_heads_reference(wanted)
    )


@CORES
@pytest.mark.parametrize("leading", [None, 70], ids=["one vector", "a pair"])
def test_residual_norm_kernel_has_no_races_and_matches_reference(leading: int | None, cores: int):
    x, update = random_array(1, 150, 256), random_array(1, 150, 256, seed=1)
    gate, scale, shift = (random_array(1, *(() if leading is None else (2,)), 256, seed=seed) for seed in (2, 3, 4))
    count = None if leading is None else jnp.array(leading)
    arguments = (x, update, gate, scale, shift, count)
    found = residual_norm.residual_norm_kernel(*arguments, eps=1e-6, interpret=interpret_params(cores))
    assert_right(found, residual_norm.residual_norm_reference(*arguments, eps=1e-6))


@CORES
@pytest.mark.parametrize("activation", [None, "silu"])
def test_linear_int8_kernel_has_no_races_and_matches_reference(
    activation: Any, cores: int, monkeypatch: pytest.MonkeyPatch
):
    """Several blocks of tokens, the last of which overshoots; weights in two groups."""
    monkeypatch.setattr(linear_int8, "choose_tiles", lambda *_: linear_int8.Tiles(128, 2))
    parts = [random_array(1, 150, 128), random_array(1, 150, 256, seed=1)]
    weights = [
        linear_int8.Int8Weight(
            *linear_int8.quantize(random_array(256, 384, seed=seed), (1,)), random_array(256, seed=seed)
        )  # as rotated
        for seed in (2, 3)
    ]
    how = {"block": 128, "activation": activation, "turned": False}
    found = linear_int8.linear_int8_kernel(parts, weights, **how, interpret=interpret_params(cores))
    # What lies in the middle between two whole numbers may go either way.
    assert_right(found, linear_int8.linear_int8_reference(parts, weights, **how), 2e-3)
    if activation is None:
        onto = linear_int8.GatedResidual(random_array(1, 150, 256, seed=4), random_array(1, 256, seed=5))
        found = linear_int8.linear_int8_kernel(parts, weights[:1], onto=onto, **how, interpret=interpret_params(cores))
        assert_right(found, linear_int8.linear_int8_reference(parts, weights[:1], onto=onto, **how), 2e-3)


@CORES
def test_quantize_tokens_kernel_has_no_races_and_matches_reference(cores: int):
    """Two blocks of tokens, the last of which overshoots."""
    x = random_array(1, 150, 256)
    found, wanted = (
        linear_int8.quantize_tokens(x, block=128, kernel=kernel, interpret=interpret_params(cores))
        for kernel in (True, False)
    )
    assert_right(found.numbers * found.worth, wanted.numbers * wanted.worth, 1e-2)  # a whole number is 1 / 127 of most


CONVOLUTIONS = {
    "behind the past": ((3, 3, 3), {"repeats": False}),
    "normed and added": ((3, 3, 3), {"repeats": False}),
    "scaled, shifted and added": ((1, 3, 3), {"repeats": False}),
    "to three channels": ((1, 3, 3), {"repeats": False}),
    "edges repeated": ((1, 3, 3), {"repeats": True}),
    "doubled": ((1, 3, 3), {"repeats": False, "doubled": True}),
    "halved": ((1, 3, 3), {"repeats": False, "halved": True}),
    "frames alone": ((3, 1, 1), {"repeats": False}),
}
HEIGHT = 8


def in_blocks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a picture in so many blocks, whatever room there is."""
    answers, most = iter([HEIGHT // count]), convolution._most
    monkeypatch.setattr(convolution, "_convolve_on_mesh", convolution._convolve_on_mesh.__wrapped__)  # keeps no trace
    monkeypatch.setattr(convolution, "_most", lambda total, limit: next(answers, None) or most(total, limit))


def run_convolution(name: str, interpret: Any) -> tuple[Any, Any]:
    window, how = CONVOLUTIONS[name]
    outs = 3 if name == "to three channels" else 7
    x, weight, bias = (
        random_array(1, 5, 3, HEIGHT, 24),
        random_array(outs, 5, *window, seed=1) / 6,
        random_array(outs, seed=2),
    )
    past = tuple(random_array(1, 5, 1, HEIGHT, 24, seed=seed) for seed in (3, 4)) if name == "behind the past" else ()
    if name.endswith("added"):
        frames = 3 - window[0] + 1
        how = {**how, "gain": 1 + random_array(5, seed=5), "onto": random_array(1, outs, frames, HEIGHT, 24, seed=6)}
    if "shifted" in name:
        how["shift"] = 2 + random_array(5, seed=7)
    with jax.set_mesh(make_mesh(jax.devices()[:1], MeshShape())):
        run: Callable[..., Any] = jax.jit(
            lambda *given: convolution.convolution(*given[:3], past=given[3], interpret=interpret, **how)
        )
        return run(x, weight, bias, past), convolution.reference(x, weight, bias, past=past, **how)


@pytest.mark.parametrize(("name", "blocks"), [("behind the past", 2), ("doubled", 8)], ids=str)
def test_convolution_kernel_in_row_blocks_matches_reference(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch):
    in_blocks(blocks, monkeypatch)
    found, wanted = run_convolution(name, True)
    assert difference(found, wanted) <= 4e-6


@CORES
@pytest.mark.parametrize(
    ("name", "blocks"),
    mostly(itertools.product(CONVOLUTIONS, (1, 4)), ("behind the past", 1), *((name, 4) for name in CONVOLUTIONS)),
)
def test_convolution_kernel_has_no_races_and_matches_reference(
    name: str, blocks: int, cores: int, monkeypatch: pytest.MonkeyPatch
):
    """The last block of rows overshoots the picture, which the kernel's padding allows: there the interpreter puts NaN,
    and none of it may count.
    """
    in_blocks(blocks, monkeypatch)
    assert_right(*run_convolution(name, interpret_params(cores, out_of_bounds_reads="uninitialized")))


@CORES
def test_modulation_kernel_has_no_races_and_matches_reference(cores: int):
    x, factor, shift = random_array(1, 24, 2, 8, 40), random_array(24, seed=1), random_array(24, seed=2)
    scale, offset = random_array(1, 24, 2, 4, 40, seed=3), random_array(1, 24, 2, 4, 40, seed=4)
    with jax.set_mesh(make_mesh(jax.devices()[:1], MeshShape())):
        found = jax.jit(lambda *given: modulation.modulate(*given, interpret=interpret_params(cores)))(
            x, factor, shift, scale, offset
        )
        assert_right(found, modulation.reference(x, factor, shift, scale, offset))


# --- the interpreter sees what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False], ids=["with its wait", "without"])
def test_interpreter_missing_wait_is_reported_as_race(waits: bool):
    """A copy into on-chip memory that is read: with the wait it is right, without a race, and NaN."""

    def body(source: Any, result: Any, held: Any, arrived: Any) -> None:
        copy = pltpu.make_async_copy(source, held, arrived)
        copy.start()
        if waits:
            copy.wait()
        result[...] = held[...] + 1
        if not waits:
            copy.wait()

    x = random_array(8, 128)
    found = pl.pallas_call(
        body,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret_params(1),
    )(x)
    jax.block_until_ready(found)
    assert races() is not waits
    assert bool(jnp.isnan(found).any()) is not waits
