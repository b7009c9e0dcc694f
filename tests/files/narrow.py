"""ComfyUI knows Z-Image by its width, and takes Qwen-Image's for granted, of which a block has 700 MB and 1.3 GB.
Imported, or as a neighbour pack, this lets it take a Z-Image of a width of `WIDTH`, and a Qwen-Image of any.
"""

from collections.abc import Mapping
from typing import Any

import comfy.model_detection
import comfy.supported_models
import torch

WIDTH, PUBLISHED, HEAD_DIM = 1152, 3840, 128
AXES = (32, 48, 48)  # of a head of Z-Image's
NODE_CLASS_MAPPINGS: dict[str, Any] = {}

_detect = comfy.model_detection.detect_unet_config


def detect(state_dict: Mapping[str, Any], key_prefix: str, **more: Any) -> Any:
    qwen, z_image = f"{key_prefix}txt_in.weight", f"{key_prefix}cap_embedder.1.weight"
    if z_image in state_dict and state_dict[z_image].shape[0] == WIDTH:
        wide = torch.empty(PUBLISHED, state_dict[z_image].shape[1], device="meta")
        heads, start = WIDTH // sum(AXES), f"{key_prefix}noise_refiner."
        refiners = len({name[len(start) :].split(".")[0] for name in state_dict if name.startswith(start)})
        own = {"dim": WIDTH, "n_heads": heads, "n_kv_heads": heads, "n_refiner_layers": refiners, "axes_dims": AXES}
        return {**_detect({**state_dict, z_image: wide}, key_prefix, **more), **own}
    found = _detect(state_dict, key_prefix, **more)
    if found and found.get("image_model") == "qwen_image":
        dim, joint = state_dict[qwen].shape
        found = {**found, "num_attention_heads": dim // HEAD_DIM, "joint_attention_dim": joint}
    return found


comfy.model_detection.detect_unet_config = detect
comfy.supported_models.ZImage.unet_config = {**comfy.supported_models.ZImage.unet_config, "dim": WIDTH}
