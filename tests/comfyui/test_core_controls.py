"""Control networks beside a denoiser on the TPU, in core's own nodes, against core's torch ones of the same weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.comfyui.test_core_networks import check
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, saved
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tests.support.patience import mostly

pytestmark = [needs_comfyui, pytest.mark.slow]

Z_IMAGE, QWEN_IMAGE = "ZImageTransformer2DModel", "QwenImageTransformer2DModel"
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # Core's ControlNet counts 30 layers; this is the least width of which core and diffusers have equal feed-forwards.
    Z_IMAGE: {
        "axes_dims": (8, 12, 12), "dim": 96, "n_heads": 3, "n_kv_heads": 3, "n_layers": 30, "n_refiner_layers": 2,
        "cap_feat_dim": 96,
    },
    QWEN_IMAGE: {**DENOISERS[QWEN_IMAGE], "num_layers": 14},
}  # fmt: skip
CASES: Mapping[str, Sequence[str]] = {
    Z_IMAGE: ("lite, inpainting, 3 chips", "version 2.0, an image for each row", "two networks"),
    QWEN_IMAGE: (
        "union in a part of the steps, then inpainting", "a patch to inpaint and a ControlNet", "Fun, 3 chips",
    ),
}  # fmt: skip
# Further numbers of chips and layers of the same networks.
MORE: Mapping[str, Sequence[str]] = {
    Z_IMAGE: ("version 1, 2 chips", "version 2.1, 8 chips"),
    QWEN_IMAGE: (
        "union, 2 chips", "union, a part of the steps, 3 chips", "inpainting, 8 chips", "a canny patch, 2 chips",
    ),
}  # fmt: skip
# What names the loader to use instead of core's, for each network.
INSTEAD = {"core's loader": "TPU", "core's patch": "TPUModelPatchLoader", "core's model": "TPUUNETLoader"}


@pytest.mark.parametrize(
    ("kind", "more"),
    mostly([(kind, more) for more in (False, True) for kind in CASES], *((kind, False) for kind in CASES)),
)
def test_control_networks_match_core_torch(kind: str, more: bool, tmp_path: Path):
    """Images of another size than the latents, whose sides are odd; two prompts of different lengths."""
    home = saved(kind, tmp_path / "folder", **CONFIGS[kind])
    path = single_files.write(tmp_path / "denoiser.safetensors", home, kind)
    cases = (MORE if more else CASES)[kind]
    found = run_script("core_controls.py", {"kind": kind, "path": str(path), "cases": cases}, tmp_path)
    refused = {name: found.pop(name) for name in INSTEAD if name in found}
    assert len(refused) >= 2 and all(INSTEAD[name] in sentence for name, sentence in refused.items()), refused
    check(found)
