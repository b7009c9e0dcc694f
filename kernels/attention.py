"""The attention kernel: arrays, grid and blocks around `attention_body`, all flat, `[tokens, heads * head_dim]`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from . import attention_int8, names
from .attention_body import Block, Extent, Scratch, grid_step, turn_of
from .attention_form import Form
from .attention_reference import Blocks, Keys
from .chip import LANES, MIB, PACKED_ROWS, SUBLANES, Interpret, round_up
from .choice import KernelRefusal

TURNED_ROWS = 2048  # at once


def flat_attention(
    q: Float[Array, "batch q_seq lanes"],
    keys: Sequence[Keys],
    *,
    head_dim: int,
    form: Form,
    log_sums: bool,
    scale: float,
    interpret: Interpret = False,
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Softmax attention of `q` to all of `keys`, and if asked the log-sum-exp of its scores; exact but for rounding,
    where the form's `scores` are.

    `head_dim` is 64 (an even number of heads) or a multiple of 128, else `NotImplementedError` says so. A row without
    keys returns zeros and a log-sum-exp of `NEGATIVE`. Padding may hold anything.
    """
    batch, q_seq, lanes = q.shape
    heads = lanes // head_dim
    listed = keys[0].blocks
    refusal(heads, head_dim, listed, form).check()
    least = max(1, LANES // head_dim)  # a block has 128 lanes at least
    together = form.heads if form.heads % least == 0 and heads % form.heads == 0 else least
    # Blocks of equal size: of a last one that is nearly empty the rest would be computed for nothing.
    block_q = round_up(-(-q_seq // -(-q_seq // form.block_q)), LANES) if listed is None else listed.size
    width = together * head_dim
    turned = form.turned(head_dim)
    blocks = _key_blocks(keys, form, LANES if turned else PACKED_ROWS)
    num_kv = -(-max(keys[0].rows, 1) // blocks[0])
    step = min(form.step, max(blocks)) if listed is None else _step_in(listed.size, form.step, turned)
    online_step = min(form.online_step, step) if listed is None else _step_in(step, form.online_step, turned)
    form = replace(
        form, heads=together, block_q=block_q, columns=min(form.columns or block_q, block_q), step=step,
        online_step=online_step,
    )  # fmt: skip
    lengths = jnp.stack(
        [jnp.full(batch, part.rows) if part.length is None else part.length for part in keys], axis=1
    ).astype(jnp.int32)
    query_blocks = -(-q_seq // block_q) if listed is None or len(listed.kept) == 1 else len(listed.kept)
    grid = (batch, heads // together, query_blocks, *((num_kv,) if num_kv > 1 else ()))
    mode = {"pipeline_mode": pl.Buffered(1)} if form.single_buffered else {}
    query_spec = pl.BlockSpec((None, block_q, width), lambda row, group, index, *_: (row, index, group))
    sums_spec = pl.BlockSpec((None, together, 1, block_q), lambda row, group, index, *_: (row, group, 0, index))
    key_specs = [
        tuple(_key_spec(block, width, part is keys[0] and num_kv > 1, turns, mode) for turns in (False, turned))
        for part, block in zip(keys, blocks, strict=True)
    ]
    units = means = None
    block_of: Callable[..., Block] = Block
    if form.scores == "int8":
        block_of = functools.partial(attention_int8.Int8Block, interpreted=bool(interpret))
        keys, units, means = attention_int8.rounded_keys(keys, batch, head_dim)
    arrays = [
        (part.keys, turn(part.values, part.blocks, interpret=interpret) if turned else part.values) for part in keys
    ]
    ones = ones_spec = None
    if listed is not None and form.scores == "int8":
        ones = jnp.broadcast_to(jnp.asarray(listed.is_real, jnp.bfloat16), (SUBLANES, listed.rows))
        ones_spec = pl.BlockSpec(ones.shape, lambda *_: (0, 0))
    sums_shape = jax.ShapeDtypeStruct((batch, heads, 1, q_seq), jnp.float32)
    out, sums = pl.pallas_call(
        functools.partial(
            grid_step,
            block_of=functools.partial(block_of, form=form, head_dim=head_dim, scale=scale),
            extents=[Extent(block, part.certain, part.rows) for part, block in zip(keys, blocks, strict=True)],
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
        metadata=_skipped(listed, step, form.unroll),
        name=form.kernel + names.WITH_RERUN * (form.maximum == "sampled" and num_kv == 1),
    )((lengths, units, listed and _scalars(listed)), q, arrays, ones)
    if not log_sums:
        return out, None
    return out, sums[:, :, 0] if means is None else attention_int8.with_means(sums[:, :, 0], q, means, scale)


def refusal(heads: int, head_dim: int, blocks: Blocks | None = None, form: Form | None = None) -> KernelRefusal:
    """Why the kernel does not take heads of this size as they are, or keys in these blocks."""
    reasons = []
    if head_dim % LANES and (head_dim != LANES // 2 or heads % 2):
        reasons.append(
            f"{heads} heads of {head_dim} lanes are neither of a multiple of {LANES} nor an even number of {LANES // 2}"
        )
    if blocks is not None and blocks.size % LANES:
        reasons.append(f"blocks of {blocks.size} keys are no multiple of {LANES}")
    if blocks is not None and form is not None and form.block_kv is not None and form.block_kv < blocks.rows:
        reasons.append("keys in blocks that are left out must all be in VMEM")
    return KernelRefusal(kernel=names.ATTENTION, reasons=tuple(reasons))


def _scalars(blocks: Blocks) -> tuple[Array, ...]:
    is_sparse = False if blocks.is_sparse is None else blocks.is_sparse
    return jnp.asarray(blocks.kept), jnp.asarray(blocks.real), jnp.asarray(is_sparse, jnp.int32)[None]


def _skipped(blocks: Blocks | None, step: int, unroll: int) -> dict[str, str] | None:
    """What the cost model must know of a kernel that may leave blocks out: how many turns of its loop that saves."""
    if blocks is None or not blocks.left_out:
        return None
    per_block = blocks.size // step
    return {names.SKIPPED: str(blocks.left_out * per_block // turn_of(per_block, unroll))}


def _step_in(size: int, wanted: int, turned: bool) -> int:
    """The longest step, of `wanted` keys at most, that divides a block; values that are turned are read by lanes."""
    multiple = LANES if turned else PACKED_ROWS
    return max(
        step for step in range(multiple, size + 1, multiple) if size % step == 0 and step <= max(wanted, multiple)
    )


def _scratch(form: Form, head_dim: int, dtype: Any) -> Scratch:
    def held(rows: int, kind: Any = jnp.float32) -> Any:
        return pltpu.VMEM((form.heads, rows, form.block_q), kind)

    is_int8 = form.scores == "int8"
    two = {"weights": (held(form.step, jnp.bfloat16 if is_int8 else dtype),) * 2}
    if form.maximum != "zero":
        row = held(SUBLANES)
        two |= {"top": (row, row), "kept": (row, row), "raw": (held(form.online_step),) * 2}
    depth = max(LANES, head_dim)
    if is_int8:
        two |= {"scaled": held(depth + LANES, jnp.int8), "out": held(head_dim + SUBLANES), "worth": held(SUBLANES)}
    return Scratch(**{"scaled": held(depth, dtype), "sums": held(SUBLANES), "out": held(head_dim), **two})


def _key_spec(block: int, width: int, divided: bool, turned: bool, mode: dict[str, Any]) -> pl.BlockSpec:
    """`block` keys of a group of heads; `divided`: those of the grid's last index."""

    def index_map(row: Any, group: Any, index: Any, *rest: Any) -> tuple:
        at = rest[0] if divided else 0
        return (row, group, at) if turned else (row, at, group)

    return pl.BlockSpec((None, width, block) if turned else (None, block, width), index_map, **mode)


def turn(
    x: Float[Array, "batch rows lanes"], blocks: Blocks | None = None, *, interpret: Interpret = False
) -> Float[Array, "batch lanes columns"]:
    """`x` with rows as lanes, their number rounded up to a multiple of 128; lanes after the last may hold anything, but
    those of padding in `blocks` are zero.

    Values of heads of 64 are read as the product wants them, once for all blocks of queries: turned in the loop they
    cost 3 % of the kernel (docs/LOG.md).
    """
    batch, rows, lanes = x.shape
    columns = round_up(rows, LANES) if blocks is None else blocks.rows
    block = min(TURNED_ROWS, columns) if blocks is None else blocks.size

    def body(real: Any, source: Any, result: Any) -> None:
        found = source[...].T
        if real is not None:
            lane = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
            found = jnp.where(lane < real[pl.program_id(2)], found, jnp.zeros_like(found))
        result[...] = found

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
        name=names.TURN,
    )(None if blocks is None else jnp.asarray(blocks.real), x)


def _cost(q: Array, keys: Sequence[Keys], head_dim: int) -> pl.CostEstimate:
    """For XLA's scheduler, and for counting model FLOPs."""
    rows = sum(part.rows if part.blocks is None else part.blocks.size * part.blocks.kept.shape[1] for part in keys)
    scores = q.size // head_dim * rows
    moved = 2 * q.size + 2 * rows * q.size // q.shape[1]
    return pl.CostEstimate(flops=4 * scores * head_dim, transcendentals=scores, bytes_accessed=moved * q.dtype.itemsize)


def _key_blocks(keys: Sequence[Keys], form: Form, multiple: int) -> list[int]:
    """Rows of each part that are in VMEM at once: all, but for the first part where the form divides it."""
    rows = [round_up(max(part.rows, 1), multiple) for part in keys]
    if form.block_kv is not None and form.block_kv < rows[0]:
        rows[0] = round_up(-(-rows[0] // -(-rows[0] // form.block_kv)), multiple)
    return rows
