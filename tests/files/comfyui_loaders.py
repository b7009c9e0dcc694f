"""Run in a process of its own: what ComfyUI's own loaders make of files, in float32, by ComfyUI's names.

Arguments: ComfyUI's folder, then for each file its kind, its path, and where the tensors go.
"""

import sys
from pathlib import Path
from typing import Any


def main(comfyui: str, *jobs: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd
    import comfy.utils
    from safetensors.torch import save_file

    for kind, path, target in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
        if kind == "vae":
            module = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path)).first_stage_model
        else:
            module = comfy.sd.load_diffusion_model(path).model.diffusion_model
        save_file({name: numbers(tensor) for name, tensor in module.named_parameters()}, Path(target))


def numbers(tensor: Any) -> Any:
    """A weight, or what a quantised one stands for, as ComfyUI computes with it."""
    tensor = tensor.data
    tensor = tensor.dequantize() if "Quantized" in type(tensor).__name__ else tensor
    return tensor.detach().float().contiguous().clone()


if __name__ == "__main__":
    main(*sys.argv[1:])
