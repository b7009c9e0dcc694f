"""ComfyUI itself as oracle: its loaders read the same denoisers and VAEs on the CPU, and hold the numbers that we read.

Encoders of text are in `test_comfyui_encoders.py`. ComfyUI makes the VAEs of Wan 2.2, HunyuanVideo 1.5 and CogVideoX in
their published sizes only (0.2 to 1.2 billion weights), and the encoders of pictures, CLIP-H and SigLIP, as well: a
miniature is nothing to it.
"""

from pathlib import Path

import pytest
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.comfyui_oracle import (
    DENOISERS,
    FORMATS,
    by_kitchen,
    holds,
    quantised,
    read_by_comfyui,
    read_by_us,
    saved,
)  # fmt: skip
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tests.support.patience import slower
from safetensors.torch import load_file

pytestmark = [needs_comfyui, pytest.mark.slow]


def test_wan_denoiser_every_format_matches_comfyui(tmp_path: Path):
    kind = "WanTransformer3DModel"
    folder = saved(kind, tmp_path / "wan", **DENOISERS[kind])
    files = []
    for number, (change, _) in enumerate(FORMATS.values()):
        files.append(("model", single_files.write(tmp_path / f"wan{number}.safetensors", folder, kind, change=change)))
    theirs = read_by_comfyui(tmp_path, *files)
    for (_, path), found, (_, bound) in zip(files, theirs, FORMATS.values(), strict=True):
        holds(read_by_us(path), found, bound)


def test_wan_vae_matches_comfyui(tmp_path: Path):
    """With as many layers as the published one has, which ComfyUI takes for granted."""
    folder = saved("AutoencoderKLWan", tmp_path / "vae", base_dim=8, z_dim=16, num_res_blocks=2)
    path = single_files.write(tmp_path / "wan_vae.safetensors", folder, "AutoencoderKLWan")
    (theirs,) = read_by_comfyui(tmp_path, ("vae", path))
    # ComfyUI renames what lies between the encoder and the decoder.
    moved = (("quant_conv.", "encoder.quant_conv."), ("post_quant_conv.", "decoder.post_quant_conv."))
    holds(read_by_us(path), single_files.renamed(theirs, tuple((f"^{new}", own) for new, own in moved)), 0.0)
    # ComfyUI has the names that the makers gave them: so has the file.
    assert theirs.keys() == load_file(path).keys()


OTHERS = [kind for kind in DENOISERS if "Wan" not in kind]


@pytest.mark.parametrize("kind", slower(OTHERS, *OTHERS[2:]))
def test_denoiser_of_other_families_matches_comfyui(kind: str, tmp_path: Path):
    folder = saved(kind, tmp_path / "folder", **DENOISERS[kind])
    path = single_files.write(tmp_path / "file.safetensors", folder, kind)
    (theirs,) = read_by_comfyui(tmp_path, ("model", path))
    # Of FLUX.2 ComfyUI renames the norms' scales.
    ours = {
        name.removesuffix(".scale") + ".weight" * name.endswith(".scale"): x for name, x in read_by_us(path).items()
    }
    holds(ours, theirs, 0.0)


def test_z_image_int8_denoiser_matches_comfyui(tmp_path: Path):
    """Query, key and value are one matrix of codes. What ConvRot adds is in `test_codes.py`."""
    kind = "ZImageTransformer2DModel"
    int8 = by_kitchen("TensorWiseINT8Layout", "int8_tensorwise", is_weight=True, per_channel=True)
    change = quantised(int8, ".attention.qkv")
    folder = saved(kind, tmp_path / "folder", **DENOISERS[kind])
    path = single_files.write(tmp_path / "file.safetensors", folder, kind, change=change)
    (theirs,) = read_by_comfyui(tmp_path, ("model", path))
    holds(read_by_us(path), theirs, 2**-7)


def test_flux2_vae_matches_comfyui(tmp_path: Path):
    """With the published encoder, which ComfyUI takes for granted, and a small decoder, whose width it reads."""
    kind = "AutoencoderKLFlux2"
    sizes = {"block_out_channels": (128, 256, 512, 512), "decoder_block_out_channels": (32, 64, 128, 128)}
    path = single_files.write(tmp_path / "flux2_vae.safetensors", saved(kind, tmp_path / "vae", **sizes), kind)
    (theirs,) = read_by_comfyui(tmp_path, ("vae", path))
    # ComfyUI renames what lies between the encoder and the decoder.
    moved = (("quant_conv.", "encoder.quant_conv."), ("post_quant_conv.", "decoder.post_quant_conv."))
    holds(read_by_us(path), single_files.renamed(theirs, tuple((f"^{new}", own) for new, own in moved)), 0.0)
