"""Flash attention for TPUs: arrays, grid and block specs around `attention_body`, all flat, `[tokens, lanes]`.

Arrays are flat, `[batch, tokens, heads * head_dim]`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from . import attention_int8, registry
from .attention_config import AttentionConfig
from .attention_kernel import KeyExtent, QueryBlock, Scratch, block_aligned_unroll, grid_step
from .attention_reference import BlockSparsity, Keys
from .dispatch import KernelUnsupported
from .hardware import LANES, MIB, PACKED_ROWS, SUBLANES, Interpret, Ref, Scalar, round_up

TRANSPOSED_ROWS = 2048  # rows that one grid step of `turn` transposes


def flat_attention(
    q: Float[Array, "batch q_seq lanes"],
    keys: Sequence[Keys],
    *,
    head_dim: int,
    form: AttentionConfig,
    log_sums: bool,
    scale: float,
    interpret: Interpret = False,
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Return softmax attention of `q` to all of `keys`, and the log-sum-exp of its scores.

    The result is exact up to rounding if `form.scores` is "exact". A row without keys returns zeros and a log-sum-exp
    of `NEGATIVE`. Padding may hold anything.

    q: queries of all heads, `[batch, q_seq, heads * head_dim]`.
    keys: arrays of keys and values; queries attend to the valid rows of all of them.
    head_dim: 64 with an even number of heads, or a multiple of 128. Raises `NotImplementedError` for another.
    form: tile sizes and the way the maximum of the scores is found.
    log_sums: whether to return the log-sum-exp, `[batch, heads, q_seq]` float32; else None is returned for it.
    scale: factor of the scores, usually `head_dim ** -0.5`.
    interpret: how to run without a TPU, see `hardware.Interpret`.
    """
    batch, q_seq, lanes = q.shape
    heads = lanes // head_dim
    listed = keys[0].blocks
    check_support(heads, head_dim, listed, form).check()
    min_heads = max(1, LANES // head_dim)  # a block has 128 lanes at least
    heads_per_step = form.heads if form.heads % min_heads == 0 and heads % form.heads == 0 else min_heads
    # Blocks of equal size, so that no last block is nearly empty: its padding would be computed for nothing.
    block_q = round_up(-(-q_seq // -(-q_seq // form.block_q)), LANES) if listed is None else listed.size
    width = heads_per_step * head_dim
    is_transposed = form.reads_transposed(head_dim)
    blocks = _key_blocks(keys, form, LANES if is_transposed else PACKED_ROWS)
    num_kv = -(-max(keys[0].rows, 1) // blocks[0])
    step = min(form.step, max(blocks)) if listed is None else _choose_step(listed.size, form.step, is_transposed)
    online_step = min(form.online_step, step) if listed is None else _choose_step(step, form.online_step, is_transposed)
    form = replace(
        form, heads=heads_per_step, block_q=block_q, columns=min(form.columns or block_q, block_q), step=step,
        online_step=online_step,
    )  # fmt: skip
    lengths = jnp.stack(
        [jnp.full(batch, part.rows) if part.length is None else part.length for part in keys], axis=1
    ).astype(jnp.int32)
    query_blocks = -(-q_seq // block_q) if listed is None or len(listed.kept) == 1 else len(listed.kept)
    grid = (batch, heads // heads_per_step, query_blocks, *((num_kv,) if num_kv > 1 else ()))
    mode = {"pipeline_mode": pl.Buffered(1)} if form.single_buffered else {}
    query_spec = pl.BlockSpec((None, block_q, width), lambda row, group, index, *_: (row, index, group))
    sums_spec = pl.BlockSpec((None, heads_per_step, 1, block_q), lambda row, group, index, *_: (row, group, 0, index))
    key_specs = [
        tuple(_key_spec(block, width, part is keys[0] and num_kv > 1, turns, mode) for turns in (False, is_transposed))
        for part, block in zip(keys, blocks, strict=True)
    ]
    units = means = None
    block_of: Callable[..., QueryBlock] = QueryBlock
    if form.scores == "int8":
        block_of = functools.partial(attention_int8.Int8QueryBlock, interpreted=bool(interpret))
        keys, units, means = attention_int8.to_int8_keys(keys, batch, head_dim)
    arrays = [
        (part.keys, transpose_rows(part.values, part.blocks, interpret=interpret) if is_transposed else part.values)
        for part in keys
    ]
    ones = ones_spec = None
    if listed is not None and form.scores == "int8":
        ones = jnp.broadcast_to(jnp.asarray(listed.valid_mask, jnp.bfloat16), (SUBLANES, listed.rows))
        ones_spec = pl.BlockSpec(ones.shape, lambda *_: (0, 0))
    sums_shape = jax.ShapeDtypeStruct((batch, heads, 1, q_seq), jnp.float32)
    out, sums = pl.pallas_call(
        functools.partial(
            grid_step,
            block_of=functools.partial(block_of, form=form, head_dim=head_dim, scale=scale),
            extents=[KeyExtent(block, part.certain, part.rows) for part, block in zip(keys, blocks, strict=True)],
            num_kv=num_kv,
            blocks=listed,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[query_spec, key_specs, ones_spec],
            out_specs=[query_spec, sums_spec if log_sums else None],
            scratch_shapes=[_scratch(form, head_dim, q.dtype)],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), sums_shape if log_sums else None],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")[: len(grid)],
            vmem_limit_bytes=form.vmem_mib * MIB,
        ),
        interpret=interpret,
        cost_estimate=_cost(q, keys, head_dim),
        metadata=_describe_skips(listed, step, form.unroll),
        name=form.kernel + registry.WITH_RERUN * (form.maximum == "sampled" and num_kv == 1),
    )((lengths, units, listed and _scalars(listed)), q, arrays, ones)
    if not log_sums:
        return out, None
    return out, sums[:, :, 0] if means is None else attention_int8.restore_means(sums[:, :, 0], q, means, scale)


def check_support(
    heads: int, head_dim: int, blocks: BlockSparsity | None = None, form: AttentionConfig | None = None
) -> KernelUnsupported:
    """Return the reasons why the kernel cannot compute attention of this shape.

    heads, head_dim: number and size of the heads on one chip.
    blocks: block sparsity of the keys; None if dense.
    form: the kernel's configuration; None to check the shapes only.
    """
    reasons = []
    if head_dim % LANES and (head_dim != LANES // 2 or heads % 2):
        reasons.append(
            f"{heads} heads of {head_dim} lanes: a head must have a multiple of {LANES} lanes, or {LANES // 2} if the "
            "number of heads is even"
        )
    if blocks is not None and blocks.size % LANES:
        reasons.append(f"blocks of {blocks.size} keys are not a multiple of {LANES}")
    if blocks is not None and form is not None and form.block_kv is not None and form.block_kv < blocks.rows:
        reasons.append("block-sparse keys must all fit in VMEM at once")
    return KernelUnsupported(kernel=registry.ATTENTION, reasons=tuple(reasons))


def _scalars(blocks: BlockSparsity) -> tuple[Array, ...]:
    is_sparse = False if blocks.is_sparse is None else blocks.is_sparse
    return jnp.asarray(blocks.kept), jnp.asarray(blocks.real), jnp.asarray(is_sparse, jnp.int32)[None]


def _describe_skips(blocks: BlockSparsity | None, step: int, unroll: int) -> dict[str, str] | None:
    """Return metadata for the cost model: the loop turns that a sparse call skips; None if dense.

    None if dense.
    """
    if blocks is None or not blocks.left_out:
        return None
    per_block = blocks.size // step
    return {registry.SKIPPED_TURNS: str(blocks.left_out * per_block // block_aligned_unroll(per_block, unroll))}


def _choose_step(size: int, wanted: int, turned: bool) -> int:
    """Return the largest step of at most `wanted` keys that divides a block of `size` keys.

    turned: whether values are transposed, so that steps are whole registers of lanes.
    """
    multiple = LANES if turned else PACKED_ROWS
    return max(
        step for step in range(multiple, size + 1, multiple) if size % step == 0 and step <= max(wanted, multiple)
    )


def _scratch(form: AttentionConfig, head_dim: int, dtype: jnp.dtype) -> Any:
    """Return the shapes of the kernel's scratch buffers, a `Scratch`."""

    def vmem(rows: int, kind: Any = jnp.float32) -> Any:
        return pltpu.VMEM((form.heads, rows, form.block_q), kind)

    is_int8, has_maximum = form.scores == "int8", form.maximum != "zero"
    depth, row = max(LANES, head_dim), vmem(SUBLANES)
    return Scratch(
        scaled=vmem(depth + LANES, jnp.int8) if is_int8 else vmem(depth, dtype),
        sums=row,
        out=vmem(head_dim + SUBLANES if is_int8 else head_dim),
        weights=(vmem(form.step, jnp.bfloat16 if is_int8 else dtype),) * 2,
        top=(row, row) if has_maximum else (),
        kept=(row, row) if has_maximum else (),
        raw=(vmem(form.online_step),) * 2 if has_maximum else (),
        worth=row if is_int8 else None,
    )


def _key_spec(block: int, width: int, divided: bool, turned: bool, mode: dict[str, Any]) -> pl.BlockSpec:
    """Return the block spec of `block` keys of a group of heads.

    width: lanes of the group. divided: whether the grid's last index selects the block of keys. turned: whether the
      array is transposed. mode: pipeline mode of the block.
    """

    def index_map(row: Scalar, group: Scalar, index: Scalar, *rest: Any) -> tuple[Scalar, ...]:
        key_block = rest[0] if divided else 0
        return (row, group, key_block) if turned else (row, key_block, group)

    return pl.BlockSpec((None, width, block) if turned else (None, block, width), index_map, **mode)


def transpose_rows(
    x: Float[Array, "batch rows lanes"], blocks: BlockSparsity | None = None, *, interpret: Interpret = False
) -> Float[Array, "batch lanes columns"]:
    """Return `x`, `[batch, rows, lanes]`, transposed to `[batch, lanes, columns]`.

    The number of columns is that of rows, rounded up to a multiple of 128. Columns after the last row may hold
    anything. If `blocks` is given, columns of padding are zero. interpret: see `hardware.Interpret`.

    Values of heads of 64 are transposed once for all blocks of queries. Transposing them in the kernel's loop would
    cost 3 % of the kernel (docs/LOG.md).
    """
    batch, rows, lanes = x.shape
    columns = round_up(rows, LANES) if blocks is None else blocks.rows
    block = min(TRANSPOSED_ROWS, columns) if blocks is None else blocks.size

    def body(real: Ref | None, source: Ref, result: Ref) -> None:
        transposed = source[...].T
        if real is not None:
            lane = jax.lax.broadcasted_iota(jnp.int32, transposed.shape, 1)
            transposed = jnp.where(lane < real[pl.program_id(2)], transposed, jnp.zeros_like(transposed))
        result[...] = transposed

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, lanes // LANES, -(-columns // block)),
            in_specs=[pl.BlockSpec((None, block, LANES), lambda row, group, index, *_: (row, index, group))],
            out_specs=pl.BlockSpec((None, LANES, block), lambda row, group, index, *_: (row, group, index)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, lanes, columns), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name=registry.TURN,
    )(None if blocks is None else jnp.asarray(blocks.real), x)


def _cost(q: Array, keys: Sequence[Keys], head_dim: int) -> pl.CostEstimate:
    """Return the cost estimate of a call, for XLA's scheduler and for counting model FLOPs."""
    rows = sum(part.rows if part.blocks is None else part.blocks.size * part.blocks.kept.shape[1] for part in keys)
    scores = q.size // head_dim * rows
    moved = 2 * q.size + 2 * rows * q.size // q.shape[1]
    return pl.CostEstimate(flops=4 * scores * head_dim, transcendentals=scores, bytes_accessed=moved * q.dtype.itemsize)


def _key_blocks(keys: Sequence[Keys], form: AttentionConfig, multiple: int) -> list[int]:
    """Return the rows of each array of keys that are in VMEM at once: all, unless the form divides the first array.

    multiple: rows are rounded up to a multiple of this.
    """
    rows = [round_up(max(part.rows, 1), multiple) for part in keys]
    if form.block_kv is not None and form.block_kv < rows[0]:
        rows[0] = round_up(-(-rows[0] // -(-rows[0] // form.block_kv)), multiple)
    return rows
