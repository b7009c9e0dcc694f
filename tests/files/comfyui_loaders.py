"""Run in a process of its own: what ComfyUI's own loaders make of files, in float32, by ComfyUI's names.

Arguments: ComfyUI's folder, and jobs as JSON: each has a `kind` ("model", "vae", "clip", "lora" or "lora keys"),
`paths`, and the `target` that the tensors go to: of a "lora", a denoiser and a LoRA file, the weights that the file
changes. One of text encoders has a `type`, ComfyUI's `options`, the `module` that is asked for, and `texts` whose
tokens are saved as well. Prints JSON by job, last, null but for "lora keys": the names that ComfyUI takes in LoRA files
of a denoiser, and the weight that each is for, with a dimension, start and length for a part of it, and the name of the
function that orders its rows.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def main(comfyui: str, jobs: str) -> None:
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import narrow  # noqa: F401 - beside this file
    import torch
    from safetensors.torch import save_file

    said: list[Any] = []
    for job in json.loads(jobs):
        said.append(lora_keys(job["paths"][0]) if job["kind"] == "lora keys" else None)
        if said[-1] is not None:
            continue
        if job["kind"] == "lora":
            save_file(merge_lora(*job["paths"]), Path(job["target"]))
            continue
        module, tokenizer = load_network(job)
        tensors = {name: numbers(tensor) for name, tensor in module.named_parameters() if is_read(name)}
        for number, text in enumerate(job.get("texts", ())):
            tensors[f"tokens.{number}"] = torch.tensor(tokenizer(text)["input_ids"])
        save_file(tensors, Path(job["target"]))
    print(json.dumps(said))


def load_network(job: Mapping[str, Any]) -> tuple[Any, Any]:
    """The network of a job, and its tokenizer."""
    import comfy.sd
    import comfy.utils

    if job["kind"] == "vae":
        return comfy.sd.VAE(sd=comfy.utils.load_torch_file(job["paths"][0])).first_stage_model, None
    if job["kind"] == "model":
        return comfy.sd.load_diffusion_model(job["paths"][0]).model.diffusion_model, None
    kind = comfy.sd.CLIPType[job["type"]]
    clip = comfy.sd.load_clip(job["paths"], clip_type=kind, model_options=job["options"])
    # What wraps the tokenizer of an encoder that is alone names it.
    tokenizer = getattr(clip.tokenizer, clip.tokenizer.clip).tokenizer if job.get("texts") else None
    return getattr(clip.cond_stage_model, job["module"]).transformer, tokenizer


def lora_keys(path: str) -> dict[str, Any]:
    import comfy.lora
    import comfy.sd

    found = comfy.lora.model_lora_keys_unet(comfy.sd.load_diffusion_model(path).model, {})
    return {key: target if isinstance(target, str) else describe_target(*target) for key, target in found.items()}


def merge_lora(path: str, lora: str) -> dict[str, Any]:
    """The weights that a file changes, with its changes, as core's loader of LoRAs merges them."""
    import comfy.lora
    import comfy.sd
    import comfy.utils
    import torch

    patcher = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32})
    patcher, _ = comfy.sd.load_lora_for_models(patcher, None, comfy.utils.load_torch_file(lora), 1.0, 0.0)
    own = patcher.model.state_dict()
    return {
        key.removeprefix("diffusion_model."): comfy.lora.calculate_weight(patches, own[key].float().clone(), key)
        for key, patches in patcher.patches.items()
    }


def describe_target(name: str, part: Any = None, order: Any = None) -> list[Any]:
    return [name, part, getattr(order, "__name__", None)]


def is_read(name: str) -> bool:
    """Not what encoders of text are without in a test's file: what sees pictures, in its full size, and the head."""
    return not name.startswith(("visual.", "model.lm_head."))


def numbers(tensor: Any) -> Any:
    """A weight, or what a quantised one stands for, as ComfyUI computes with it."""
    tensor = tensor.data
    tensor = tensor.dequantize() if "Quantized" in type(tensor).__name__ else tensor
    return tensor.detach().float().contiguous().clone()


if __name__ == "__main__":
    main(*sys.argv[1:])
