"""What ComfyUI's loaders and ours read of the same files, and the formats in which tests write them."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.single_files import Tensors
from comfyui_tpu.tests.files.test_codes import mark
from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
from comfyui_tpu.tpu_runtime.formats import single_file
from comfyui_tpu.tpu_runtime.models import LAYOUTS
from safetensors.torch import load_file

FP8 = torch.float8_e4m3fn


# What the makers of such files quantise: the matrices of blocks, here those of a name with this in it.
DENOISER = ".ffn."


def quantised(
    make: Callable[[torch.Tensor], Mapping[str, torch.Tensor]], layers: str = DENOISER
) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if layers in name and name.endswith(".weight") and tensor.ndim == 2:
                layer = name.removesuffix("weight")
                found |= {layer + own: value for own, value in make(tensor).items()}
            else:
                found[name] = tensor.to(torch.bfloat16)
        return found

    return change


def fp8_old(tensor: torch.Tensor) -> Tensors:
    scale = tensor.abs().max() / 448
    return {"weight": (tensor / scale).to(FP8), "scale_weight": scale}


def fp8_new(tensor: torch.Tensor) -> Tensors:
    scale = tensor.abs().max() / 448
    stored = (tensor / scale).to(FP8)
    return {"weight": stored, "weight_scale": scale, "comfy_quant": mark(format="float8_e4m3fn")}


def by_kitchen(layout: str, kind: str, **options: object) -> Callable[[torch.Tensor], Tensors]:
    def make(tensor: torch.Tensor) -> Tensors:
        import comfy_kitchen.tensor as kitchen

        stored, parameters = getattr(kitchen, layout).quantize(tensor.to(torch.bfloat16), **options)
        own = {"weight": stored, "comfy_quant": mark(format=kind)}
        if kind == "nvfp4":
            scales = {"weight_scale": parameters.block_scale, "weight_scale_2": parameters.scale.float()}
        elif kind == "mxfp8":
            scales = {"weight_scale": parameters.scale.view(torch.uint8)}
        else:
            scales = {"weight_scale": parameters.scale.float()}
        return {**own, **scales}

    return make


# By format: how a file is changed, and how far a number may be off: ComfyUI rounds twice to bfloat16, we once or never.
FORMATS: Mapping[str, tuple[Callable[[Tensors], Tensors], float]] = {
    "float32": (single_files.same, 0.0),
    "fp8, ComfyUI's first marks": (
        lambda tensors: {**quantised(fp8_old)(tensors), "scaled_fp8": torch.zeros(2, dtype=FP8)},
        2**-7,
    ),
    "fp8": (quantised(fp8_new), 2**-7),
    "mxfp8": (quantised(by_kitchen("TensorCoreMXFP8Layout", "mxfp8")), 2**-7),
    "nvfp4": (quantised(by_kitchen("TensorCoreNVFP4Layout", "nvfp4")), 2**-7),
    "int8": (
        quantised(by_kitchen("TensorWiseINT8Layout", "int8_tensorwise", is_weight=True, per_channel=True)), 2**-7,
    ),
}  # fmt: skip


def read_by_comfyui(tmp_path: Path, *files: tuple[str, Path]) -> list[Tensors]:
    """What ComfyUI makes of denoisers ("model") and VAEs ("vae"), by its names."""
    return run_comfyui(tmp_path, *({"kind": kind, "paths": [str(path)]} for kind, path in files))


def run_comfyui(tmp_path: Path, *jobs: Mapping[str, Any]) -> list[Any]:
    """What `comfyui_loaders.py` says of each job, in one process: tensors, or JSON of a job for "lora keys"."""
    script = Path(single_files.__file__).with_name("comfyui_loaders.py")
    targets = [tmp_path / f"{number}.safetensors" for number in range(len(jobs))]
    said = [{**job, "target": str(target)} for job, target in zip(jobs, targets, strict=True)]
    found = run_script(script, said, tmp_path)
    return [load_file(target) if keys is None else keys for target, keys in zip(targets, found, strict=True)]


def read_by_us(path: Path) -> Tensors:
    (held,) = single_file.find_networks(path, LAYOUTS)
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, lambda: None)
        return {name: reader.slice(tensor, ()).float() for name, tensor in held.tensors.items()}


def holds(ours: Tensors, theirs: Tensors, bound: float) -> None:
    assert len(theirs) > 20 and theirs.keys() <= ours.keys(), theirs.keys() - ours.keys()
    for name, wanted in theirs.items():
        found = ours[name][tuple(slice(0, size) for size in wanted.shape)]
        difference = ((found - wanted).abs() / wanted.abs().clamp(min=1e-6)).max().item()
        print(f"{name}: {difference:.2e}") if difference else None
        assert difference <= bound, name


# Denoisers of sizes that ComfyUI's detection allows, by upstream's class.
DENOISERS: Mapping[str, Mapping[str, Any]] = {
    "WanTransformer3DModel": {"num_attention_heads": 1, "attention_head_dim": 128, "ffn_dim": 256, "num_layers": 2},
    "Flux2Transformer2DModel": {
        "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 96,
    },
    "CogVideoXTransformer3DModel": {
        "num_layers": 2, "num_attention_heads": 2, "patch_size_t": 2, "text_embed_dim": 96, "patch_bias": False,
        "use_rotary_positional_embeddings": True,
    },
    "HunyuanVideo15Transformer3DModel": {
        "num_layers": 2, "num_attention_heads": 2, "text_embed_dim": 96, "image_embed_dim": 64,
    },
    # Narrower than ComfyUI's detection allows: see `narrow.py`.
    "ZImageTransformer2DModel": {
        "dim": 1152, "n_heads": 9, "n_kv_heads": 9, "n_layers": 2, "n_refiner_layers": 1, "cap_feat_dim": 96,
    },
    "QwenImageTransformer2DModel": {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 96},
}  # fmt: skip


def saved(kind: str, folder: Path, **config: object) -> Path:
    """A network of upstream's with random weights, of a size that ComfyUI's detection allows."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(diffusers, kind)(**config).save_pretrained(folder)
    return folder
