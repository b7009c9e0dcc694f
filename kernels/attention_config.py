"""Configuration of the attention kernel: tile sizes, and the choice of the fastest that fit a chip."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from . import registry
from .dispatch import uses_small_tiles
from .hardware import LANES, MIB, PACKED_ROWS, RESERVED_MIB, SUBLANES, VMEM_MIB, round_up

# Written by `benchmarks/tune_attention.py`: the fastest `tiles` for `kv_rows` keys, and the `libtpu` that timed them.
TUNED_TILES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("attention_tiles.json").read_text())
SPILLED_BYTES = 4 * MIB  # of registers that the compiler spills: the largest form spills 3 MiB
# Small `columns` interleave the two products, which keeps both matrix units busiest.
_INT8 = {"step": 512, "unroll": 8, "columns": 256}
# By the format of approximate scores and the lanes of a head.
SCORE_TILES: dict[str, dict[int, dict[str, Any]]] = {
    "int8": {64: {"block_q": 1024, "heads": 2, **_INT8}, 128: {"block_q": 2048, **_INT8}}
}
Maximum = Literal["zero", "sampled", "online"]
Scores = str  # "exact", or a name in `number_formats.SCORES`


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Configuration of the attention kernel."""

    scores: Scores = "exact"  # others are approximate, see `attention_int8`
    # What is subtracted before the exponential. "zero": nothing, for bounded scores. "online": a running maximum.
    # "sampled": the maximum over the first keys; a block of queries that overflows is computed again "online".
    maximum: Maximum = "sampled"
    block_q: int = 2048  # queries of a grid step
    step: int = 1024  # keys of a step of the pipeline
    unroll: int = 2  # steps of one turn of the loop
    online_step: int = 256  # keys of a step under a running maximum
    columns: int | None = None  # queries of one matrix product; None: all of a block
    block_kv: int | None = None  # keys in VMEM at once; None: all
    heads: int = 1  # heads of a grid step, at least 128 lanes
    single_buffered: bool = False  # whether keys have one buffer in VMEM instead of two
    vmem_mib: int = 100  # limit of the kernel's VMEM

    def __post_init__(self) -> None:
        for fields, multiple in (("block_q", "columns"), LANES), (("step", "online_step", "block_kv"), PACKED_ROWS):
            for name in fields:
                if (getattr(self, name) or 0) % multiple:
                    raise ValueError(f"{name}={getattr(self, name)} must be a multiple of {multiple}.")
        if self.unroll % 2:
            raise ValueError(f"unroll={self.unroll} must be even: steps alternate between two buffers.")
        if self.scores == "int8" and self.maximum == "zero":
            raise ValueError(
                f"maximum={self.maximum} is not supported with int8 scores. Use sampled or online: the scale of int8 "
                "scores depends on their size."
            )

    @property
    def kernel(self) -> str:
        return kernel_name(self.scores)

    def reads_transposed(self, head_dim: int) -> bool:
        """Return whether the kernel reads values transposed, `[lanes, keys]`."""
        return head_dim < LANES or self.scores == "int8"


def kernel_name(scores: Scores) -> str:
    """Return the kernel's name in fallbacks. A machine can disable that of a format; its calls are then exact."""
    return registry.ATTENTION_BY_SCORES[scores]


def choose_config(
    device_kind: str,
    maximum: Maximum,
    *,
    scores: Scores = "exact",
    q_seq: int,
    kv_rows: Sequence[int],
    heads: int,
    head_dim: int,
    itemsize: int,
) -> AttentionConfig:
    """Return the fastest form that fits in VMEM: with all keys, then single-buffered, then with keys divided.

    If none fits, the last is returned, and the compiler raises the error.

    device_kind: JAX's name of the chip. maximum, scores: see `AttentionConfig`.
    q_seq: queries. kv_rows: keys of each array. heads, head_dim: of one chip.
    itemsize: bytes of an element of queries, keys and values.
    """
    if scores == "exact":
        tiles = choose_tiles(device_kind, head_dim=head_dim, kv_rows=sum(kv_rows), heads=heads)
    else:
        tiles = SCORE_TILES[scores][min(head_dim, LANES)]
    limit_mib = (VMEM_MIB.get(device_kind, 16) - RESERVED_MIB) // (1 + uses_small_tiles(kernel_name(scores)))
    candidates = list(_candidates(AttentionConfig(scores=scores, maximum=maximum, vmem_mib=limit_mib, **tiles)))
    fitting = (f for f in candidates if estimate_vmem_bytes(f, q_seq, kv_rows, head_dim, itemsize) <= limit_mib * MIB)
    return next(fitting, candidates[-1])


