"""Written by `benchmarks/tune_attention.py`: the `tiles` for `kv_rows` keys, by which `libtpu`."""

from typing import Any

# fmt: off
ENTRIES: tuple[dict[str, Any], ...] = (
    {'device_kind': 'TPU v6 lite', 'head_dim': 64, 'kv_rows': 39826, 'libtpu': '0.0.42.1', 'tiles': {'block_q': 1024, 'step': 256, 'unroll': 16, 'columns': 512, 'heads': 2}},  # noqa: E501
    {'device_kind': 'TPU v6 lite', 'head_dim': 128, 'kv_rows': 512, 'libtpu': '0.0.42.1', 'tiles': {'block_q': 1024, 'step': 512, 'unroll': 2, 'heads': 4}},  # noqa: E501
    {'device_kind': 'TPU v6 lite', 'head_dim': 128, 'kv_rows': 4608, 'libtpu': '0.0.42.1', 'tiles': {'block_q': 2048, 'step': 1024, 'unroll': 4}},  # noqa: E501
    {'device_kind': 'TPU v6 lite', 'head_dim': 128, 'kv_rows': 75600, 'libtpu': '0.0.42.1', 'tiles': {'block_q': 2048, 'step': 1024, 'unroll': 4}},  # noqa: E501
    {'device_kind': 'TPU v6 lite', 'head_dim': 128, 'kv_rows': 112856, 'libtpu': '0.0.42.1', 'tiles': {'block_q': 2048, 'step': 1024, 'unroll': 4}},  # noqa: E501
)
