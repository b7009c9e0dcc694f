"""How the attention kernel goes about a call, and the fastest form that fits a chip."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from . import names
from .chip import LANES, MIB, PACKED_ROWS, RESERVED_MIB, SUBLANES, VMEM_MIB, round_up
from .choice import is_small

# Written by `benchmarks/tune_attention.py`: the `tiles` for `kv_rows` keys, by which `libtpu`.
ENTRIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("attention_tiles.json").read_text())
SPILLED_BYTES = 4 * MIB  # registers that the compiler spills: 3 MiB of the largest form
# By the lanes of a head. Where the second product follows the first piece by piece, both matrix units are busiest.
_INT8 = {"step": 512, "unroll": 8, "columns": 256}
INT8_TILES: dict[int, dict[str, Any]] = {64: {"block_q": 1024, "heads": 2, **_INT8}, 128: {"block_q": 2048, **_INT8}}
# Where int8 saves time: v5e, whose vector units know no bfloat16, needs 4.0 bundles a thousand scores for it and 3.9
# without (docs/LOG.md), and TPU7x multiplies no integers.
TAKES_INT8 = ("TPU v6 lite",)
Maximum = Literal["zero", "sampled", "online"]
Scores = Literal["exact", "int8"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the kernel goes about a call.

    `maximum` under which exponentials are taken: `"zero"` where scores are bounded, `"sampled"` from the first keys
    (and all again `"online"` for a block of queries that it fails), `"online"`: running. `block_q` queries a grid step,
    in products of `columns` (None: all); `step` keys a step (`online_step` under a running maximum), `unroll` steps a
    turn of the loop. `block_kv`: keys in VMEM at once, None: all. `heads` a grid step; 128 lanes at least. `scores` of
    int8 products are not exact, see `attention_int8`.
    """

    scores: Scores = "exact"
    maximum: Maximum = "sampled"
    block_q: int = 2048
    step: int = 1024
    unroll: int = 2
    online_step: int = 256
    columns: int | None = None
    block_kv: int | None = None
    heads: int = 1
    single_buffered: bool = False
    vmem_mib: int = 100

    def __post_init__(self) -> None:
        for fields, multiple in (("block_q", "columns"), LANES), (("step", "online_step", "block_kv"), PACKED_ROWS):
            for name in fields:
                if (getattr(self, name) or 0) % multiple:
                    raise ValueError(f"{name}={getattr(self, name)} must be a multiple of {multiple}.")
        if self.unroll % 2:
            raise ValueError(f"unroll={self.unroll} must be even: steps alternate between two buffers.")
        if self.scores == "int8" and self.maximum == "zero":
            raise ValueError("scores of int8 are exact to a part of their size: maximum must be sampled or online.")

    @property
    def kernel(self) -> str:
        return kernel_of(self.scores)

    def turned(self, head_dim: int) -> bool:
        """Whether values are read with tokens as lanes."""
        return head_dim < LANES or self.scores == "int8"


def kernel_of(scores: Scores) -> str:
    """The name by which a machine may do without: what int8 cannot compute is computed exactly."""
    return names.ATTENTION_INT8 if scores == "int8" else names.ATTENTION


def fastest(
    device_kind: str,
    maximum: Maximum,
    *,
    scores: Scores = "exact",
    q_seq: int,
    kv_rows: Sequence[int],
    heads: int,
    head_dim: int,
    itemsize: int,
) -> Form:
    """The fastest form that fits the chip's VMEM: all keys there, then without a second buffer, then divided.

    Where even the last does not fit, the compiler says so.
    """
    if scores == "exact":
        tiles = tiles_for(device_kind, head_dim=head_dim, kv_rows=sum(kv_rows), heads=heads)
    else:
        tiles = INT8_TILES[min(head_dim, LANES)]
    limit_mib = (VMEM_MIB.get(device_kind, 16) - RESERVED_MIB) // (1 + is_small(kernel_of(scores)))
    candidates = list(_candidates(Form(scores=scores, maximum=maximum, vmem_mib=limit_mib, **tiles)))
    fitting = (f for f in candidates if vmem_bytes(f, q_seq, kv_rows, head_dim, itemsize) <= limit_mib * MIB)
    return next(fitting, candidates[-1])


def _candidates(form: Form) -> Iterator[Form]:
    """Forms of falling speed that need ever less VMEM."""
    yield form
    for block_q, step in ((1, 1), (1, 2), (2, 2)):
        yield replace(_smaller(form, block_q, step), single_buffered=True)
    # A rerun needs all keys.
    divided = replace(form, maximum="online" if form.maximum == "sampled" else form.maximum)
    for shrink in (1, 2, 4, 8):
        for block_kv in (16384, 8192, 4096, 2048, 1024):
            yield replace(_smaller(divided, shrink, shrink), block_kv=block_kv)
    yield replace(_smaller(divided, 8, 8), block_kv=512)


def _smaller(form: Form, block_q: int, step: int) -> Form:
    wanted = max(LANES, form.block_q // block_q)
    columns = form.columns and min(form.columns, wanted)
    return replace(form, block_q=wanted, step=max(128, form.step // step), columns=columns)


def vmem_bytes(form: Form, q_seq: int, kv_rows: Sequence[int], head_dim: int, itemsize: int) -> int:
    """What a form needs of the memory on the chip."""
    width = max(LANES, form.heads * head_dim)
    block_q = min(form.block_q, round_up(q_seq, LANES))
    rows = [min(kv_rows[0], form.block_kv or kv_rows[0]), *kv_rows[1:]]
    step = min(form.step, max(rows))
    heads = width // head_dim
    is_int8 = form.scores == "int8"
    row = width * (3 if is_int8 else 2 * itemsize)
    buffers = (1 if form.single_buffered else 2) * sum(rows) * row + 4 * block_q * width * itemsize
    held = heads * block_q * ((max(LANES, head_dim) + 2 * step) * itemsize + 4 * (head_dim + SUBLANES))
    if form.maximum != "zero":
        held += heads * block_q * 4 * (4 * SUBLANES + 2 * min(form.online_step, step))
    return buffers + held + SPILLED_BYTES


def tiles_for(device_kind: str, *, head_dim: int, kv_rows: int, heads: int) -> dict[str, Any]:
    """Fields of a `Form`: of the table's entry nearest in number of keys, at most twice as many or half."""

    def distance(entry: dict[str, Any]) -> float:
        return abs(math.log(max(kv_rows, 1) / entry["kv_rows"]))

    fitting = [
        entry
        for entry in ENTRIES
        if (entry["device_kind"], entry["head_dim"]) == (device_kind, head_dim)
        and heads % entry["tiles"].get("heads", 1) == 0
        and distance(entry) <= math.log(2)
    ]
    return min(fitting, key=distance)["tiles"] if fitting else _usual(head_dim, kv_rows, heads)


def _usual(head_dim: int, kv_rows: int, heads: int) -> dict[str, Any]:
    """Where the table has no entry."""
    if head_dim == 64:
        return {"block_q": 1024, "step": 256, "unroll": 8, "columns": 512, "heads": 2}
    if kv_rows <= 1536:
        together = next(n for n in (4, 2, 1) if heads % n == 0)
        return {"block_q": 1024, "step": 512, "unroll": 2, "heads": together}
    return {"block_q": 2048, "step": 1024, "unroll": 2}