def _candidates(form: AttentionConfig) -> Iterator[AttentionConfig]:
    """Yield forms by falling speed and falling need of VMEM, beginning with `form`."""
    yield form
    for block_q, step in ((1, 1), (1, 2), (2, 2)):
        yield replace(_smaller(form, block_q, step), single_buffered=True)
    # A rerun needs all keys in VMEM.
    divided = replace(form, maximum="online" if form.maximum == "sampled" else form.maximum)
    for shrink in (1, 2, 4, 8):
        for block_kv in (16384, 8192, 4096, 2048, 1024):
            yield replace(_smaller(divided, shrink, shrink), block_kv=block_kv)
    yield replace(_smaller(divided, 8, 8), block_kv=512)


def _smaller(form: AttentionConfig, block_q: int, step: int) -> AttentionConfig:
    """Return `form` with `block_q` and `step` divided by these numbers."""
    rows = max(LANES, form.block_q // block_q)
    columns = form.columns and min(form.columns, rows)
    return replace(form, block_q=rows, step=max(128, form.step // step), columns=columns)


def estimate_vmem_bytes(form: AttentionConfig, q_seq: int, kv_rows: Sequence[int], head_dim: int, itemsize: int) -> int:
    """Return the bytes of VMEM that a form needs: buffers of blocks, scratch and spilled registers.

    q_seq, kv_rows, head_dim, itemsize: as for `fastest`.
    """
    width = max(LANES, form.heads * head_dim)
    block_q = min(form.block_q, round_up(q_seq, LANES))
    rows = [min(kv_rows[0], form.block_kv or kv_rows[0]), *kv_rows[1:]]
    step = min(form.step, max(rows))
    heads = width // head_dim
    is_int8 = form.scores == "int8"
    row = width * (3 if is_int8 else 2 * itemsize)
    buffers = (1 if form.single_buffered else 2) * sum(rows) * row + 4 * block_q * width * itemsize
    scratch = heads * block_q * ((max(LANES, head_dim) + 2 * step) * itemsize + 4 * (head_dim + SUBLANES))
    if form.maximum != "zero":
        scratch += heads * block_q * 4 * (4 * SUBLANES + 2 * min(form.online_step, step))
    return buffers + scratch + SPILLED_BYTES


def choose_tiles(device_kind: str, *, head_dim: int, kv_rows: int, heads: int) -> dict[str, Any]:
    """Return fields of a `AttentionConfig`: those of the table's entry with the nearest number of keys, else defaults.

    The number of keys differs by at most a factor of two. device_kind, head_dim, heads: must match the entry.
    kv_rows: keys of all arrays.
    """

    def distance(entry: dict[str, Any]) -> float:
        return abs(math.log(max(kv_rows, 1) / entry["kv_rows"]))

    matching = [
        entry
        for entry in TUNED_TILES
        if (entry["device_kind"], entry["head_dim"]) == (device_kind, head_dim)
        and heads % entry["tiles"].get("heads", 1) == 0
        and distance(entry) <= math.log(2)
    ]
    return min(matching, key=distance)["tiles"] if matching else _usual(head_dim, kv_rows, heads)


def _usual(head_dim: int, kv_rows: int, heads: int) -> dict[str, Any]:
    """Return fields of a `AttentionConfig` for a call without an entry in the table."""
    if head_dim == 64:
        return {"block_q": 1024, "step": 256, "unroll": 8, "columns": 512, "heads": 2}
    if kv_rows <= 1536:
        heads_per_step = next(n for n in (4, 2, 1) if heads % n == 0)
        return {"block_q": 1024, "step": 512, "unroll": 2, "heads": heads_per_step}
    return {"block_q": 2048, "step": 1024, "unroll": 2}
