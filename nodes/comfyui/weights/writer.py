"""Writes a safetensors file tensor by tensor, so that the host holds one at a time."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ....tpu_runtime.files import open_atomic
from ....tpu_runtime.messages import compose
from .lazy_tensor import LazyTensor

# Names of formats in safetensors.
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def save(
    tensors: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    check: Callable[[], None],
) -> None:
    """Write `tensors`, each `[...]`, to a safetensors file at `path`, with `metadata`.

    check: raises if the user cancelled.
    Raises ValueError before writing if a tensor has no values, or the disk has too little space. After an error or a
    cancel no file is left.
    """
    target = Path(path)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if not isinstance(tensor, LazyTensor) and tensor.device.type == "meta":
            raise ValueError(compose(
                "comfyui.not_written_without_values", file_name=target.name, tensor_name=name,
                shape=tuple(tensor.shape),
            ))  # fmt: skip
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    free = shutil.disk_usage(target.parent).free
    if end > free:
        raise ValueError(compose(
            "comfyui.not_written_disk_full", name=target.name, size=f"{end / 1e9:.1f}", parent=target.parent,
            free=f"{free / 1e9:.1f}",
        ))  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open_atomic(target) as scratch, scratch.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            check()
            values = tensor.read() if isinstance(tensor, LazyTensor) else tensor
            file.write(values.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)
