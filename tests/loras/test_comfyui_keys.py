"""ComfyUI's own map of names in LoRA files (`comfy.lora.model_lora_keys_unet`) as oracle.

Every name that it takes for a denoiser is taken here, and is the same weight, or the same rows of it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, run_comfyui, saved
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui
from comfyui_tpu.tpu_runtime.checkpoints import virtual_folder
from comfyui_tpu.tpu_runtime.files import TensorFile
from comfyui_tpu.tpu_runtime.formats import single_file
from comfyui_tpu.tpu_runtime.formats.key_map import KeyMap, lookup
from comfyui_tpu.tpu_runtime.formats.single_file import NetworkFile
from comfyui_tpu.tpu_runtime.model_spec import KeyTable, RowSlice
from comfyui_tpu.tpu_runtime.models import LAYOUTS, spec_for_family

pytestmark = [needs_comfyui, pytest.mark.slow]

PREFIX = "diffusion_model."
# Wan's from a picture has modules of its own.
PICTURE = {"image_dim": 1280, "added_kv_proj_dim": 128, "in_channels": 36}
FILES = {
    **{kind.partition("Transformer")[0]: (kind, sizes) for kind, sizes in DENOISERS.items()},
    "Wan from a picture": ("WanTransformer3DModel", {**DENOISERS["WanTransformer3DModel"], **PICTURE}),
}


FAMILIES = {
    "Wan": "Wan21", "Wan from a picture": "Wan21", "Flux2": "Flux2", "CogVideoX": "CogVideoX",
    "HunyuanVideo15": "HunyuanVideo15", "ZImage": "ZImage", "QwenImage": "QwenImage",
}  # fmt: skip

# What ComfyUI also takes for every Flux: names of Flux.1's modules in diffusers, of which FLUX.2's has none.
FLUX1 = re.compile(
    r"(single_)?transformer_blocks\.\d+\.(ff(_context)?\.net\.|norm1(_context)?\.linear|attn\.to_[qkv]$|proj_mlp|proj_out|norm\.linear)"
    r"|time_text_embed\.|controlnet_x_embedder"
)
# A module, which groups of the file's rows it has, and which of its own rows are meant.
Meant = set[tuple[str, tuple[int, ...], tuple[int, int]]]


@dataclass(frozen=True)
class Denoiser:
    """A file of a denoiser: its tensors by ComfyUI's names and by ours."""

    held: NetworkFile
    local_devices: Mapping[str, TensorFile]
    table: KeyTable

    def span(self, one: RowSlice) -> tuple[int, int]:
        shape = self.local_devices[name if (name := f"{one.name}.weight") in self.local_devices else one.name].shape
        return 0, one.squares * shape[1] if one.squares else shape[0]

    def found(self, key: str) -> Meant:
        names = KeyMap(self.local_devices, self.table).find(key)
        return {(one.name, one.groups, self.span(one)) for one in names}

    def expected(self, target: Any) -> Meant:
        """What a weight of ComfyUI's, or a part of its rows, is here."""
        name, part, order = (target, None, None) if isinstance(target, str) else target
        name = name.removeprefix(PREFIX)
        module = name.removesuffix(".weight")
        rows = lookup(module, self.table) or (RowSlice(module),)
        if order == "swap_scale_shift":
            # ComfyUI turns the halves of what such a file has, which are in the order that ours have.
            return {(one.name, (0,), self.span(one)) for one in rows}
        assert order is None
        if part is None:
            return {(one.name, one.groups, self.span(one)) for one in rows}
        dimension, start, length = part
        assert dimension == 0
        if len(rows) == 1:
            return {(rows[0].name, (0,), (start, start + length))}
        size = self.held.tensors[name].shape[0]
        inside = [one for one in rows if start <= one.groups[0] * size // one.of < start + length]
        return {(one.name, (0,), self.span(one)) for one in inside}


def denoiser(path: Path) -> Denoiser:
    (held,) = single_file.find_networks(path, LAYOUTS)
    return Denoiser(
        held, virtual_folder.translate_tensors(held), virtual_folder.collect_original_keys(held.layout.class_name)
    )


def is_asked(name: str, key: str, target: Any) -> bool:
    """Not differences of biases, which are named after their module, nor names of Flux.1, nor of a modulation that
    Z-Image's blocks for the text do not have.
    """
    if str(target).endswith(".bias") or re.search(r"context_refiner.\d+.adaLN", key):
        return False
    dotted = re.sub(r"^(transformer|unet)\.", "", key)
    if name != "Flux2" or dotted.startswith((PREFIX, "lora_unet_")):
        return True
    if dotted.startswith(("lycoris_", "lora_transformer_")):
        return False  # the same names once more, with underscores
    return not FLUX1.match(dotted) or (".attn.to_" in dotted and not dotted.startswith("single_"))


def test_key_map_names_and_order_match_comfyui(tmp_path: Path):
    paths = {}
    for name, (kind, sizes) in FILES.items():
        folder = saved(kind, tmp_path / name, **sizes)
        paths[name] = single_files.write(tmp_path / f"{name}.safetensors", folder, kind)
    jobs = [{"kind": "lora keys", "paths": [str(path)]} for path in paths.values()]
    for (name, path), keys in zip(paths.items(), run_comfyui(tmp_path, *jobs), strict=True):
        own = denoiser(path)
        asked = {key: target for key, target in keys.items() if is_asked(name, key, target)}
        assert len(asked) > 60
        for key, target in asked.items():
            assert own.found(key) == own.expected(target) != set(), (name, key, target)
        check_order(own, asked, spec_for_family(FAMILIES[name]).component("transformer").lora_prefixes)


def check_order(own: Denoiser, asked: Mapping[str, Any], prefixes: tuple[str, ...]) -> None:
    """Of several names for one weight the last in ComfyUI's map counts; others than those in it do not."""
    names = KeyMap(own.local_devices, own.table)
    places: dict[str, list[int | None]] = defaultdict(list)
    for key, target in asked.items():
        if not key.endswith((".modulation", "pad_token", ".pe", "emb_pos")):
            places[str(target)].append(names.comfyui_order(key, prefixes))
    for target, found in places.items():
        assert None not in found and found == sorted(set(found)), (target, found)
    for key in asked:
        for other in (f"base_model.model.{key}", f"lora_unet__{key}", f"model.{key}", f"module.{key}"):
            assert names.comfyui_order(other, prefixes) is None
