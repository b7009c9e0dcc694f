"""The attention kernel: arrays, grid and blocks around `kernel_body`, all flat, `[tokens, heads * head_dim]`."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .kernel_body import LANES, ROWS, SUBLANES, Block, Part, attend
from .keys import Keys
from .policy import AttentionPolicy, Form
from .tiles import round_up

MIB = 2**20
TURNED_ROWS = 2048  # at once


def flat_attention(
    q: Float[Array, "batch q_seq lanes"],
    keys: Sequence[Keys],
    *,
    head_dim: int,
    form: Form,
    log_sums: bool,
    scale: float,
    interpret: bool = False,
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Softmax attention of `q` to all of `keys`, and if asked the log-sum-exp of its scores.

    `head_dim` is 64 (an even number of heads) or a multiple of 128. A row without keys gives zeros and a log-sum-exp of
    `NEGATIVE`. Padding may hold anything.
    """
    batch, q_seq, lanes = q.shape
    heads = lanes // head_dim
    least = max(1, LANES // head_dim)  # a block has 128 lanes at least
    together = form.heads if form.heads % least == 0 and heads % form.heads == 0 else least
    # Blocks of equal size: of a last one that is nearly empty the rest would be computed for nothing.
    block_q = round_up(-(-q_seq // -(-q_seq // form.block_q)), LANES)
    width = together * head_dim
    turned = head_dim < LANES
    blocks = _key_blocks(keys, form, LANES if turned else ROWS)
    num_kv = -(-max(keys[0].rows, 1) // blocks[0])
    step = min(form.step, max(blocks))
    lengths = jnp.stack(
        [jnp.full(batch, part.rows) if part.length is None else part.length for part in keys], axis=1
    ).astype(jnp.int32)
    grid = (batch, heads // together, -(-q_seq // block_q), *((num_kv,) if num_kv > 1 else ()))

    def queries(row: Any, group: Any, index: Any, *_: Any) -> tuple:
        return row, index, group

    mode = {"pipeline_mode": pl.Buffered(1)} if form.single_buffered else {}
    arrays, key_specs = [], []
    for part, block in zip(keys, blocks, strict=True):
        divided = part is keys[0] and num_kv > 1
        arrays += [part.keys, turn(part.values, interpret=interpret) if turned else part.values]
        key_specs += [_key_spec(block, width, divided, is_turned, mode) for is_turned in (False, turned)]
    query_spec = pl.BlockSpec((None, block_q, width), queries)
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    out_specs = [query_spec]
    if log_sums:
        out_shape.append(jax.ShapeDtypeStruct((batch, heads, 1, q_seq), jnp.float32))
        out_specs.append(
            pl.BlockSpec((None, together, 1, block_q), lambda row, group, index, *_: (row, group, 0, index))
        )
    online_step = min(form.online_step, step)
    weights = pltpu.VMEM((together, step, block_q), q.dtype)
    row = pltpu.VMEM((together, SUBLANES, block_q), jnp.float32)
    running = [row, row, row, row, *[pltpu.VMEM((together, online_step, block_q), jnp.float32)] * 2]
    body = functools.partial(
        _body,
        keys=[(block, part.certain, part.rows) for part, block in zip(keys, blocks, strict=True)],
        log_sums=log_sums,
        num_kv=num_kv,
        settings={
            "head_dim": head_dim,
            "heads": together,
            "maximum": form.maximum,
            "columns": min(form.columns or block_q, block_q),
            "step": step,
            "online_step": online_step,
            "unroll": form.unroll,
            "scale": scale,
        },
        turned=turned,
    )
    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[query_spec, *key_specs],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((together, max(LANES, head_dim), block_q), q.dtype),
                row,
                pltpu.VMEM((together, head_dim, block_q), jnp.float32),
                weights,
                weights,
                *(running if form.maximum != "zero" else []),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")[: len(grid)],
            vmem_limit_bytes=form.vmem_mib * MIB,
        ),
        interpret=interpret,
        cost_estimate=_cost(q, keys, head_dim),
        # The name tells `plan` how to count.
        name="attention_with_rerun" if form.maximum == "sampled" and num_kv == 1 else "attention",
    )(lengths, q, *arrays)
    return results[0], results[1][:, :, 0] if log_sums else None


def _key_spec(block: int, width: int, divided: bool, turned: bool, mode: dict[str, Any]) -> pl.BlockSpec:
    """`block` keys of a group of heads; `divided`: those of the grid's last index."""

    def index_map(row: Any, group: Any, index: Any, *rest: Any) -> tuple:
        at = rest[0] if divided else 0
        return (row, group, at) if turned else (row, at, group)

    return pl.BlockSpec((None, width, block) if turned else (None, block, width), index_map, **mode)


def turn(x: Float[Array, "batch rows lanes"], *, interpret: bool = False) -> Float[Array, "batch lanes columns"]:
    """`x` with rows as lanes, their number rounded up to whole registers: what is beyond the last may be anything.

    Values of heads of 64 are read as the product wants them, once for all blocks of queries: turned in the loop they
    cost 3 % of the kernel (docs/LOG.md).
    """
    batch, rows, lanes = x.shape
    columns = round_up(rows, LANES)
    block = min(TURNED_ROWS, columns)

    def body(source: Any, result: Any) -> None:
        result[...] = source[...].T

    return pl.pallas_call(
        body,
        grid=(batch, lanes // LANES, -(-columns // block)),
        in_specs=[pl.BlockSpec((None, block, LANES), lambda row, group, index: (row, index, group))],
        out_specs=pl.BlockSpec((None, LANES, block), lambda row, group, index: (row, group, index)),
        out_shape=jax.ShapeDtypeStruct((batch, lanes, columns), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="turn",
    )(x)


def _cost(q: Array, keys: Sequence[Keys], head_dim: int) -> pl.CostEstimate:
    """For XLA's scheduler, and for counting model FLOPs."""
    rows = sum(part.rows for part in keys)
    scores = q.size // head_dim * rows
    moved = 2 * q.size + 2 * rows * q.size // q.shape[1]
    return pl.CostEstimate(flops=4 * scores * head_dim, transcendentals=scores, bytes_accessed=moved * q.dtype.itemsize)


def _key_blocks(keys: Sequence[Keys], form: Form, multiple: int) -> list[int]:
    """Rows of each part that are in VMEM at once: all, but for the first part where the form divides it."""
    rows = [round_up(max(part.rows, 1), multiple) for part in keys]
    if form.block_kv is not None and form.block_kv < rows[0]:
        rows[0] = round_up(-(-rows[0] // -(-rows[0] // form.block_kv)), multiple)
    return rows


def local_attention(
    q: Float[Array, "batch q_seq lanes"],
    keys: Sequence[Keys],
    *,
    head_dim: int,
    log_sums: bool,
    policy: AttentionPolicy,
    device_kind: str,
    interpret: bool = False,
) -> tuple[Float[Array, "batch q_seq lanes"], Float[Array, "batch heads q_seq"] | None]:
    """Like `reference.flat_attention`, by the kernel. Heads of a size it does not know are padded with zeros."""
    heads = q.shape[2] // head_dim
    padded = 64 if head_dim <= 64 and heads % 2 == 0 else round_up(head_dim, LANES)
    if padded != head_dim:
        q, *rest = (_resize(x, head_dim, padded) for x in (q, *(x for part in keys for x in (part.keys, part.values))))
        keys = [replace(part, keys=rest[2 * n], values=rest[2 * n + 1]) for n, part in enumerate(keys)]
    form = policy.form_for(
        device_kind,
        q_seq=q.shape[1],
        kv_rows=[part.rows for part in keys],
        heads=heads,
        head_dim=padded,
        itemsize=q.dtype.itemsize,
    )
    out, log_sum = flat_attention(
        q, keys, head_dim=padded, form=form, log_sums=log_sums, scale=head_dim**-0.5, interpret=interpret
    )
    return out if padded == head_dim else _resize(out, padded, head_dim), log_sum


def _resize(x: Array, head_dim: int, wanted: int) -> Array:
    """Heads of `wanted` lanes: zeros are added, or lanes cut off."""
    heads = x.reshape(*x.shape[:2], -1, head_dim)[..., :wanted]
    return jnp.pad(heads, ((0, 0),) * 3 + ((0, max(0, wanted - head_dim)),)).reshape(*x.shape[:2], -1)


def _body(
    lengths: Any, query: Any, *refs: Any, keys: list, log_sums: bool, num_kv: int, settings: dict, turned: bool
) -> None:
    key_refs, refs = refs[: 2 * len(keys)], refs[2 * len(keys) :]
    result, refs = refs[0], refs[1:]
    log_sum, refs = (refs[0], refs[1:]) if log_sums else (None, refs)
    scaled, sums, out, *pairs = refs
    pairs = [(pairs[n], pairs[n + 1]) for n in range(0, len(pairs), 2)]
    block = Block(
        query=query,
        result=result,
        log_sum=log_sum,
        scaled=scaled,
        sums=sums,
        out=out,
        **dict(zip(("weights", "top", "kept", "raw"), pairs, strict=False)),
        **settings,
    )
    row = pl.program_id(0)
    at = pl.program_id(3) if num_kv > 1 else 0
    parts = []
    for index, (rows, certain, total) in enumerate(keys):
        before = at * rows if index == 0 and num_kv > 1 else 0
        # Where keys are divided, a block is as certain as the last one.
        sure = max(0, certain - (num_kv - 1) * rows) if index == 0 else certain
        length = total if certain == total and num_kv == 1 else lengths[row, index] - before
        k, v = key_refs[2 * index : 2 * index + 2]
        parts.append(Part(keys=k, values=v, turned=turned, rows=rows, certain=min(sure, rows), length=length))
    attend(block, parts, at=at, num_kv=num_kv)
