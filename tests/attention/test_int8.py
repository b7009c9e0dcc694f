"""Attention with int8 scores against a float64 softmax of what int8 makes of queries and keys, written out here."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.attention import policy as policy_module
from comfyui_tpu.attention.api import attention, joint_attention
from comfyui_tpu.attention.policy import AttentionPolicy, Kernel
from comfyui_tpu.kernels import attention_config, attention_int8, attention_kernel, hardware
from comfyui_tpu.kernels.attention_config import AttentionConfig
from comfyui_tpu.kernels.number_formats import SCORE_CHIPS
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support import closeness
from comfyui_tpu.tests.support.closeness import OPERATION
from comfyui_tpu.tests.support.patience import mostly, slower

from .test_attention import inputs, poison, scored, softmax_attention

pytestmark = pytest.mark.slow

SMALL = AttentionConfig(scores="int8", block_q=128, step=32, online_step=32)
REFERENCE = AttentionPolicy(kernel="reference", scores="int8")
FORMS = {
    "sampled": AttentionPolicy(kernel="pallas", scores="int8", form=SMALL),
    "pieces": AttentionPolicy(kernel="pallas", scores="int8", form=replace(SMALL, block_q=256, columns=128)),
    "online": AttentionPolicy(kernel="pallas", scores="int8", form=replace(SMALL, maximum="online")),
    "keys in the grid": AttentionPolicy(
        kernel="pallas", scores="int8", form=replace(SMALL, maximum="online", block_kv=128)
    ),
}
# What lies in the middle between two whole numbers may go either way.
HALVES = 2e-3
# Weights are rounded to bfloat16, and so are their exponents: up to this many of its steps.
WEIGHTS = 3 * 2.0**-8


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on this machine's devices too, as on those that int8 makes faster."""
    monkeypatch.setattr(policy_module, "LONG_SEQUENCE_TOKENS", 0)
    monkeypatch.setitem(SCORE_CHIPS, "int8", (*SCORE_CHIPS["int8"], jax.devices()[0].device_kind))


