"""Names of files as ComfyUI's templates have them before anything is downloaded: which are known, and as what."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes.graphs.loader_swap import LOADERS, swap_loaders
from comfyui_tpu.nodes.model import build_catalogue
from comfyui_tpu.tests.checkpoints.template_files import CONTROLS, FAMILY, NOT_OURS, OURS
from comfyui_tpu.tpu_runtime.models import published

STRANGERS = {name: why for why, names in NOT_OURS.items() for name in names}


def test_list_models_maps_recorded_files_to_their_models():
    found = {name: published.list_models().get(f"{name}.safetensors") for name in (*OURS, *STRANGERS)}
    assert found == {**OURS, **dict.fromkeys(STRANGERS)}


def test_published_controls_equal_recorded_files():
    assert {name.removesuffix(".safetensors") for name in published.CONTROLS} == set(CONTROLS)


def test_list_models_has_no_files_outside_the_record():
    """But for text encoders, whose loaders go by their type."""
    encoders = {file.name for formats in published.SETS.values() for files in formats.values() for file in files}
    encoders = {file for file in encoders if any(word in file for word in ("xxl", "qwen_", "mistral", "byt5"))}
    others = {name.removesuffix(".safetensors") for name in published.list_models()}
    others -= {name.removesuffix(".safetensors") for name in encoders if "image" not in name}
    assert others - OURS.keys() == {"mistral_3_small_flux2_bf16", "qwen_3_4b_fp8_mixed", "qwen_3_8b"}


@pytest.mark.parametrize("name", ["qwen_image_fp8_e4m3fn", "qwen_image_edit_2509_fp8_e4m3fn", "wan2.1_vace_14B_fp16"])
@pytest.mark.parametrize("folder", ["", "Qwen/", "a\\b\\"])
def test_swap_loaders_fresh_template_swaps_known_file_names(name: str, folder: str):
    api = {"1": {"class_type": "UNETLoader", "inputs": {"unet_name": f"{folder}{name}.safetensors"}}}
    found, (said,) = swap_loaders(api, [])
    wanted = "TPUUNETLoader" if name in OURS and "\\" not in folder else "UNETLoader"
    assert found["1"]["class_type"] == wanted and ("is now" in said) == (wanted != "UNETLoader")


def test_build_catalogue_includes_published_file_names():
    known = build_catalogue()
    assert known["qwen_image_fp8_e4m3fn.safetensors"]["name"] == "qwen-image-2512"
    assert (
        known["Wan2_1-I2V-14B-480p_fp8_e4m3fn_scaled_KJ.safetensors"]["unused"]
        == known["wan2.1_i2v_480p_14B_fp16.safetensors"]["unused"]
    )


UNET, VAE = "UNETLoader", "VAELoader"
LATE = "Only part of this workflow can run on the TPU: ComfyUI runs {} on the CPU. That takes far too long."


@pytest.mark.parametrize(
    ("files", "slow"),
    [
        ([(UNET, "wan2.1_vace_14B_fp16"), (VAE, "wan_2.1_vae")], "UNETLoader (wan2.1_vace_14B_fp16.safetensors)"),
        ([(UNET, "wan2.1_t2v_14B_fp16"), (VAE, "wan_alpha_2.1_vae_rgb_channel")],
         "VAELoader (wan_alpha_2.1_vae_rgb_channel.safetensors)"),
        ([(UNET, "wan2.1_t2v_14B_fp16"), (VAE, "Wan2_1_VAE_bf16")], ""),  # all
        ([(UNET, "flux1-dev"), (VAE, "taesd")], ""),  # none: nothing runs on the TPU, as before
        ([(UNET, "wan2.1_i2v_480p_14B_fp16"), ("CLIPVisionLoader", "clip_vision_g")], ""),  # that takes seconds
    ],
)  # fmt: skip
def test_swap_loaders_partial_graph_warns_first_about_cpu_nodes(files: list[tuple[str, str]], slow: str):
    api = {
        str(number): {"class_type": kind, "inputs": {LOADERS[kind][1][0]: f"{name}.safetensors"}}
        for number, (kind, name) in enumerate(files)
    }
    changes = swap_loaders(api, [])[1]
    assert (changes[0].startswith(LATE.format(slow)), len(changes)) == (bool(slow), len(files) + bool(slow))
    assert swap_loaders(api, [], back=True)[1] == []


def templates() -> Path | None:
    spec = importlib.util.find_spec("comfyui_workflow_templates_json")
    return Path(str(spec.origin)).parent / "templates" if spec else None


def loader_files(document: Any) -> Iterator[str]:
    """Files that the loaders of a template name which are known by their file."""
    graphs = [document, *(document.get("definitions") or {}).get("subgraphs", [])]
    for node in (node for graph in graphs for node in graph.get("nodes", [])):
        if node.get("type") in LOADERS and "type" not in LOADERS[node["type"]][1]:
            values = node.get("widgets_values") or [""]
            yield str(next(iter(values.values()) if isinstance(values, dict) else iter(values), ""))


@pytest.mark.skipif(templates() is None, reason="ComfyUI's templates are not installed")
def test_installed_templates_name_only_recorded_files():
    folder = templates()
    assert folder is not None
    found: dict[str, list[str]] = {}
    for path in folder.glob("*.json"):
        document = json.loads(path.read_text("utf-8"))
        if not path.name.startswith("index") and isinstance(document, dict):
            for name in loader_files(document):
                found.setdefault(name.rpartition("/")[2].removesuffix(".safetensors"), []).append(path.stem)
    unknown = {name: sorted(of) for name, of in found.items() if FAMILY.search(name)}
    unknown = {name: of for name, of in unknown.items() if name not in {*OURS, *STRANGERS, *CONTROLS}}
    assert not unknown, f"Decide in template_files.py of which model these files are, if any: {unknown}"
    assert len(found) > 100
