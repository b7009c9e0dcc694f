"""What one grid step of the attention kernel does: a block of queries against the keys in VMEM.

Scores are kept transposed, `[keys, queries]`: sums over keys are then sums of registers, and nothing of a row of scores
crosses lanes. `docs/attention.md` has a picture of the pipeline and the proofs of exactness.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from .attention_form import Form
from .attention_reference import NEGATIVE, TOGETHER, Blocks
from .chip import LANES, PACKED_ROWS, SUBLANES, precision

# Of a sum of exponentials above this the maximum was too low by 83 at least (of up to 2^17 keys): float32 ends at 128.
LIMIT = 2.0**100
SAMPLED_KEYS = 256
LOG2_E = 1.4426950408889634


class Scratch(NamedTuple):
    """What a grid step keeps in VMEM. `sums` `[heads, 8, block_q]` and `out` `[heads, head_dim, block_q]` are float32.

    What one stage of the pipeline leaves for the next has two buffers, one for even and one for odd steps: `weights`
    `[heads, step, block_q]`, exponentials; and under a running maximum `raw` `[heads, step, block_q]`, scores, `top`
    and `kept` `[heads, 8, block_q]`, the maximum and the factor that it leaves of sums.
    """

    scaled: Any
    sums: Any
    out: Any
    weights: tuple[Any, Any]
    top: tuple[Any, ...] = ()
    kept: tuple[Any, ...] = ()
    raw: tuple[Any, ...] = ()
    worth: Any = None  # of int8 scores, see `attention_int8`


class Extent(NamedTuple):
    """Of one array of keys: `block` rows are in VMEM at once, of `rows` in all, of which `certain` are always real."""

    block: int
    certain: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class KeyBlock:
    """Keys of one array in VMEM: `rows` of them, of which the first `certain` are real whatever `length` says.

    `length` is how many are real: a number, or a scalar read in the kernel. `values` are `[lanes, rows]` where the form
    has them turned, else like keys `[rows, lanes]`; `clean`: those of padding are zero.
    Then `ones` `[8, rows]` may say the same to `attention_int8`, and weights of padding need no more than be finite:
    where they are not, the block of queries fails.
    """

    keys: Any
    values: Any
    rows: int
    certain: int
    length: Any
    clean: bool = False
    ones: Any = None

    def num_runs(self, size: int) -> int:
        """Of all keys: runs of `size` and a rest."""
        return -(-self.rows // size)

    def alone(self, at: int, size: int, skipped: Any, unroll: int) -> "KeyRun":
        """Run `at` out of the loop, of which so many turns were `skipped`."""
        start = at * size
        return KeyRun(
            part=self, start=start, size=min(size, self.rows - start), masked=start + size > self.certain,
            real=self.length - start,
        )  # fmt: skip

    def in_a_loop(self, size: int) -> int:
        """How many of the first runs a loop may go through: they are of `size`, and without padding."""
        return min(self.certain, self.rows) // size

    def a_turn(self, size: int, unroll: int) -> int:
        """How many runs a loop's turn takes, of which `unroll` are wanted."""
        return unroll

    def skipped(self, size: int, unroll: int) -> Any:
        """How many of the loop's turns are not taken."""
        return None

    def run(self, at: int, size: int, turn: Any, unroll: int) -> "KeyRun":
        """In the loop's `turn`, run `at` of its first; before the loop ends, so none is of padding."""
        start = pl.multiple_of((at + turn * unroll) * size, size)
        return KeyRun(part=self, start=start, size=size, masked=False, real=size)

    def sample(self) -> "KeyRun":
        """Keys by which a maximum is guessed: the first."""
        size = min(SAMPLED_KEYS, max(PACKED_ROWS, self.rows // 8 // PACKED_ROWS * PACKED_ROWS))
        return KeyRun(part=self, start=0, size=size, masked=size > self.certain, real=self.length)


@dataclass(frozen=True, kw_only=True)
class ListedKeys(KeyBlock):
    """Keys in equal blocks of `block` rows, of which `count` are listed: `place` says which the nth is, `real` how many
    keys of a block are, which `least` of each are.
    """

    block: int
    count: int
    least: int
    left_out: int
    is_sparse: Any
    place: Callable[[Any], Any]
    real: Callable[[Any], Any]

    def num_runs(self, size: int) -> int:
        return self.in_a_loop(size)

    def alone(self, at: int, size: int, skipped: Any, unroll: int) -> "KeyRun":
        return self.run(at, size, 0 if skipped is None else -skipped, unroll)

    def in_a_loop(self, size: int) -> int:
        return self.count * (self.block // size)

    def a_turn(self, size: int, unroll: int) -> int:
        return turn_of(self.block // size, unroll)

    def skipped(self, size: int, unroll: int) -> Any:
        return self.is_sparse * (self.left_out * (self.block // size) // unroll) if self.left_out else None

    def run(self, at: int, size: int, turn: Any, unroll: int) -> "KeyRun":
        per_block = self.block // size
        number = self.place(at // per_block + turn * (unroll // per_block))
        inside = at % per_block * size
        return KeyRun(
            part=self, start=pl.multiple_of(number * self.block + inside, size), size=size,
            masked=inside + size > self.least, real=self.real(number) - inside,
        )  # fmt: skip

    def sample(self) -> "KeyRun":
        return self.run(0, math.gcd(SAMPLED_KEYS, self.block), 0, 0)


@dataclass(frozen=True, kw_only=True)
class KeyRun:
    """A run of `size` keys of a part, of which the first `real` are. `masked`: some may be padding."""

    part: KeyBlock
    start: Any
    size: int
    masked: bool
    real: Any

    @property
    def rows(self) -> Any:
        return pl.ds(self.start, self.size)

    def valid(self, shape: tuple[int, ...], axis: int = 0) -> Array:
        """Which places of `shape` along `axis` are real keys."""
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < self.real


@dataclass(frozen=True, kw_only=True)
class Block:
    """One grid step: what it reads, writes and keeps of `form.heads` heads of `head_dim`, side by side in lanes."""

    form: Form
    head_dim: int
    scale: float
    query: Any
    out: Any
    log_sum: Any | None
    vmem: Scratch
    units: Sequence[Any] = ()

    @property
    def block_q(self) -> int:
        return self.vmem.out.shape[-1]

    def lanes(self, head: int) -> Any:
        """The lanes of keys that hold `head`: full registers, so perhaps a neighbour's lanes too."""
        return pl.ds(head * self.head_dim // LANES * LANES, max(LANES, self.head_dim))

    def pieces(self) -> Iterator[tuple[int, Any]]:
        columns = self.form.columns or self.block_q
        for head in range(self.form.heads):
            for start in range(0, self.block_q, columns):
                yield head, pl.ds(start, min(columns, self.block_q - start))

    def prepare(self, part: KeyBlock) -> None:
        """Scales the queries, in base 2, and zeroes the lanes of other heads; takes the maximum; clears the sums."""
        for head in range(self.form.heads):
            self.vmem.scaled[head] = self.scaled_query(head).astype(self.vmem.scaled.dtype).T
        self.clear()
        if self.form.maximum == "sampled":
            step = part.sample()
            for head, columns in self.pieces():
                self.vmem.top[0][head, :, columns] = spread(jnp.max(self.masked_scores(step, head, columns), 0))

    def scaled_query(self, head: int) -> Array:
        """`[queries, lanes]`, float32."""
        query = self.query[:, self.lanes(head)].astype(jnp.float32) * (self.scale * LOG2_E)
        if self.head_dim >= LANES:
            return query
        lane = jax.lax.broadcasted_iota(jnp.int32, query.shape, 1)
        first = head * self.head_dim % LANES
        return jnp.where((lane >= first) & (lane < first + self.head_dim), query, 0)

    def clear(self) -> None:
        self.vmem.sums[...] = jnp.zeros_like(self.vmem.sums)
        self.vmem.out[...] = jnp.zeros_like(self.vmem.out)
        for top in self.vmem.top:
            top[...] = jnp.full_like(top, NEGATIVE)

    def product(self, left: Array, right: Array, dims: tuple) -> Array:
        return jax.lax.dot_general(
            left, right, (dims, ((), ())), preferred_element_type=jnp.float32, precision=precision(left.dtype)
        )

    def scores(self, step: KeyRun, head: int, columns: Any) -> Array:
        """`[keys, queries]`, in base 2; of padding anything."""
        return self.product(
            step.part.keys[step.rows, self.lanes(head)], self.vmem.scaled[head, :, columns], ((1,), (0,))
        )

    def masked_scores(self, step: KeyRun, head: int, columns: Any) -> Array:
        found = self.scores(step, head, columns)
        return jnp.where(step.valid(found.shape), found, NEGATIVE) if step.masked else found

    def weighted(self, step: KeyRun, parity: int, head: int, columns: Any) -> Array:
        """The step's values summed by weight, `[head_dim, queries]`."""
        lanes, axis = pl.ds(head * self.head_dim, self.head_dim), int(self.form.turned(self.head_dim))  # of keys
        values = step.part.values[(lanes, step.rows) if axis else (step.rows, lanes)]
        if step.masked and not step.part.clean:
            values = jnp.where(step.valid(values.shape, axis), values, jnp.zeros_like(values))
        return self.product(
            self.with_sums(values, step), self.vmem.weights[parity][head, : step.size, columns], ((axis,), (0,))
        )

    def with_sums(self, values: Array, step: KeyRun) -> Array:
        """Values, and what sums the weights where no vector unit does."""
        return values

    # --- under a fixed maximum ----------------------------------------------------------------------------------------

    def exponents(self, step: KeyRun, parity: int, head: int, columns: Any) -> None:
        scores = self.scores(step, head, columns)
        if self.form.maximum == "sampled":
            scores = scores - self.vmem.top[0][head, :1, columns]
        self.vmem.sums[head, :, columns] += self.keep_weights(jnp.exp2(scores), step, parity, head, columns)

    def keep_weights(self, weights: Array, step: KeyRun, parity: int, head: int, columns: Any) -> Array | float:
        """Stores `[keys, queries]` without padding for the second product; their sums, `[8, queries]`."""
        if step.masked and step.part.ones is None:
            weights = jnp.where(step.valid(weights.shape), weights, 0)
        buffer = self.vmem.weights[parity]
        buffer[head, : step.size, columns] = weights.astype(buffer.dtype)
        return self.summed(weights)

    def summed(self, weights: Array) -> Array | float:
        return jnp.sum(weights.reshape(-1, SUBLANES, weights.shape[1]), axis=0)

    def accumulate(self, step: KeyRun, parity: int, head: int, columns: Any) -> None:
        self.vmem.out[head, :, columns] += self.weighted(step, parity, head, columns)

    # --- under a running maximum --------------------------------------------------------------------------------------

    def measure(self, step: KeyRun, parity: int, head: int, columns: Any) -> None:
        """Scores, and the maximum with them."""
        scores = self.masked_scores(step, head, columns)
        before = self.vmem.top[1 - parity][head, :1, columns]
        top = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
        self.vmem.raw[parity][head, : step.size, columns] = scores
        self.vmem.top[parity][head, :, columns] = spread(top)
        self.vmem.kept[parity][head, :, columns] = spread(jnp.exp2(before - top))

    def exponents_online(self, step: KeyRun, parity: int, head: int, columns: Any) -> None:
        scores = self.vmem.raw[parity][head, : step.size, columns] - self.vmem.top[parity][head, :1, columns]
        added = self.keep_weights(jnp.exp2(scores), step, parity, head, columns)
        self.vmem.sums[head, :, columns] = (
            self.vmem.sums[head, :, columns] * self.vmem.kept[parity][head, :, columns] + added
        )

    def accumulate_online(self, step: KeyRun, parity: int, head: int, columns: Any) -> None:
        kept = self.vmem.kept[parity][head, :1, columns]
        self.vmem.out[head, :, columns] = self.vmem.out[head, :, columns] * kept + self.weighted(
            step, parity, head, columns
        )

    # --- the pipeline -------------------------------------------------------------------------------------------------

    def run(self, parts: list[KeyBlock]) -> None:
        """All keys under the fixed maximum: the second product one step behind the exponents."""
        self.pipeline(parts, ((0, self.exponents), (1, self.accumulate)), self.form.step, self.form.unroll)

    def run_online(self, parts: list[KeyBlock]) -> None:
        """All keys under the running maximum: exponents one step behind the scores, the second product two."""
        stages = ((2, self.accumulate_online), (1, self.exponents_online), (0, self.measure))
        last = self.pipeline(parts, stages, self.form.online_step, 2)
        self.vmem.top[1 - last][...] = self.vmem.top[last][...]

    def pipeline(self, parts: list[KeyBlock], stages: tuple[tuple[int, Callable], ...], size: int, unroll: int) -> int:
        """Every stage for every step of keys, each so many steps behind; the buffer that the last step used.

        Most steps are those of a loop of `unroll` steps a turn; those before, after and with padding are written out.
        """
        steps = [(part, number) for part in parts for number in range(part.num_runs(size))]
        depth = max(behind for behind, _ in stages)
        uniform, unroll = parts[0].in_a_loop(size), parts[0].a_turn(size, unroll)
        skipped = parts[0].skipped(size, unroll)
        turns = (uniform - depth) // unroll if skipped is not None or uniform >= depth + 2 * unroll else 0
        looped = range(depth, depth + turns * unroll)

        def tick(parity: int, step_at: Callable[[int], KeyRun | None]) -> None:
            for head, columns in self.pieces():
                for behind, stage in stages:
                    step = step_at(behind)
                    if step is not None:
                        stage(step, (parity - behind) % 2, head, columns)

        def alone(at: int, skipped: Any, behind: int) -> KeyRun | None:
            if not 0 <= at - behind < len(steps):
                return None
            part, number = steps[at - behind]
            return part.alone(number, size, skipped, unroll)

        def turn(index: Array, _: None) -> None:
            taken = index if skipped is None else index - skipped
            for offset in range(unroll):

                def step_at(behind: int, at: int = depth + offset) -> KeyRun:
                    return parts[0].run(at - behind, size, taken, unroll)

                tick(depth + offset, step_at)

        for at in range(len(steps) + depth):
            if turns and at == looped.start:
                assert unroll % 2 == 0
                jax.lax.fori_loop(0 if skipped is None else skipped, turns, turn, None)
            if at not in looped:
                tick(at, functools.partial(alone, at, None if at < looped.start else skipped))
        return (len(steps) - 1) % 2

    # --- the result ---------------------------------------------------------------------------------------------------

    def totals(self, head: int) -> Array:
        return jnp.sum(self.vmem.sums[head], axis=0, keepdims=True)  # [1, block_q]

    def failed(self) -> Array:
        """Whether a fixed maximum was too low for some query; also where something is not finite."""
        worst = functools.reduce(
            jnp.maximum, (jnp.where(self.totals(h) < LIMIT, 0.0, 1.0) for h in range(self.form.heads))
        )
        return jnp.max(worst) > 0

    def write(self) -> None:
        """The result, transposed back, and the log-sum-exp if asked. Without any key: zeros and `NEGATIVE`."""
        for head in range(self.form.heads):
            total = self.totals(head)
            out = self.vmem.out[head, : self.head_dim] / jnp.where(total > 0, total, 1.0)
            self.out[:, pl.ds(head * self.head_dim, self.head_dim)] = out.T.astype(self.out.dtype)
            if self.log_sum is not None:
                top = self.vmem.top[0][head, :1] if self.vmem.top else 0.0
                found = (jnp.log2(jnp.where(total > 0, total, 1.0)) + top) / LOG2_E
                self.log_sum[head] = jnp.where(total > 0, found, NEGATIVE)


def spread(row: Array) -> Array:
    """`[queries]` or `[1, queries]` over the 8 sublanes of registers."""
    return jnp.broadcast_to(row.reshape(1, -1), (SUBLANES, row.shape[-1]))


def grid_step(
    scalars: tuple[Any, Any, Any],
    query: Any,
    keys: Sequence[tuple[Any, Any]],
    ones: Any | None,
    out: Any,
    log_sum: Any | None,
    scratch: Scratch,
    *,
    extents: Sequence[Extent],
    num_kv: int,
    block_of: Callable[..., Block],
    blocks: Blocks | None,
) -> None:
    """One of the `num_kv` steps over which the first array's keys are divided; the other arrays come with the last.

    `scalars`: how many keys are real, `[rows, arrays]`; for `attention_int8` what keys are worth, `[rows, heads]`; and
    of keys in `blocks`, which are whole, those of each block of queries, how many keys of each block are real, and
    whether the last are left out.
    """
    lengths, units, listed = scalars
    row, group, at = pl.program_id(0), pl.program_id(1), pl.program_id(3) if num_kv > 1 else 0
    heads = scratch.out.shape[0]
    own = () if units is None else tuple(units[row, group * heads + head] for head in range(heads))
    block = block_of(query=query, out=out, log_sum=log_sum, vmem=scratch, units=own)
    parts = []
    for index, ((k, v), extent) in enumerate(zip(keys, extents, strict=True)):
        before = at * extent.block if index == 0 and num_kv > 1 else 0
        # Where keys are divided, a block is as certain as the last one.
        certain = extent.certain if index else max(0, extent.certain - (num_kv - 1) * extent.block)
        is_known = extent.certain == extent.rows and num_kv == 1
        length = extent.rows if is_known else lengths[row, index] - before
        certain = min(certain, extent.block)
        parts.append(KeyBlock(keys=k, values=v, rows=extent.block, certain=certain, length=length))
    if blocks is not None:
        parts[0] = _listed(parts[0], blocks, *listed, clean=block.form.turned(block.head_dim), ones=ones)
    run = block.run_online if block.form.maximum == "online" else block.run
    if num_kv == 1:
        block.prepare(parts[0])
        run(parts)
        finish(block, parts)
        return

    @pl.when(at == 0)
    def _() -> None:
        block.prepare(parts[0])

    run(parts[:1])

    @pl.when(at == num_kv - 1)
    def _() -> None:
        if parts[1:]:
            run(parts[1:])
        block.write()


def turn_of(per_block: int, unroll: int) -> int:
    """Runs that a loop over blocks of so many takes at once: whole blocks, for it must be known which runs have
    padding, in a number that divides those that are left out together.
    """
    wanted = math.lcm(per_block, unroll) // per_block
    return per_block * next(count for count in (1, 2, TOGETHER) if count >= min(wanted, TOGETHER))


def _listed(
    part: KeyBlock, blocks: Blocks, kept: Any, real: Any, is_sparse: Any, *, clean: bool, ones: Any
) -> ListedKeys:
    """The same keys in blocks; `kept`, `real` and `is_sparse` are those of `blocks`, as the kernel reads them."""
    own = jnp.minimum(pl.program_id(2), len(blocks.kept) - 1)
    return ListedKeys(
        keys=part.keys, values=part.values, rows=part.rows, certain=0, length=part.rows, clean=clean, ones=ones,
        block=blocks.size, count=blocks.kept.shape[1], least=int(blocks.real.min()), left_out=blocks.left_out,
        is_sparse=is_sparse[0],
        place=lambda n: kept[own, n], real=lambda number: real[number],
    )  # fmt: skip


def finish(block: Block, parts: list[KeyBlock]) -> None:
    """Writes the result; first all again under a running maximum, where the sampled one was too low."""
    if block.form.maximum == "sampled":

        @pl.when(block.failed())
        def _() -> None:
            block.clear()
            block.run_online(parts)

    block.write()
