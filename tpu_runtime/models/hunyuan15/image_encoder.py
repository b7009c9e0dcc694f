"""SigLIP's vision model (https://arxiv.org/abs/2303.15343), whose image tokens HunyuanVideo 1.5's image to video uses.

It is transformers' `SiglipVisionModel` so400m-patch14-384, without its pooling head: `[images, 3, 384, 384]` to
`[images, 729, 1152]`.
"""

from typing import TYPE_CHECKING

from ... import media
from ...model_spec import Call, Component, ConfigRequirement
from ...model_spec.upstream import Net
from ..common import layers

if TYPE_CHECKING:
    import numpy as np
    import torch

# SigLIP's input: pixels on a side; and its output: a token per patch of 14 x 14 pixels.
VISION_SIZE, VISION_TOKENS = 384, 27 * 27


def look(call: Call, pixels: "torch.Tensor") -> "np.ndarray":
    """Return SigLIP's tokens `[images, 729, dim]` of `pixels` `[images, 3, 384, 384]`."""
    return call("image_encoder", tokens_of, pixels)[0]


def tokens_of(encoder: Net, pixels: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return SigLIP's last hidden state `[images, 729, dim]` of `pixels` `[images, 3, 384, 384]`."""
    from ...programs.upstream_network import scan_states

    states = scan_states(encoder.encoder.layers, encoder.embeddings(pixels), attention_mask=None)
    return encoder.post_layernorm(states), None


def trim_vision(encoder: Net) -> None:
    """Remove the pooling head."""
    encoder.use_head = False
    del encoder.head


def preprocess_image(image: "torch.Tensor") -> "torch.Tensor":
    """Preprocess `[1, height, width, 3]` in 0..1 as SigLIP's image processor does: `[1, 3, 384, 384]` in -1..1."""
    import numpy as np
    import torch
    from PIL import Image

    pillow_image = media.to_pillow(image[0])
    pixels = np.asarray(pillow_image.resize((VISION_SIZE, VISION_SIZE), Image.Resampling.BICUBIC), np.float32)
    return (torch.from_numpy(pixels) / 255.0 * 2.0 - 1.0).movedim(-1, 0)[None]


IMAGE_ENCODER = Component(
    name="image_encoder",
    library="transformers",
    class_name="SiglipVisionModel",
    config={
        "hidden_size": 1152,
        "image_size": VISION_SIZE,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    tiny={
        "architectures": ["SiglipVisionModel"],
        "hidden_size": 28,
        "intermediate_size": 50,
        "num_attention_heads": 7,
        "num_hidden_layers": 3,
    },
    needs={
        "image_size": ConfigRequirement((VISION_SIZE,), required=True),
        "patch_size": ConfigRequirement((14,), required=True),
    },
    blocks=("encoder.layers",),
    only=("embeddings.", "encoder.", "post_layernorm."),
    # The prefix that transformers 4 wrote, as published.
    aliases={"vision_model.": ""},
    trim=trim_vision,
    rules=layers.VISION_RULES,
)
