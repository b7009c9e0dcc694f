"""Weight files as other programs write them, without a config: safetensors byte by byte, GGUF by its own package."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec

# The marker tensor of ComfyUI's files of Qwen-Image Edit 2511.
MARK = "__index_timestep_zero__"


def denoiser(spec: ModelSpec, folder: str = "transformer") -> single_files.Tensors:
    """Return the tensors of a tiny model's denoiser by their original names, without marker tensors."""
    source = tiny.ensure_random(spec) / folder
    config = json.loads((source / "config.json").read_text())
    class_name = spec.component(folder).class_name
    tensors = single_files.makers(class_name, config, single_files.load_folder(source))
    return {name: tensor for name, tensor in tensors.items() if name != MARK}


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a length, a JSON header and the data, and return the path.

    The format: https://github.com/huggingface/safetensors#format.
    """
    header, data = {"__metadata__": dict(metadata)} if metadata else {}, b""
    for name, tensor in tensors.items():
        content = tensor.float().numpy().astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(content)],
        }  # fmt: skip
        data += content
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def write_gguf(path: Path, tensors: Mapping[str, torch.Tensor], architecture: str, **fields: object) -> str:
    """Write a file like ComfyUI-GGUF's converter, with more fields. Returns the path.

    Empty tensors are left out, as by the converter.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(name, value)
    for name, tensor in tensors.items():
        if tensor.numel():
            array = tensor.float().numpy()
            if array.ndim > 4:
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(array.shape))
                array = array.reshape(len(array), -1)
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
