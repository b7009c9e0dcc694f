"""Attention to some blocks of keys only, against a float64 softmax over these, written out here."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.attention import tiles
from comfyui_tpu.attention.api import joint_attention
from comfyui_tpu.attention.policy import AttentionPolicy, Kernel
from comfyui_tpu.attention.tiles import SlidingTileMask, Tiling
from comfyui_tpu.kernels import attention as kernel
from comfyui_tpu.kernels import attention_kernel, attention_reference
from comfyui_tpu.kernels.attention_config import AttentionConfig
from comfyui_tpu.kernels.attention_reference import BLOCKS_PER_TURN, BlockSparsity, keys_in_blocks, keys_of_length
from comfyui_tpu.kernels.number_formats import SCORE_CHIPS
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support import closeness
from comfyui_tpu.tests.support.closeness import OPERATION
from comfyui_tpu.tests.support.patience import mostly

pytestmark = pytest.mark.slow

SMALL = AttentionConfig(block_q=128, step=64, online_step=64)
FORMS = {
    "bounded": replace(SMALL, maximum="zero"),
    "sampled": SMALL,
    "pieces": replace(SMALL, columns=128, step=32, unroll=4),
    "online": replace(SMALL, maximum="online"),
    "int8": replace(SMALL, scores="int8"),
    "int8, online": replace(SMALL, scores="int8", maximum="online"),
}


def random_blocks(count: int, size: int = 128, blocks: int = 7, keep: int = 1, seed: int = 0) -> BlockSparsity:
    """Each block's own and others drawn, of `count`; of some blocks few rows are real, of one `keep`."""
    random = np.random.default_rng(seed)
    others = [random.permutation([n for n in range(blocks) if n != own])[: count - 1] for own in range(blocks)]
    real = random.integers(size // 2, size + 1, blocks)
    real[[2, 4]] = keep, size
    kept = np.array([[own, *each] for own, each in enumerate(others)], np.int32)
    return BlockSparsity(size=size, real=real.astype(np.int32), kept=kept)


def random_qkv(
    blocks: BlockSparsity, heads: int, head_dim: int, extra: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values; of padding keys and values are NaN."""
    random = np.random.default_rng(1)
    q, k, v = (random.normal(size=(1, blocks.rows + extra, heads, head_dim)).astype(np.float32) for _ in range(3))
    padding = ~real_rows(blocks)
    for x in (k, v):
        x[:, : blocks.rows][:, padding] = np.nan
        x[:, blocks.rows :] = np.nan
    return q, k, v


def real_rows(blocks: BlockSparsity) -> np.ndarray:
    return (np.arange(blocks.size) < blocks.real[:, None]).ravel()


def softmax(q: Any, k: Any, v: Any, blocks: BlockSparsity, text: Any = None) -> np.ndarray:
    """`[rows, heads, head_dim]` of each block of queries, by its own keys and all of the text's."""
    real, out = real_rows(blocks), np.zeros(q.shape[1:], np.float64)
    for number in range(-(-q.shape[1] // blocks.size)):
        rows = slice(number * blocks.size, (number + 1) * blocks.size)
        own = blocks.kept[min(number, len(blocks.kept) - 1)]
        places = [n * blocks.size + i for n in own for i in range(blocks.size) if real[n * blocks.size + i]]
        keys, values = (x[0, places].astype(np.float64) for x in (k, v))
        if text is not None:
            keys, values = np.concatenate([keys, text[0][0]]), np.concatenate([values, text[1][0]])
        scores = np.einsum("qhd,khd->hqk", q[0, rows].astype(np.float64), keys) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[rows] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
    return out


def flat(x: Any) -> jax.Array:
    return jnp.asarray(x.reshape(*x.shape[:2], -1))


def run_block_attention(name: str, q: Any, k: Any, v: Any, blocks: BlockSparsity, text: Any = None) -> jax.Array:
    """`[rows, heads, head_dim]` by the reference or by the kernel in the form of that name."""
    keys = [keys_in_blocks(flat(k), flat(v), blocks)]
    if text is not None:
        keys.append(keys_of_length(flat(text[0]), flat(text[1]), text[0].shape[1]))
    how = {"head_dim": q.shape[-1], "log_sums": False}
    if name == "reference":
        run = functools.partial(attention_reference.flat_attention, **how)
    else:
        run = functools.partial(
            kernel.flat_attention, form=FORMS[name], scale=q.shape[-1] ** -0.5, interpret=True, **how
        )
    return jax.jit(lambda q: run(q, keys)[0])(flat(q)).reshape(q.shape[1:])


def run_with_sparsity_switch(name: str, blocks: BlockSparsity, q: Any, k: Any, v: Any, is_sparse: Any) -> jax.Array:
    return run_block_attention(name, q, k, v, replace(blocks, is_sparse=is_sparse))


def error_bound(name: str) -> float:
    """int8 rounds queries and keys, to about as much."""
    return 6e-2 if name.startswith("int8") else OPERATION


FEW_FORMS = ("reference", "sampled", "pieces", "online", "int8")


@pytest.mark.parametrize(
    ("name", "head_dim", "left_out"),
    mostly(
        ((name, *size) for name in FEW_FORMS for size in ((64, 4), (128, 8))),
        ("reference", 64, 4), ("sampled", 128, 8), ("pieces", 64, 4), ("online", 128, 8), ("int8", 64, 4),
    ),
)  # fmt: skip
def test_block_attention_drops_left_out_blocks_when_sparse(name: str, head_dim: int, left_out: int):
    """Of eleven; one program."""
    blocks = replace(random_blocks(11, blocks=11), left_out=left_out)
    q, k, v = random_qkv(blocks, 2, head_dim)
    run = jax.jit(functools.partial(run_with_sparsity_switch, name, blocks))
    for is_sparse in (True, False):
        own = replace(blocks, kept=blocks.kept[:, : 11 - left_out * is_sparse], left_out=0)
        assert closeness.difference(run(q, k, v, is_sparse), softmax(q, k, v, own)) <= error_bound(name)


@pytest.mark.parametrize("name", FEW_FORMS)
def test_block_attention_attends_to_listed_blocks_only(name: str, head_dim: int = 128):
    """Rows behind the last block, as on chips that do not divide them, are anything."""
    blocks = random_blocks(3)
    q, k, v = random_qkv(blocks, 2, head_dim, extra=16)
    found = run_block_attention(name, q, k, v, blocks)[: blocks.rows]
    wanted = softmax(q[:, : blocks.rows], k, v, blocks)
    assert closeness.difference(found, wanted) <= error_bound(name)
    other = replace(blocks, kept=random_blocks(3, seed=5).kept)
    assert closeness.difference(found, softmax(q[:, : blocks.rows], k, v, other)) > 0.1


@pytest.mark.parametrize("name", ["reference", "bounded", "int8, online"])
def test_block_attention_with_text_attends_to_all_text_keys(name: str):
    """And its own queries, of which all have one list, see every block."""
    blocks = random_blocks(3)
    q, k, v = random_qkv(blocks, 2, 128)
    text = tuple(np.random.default_rng(2).normal(size=(2, 1, 37, 2, 128)).astype(np.float32))
    assert closeness.difference(
        run_block_attention(name, q, k, v, blocks, text), softmax(q, k, v, blocks, text)
    ) <= error_bound(name)
    every = replace(blocks, kept=np.arange(7, dtype=np.int32)[None])
    found = run_block_attention(name, text[0], k, v, every, text)
    assert closeness.difference(found, softmax(text[0], k, v, every, text)) <= error_bound(name)


@pytest.mark.parametrize("name", ["bounded", "online"])
def test_block_attention_with_all_blocks_equals_dense_kernel(name: str):
    """To the bit, where no key is padding and no maximum is guessed from other keys."""
    blocks = BlockSparsity(size=128, real=np.full(7, 128, np.int32), kept=np.tile(np.arange(7, dtype=np.int32), (7, 1)))
    q, k, v = random_qkv(blocks, 2, 128)
    keys = [keys_of_length(flat(k), flat(v), blocks.rows)]
    how = {"head_dim": 128, "form": FORMS[name], "scale": 128**-0.5, "interpret": True, "log_sums": False}
    dense = jax.jit(lambda q: kernel.flat_attention(q, keys, **how)[0])(flat(q))
    assert np.array_equal(run_block_attention(name, q, k, v, blocks).reshape(dense.shape), dense)


@pytest.mark.parametrize("name", ["sampled", "online", "int8"])
def test_block_attention_rerun_of_query_block_matches_softmax(name: str):
    """One key far above those of the guess, in a block that some lists have: 140 in base 2, of the last block."""
    blocks = random_blocks(3)
    q, k, v = random_qkv(blocks, 2, 128)
    q[..., 0], q[..., 1:] = 8.0, 0.0
    k[:, :, :, 0] = np.where(np.isnan(k[..., 0]), np.nan, np.random.default_rng(3).uniform(-1, 1, k.shape[:3]))
    k[0, 6 * 128 + 1, :, 0] += 140 * np.log(2) * 128**0.5 / 8
    found, wanted = run_block_attention(name, q, k, v, blocks), softmax(q, k, v, blocks)
    have = [6 in own for own in blocks.kept]
    assert 1 < sum(have) < 7
    for number, has_it in enumerate(have):
        rows = slice(number * 128, (number + 1) * 128)
        if has_it:
            taken = np.broadcast_to(v[0, 6 * 128 + 1], wanted[rows].shape)
            assert closeness.difference(wanted[rows], taken) < 1e-6
            assert closeness.difference(found[rows], taken) <= 2.0**-7
        elif not name.startswith("int8"):  # whose scale that key has taken
            assert closeness.difference(found[rows], wanted[rows]) <= OPERATION


def test_block_attention_without_rerun_is_not_finite(monkeypatch: pytest.MonkeyPatch):
    blocks = random_blocks(3)
    q, k, v = random_qkv(blocks, 2, 128)
    q[..., 0], q[..., 1:] = 8.0, 0.0
    k[..., 0] = 0.0
    k[0, 6 * 128 + 1, :, 0] = 140 * np.log(2) * 128**0.5 / 8
    monkeypatch.setattr(attention_kernel.QueryBlock, "has_failed", lambda self: False)
    assert not np.isfinite(run_block_attention("sampled", q, k, v, blocks)).all()


@pytest.mark.parametrize("name", ["reference", "sampled", "int8"])
def test_block_attention_log_sums_cover_kept_keys_only(name: str):
    blocks = random_blocks(2)
    q, k, v = random_qkv(blocks, 2, 128)
    keys = [keys_in_blocks(flat(k), flat(v), blocks)]
    if name == "reference":
        _, found = attention_reference.flat_attention(flat(q), keys, head_dim=128, log_sums=True)
    else:
        how = {"head_dim": 128, "form": FORMS[name], "scale": 128**-0.5, "interpret": True}
        _, found = kernel.flat_attention(flat(q), keys, log_sums=True, **how)
    assert found is not None
    real = real_rows(blocks)
    for number, own in enumerate(blocks.kept):
        rows = slice(number * 128, (number + 1) * 128)
        places = [n * 128 + i for n in own for i in range(128) if real[n * 128 + i]]
        scores = np.einsum("qhd,khd->hqk", *(x.astype(np.float64) for x in (q[0, rows], k[0, places]))) * 128**-0.5
        wanted = np.log(np.exp(scores).sum(-1))
        error = np.abs(np.asarray(found)[0, :, rows] - wanted).max() / np.abs(wanted).max()
        assert error < (3e-2 if name == "int8" else 5e-5)


def test_block_sparsity_unsupported_sizes_raise_value_error():
    blocks = replace(random_blocks(3), size=96)
    assert str(kernel.check_support(2, 64, blocks)).endswith("blocks of 96 keys are not a multiple of 128.")
    with pytest.raises(ValueError) as error:
        replace(random_blocks(7), left_out=3)
    assert str(error.value) == "left_out is 3; it must be a multiple of 4 and at most 5, so that 2 of 7 blocks remain."
    with pytest.raises(ValueError, match="left_out is 4; it must be .* at most 3"):
        replace(random_blocks(5, blocks=5), left_out=4)
    divided = replace(SMALL, maximum="online", block_kv=128)
    assert "must all fit in VMEM at once" in str(kernel.check_support(2, 64, random_blocks(3), divided))
    assert not kernel.check_support(2, 64, random_blocks(3), SMALL)


# --- tiles ------------------------------------------------------------------------------------------------------------

WAN = (7, 9, 16)


@pytest.mark.parametrize("tile", [WAN, (8, 8, 16)], ids=str)
@pytest.mark.parametrize(
    "sizes", [(21, 45, 80), (31, 45, 80), (21, 30, 52), (5, 7, 11), (1, 45, 80), (2, 3, 1), (13, 61, 37)], ids=str
)
def test_tiling_assigns_each_token_one_row_of_a_connected_tile(sizes: tuple[int, int, int], tile: tuple[int, int, int]):
    found, tokens, most = Tiling(sizes=sizes, tile=tile), int(np.prod(sizes)), int(np.prod(tile))
    assert found.real.sum() == tokens and found.real.max() - found.real.min() <= 1
    assert tokens <= found.count * most < tokens + most and 1 <= found.real.min() <= found.real.max() <= most
    assert np.array_equal(found.row_tokens[found.token_rows], np.arange(tokens))
    assert len(found.row_tokens) == found.rows * found.count
    assert np.array_equal(found.token_rows // found.rows, found.token_tiles)
    assert np.array_equal(found.blocks(None).kept[:, 0], np.arange(found.count))
    for number in range(found.count):
        assert is_one_piece(found.places[found.token_tiles == number])


def is_one_piece(places: np.ndarray) -> bool:
    """Whether one can go from each of these tokens to each other without leaving them."""
    left = {*map(tuple, places.tolist())}
    reached = [left.pop()]
    for place in reached:
        for axis, step in itertools.product(range(3), (-1, 1)):
            beside = (*place[:axis], place[axis] + step, *place[axis + 1 :])
            if beside in left:
                left.remove(beside)
                reached.append(beside)
    return not left


def test_tiling_of_wan_720p_is_75_boxes():
    found = Tiling(sizes=(21, 45, 80), tile=WAN)
    assert (found.count, found.rows, set(found.real)) == (75, 1024, {1008})
    assert all(tuple(np.ptp(found.places[found.token_tiles == tile], axis=0) + 1) == WAN for tile in range(75))


def test_tiling_of_hunyuanvideo_720p_is_109_tiles():
    found = Tiling(sizes=(31, 45, 80), tile=(8, 8, 16))
    assert (found.count, found.rows, set(found.real), found.left_out) == (109, 1024, {1023, 1024}, 56)
    # With a bend or without, a tile is about as long as the wanted one.
    lengths = [np.ptp(found.places[found.token_tiles == tile], axis=0) + 1 for tile in range(109)]
    assert all(
        abs(mean - wanted) < 0.15 * wanted for mean, wanted in zip(np.mean(lengths, axis=0), (8, 8, 16), strict=True)
    )


def test_tiling_blocks_keep_own_and_nearest_tiles():
    found = Tiling(sizes=(21, 45, 80), tile=WAN)
    blocks = found.blocks(None)
    assert found.left_out == blocks.left_out == 40
    assert np.array_equal(np.sort(blocks.kept, axis=1), np.tile(np.arange(75), (75, 1)))
    kept = blocks.kept[:, :35]
    assert np.array_equal(kept[:, 0], np.arange(75))
    boxes = [found.places[found.token_tiles == tile].min(axis=0) // WAN for tile in range(75)]
    for own, row in enumerate(kept):
        away = ((np.array(boxes) - boxes[own]) ** 2).sum(axis=1)
        assert away[row].max() <= np.delete(away, row).min()


@pytest.mark.parametrize(
    ("sizes", "count", "kept"), [((3, 3, 3), 1, 1), ((7, 9, 80), 5, 5), ((7, 18, 64), 8, 4), ((21, 16, 53), 18, 10)]
)
def test_tiling_keeps_about_half_of_the_tiles_in_fours(sizes: tuple[int, int, int], count: int, kept: int):
    found = Tiling(sizes=sizes, tile=WAN)
    assert (found.count, found.count - found.left_out) == (count, kept)


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        (MeshShape(), "reference"),
        (MeshShape(sp=4), "reference"),
        (MeshShape(dp=2, sp=2, tp=2), "reference"),
        pytest.param(MeshShape(sp=2), "pallas", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tile_attention_on_every_mesh_matches_softmax(shape: MeshShape, how: Kernel, monkeypatch: pytest.MonkeyPatch):
    """Each chip has its heads' whole lists; a text beside has all keys, and all have it."""
    monkeypatch.setattr(tiles, "TILE_ROWS_MULTIPLE", 128)
    found = Tiling(sizes=(3, 5, 11), tile=(1, 3, 7))
    random = np.random.default_rng(4)
    rows = -(-found.rows * found.count // 64) * 64
    heads = 8 if how == "reference" else 4  # of the kernel, whose program grows with them, two for each chip
    latent = tuple(random.normal(size=(2, rows, heads, 64)).astype(np.float32) for _ in range(3))
    text = tuple(random.normal(size=(2, 7, heads, 64)).astype(np.float32) for _ in range(3))
    mesh = make_mesh(jax.devices()[: shape.num_devices], shape)
    policy = AttentionPolicy(kernel=how, form=SMALL if how == "pallas" else None)

    @jax.jit
    def run(latent: Any, text: Any, is_sparse: Any) -> Any:
        nearby = SlidingTileMask(tiles=found, is_sparse=is_sparse)
        where = {"lengths": (165, 7), "placements": ("sharded", "replicated"), "mesh": mesh}
        return joint_attention(latent, text, **where, policy=policy, nearby=nearby)

    for is_sparse in (True, False):
        blocks = found.blocks(None)
        blocks = replace(blocks, kept=blocks.kept[:, : 4 if is_sparse else 8], left_out=0)
        out, text_out = run(latent, text, is_sparse)
        every = replace(found.blocks(None), left_out=0)
        for row in range(2):
            own, beside = ([x[row : row + 1] for x in stream] for stream in (latent, text))
            wanted = softmax(*own, blocks, beside[1:])
            real = real_rows(blocks)
            assert closeness.difference(out[row][: blocks.rows][real], wanted[: blocks.rows][real]) <= OPERATION
            wanted = softmax(beside[0], *own[1:], replace(every, kept=every.kept[:1]), beside[1:])
            assert closeness.difference(text_out[row], wanted) <= OPERATION


@pytest.mark.parametrize("how", ["reference", "pallas"])
def test_tile_attention_int8_on_two_chips_matches_one_chip(how: Kernel, monkeypatch: pytest.MonkeyPatch):
    """Before chips exchange them, by the real ones alone: padding in tiles, behind them and of a text is NaN."""
    monkeypatch.setattr(tiles, "TILE_ROWS_MULTIPLE", 128)
    monkeypatch.setattr("comfyui_tpu.attention.policy.LONG_SEQUENCE_TOKENS", 0)
    monkeypatch.setitem(SCORE_CHIPS, "int8", (jax.devices()[0].device_kind,))
    found = Tiling(sizes=(3, 5, 11), tile=(1, 3, 7))
    random = np.random.default_rng(5)
    latent, text = (random.normal(size=(3, 2, rows, 6, 64)).astype(np.float32) for rows in (1088, 7))
    real = np.append(found.blocks(None).valid_mask, np.zeros(64, bool))
    latent[1:, :, ~real], text[1:, 0, 3:] = np.nan, np.nan
    policy = AttentionPolicy(kernel=how, scores="int8", form=FORMS["int8"] if how == "pallas" else None)

    @functools.partial(jax.jit, static_argnames="mesh")
    def run(latent: Any, text: Any, mesh: Any) -> Any:
        return joint_attention(
            tuple(latent), tuple(text), lengths=(165, jnp.array([3, 7])), placements=("sharded", "replicated"),
            mesh=mesh, policy=policy, nearby=SlidingTileMask(tiles=found, is_sparse=jnp.array(True)),
        )  # fmt: skip

    (out, text_out), wanted = (
        run(latent, text, mesh) for mesh in (make_mesh(jax.devices()[:2], MeshShape(sp=2)), None)
    )
    # What lies in the middle between two whole numbers may go either way.
    assert closeness.difference(out[:, real], wanted[0][:, real]) <= 2e-3
    assert closeness.difference(text_out, wanted[1]) <= 2e-3


def test_block_aligned_unroll_divides_left_out_blocks():
    for per_block in range(1, 9):
        for unroll in range(2, 17, 2):
            turn = attention_kernel.block_aligned_unroll(per_block, unroll)
            assert turn % per_block == 0 and BLOCKS_PER_TURN * per_block % turn == 0, (per_block, unroll)
