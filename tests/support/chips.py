"""What a monitor might be told of a TPU."""

import time
from typing import Any

GIB = 2**30


def chip(index: int, **known: Any) -> dict[str, Any]:
    fields = ("coords", "hbm_reserved", "hbm_reserved_peak", "tensorcore_utilization", "duty_cycle")
    memory = {"hbm_used": 3 * GIB, "hbm_peak": 5 * GIB, "hbm_limit": 32 * GIB}
    return dict.fromkeys(fields) | {"index": index, "kind": "TPU v6e"} | memory | known


def tpu(num_chips: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "platform": "tpu",
        "message": f"{num_chips} x TPU v6e",
        "chips": [chip(index) for index in range(num_chips)],
        "resident": [
            {"id": "vae/x", "component": "vae", "model": "tiny/wan21", "bytes_per_chip": GIB, "last_used": time.time()}
        ],
        "running": None,
        "behind": [],
        "last_run": None,
        "caches": [{"name": "xla", "path": "/cache/xla", "files": 3, "bytes": 4096}],
        "counts": {"load": 1, "encode": 1, "compile": 2},
    } | changes
