"""What ComfyUI's executor runs, and what is announced between its nodes: calls as soon as they are known."""

from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.tests.comfyui.core_scripts import run_script
from comfyui_tpu.tests.comfyui.test_core_expected import node
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui

pytestmark = [needs_comfyui, pytest.mark.slow]


def prompt(**changed: Any) -> dict[str, Any]:
    nodes = {
        "unet": node("TPUUNETLoader", unet_name="a.safetensors"),
        "vae": node("TPUVAELoader", vae_name="b.safetensors"),
        "camera": node("Camera", side=80),
        "text": node("Text"),
        "latent": node("VAEEncode", pixels=["camera", 0], vae=["vae", 0]),
        "sampler": node("KSampler", model=["unet", 0], positive=["text", 0], latent_image=["latent", 0], cfg=1.0),
        "frames": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
    }
    return nodes | changed


def events(folder: Path, *prompts: dict[str, Any], cache: str = "CLASSIC") -> list[list[str]]:
    """What happened, by prompt."""
    found: list[list[str]] = []
    for event in run_script("core_ahead.py", {"prompts": prompts, "cache": cache}, folder):
        if event == "queued":
            found.append([])
        else:
            found[-1].append(event)
    return found


@pytest.mark.parametrize("cache", ["CLASSIC", "LRU", "NONE"])
def test_sampler_is_announced_from_node_results_before_run(cache: str, tmp_path: Path):
    """The size of an unknown node's image, and a prompt that an unknown node has encoded."""
    (found,) = events(tmp_path, prompt(), cache=cache)
    assert found.index("sampler of 10x8") < found.index("sampler runs") < found.index("frames runs")
    assert found.index("sampler of 10x8") > max(found.index("camera runs"), found.index("text runs"))
    assert found.count("sampler of 10x8") == 1
    assert found.index("frames of 10x8") < found.index("sampler runs")


def test_sampler_with_cached_loaders_is_announced_before_run(tmp_path: Path):
    """ComfyUI does not run a node again whose inputs stay: another size was compiled at the first step."""
    first = prompt(text=node("Text"), latent=node("EmptySD3LatentImage", width=64, height=64))
    second = {**first, "latent": node("EmptySD3LatentImage", width=64, height=96)}
    before, after = events(tmp_path, first, second)
    assert before.index("sampler of 8x8") < before.index("sampler runs")
    assert "unet runs" not in after and after.index("sampler of 12x8") < after.index("sampler runs")


def test_sampler_with_late_number_is_announced_before_run(tmp_path: Path):
    latent = node("EmptySD3LatentImage", width=64, height=["number", 0])
    (found,) = events(tmp_path, prompt(number=node("Counter", side=160), latent=latent))
    assert found.index("number runs") < found.index("sampler of 20x8") < found.index("sampler runs")
