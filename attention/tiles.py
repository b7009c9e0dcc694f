"""The kernel's tiles, by chip, head size and number of keys: the table that
`benchmarks/tune_attention.py` writes, and what holds where it has no entry.
"""

import math
from typing import Any

from ..sharding.chips import CHIPS
from .tile_table import ENTRIES

# On-chip memory of one core, by JAX's name of the chip; the compiler keeps some for itself.
VMEM_MIB = {chip.device_kind: chip.vmem_mib for chip in CHIPS}
RESERVED_MIB = 8


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def tiles_for(device_kind: str, *, head_dim: int, kv_rows: int, heads: int) -> dict[str, Any]:
    """Fields of a `policy.Form`: of the entry nearest in number of keys, at most twice as many or half."""

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
    if head_dim == 64:
        return {"block_q": 1024, "step": 256, "unroll": 8, "columns": 512, "heads": 2}
    if kv_rows <= 1536:
        together = next(n for n in (4, 2, 1) if heads % n == 0)
        return {"block_q": 1024, "step": 512, "unroll": 2, "heads": together}
    return {"block_q": 2048, "step": 1024, "unroll": 2}
