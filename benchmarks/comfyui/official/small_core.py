"""A neighbour pack with which ComfyUI's own loaders take tiny encoders, and its nodes make small images.

ComfyUI takes the sizes of text and image encoders, of some VAEs, and of the images in prompts for granted.
`sizes.json` in the server's base folder has those of the tiny files by file name. Nodes that the templates need and
this ComfyUI lacks are not added.
"""

import importlib
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.sd
import comfy.utils
import folder_paths
import torch

import nodes

BASE = Path(folder_paths.get_output_directory()).parent
SIZES = json.loads((BASE / "sizes.json").read_text("utf-8"))
# Pixels of a side of reference images in prompts, and the divisor of the sizes that an image is scaled to.
REFERENCE_SIDE, DIVISOR = 96, 12


def find_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# --- text and image encoders ------------------------------------------------------------------------------------------

_load_clip = comfy.sd.load_clip


def load_clip(ckpt_paths: list[str], *args: Any, clip_type: Any = None, **options: Any) -> Any:
    """Create core's CLIP of tiny files in float32, which core cannot recognise by their sizes."""
    name = Path(ckpt_paths[0]).name
    said = SIZES["clip"].get(f"{clip_type.name}/{name}")
    if said is None:
        return _load_clip(ckpt_paths, *args, clip_type=clip_type, **options)
    target: Any = type("Target", (), {"params": {}})()
    target.clip = find_class(f"comfy.text_encoders.{said['encoder']}")(**said["arguments"])
    target.tokenizer = find_class(f"comfy.text_encoders.{said['tokenizer']}")
    files = [comfy.utils.load_torch_file(path) for path in ckpt_paths]
    carried = {key: files[0][key] for key in ("spiece_model", "tekken_model") if key in files[0]}
    chosen = {**said["options"], "dtype": torch.float32}
    return comfy.sd.CLIP(target, tokenizer_data=carried, model_options=chosen, state_dict=files)


_load_vision = comfy.clip_vision.load


def load_vision(ckpt_path: str) -> Any:
    said = SIZES["vision"].get(Path(ckpt_path).name)
    if said is None:
        return _load_vision(ckpt_path)
    config = json.loads((Path(comfy.clip_vision.__file__).parent / said["config"]).read_text("utf-8"))
    found = comfy.clip_vision.ClipVisionModel({**config, **said["sizes"]})
    missing, _ = found.load_sd(comfy.utils.load_torch_file(ckpt_path))
    assert not [name for name in missing if "projection" not in name], missing
    return found


comfy.sd.load_clip, comfy.clip_vision.load = load_clip, load_vision


# --- networks and images of one size ----------------------------------------------------------------------------------


def make_smaller(path: str, sizes: dict[str, Any]) -> None:
    """Let core create a network with these keywords in place of its own."""
    module, name = path.rsplit(".", 1)
    owner = importlib.import_module(module)
    made = getattr(owner, name)
    setattr(owner, name, lambda **options: made(**{**options, **sizes}))


for path, sizes in SIZES["networks"].items():
    make_smaller(path, sizes)


def module_of(node: str) -> dict[str, Any]:
    """Return the names in the module of a node of core's."""
    return vars(sys.modules[nodes.NODE_CLASS_MAPPINGS[node].__module__])


def scale_references(node: str) -> None:
    """Let a node scale the images of a prompt to a few pixels for the VAE. What the text encoder sees stays."""
    found = nodes.NODE_CLASS_MAPPINGS[node]
    source = textwrap.dedent(inspect.getsource(found.execute.__func__))
    small = source.replace("1024 * 1024", f"{REFERENCE_SIDE} * {REFERENCE_SIDE}")
    assert small != source
    namespace: dict[str, Any] = {}
    exec(compile(small, "small_core", "exec"), module_of(node), namespace)  # noqa: S102
    found.execute = namespace["execute"]


scale_references("TextEncodeQwenImageEditPlus")
kontext = module_of("FluxKontextImageScale")["PREFERRED_KONTEXT_RESOLUTIONS"]
kontext[:] = [tuple(round(side / DIVISOR / 8) * 8 for side in size) for size in kontext]


# --- results ----------------------------------------------------------------------------------------------------------


class KeepSamples:
    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "keep", (), True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",), "name": ("STRING", {"default": ""})}}

    def keep(self, samples: dict[str, Any], name: str) -> dict[str, Any]:
        torch.save(samples["samples"].float().cpu().clone(), BASE / "output" / f"{name}.0.pt")
        return {}


NODE_CLASS_MAPPINGS = {"KeepSamples": KeepSamples}
