"""The kernel's tiles, by chip, head size and number of keys. Written by `benchmarks/tune_attention.py`."""

from typing import Any

# On-chip memory of one core, jax/_src/pallas/mosaic/tpu_info.py; the compiler keeps some for itself.
VMEM_MIB = {"TPU v4": 16, "TPU v5 lite": 128, "TPU v5": 64, "TPU v6 lite": 128, "TPU7x": 64}
RESERVED_MIB = 4


def tiles_for(device_kind: str, *, head_dim: int, kv_rows: int, heads: int) -> dict[str, Any]:
    """Fields of a `policy.Form`."""
    if head_dim == 64:
        return {"block_q": 1024, "step": 512, "unroll": 8, "columns": 512, "heads": 2}
    if kv_rows <= 1536:
        together = next(n for n in (4, 2, 1) if heads % n == 0)
        return {"block_q": 1024, "step": 512, "unroll": 2, "heads": together}
    return {"block_q": 2048, "step": 1024, "unroll": 4}