def round_to_int8(q: np.ndarray, k: np.ndarray, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys as int8 knows them: keys of a head by one scale, without their mean; a query by its own, which
    makes the scale of its scores in base 2 a power of two.
    """
    q, k = q.astype(np.float64), k.astype(np.float64)
    for row, length in enumerate(lengths):
        real = k[row, :length]  # [keys, heads, head_dim]
        real -= real.mean(axis=0)
        unit = np.maximum(np.abs(real).max(axis=(0, 2)), 1e-30) / 127
        k[row, :length] = np.round(real / unit[:, None]) * unit[:, None]
        base = q.shape[3] ** -0.5 / np.log(2)
        worth = 2 ** np.ceil(np.log2(np.abs(q[row]).max(axis=2) * base * unit / 127))[..., None]
        step = worth / (base * unit[:, None])
        q[row] = np.round(q[row] / step) * step
    return q, k


@pytest.mark.parametrize(
    ("name", "head_dim"),
    mostly(
        itertools.product(["reference", *FORMS], [64, 128]),
        ("reference", 64), ("sampled", 128), ("pieces", 128), ("online", 64), ("keys in the grid", 64),
    ),
)  # fmt: skip
def test_int8_attention_every_form_matches_softmax_of_rounded_scores(name: str, head_dim: int):
    q, k, v = inputs(4, 131, 229, 2, head_dim)
    lengths = [229, 1, 128, 197]
    policy = REFERENCE if name == "reference" else FORMS[name]
    run = jax.jit(lambda q, k, v, n: attention(q, k, v, kv_length=n, policy=policy))
    out = run(q, poison(k, lengths), poison(v, lengths), jnp.array(lengths))
    wanted = softmax_attention(*round_to_int8(q, k, lengths), v, lengths)
    assert closeness.difference(out, wanted) <= (HALVES if name == "reference" else WEIGHTS)
    exact = softmax_attention(q, k, v, lengths)
    assert OPERATION < closeness.difference(out, exact) < 6e-2


def test_int8_attention_key_offset_keeps_accuracy():
    """Which is large in trained models; without the mean taken off, it would take most of the 127 numbers."""
    q, k, v = inputs(1, 131, 229, 2, 64)
    offset = 40 * np.random.default_rng(3).normal(size=(1, 1, 2, 64)).astype(np.float32)
    run = jax.jit(lambda q, k, v: attention(q, k, v, policy=FORMS["sampled"]))
    assert closeness.difference(run(q, k + offset, v), softmax_attention(q, k, v, [229])) < 6e-2


@pytest.mark.parametrize("name", ["sampled", "online"])
def test_int8_attention_late_key_with_high_score_matches_softmax(name: str):
    random = np.random.default_rng(0)
    run = jax.jit(lambda q, k, v: attention(q, k, v, policy=FORMS[name]))
    v = random.normal(size=(1, 331, 2, 64)).astype(np.float32)
    for gap in (0, 110, 140, 400):
        targets = random.uniform(-1, 1, 331)
        targets[330] += gap
        q, k = scored(targets, 33)
        wanted = softmax_attention(*round_to_int8(q, k, [331]), v, [331])
        assert closeness.difference(run(q, k, v), wanted) <= 2 * WEIGHTS, gap


def test_int8_attention_without_rerun_is_not_finite_for_high_scores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_kernel.QueryBlock, "has_failed", lambda self: False)
    q, k = scored(np.where(np.arange(331) == 300, 140.0, 0.0), 33)
    out = jax.jit(lambda q, k: attention(q, k, k, policy=FORMS["sampled"]))(q, k)
    assert not np.isfinite(out).all()


@pytest.mark.parametrize("name", ["reference", "sampled", "online"])
@pytest.mark.parametrize("which", ["query", "key", "both"])
def test_int8_attention_zero_queries_or_keys_give_mean_of_values(name: str, which: str):
    """A head that was never trained, or trained away, has queries or keys of zeros."""
    q, k, v = inputs(1, 128, 128, 2, 64)
    q, k = q * (which == "key"), k * (which == "query")
    policy = REFERENCE if name == "reference" else FORMS[name]
    out = jax.jit(functools.partial(attention, policy=policy))(q, k, v)
    assert closeness.difference(out, np.broadcast_to(v.mean(axis=1, keepdims=True), v.shape)) <= WEIGHTS


@pytest.mark.parametrize("name", ["sampled", "online"])
def test_int8_attention_row_without_keys_is_zeros(name: str):
    q, k, v = inputs(2, 5, 40, 2, 64)
    run = jax.jit(lambda q, k, v, n: attention(q, k, v, kv_length=n, policy=FORMS[name]))
    out = run(q, poison(k, [0, 1]), poison(v, [0, 1]), jnp.array([0, 1]))
    assert not np.asarray(out[0]).any()
    assert closeness.difference(out[1], np.broadcast_to(v[1, :1], out[1].shape)) <= WEIGHTS


@pytest.mark.parametrize("name", ["sampled", "online"])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_int8_attention_nan_input_gives_nan_output(name: str, which: str):
    """A step's check for it must not be deceived: no whole number is NaN."""
    arrays = dict(zip(("query", "key", "value"), inputs(1, 5, 40, 2, 64), strict=True))
    arrays[which][0, 3] = np.nan
    out = np.asarray(jax.jit(lambda q, k, v: attention(q, k, v, policy=FORMS[name]))(*arrays.values()))
    assert np.isnan(out[0, 3]).all()
    assert which != "query" or np.isfinite(np.delete(out[0], 3, axis=0)).all()


@pytest.mark.parametrize("scores", ["reference", "sampled"])
@pytest.mark.parametrize(
    "shape", slower([MeshShape(sp=2), MeshShape(sp=3), MeshShape(dp=2, sp=2, tp=2)], MeshShape(sp=2)), ids=str
)
def test_int8_attention_on_every_mesh_matches_softmax(shape: MeshShape, scores: str):
    """All-to-alls and a ring, of keys that are rounded before, by what all chips have; joint with a text of its own
    padding.
    """
    policy = REFERENCE if scores == "reference" else FORMS[scores]
    mesh = make_mesh(jax.devices()[: shape.num_devices], shape)
    latent, text = inputs(2, 48, 48, 4 if shape.tp > 1 else 2, 64), inputs(2, 7, 7, 4 if shape.tp > 1 else 2, 64)
    latent[1][:, :24] += 3  # so that the means of chips differ
    joint = [np.concatenate([x[:, :41], y], axis=1) for x, y in zip(latent, text, strict=True)]
    poisoned = [latent[0], *(poison(x, [41, 41]) for x in latent[1:])]
    poisoned_text = [text[0], *(poison(x, [1, 5]) for x in text[1:])]
    both = jax.jit(
        lambda a, b, n: joint_attention(
            a, b, lengths=(41, n), placements=("sharded", "replicated"), mesh=mesh, policy=policy
        )
    )
    out, text_out = both(tuple(poisoned), tuple(poisoned_text), jnp.array([1, 5]))
    expected = softmax_attention(*joint, [42, 46])
    assert closeness.difference(out[:, :41], expected[:, :41]) < 8e-2
    assert closeness.difference(text_out, expected[:, 41:]) < 8e-2
    same = softmax_attention(*round_to_int8(*joint[:2], [42, 46]), joint[2], [42, 46])
    bound = HALVES if scores == "reference" else WEIGHTS
    assert closeness.difference(np.concatenate([out[:, :41], text_out], axis=1), same) <= bound


@pytest.mark.parametrize("kernel", ["reference", "pallas"])
def test_int8_attention_short_sequence_is_exact(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, compare: Callable):
    q, k, v = inputs(2, 48, 7, 2, 64)
    run = functools.partial(attention, policy=AttentionPolicy(kernel=kernel, scores="int8"))
    wanted = softmax_attention(q, k, v, [7, 7])
    assert closeness.difference(jax.jit(run)(q, k, v), wanted) > OPERATION
    monkeypatch.setattr(policy_module, "LONG_SEQUENCE_TOKENS", 8)
    compare("attention", jax.jit(functools.partial(run))(q, k, v), wanted, error=OPERATION)


def test_choose_scores_uses_int8_only_on_chips_it_speeds_up():
    policy = AttentionPolicy(scores="int8")
    found = {kind: policy.choose_scores(75600, kind) for kind in ("TPU v6 lite", "TPU v5 lite", "TPU7x", "TPU v4")}
    assert found == {"TPU v6 lite": "int8", "TPU v5 lite": "exact", "TPU7x": "exact", "TPU v4": "exact"}


def test_attention_config_int8_with_maximum_zero_raises_value_error():
    with pytest.raises(ValueError) as error:
        AttentionConfig(scores="int8", maximum="zero")
    assert str(error.value).startswith("maximum=zero is not supported with int8 scores. Use sampled or online")


@pytest.mark.parametrize(
    ("kind", "divided"), [("TPU v6 lite", False), ("TPU v5 lite", False), ("TPU v4", True)], ids=str
)
@pytest.mark.parametrize("rows", [[75600], [111600, 1256]], ids=["Wan", "HunyuanVideo"])
def test_choose_config_int8_depends_on_chip(kind: str, divided: bool, rows: list[int]):
    call: dict[str, Any] = {"q_seq": rows[0], "kv_rows": rows, "head_dim": 128, "itemsize": 2}
    policy = AttentionPolicy(bounded=True, scores="int8")
    form = attention_config.choose_config(kind, policy.maximum("int8"), scores="int8", heads=4, **call)
    assert (form.scores, form.block_kv is not None) == ("int8", divided)
    used = attention_config.estimate_vmem_bytes(form, *call.values())
    assert used <= form.vmem_mib * 2**20 < hardware.VMEM_MIB[kind] * 2**20


def test_round_up_to_power_of_two_matches_ceil_log2():
    values = jnp.array([1.0, 1.5, 2.0, 0.3, 1e-30, 127.0])
    assert np.array_equal(
        attention_int8.round_up_to_power_of_two(values), 2 ** np.ceil(np.log2(np.asarray(values, np.float64)))
    )
