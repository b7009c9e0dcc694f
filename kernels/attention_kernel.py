"""One grid step of the attention kernel: a block of queries against the keys in VMEM.

Scores are kept transposed, `[keys, queries]`. Sums over keys are then sums of registers, and no score crosses lanes.
`docs/attention.md` shows the pipeline and proves exactness.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from .attention_config import AttentionConfig
from .attention_reference import BLOCKS_PER_TURN, MASK_VALUE, BlockSparsity
from .hardware import LANES, PACKED_ROWS, SUBLANES, Ref, Scalar, Slice, matmul_precision

# A sum of exponentials above this shows that the maximum was too low by at least 83 (of up to 2^17 keys).
MAX_SUM = 2.0**100
SAMPLED_KEYS = 256  # keys that the sampled maximum is taken from
LOG2_E = 1.4426950408889634


class Scratch(NamedTuple):
    """Scratch buffers of a grid step in VMEM. A pair is one buffer for even and one for odd steps of the pipeline."""

    scaled: Ref  # queries times the scale, transposed, `[heads, lanes, block_q]`
    sums: Ref  # partial sums of the exponentials, `[heads, 8, block_q]` float32
    out: Ref  # weighted sum of the values, `[heads, head_dim, block_q]` float32
    weights: tuple[Ref, Ref]  # exponentials, `[heads, step, block_q]`
    top: tuple[Ref, ...] = ()  # maximum of the scores, `[heads, 8, block_q]` float32; empty where it is zero
    kept: tuple[Ref, ...] = ()  # under a running maximum: its factor on earlier sums, `[heads, 8, block_q]` float32
    raw: tuple[Ref, ...] = ()  # under a running maximum: scores, `[heads, online_step, block_q]` float32
    worth: Ref | None = None  # scale of int8 scores, `[heads, 8, block_q]` float32, see `attention_int8`


class KeyExtent(NamedTuple):
    """Sizes of one array of keys, known before the trace."""

    block: int  # rows in VMEM at once
    certain: int  # rows that are valid in every batch row
    rows: int  # rows in all


@dataclass(frozen=True, kw_only=True)
class KeyBlock:
    """Keys of one array in VMEM, dense."""

    keys: Ref  # `[rows, lanes]`
    values: Ref  # `[rows, lanes]`, or `[lanes, rows]` if the form transposes them
    rows: int  # rows in VMEM, with padding
    certain: int  # leading rows that are valid whatever `length` is
    length: Scalar  # leading rows that are valid
    clean: bool = False  # whether values of padding are zero, so that weights of padding only have to be finite
    ones: Ref | None = None  # if `clean`: 1 for valid keys and 0 for padding, `[8, rows]`, for `attention_int8`

    def num_chunks(self, size: int) -> int:
        """Return the number of runs of up to `size` keys."""
        return -(-self.rows // size)

    def alone(self, at: int, size: int, skipped: Scalar | None, unroll: int) -> "KeyChunk":
        """Return run `at` of `size` keys outside the loop, after `skipped` of its turns of `unroll` runs."""
        start = at * size
        return KeyChunk(
            part=self, start=start, size=min(size, self.rows - start), masked=start + size > self.certain,
            real=self.length - start,
        )  # fmt: skip

    def num_loop_chunks(self, size: int) -> int:
        """Return the number of leading runs that a loop may process: full runs of `size` keys without padding."""
        return min(self.certain, self.rows) // size

    def chunks_per_turn(self, size: int, unroll: int) -> int:
        """Return the number of runs of `size` keys in one turn of the loop, at least `unroll` if possible."""
        return unroll

    def count_skipped_turns(self, size: int, unroll: int) -> Scalar | None:
        """Return the number of turns of `unroll` runs that the loop skips; None if it cannot skip any."""
        return None

    def run(self, at: int, size: int, turn: Scalar, unroll: int) -> "KeyChunk":
        """Return run `at` (of `size` keys) of the first turn, moved on to `turn` of `unroll` runs; no padding."""
        start = pl.multiple_of(cast(Array, (at + turn * unroll) * size), size)
        return KeyChunk(part=self, start=start, size=size, masked=False, real=size)

    def sample(self) -> "KeyChunk":
        """Return the leading keys, which the maximum is sampled from."""
        size = min(SAMPLED_KEYS, max(PACKED_ROWS, self.rows // 8 // PACKED_ROWS * PACKED_ROWS))
        return KeyChunk(part=self, start=0, size=size, masked=size > self.certain, real=self.length)


@dataclass(frozen=True, kw_only=True)
class BlockSparseKeys(KeyBlock):
    """Keys in equal blocks, of which a block of queries attends to the listed ones."""

    block: int  # rows of a block
    count: int  # blocks that are listed
    least: int  # valid keys that every block has
    left_out: int  # blocks at the end of the list that a sparse call skips
    is_sparse: Scalar  # 1 if the call skips them, else 0
    place: Callable[[Scalar], Scalar]  # position in the list -> number of the block
    real: Callable[[Scalar], Scalar]  # number of a block -> its valid keys

    def num_chunks(self, size: int) -> int:
        return self.num_loop_chunks(size)

    def alone(self, at: int, size: int, skipped: Scalar | None, unroll: int) -> "KeyChunk":
        return self.run(at, size, 0 if skipped is None else -skipped, unroll)

    def num_loop_chunks(self, size: int) -> int:
        return self.count * (self.block // size)

    def chunks_per_turn(self, size: int, unroll: int) -> int:
        return block_aligned_unroll(self.block // size, unroll)

    def count_skipped_turns(self, size: int, unroll: int) -> Scalar | None:
        return self.is_sparse * (self.left_out * (self.block // size) // unroll) if self.left_out else None

    def run(self, at: int, size: int, turn: Scalar, unroll: int) -> "KeyChunk":
        per_block = self.block // size
        number = self.place(at // per_block + turn * (unroll // per_block))
        inside = at % per_block * size
        return KeyChunk(
            part=self, start=pl.multiple_of(cast(Array, number * self.block + inside), size), size=size,
            masked=inside + size > self.least, real=self.real(number) - inside,
        )  # fmt: skip

    def sample(self) -> "KeyChunk":
        return self.run(0, math.gcd(SAMPLED_KEYS, self.block), 0, 0)


@dataclass(frozen=True, kw_only=True)
class KeyChunk:
    """A run of consecutive keys, which one step of the pipeline processes."""

    part: KeyBlock  # the keys that it is a run of
    start: Scalar  # first row
    size: int  # rows
    masked: bool  # whether some may be padding
    real: Scalar  # leading rows that are valid

    @property
    def rows(self) -> Slice:
        return pl.ds(self.start, self.size)

    def valid(self, shape: tuple[int, ...], axis: int = 0) -> Array:
        """Return the mask of valid keys, bool `[*shape]`, with the keys of this run along `axis`."""
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < self.real


@dataclass(frozen=True, kw_only=True)
class QueryBlock:
    """A block of queries in one grid step: `form.heads` heads of `head_dim`, side by side in lanes."""

    form: AttentionConfig
    head_dim: int
    scale: float  # of the scores
    query: Ref  # `[block_q, lanes]`
    out: Ref  # the result, `[block_q, lanes]`
    log_sum: Ref | None  # log-sum-exp of the scores, `[heads, 1, block_q]` float32; None if not requested
    vmem: Scratch
    units: Sequence[Array] = ()  # of int8 keys: the scale of each head

    @property
    def block_q(self) -> int:
        return self.vmem.out.shape[-1]

    def head_lanes(self, head: int) -> Slice:
        """Return the lanes of the keys that hold `head`: full registers, which may hold a neighbour's lanes too."""
        return pl.ds(head * self.head_dim // LANES * LANES, max(LANES, self.head_dim))

    def pieces(self) -> Iterator[tuple[int, Slice]]:
        """Yield each head with each slice of `form.columns` queries: the operands of one matrix product."""
        columns = self.form.columns or self.block_q
        for head in range(self.form.heads):
            for start in range(0, self.block_q, columns):
                yield head, pl.ds(start, min(columns, self.block_q - start))

    def prepare(self, part: KeyBlock) -> None:
        """Prepare the scratch buffers: scale the queries, clear the sums, sample the maximum from `part`."""
        for head in range(self.form.heads):
            self.vmem.scaled[head] = self.scale_query(head).astype(self.vmem.scaled.dtype).T
        self.clear()
        if self.form.maximum == "sampled":
            step = part.sample()
            for head, columns in self.pieces():
                self.vmem.top[0][head, :, columns] = broadcast_sublanes(
                    jnp.max(self.compute_masked_scores(step, head, columns), 0)
                )

    def scale_query(self, head: int) -> Array:
        """Return the queries of `head` in base 2, times the scale, `[queries, lanes]` float32; others are zero."""
        query = self.query[:, self.head_lanes(head)].astype(jnp.float32) * (self.scale * LOG2_E)
        if self.head_dim >= LANES:
            return query
        lane = jax.lax.broadcasted_iota(jnp.int32, query.shape, 1)
        first = head * self.head_dim % LANES
        return jnp.where((lane >= first) & (lane < first + self.head_dim), query, 0)

    def clear(self) -> None:
        """Set sums and results to zero and maxima to `NEGATIVE`."""
        self.vmem.sums[...] = jnp.zeros_like(self.vmem.sums)
        self.vmem.out[...] = jnp.zeros_like(self.vmem.out)
        for top in self.vmem.top:
            top[...] = jnp.full_like(top, MASK_VALUE)

    def product(self, left: Array, right: Array, dims: tuple) -> Array:
        """Return the float32 product of `left` `[m, k]` and `right` `[k, n]`, summed over `dims`."""
        return jax.lax.dot_general(
            left, right, (dims, ((), ())), preferred_element_type=jnp.float32, precision=matmul_precision(left.dtype)
        )

    def scores(self, step: KeyChunk, head: int, columns: Slice) -> Array:
        """Return scores of the keys of `step` for `head` and `columns`, in base 2, `[keys, queries]` float32.

        Scores of padding may be anything.
        """
        return self.product(
            step.part.keys[step.rows, self.head_lanes(head)], self.vmem.scaled[head, :, columns], ((1,), (0,))
        )

    def compute_masked_scores(self, step: KeyChunk, head: int, columns: Slice) -> Array:
        """Return `scores` of `step`, `head` and `columns`, `[keys, queries]`, with padding `NEGATIVE`."""
        scores = self.scores(step, head, columns)
        return jnp.where(step.valid(scores.shape), scores, MASK_VALUE) if step.masked else scores

    def weight_values(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> Array:
        """Return the values of `step`, weighted by buffer `parity` of `head` and `columns`, `[head_dim, queries]`."""
        lanes = pl.ds(head * self.head_dim, self.head_dim)
        axis = int(self.form.reads_transposed(self.head_dim))  # of keys
        values = step.part.values[(lanes, step.rows) if axis else (step.rows, lanes)]
        if step.masked and not step.part.clean:
            values = jnp.where(step.valid(values.shape, axis), values, jnp.zeros_like(values))
        return self.product(
            self.append_sum_rows(values, step), self.vmem.weights[parity][head, : step.size, columns], ((axis,), (0,))
        )

    def append_sum_rows(self, values: Array, step: KeyChunk) -> Array:
        """Return the values with rows that sum the weights, if the second product does that; here unchanged.

        values: `[keys, lanes]`, or `[lanes, keys]` if the form transposes them.
        """
        return values

    # --- under a fixed maximum ----------------------------------------------------------------------------------------

    def exponentiate(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> None:
        """Store the exponentials of `step` for `head` and `columns` in buffer `parity` and add them to the sums."""
        scores = self.scores(step, head, columns)
        if self.form.maximum == "sampled":
            scores = scores - self.vmem.top[0][head, :1, columns]
        self.vmem.sums[head, :, columns] += self.store_weights(jnp.exp2(scores), step, parity, head, columns)

    def store_weights(self, weights: Array, step: KeyChunk, parity: int, head: int, columns: Slice) -> Array | float:
        """Store the weights without padding in buffer `parity` and return their sums, `[8, queries]`.

        weights: exponentials of `step` for `head` and `columns`, `[keys, queries]`.
        """
        if step.masked and step.part.ones is None:
            weights = jnp.where(step.valid(weights.shape), weights, 0)
        buffer = self.vmem.weights[parity]
        buffer[head, : step.size, columns] = weights.astype(buffer.dtype)
        return self.sum_weights(weights)

    def sum_weights(self, weights: Array) -> Array | float:
        """Return partial sums of `weights` `[keys, queries]` over keys, `[8, queries]`."""
        return jnp.sum(weights.reshape(-1, SUBLANES, weights.shape[1]), axis=0)

    def accumulate(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> None:
        """Add the values of `step`, weighted by buffer `parity`, to the result of `head` and `columns`."""
        self.vmem.out[head, :, columns] += self.weight_values(step, parity, head, columns)

    # --- under a running maximum --------------------------------------------------------------------------------------

    def measure(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> None:
        """Store the scores of `step` for `head` and `columns` in buffer `parity` and update the running maximum."""
        scores = self.compute_masked_scores(step, head, columns)
        before = self.vmem.top[1 - parity][head, :1, columns]
        top = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
        self.vmem.raw[parity][head, : step.size, columns] = scores
        self.vmem.top[parity][head, :, columns] = broadcast_sublanes(top)
        self.vmem.kept[parity][head, :, columns] = broadcast_sublanes(jnp.exp2(before - top))

    def exponentiate_online(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> None:
        """Store exponentials of `step`, by `parity`, `head` and `columns`, under the running maximum; update sums."""
        scores = self.vmem.raw[parity][head, : step.size, columns] - self.vmem.top[parity][head, :1, columns]
        added = self.store_weights(jnp.exp2(scores), step, parity, head, columns)
        self.vmem.sums[head, :, columns] = (
            self.vmem.sums[head, :, columns] * self.vmem.kept[parity][head, :, columns] + added
        )

    def accumulate_online(self, step: KeyChunk, parity: int, head: int, columns: Slice) -> None:
        """Rescale the result of `head` and `columns` by buffer `parity` and add the values of `step`."""
        kept = self.vmem.kept[parity][head, :1, columns]
        self.vmem.out[head, :, columns] = self.vmem.out[head, :, columns] * kept + self.weight_values(
            step, parity, head, columns
        )

    # --- the pipeline -------------------------------------------------------------------------------------------------

    def run(self, parts: list[KeyBlock]) -> None:
        """Process all keys under the fixed maximum; the second product runs one step after the exponents."""
        self.pipeline(parts, ((0, self.exponentiate), (1, self.accumulate)), self.form.step, self.form.unroll)

    def run_online(self, parts: list[KeyBlock]) -> None:
        """Process all keys under the running maximum: scores, a step later exponents, two steps later the product."""
        stages = ((2, self.accumulate_online), (1, self.exponentiate_online), (0, self.measure))
        last = self.pipeline(parts, stages, self.form.online_step, 2)
        self.vmem.top[1 - last][...] = self.vmem.top[last][...]

    def pipeline(self, parts: list[KeyBlock], stages: tuple[tuple[int, Callable], ...], size: int, unroll: int) -> int:
        """Run every stage for every run of keys, as a software pipeline. Return the parity of the last step.

        Most steps run in a loop of `unroll` steps a turn. The steps before it, after it and with padding are written
        out.
        parts: all arrays of keys; the loop processes the first. size: keys of a run. stages: delays in steps, and
          methods.
        """
        steps = [(part, number) for part in parts for number in range(part.num_chunks(size))]
        depth = max(delay for delay, _ in stages)
        uniform, unroll = parts[0].num_loop_chunks(size), parts[0].chunks_per_turn(size, unroll)
        skipped = parts[0].count_skipped_turns(size, unroll)
        turns = (uniform - depth) // unroll if skipped is not None or uniform >= depth + 2 * unroll else 0
        looped = range(depth, depth + turns * unroll)

        def tick(parity: int, step_at: Callable[[int], KeyChunk | None]) -> None:
            for head, columns in self.pieces():
                for delay, stage in stages:
                    step = step_at(delay)
                    if step is not None:
                        stage(step, (parity - delay) % 2, head, columns)

        def alone(at: int, skipped: Scalar | None, delay: int) -> KeyChunk | None:
            if not 0 <= at - delay < len(steps):
                return None
            part, number = steps[at - delay]
            return part.alone(number, size, skipped, unroll)

        def turn(index: Array, _: None) -> None:
            taken = index if skipped is None else index - skipped
            for offset in range(unroll):

                def select_step(delay: int, at: int = depth + offset) -> KeyChunk:
                    return parts[0].run(at - delay, size, taken, unroll)

                tick(depth + offset, select_step)

        for tick_at in range(len(steps) + depth):
            if turns and tick_at == looped.start:
                assert unroll % 2 == 0
                jax.lax.fori_loop(0 if skipped is None else skipped, turns, turn, None)
            if tick_at not in looped:
                tick(tick_at, functools.partial(alone, tick_at, None if tick_at < looped.start else skipped))
        return (len(steps) - 1) % 2

    # --- the result ---------------------------------------------------------------------------------------------------

    def denominators(self, head: int) -> Array:
        """Return the sums of the exponentials of each query, `[1, block_q]` float32."""
        return jnp.sum(self.vmem.sums[head], axis=0, keepdims=True)  # [1, block_q]

    def has_failed(self) -> Array:
        """Return whether a fixed maximum was too low for some query, or a sum is not finite."""
        worst = functools.reduce(
            jnp.maximum, (jnp.where(self.denominators(h) < MAX_SUM, 0.0, 1.0) for h in range(self.form.heads))
        )
        return jnp.max(worst) > 0

    def write(self) -> None:
        """Write the result, transposed back, and the log-sum-exp; zeros and `NEGATIVE` for a row without keys."""
        for head in range(self.form.heads):
            total = self.denominators(head)
            out = self.vmem.out[head, : self.head_dim] / jnp.where(total > 0, total, 1.0)
            self.out[:, pl.ds(head * self.head_dim, self.head_dim)] = out.T.astype(self.out.dtype)
            if self.log_sum is not None:
                top = self.vmem.top[0][head, :1] if self.vmem.top else 0.0
                log_sum = (jnp.log2(jnp.where(total > 0, total, 1.0)) + top) / LOG2_E
                self.log_sum[head] = jnp.where(total > 0, log_sum, MASK_VALUE)


def broadcast_sublanes(row: Array) -> Array:
    """Return `row`, `[queries]` or `[1, queries]`, repeated over the 8 sublanes of registers, `[8, queries]`."""
    return jnp.broadcast_to(row.reshape(1, -1), (SUBLANES, row.shape[-1]))


def grid_step(
    scalars: tuple[Ref, Ref | None, tuple[Ref, Ref, Ref] | None],
    query: Ref,
    keys: Sequence[tuple[Ref, Ref]],
    ones: Ref | None,
    out: Ref,
    log_sum: Ref | None,
    scratch: Scratch,
    *,
    extents: Sequence[KeyExtent],
    num_kv: int,
    block_of: Callable[..., QueryBlock],
    blocks: BlockSparsity | None,
) -> None:
    """Run one of `num_kv` steps, into which the first array's keys are divided; other arrays follow in the last.

    scalars: valid keys `[rows, arrays]`; scales of int8 keys `[rows, heads]` or None; and, with `blocks`, its lists.
    query, out: `[block_q, lanes]`. keys: keys and values of each array, of the sizes `extents`. ones: see `KeyBlock`.
    log_sum: see `QueryBlock`. scratch: buffers. block_of: makes the `QueryBlock`.
    blocks: sparsity of the first array, or None.
    """
    lengths, units, listed = scalars
    row, group, step_index = pl.program_id(0), pl.program_id(1), pl.program_id(3) if num_kv > 1 else 0
    heads = scratch.out.shape[0]
    head_units = () if units is None else tuple(units[row, group * heads + head] for head in range(heads))
    block = block_of(query=query, out=out, log_sum=log_sum, vmem=scratch, units=head_units)
    parts = []
    for index, ((k, v), extent) in enumerate(zip(keys, extents, strict=True)):
        before = step_index * extent.block if index == 0 and num_kv > 1 else 0
        # If keys are divided, only the last block's valid rows are certain.
        certain = extent.certain if index else max(0, extent.certain - (num_kv - 1) * extent.block)
        is_known = extent.certain == extent.rows and num_kv == 1
        length = extent.rows if is_known else lengths[row, index] - before
        certain = min(certain, extent.block)
        parts.append(KeyBlock(keys=k, values=v, rows=extent.block, certain=certain, length=length))
    if blocks is not None:
        assert listed is not None
        parts[0] = _select_blocks(
            parts[0], blocks, *listed, clean=block.form.reads_transposed(block.head_dim), ones=ones
        )
    run = block.run_online if block.form.maximum == "online" else block.run
    if num_kv == 1:
        block.prepare(parts[0])
        run(parts)
        finish(block, parts)
        return

    @pl.when(step_index == 0)
    def _() -> None:
        block.prepare(parts[0])

    run(parts[:1])

    @pl.when(step_index == num_kv - 1)
    def _() -> None:
        if parts[1:]:
            run(parts[1:])
        block.write()


def block_aligned_unroll(per_block: int, unroll: int) -> int:
    """Return the runs of one loop turn over blocks of `per_block` runs: whole blocks, about `unroll` runs.

    Which runs have padding must be known before the trace, so blocks stay whole. Their number divides
    `BLOCKS_PER_TURN`.
    """
    num_blocks = math.lcm(per_block, unroll) // per_block
    return per_block * next(count for count in (1, 2, BLOCKS_PER_TURN) if count >= min(num_blocks, BLOCKS_PER_TURN))


def _select_blocks(
    part: KeyBlock, blocks: BlockSparsity, kept: Ref, real: Ref, is_sparse: Ref, *, clean: bool, ones: Ref | None
) -> BlockSparseKeys:
    """Return `part` as keys in blocks.

    kept, real, is_sparse: the same fields of `blocks`, as the kernel reads them.
    """
    query_block = jnp.minimum(pl.program_id(2), len(blocks.kept) - 1)
    return BlockSparseKeys(
        keys=part.keys, values=part.values, rows=part.rows, certain=0, length=part.rows, clean=clean, ones=ones,
        block=blocks.size, count=blocks.kept.shape[1], least=int(blocks.real.min()), left_out=blocks.left_out,
        is_sparse=is_sparse[0],
        place=lambda n: kept[query_block, n], real=lambda number: real[number],
    )  # fmt: skip


def finish(block: QueryBlock, parts: list[KeyBlock]) -> None:
    """Write the result. If the sampled maximum was too low, first process all keys again under a running maximum."""
    if block.form.maximum == "sampled":

        @pl.when(block.has_failed())
        def _() -> None:
            block.clear()
            block.run_online(parts)

    block.write()
