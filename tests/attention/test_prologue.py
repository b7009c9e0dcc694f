"""The way into attention: norms and rotary embedding against torch's and diffusers' own, the exchange's layout."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.attention.api import attention, joint_attention
from comfyui_tpu.attention.policy import AttentionPolicy
from comfyui_tpu.attention.prologue import HeadLayout, Prologue
from comfyui_tpu.kernels.attention_config import AttentionConfig
from comfyui_tpu.kernels.number_formats import SCORE_CHIPS
from comfyui_tpu.kernels.prologue import Norm
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.closeness import OPERATION, difference
from comfyui_tpu.tests.support.patience import mostly
from diffusers.models.embeddings import apply_rotary_emb

pytestmark = pytest.mark.slow

EPS = 1e-6
# The kernel's program, and the time to compile it, grow with its tiles.
SMALL = {"block_q": 128, "step": 32, "online_step": 32}


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(shape).normal(size=shape).astype(np.float32))


def tables(seq: int, head_dim: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    angles = random_tensor(rows, seq, head_dim // 2).repeat_interleave(2, dim=2) * 3
    return angles.cos(), angles.sin()


def norms(lanes: int, head_dim: int) -> dict[str, torch.nn.Module]:
    found = {
        "RMS norm of heads": torch.nn.RMSNorm(head_dim, eps=EPS),
        "RMS norm of all": torch.nn.RMSNorm(lanes, eps=EPS),
        "layer norm of heads": torch.nn.LayerNorm(head_dim, eps=EPS),
        "layer norm of all": torch.nn.LayerNorm(lanes, eps=EPS),
    }
    for norm in found.values():
        for parameter in norm.parameters():
            parameter.data = random_tensor(*parameter.shape)
    return found


def upstream(x: torch.Tensor, module: torch.nn.Module, head_dim: int, rotary: Any) -> torch.Tensor:
    """`[batch, seq, lanes]` as diffusers prepares it."""
    size = module.weight.numel()
    x = module(x.unflatten(2, (-1, size))).flatten(2)
    heads = x.unflatten(2, (-1, head_dim)).transpose(1, 2)
    each = [
        apply_rotary_emb(row[None], tuple(table[index % len(table)] for table in rotary))
        for index, row in enumerate(heads)
    ]
    return torch.cat(each).transpose(1, 2).flatten(2)


def norm_of(module: torch.nn.Module) -> Norm:
    weight, bias = (None if v is None else v.detach().numpy() for v in (module.weight, getattr(module, "bias", None)))
    return Norm(weight=jnp.asarray(weight), bias=None if bias is None else jnp.asarray(bias), eps=EPS)


RMS, RMS_ALL, LAYER, LAYER_ALL = NORMS = tuple(norms(4, 2))
PAIRED, ONE_PAIR, WIDE, WIDE_ROWS, NARROW = SHAPES = (
    (8, 64, 2, 2), (2, 64, 1, 1), (6, 128, 3, 1), (4, 128, 1, 2), (6, 24, 2, 2)
)  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "head_dim", "groups", "rows", "name", "kernel"),
    mostly(
        ((*shape, name, kernel) for shape in SHAPES for name in NORMS for kernel in (False, True)),
        (*PAIRED, RMS, False), (*ONE_PAIR, LAYER, False), (*WIDE, RMS_ALL, False), (*WIDE_ROWS, LAYER_ALL, False),
        (*NARROW, RMS_ALL, False),
        # The kernel has code of its own for each norm, and for heads of half a register.
        *((*shape, name, True) for shape in (PAIRED, WIDE) for name in NORMS),
        (*ONE_PAIR, RMS_ALL, True), (*WIDE_ROWS, RMS, True), (*WIDE_ROWS, LAYER_ALL, True), (*NARROW, LAYER, True),
        (*NARROW, LAYER_ALL, True),
    ),
    ids=str,
)  # fmt: skip
def test_head_layout_divide_matches_diffusers_norm_and_rotary(
    name: str, heads: int, head_dim: int, groups: int, rows: int, kernel: bool, compare: Callable
):
    """Rows share a table, or each has its own."""
    seq, lanes = 139, heads * head_dim  # not a whole number of blocks
    module, rotary, x = norms(lanes, head_dim)[name], tables(seq, head_dim, rows), random_tensor(2, seq, lanes)
    layout = HeadLayout(head_dim=head_dim, kernel=kernel, interpret=True)
    rotated = [jnp.asarray(table.numpy()) for table in rotary]
    found = layout.divide(jnp.asarray(x.numpy()), groups, 1, norm_of(module), tuple(rotated))
    with torch.no_grad():
        expected = upstream(x, module, head_dim, rotary).unflatten(2, (groups, -1)).movedim(2, 1)
    compare(f"{name}, {heads} heads of {head_dim}", np.asarray(found[0]), expected.numpy(), error=OPERATION)


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_head_layout_join_restores_divided_tensor(kernel: bool):
    x = jnp.asarray(random_tensor(2, 139, 6 * 128).numpy(), jnp.bfloat16)
    layout = HeadLayout(head_dim=128, kernel=kernel, interpret=True)
    assert layout.parts(256) == layout.parts(384) == (2 if kernel else 1)
    assert layout.parts(128) == 1
    divided = layout.divide(x, 3, 2)
    np.testing.assert_array_equal(divided[1][:, 2], x[:, :, 5 * 128 :])
    np.testing.assert_array_equal(layout.join(divided), x)


@pytest.mark.parametrize(
    ("heads", "groups", "kernel"),
    mostly(
        itertools.product([3, 5, 7], [1, 2, 3], [False, True]),
        (3, 1, False), (5, 2, False), (7, 3, False), (3, 2, True), (5, 3, True), (7, 1, True),
    ),
)  # fmt: skip
def test_head_layout_odd_heads_split_into_unequal_parts(heads: int, groups: int, kernel: bool):
    """And a chip takes of them what it has, also where what is before a part is no multiple of its width."""
    x = jnp.asarray(random_tensor(2, 139, groups * heads * 128).numpy(), jnp.bfloat16)
    layout = HeadLayout(head_dim=128, kernel=kernel, interpret=True)
    divided = layout.divide(x, groups, 2)
    assert [part.shape[3] // 128 for part in divided] == [heads // 2 + 1, heads // 2]
    np.testing.assert_array_equal(divided[1][:, -1], x[:, :, -(heads // 2) * 128 :])
    np.testing.assert_array_equal(layout.join(divided), x)
    norm = Norm(weight=jnp.asarray(random_tensor(128).numpy()), eps=EPS)
    every = layout.divide(x, groups, 2, norm)
    taken = layout.take(x, jnp.int32(groups - 1), groups, 2, norm, None)
    for part, own in zip(every, taken, strict=True):
        np.testing.assert_array_equal(part[:, groups - 1], own)


def test_head_layout_nan_stays_in_its_row():
    x = random_tensor(1, 40, 256).numpy()
    x[0, 17] = np.nan
    layout = HeadLayout(head_dim=128, kernel=True, interpret=True)
    norm = Norm(weight=jnp.ones(128), eps=EPS)
    rotary = tuple(jnp.asarray(table.numpy()) for table in tables(40, 128))
    found = np.asarray(layout.divide(jnp.asarray(x), 2, 1, norm, rotary)[0])
    assert np.isnan(found[0, :, 17]).all()
    assert np.isfinite(np.delete(found, 17, axis=2)).all()


MESHES = (MeshShape(sp=4), 2), (MeshShape(sp=2, tp=2), 1), (MeshShape(dp=2, sp=3), 2)


@pytest.mark.parametrize(
    ("shape", "rows", "name"),
    mostly(
        ((*mesh, name) for name in ("RMS norm of heads", "RMS norm of all") for mesh in MESHES),
        (*MESHES[1], "RMS norm of heads"), *((*mesh, "RMS norm of all") for mesh in MESHES),
    ),
    ids=str,
)  # fmt: skip
def test_prologue_on_every_mesh_matches_diffusers(shape: MeshShape, rows: int, name: str, compare: Callable):
    """Heads lie on several chips too, where a norm over all of them must not be taken over a chip's own."""
    heads, head_dim, seq = 8, 64, 48  # two parts of two heads where two chips exchange
    module, rotary = norms(heads * head_dim, head_dim)[name], tables(seq, head_dim, rows)
    q, k, v = (random_tensor(2, seq, heads * head_dim) + shift for shift in (0.0, 0.1, 0.2))
    with torch.no_grad():
        ready = [upstream(x, module, head_dim, rotary) for x in (q, k)]
        split = [x.unflatten(2, (heads, head_dim)).transpose(1, 2) for x in (*ready, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*split).transpose(1, 2)
    norm = norm_of(module)
    prologue = Prologue(query_norm=norm, key_norm=norm, tables=tuple(jnp.asarray(t.numpy()) for t in rotary))
    mesh = make_mesh(jax.devices()[: shape.num_devices], shape)
    for policy in (AttentionPolicy(), AttentionPolicy(kernel="pallas", form=AttentionConfig(**SMALL))):
        run = jax.jit(lambda p, *x, policy=policy: attention(*x, mesh=mesh, prologue=p, policy=policy))
        out = run(prologue, *(x.numpy().reshape(2, seq, heads, head_dim) for x in (q, k, v)))
        compare(f"{name}, {shape}, {policy.kernel}", np.asarray(out), expected.numpy(), error=OPERATION)


@pytest.mark.parametrize("scores", ["exact", "int8"])
def test_joint_attention_odd_heads_on_two_chips_match_one_chip(scores: Any, monkeypatch: pytest.MonkeyPatch):
    """Three heads each, latents beside a text that every chip has: as on one chip."""
    monkeypatch.setattr("comfyui_tpu.attention.policy.LONG_SEQUENCE_TOKENS", 0)
    monkeypatch.setitem(SCORE_CHIPS, "int8", (jax.devices()[0].device_kind,))
    how = AttentionPolicy(kernel="pallas", scores=scores, form=AttentionConfig(scores=scores, **SMALL))
    latents, text = ([random_tensor(1, seq, 6, 128).numpy() + shift for shift in (0, 0.1, 0.2)] for seq in (64, 9))
    chosen = {"lengths": (57, 9), "placements": ("sharded", "replicated"), "policy": how}
    run = jax.jit(lambda *streams, mesh: joint_attention(*streams, mesh=mesh, **chosen), static_argnames="mesh")
    mesh = make_mesh(jax.devices()[:2], MeshShape(sp=2))
    found, wanted = (run(tuple(latents), tuple(text), mesh=each) for each in (mesh, None))
    bound = OPERATION if scores == "exact" else 2e-3  # what lies between two whole numbers may go either way
    for ours, theirs, real in zip(found, wanted, (57, 9), strict=True):
        assert difference(ours[:, :real], theirs[:, :real]) <= bound


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("name", ["RMS norm of heads", "RMS norm of all"])
def test_head_layout_take_equals_own_groups_of_divide(name: str, kernel: bool, compare: Callable):
    module, rotary, x = norms(8 * 64, 64)[name], tables(139, 64), random_tensor(2, 139, 8 * 64)
    layout = HeadLayout(head_dim=64, kernel=kernel, interpret=True)
    rest = norm_of(module), tuple(jnp.asarray(table.numpy()) for table in rotary)
    divided = layout.divide(jnp.asarray(x.numpy()), 2, 2, *rest)
    for chip in (0, 1):
        taken = layout.take(jnp.asarray(x.numpy()), jnp.int32(chip), 2, 2, *rest)
        for part, whole in zip(taken, divided, strict=True):
            compare(f"chip {chip}", part, whole[:, chip], error=OPERATION)
