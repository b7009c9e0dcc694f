"""ComfyUI itself as oracle: its loaders read the same files on the CPU, and hold the numbers that we read.

Where its detection has sizes of its own (text encoders, some VAEs) a miniature is nothing to it.
"""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.single_files import Tensors
from comfyui_tpu.tests.files.test_codes import mark
from comfyui_tpu.tests.support.comfyui_server import COMFYUI, STUBS, needs_comfyui
from comfyui_tpu.tpu_runtime.checkpoints import load
from comfyui_tpu.tpu_runtime.formats import contents
from comfyui_tpu.tpu_runtime.models.layouts import LAYOUTS
from safetensors.torch import load_file

pytestmark = [needs_comfyui, pytest.mark.slow]
FP8 = torch.float8_e4m3fn


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """What the makers of such files quantise: the blocks' matrices."""
    return ".ffn." in name and name.endswith(".weight") and tensor.ndim == 2


def quantised(make: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if is_quantised(name, tensor):
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
    (tmp_path / "stubs").mkdir(exist_ok=True)
    (tmp_path / "stubs" / "sitecustomize.py").write_text(textwrap.dedent(STUBS))
    script = Path(single_files.__file__).with_name("comfyui_loaders.py")
    targets = [tmp_path / f"{number}.safetensors" for number in range(len(files))]
    jobs = [str(part) for (kind, path), target in zip(files, targets, strict=True) for part in (kind, path, target)]
    found = subprocess.run(
        [sys.executable, str(script), str(COMFYUI), *jobs], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "stubs")}, cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return [load_file(target) for target in targets]


def read_by_us(path: Path) -> Tensors:
    (held,) = contents.networks(path, LAYOUTS)
    with contextlib.ExitStack() as stack:
        reader = load.Reader(stack, lambda: None)
        return {name: reader.slice(tensor, ()).float() for name, tensor in held.tensors.items()}


def holds(ours: Tensors, theirs: Tensors, bound: float) -> None:
    assert theirs.keys() <= ours.keys() and len(theirs) > 20
    for name, wanted in theirs.items():
        found = ours[name][tuple(slice(0, size) for size in wanted.shape)]
        difference = ((found - wanted).abs() / wanted.abs().clamp(min=1e-6)).max().item()
        print(f"{name}: {difference:.2e}") if difference else None
        assert difference <= bound, name


def saved(kind: str, folder: Path, **config: object) -> Path:
    """A network of upstream's with random weights, of a size that ComfyUI's detection allows."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(diffusers, kind)(**config).save_pretrained(folder)
    return folder


def test_every_format_of_wan_is_what_comfyui_reads(tmp_path: Path):
    kind = "WanTransformer3DModel"
    folder = saved(kind, tmp_path / "wan", num_attention_heads=1, attention_head_dim=128, ffn_dim=256, num_layers=2)
    files = []
    for number, (change, _) in enumerate(FORMATS.values()):
        files.append(("model", single_files.write(tmp_path / f"wan{number}.safetensors", folder, kind, change=change)))
    theirs = read_by_comfyui(tmp_path, *files)
    for (_, path), found, (_, bound) in zip(files, theirs, FORMATS.values(), strict=True):
        holds(read_by_us(path), found, bound)


def test_the_vae_of_wan_is_what_comfyui_reads(tmp_path: Path):
    """With as many layers as the published one has, which ComfyUI takes for granted."""
    folder = saved("AutoencoderKLWan", tmp_path / "vae", base_dim=8, z_dim=16, num_res_blocks=2)
    path = single_files.write(tmp_path / "wan_vae.safetensors", folder, "AutoencoderKLWan")
    (theirs,) = read_by_comfyui(tmp_path, ("vae", path))
    holds(read_by_us(path), theirs, 0.0)
    # ComfyUI has the names that the makers gave them: so has the file.
    assert theirs.keys() == load_file(path).keys()


def test_flux_is_what_comfyui_reads(tmp_path: Path):
    kind = "Flux2Transformer2DModel"
    sizes = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 96}
    path = single_files.write(tmp_path / "flux.safetensors", saved(kind, tmp_path / "flux", **sizes), kind)
    (theirs,) = read_by_comfyui(tmp_path, ("model", path))
    # ComfyUI renames the norms' scales.
    ours = {
        name.removesuffix(".scale") + ".weight" * name.endswith(".scale"): x for name, x in read_by_us(path).items()
    }
    holds(ours, theirs, 0.0)


def test_cogvideox_is_what_comfyui_reads(tmp_path: Path):
    kind = "CogVideoXTransformer3DModel"
    sizes = {
        "num_layers": 2, "num_attention_heads": 2, "patch_size_t": 2, "text_embed_dim": 96, "patch_bias": False,
        "use_rotary_positional_embeddings": True,
    }  # fmt: skip
    path = single_files.write(tmp_path / "cogvideox.safetensors", saved(kind, tmp_path / "cogvideox", **sizes), kind)
    (theirs,) = read_by_comfyui(tmp_path, ("model", path))
    holds(read_by_us(path), theirs, 0.0)


def test_hunyuan_is_what_comfyui_reads(tmp_path: Path):
    kind = "HunyuanVideo15Transformer3DModel"
    sizes = {"num_layers": 2, "num_attention_heads": 2, "text_embed_dim": 96, "image_embed_dim": 64}
    path = single_files.write(tmp_path / "hunyuan.safetensors", saved(kind, tmp_path / "hunyuan", **sizes), kind)
    (theirs,) = read_by_comfyui(tmp_path, ("model", path))
    holds(read_by_us(path), theirs, 0.0)
