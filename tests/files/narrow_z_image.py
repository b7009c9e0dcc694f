"""ComfyUI knows Z-Image by its width, of which a block alone has 700 MB. Imported, or as a neighbour pack, this lets it
take one of a width of `WIDTH` for it too.
"""

from collections.abc import Mapping
from typing import Any

import comfy.model_detection
import comfy.supported_models
import torch

WIDTH, PUBLISHED, HEAD_DIM = 1152, 3840, 128
NODE_CLASS_MAPPINGS: dict[str, Any] = {}

_detect = comfy.model_detection.detect_unet_config


def detect(state_dict: Mapping[str, Any], key_prefix: str, **more: Any) -> Any:
    name = f"{key_prefix}cap_embedder.1.weight"
    if name not in state_dict or state_dict[name].shape[0] != WIDTH:
        return _detect(state_dict, key_prefix, **more)
    wide = torch.empty(PUBLISHED, state_dict[name].shape[1], device="meta")
    heads = WIDTH // HEAD_DIM
    own = {"dim": WIDTH, "n_heads": heads, "n_kv_heads": heads, "n_refiner_layers": 1}
    return {**_detect({**state_dict, name: wide}, key_prefix, **more), **own}


comfy.model_detection.detect_unet_config = detect
comfy.supported_models.ZImage.unet_config = {**comfy.supported_models.ZImage.unet_config, "dim": WIDTH}
