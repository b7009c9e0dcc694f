"""CLIP's vision model (https://arxiv.org/abs/2103.00020), whose image tokens Wan 2.1's image to video attends to.

It is transformers' `CLIPVisionModel` without its last layer, a ViT-H/14: `[images, 3, 224, 224]` to
`[images, 257, 1280]`.
"""

from typing import TYPE_CHECKING

from ... import media
from ...model_spec import Call, Component, ConfigRequirement
from ...model_spec.upstream import Net
from ..common import layers

if TYPE_CHECKING:
    import numpy as np
    import torch

# CLIP's input: pixels on a side; and its output: a token per patch of 14 x 14 pixels, and the class token.
VISION_SIZE, VISION_TOKENS = 224, 16 * 16 + 1
# CLIP's normalization: mean and standard deviation of each colour channel, for pixels in 0..1.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def look(call: Call, pixels: "torch.Tensor") -> "np.ndarray":
    """Return CLIP's tokens `[images, 257, dim]` of `pixels` `[images, 3, 224, 224]`."""
    return call("image_encoder", tokens_of, pixels)[0]


def tokens_of(encoder: Net, pixels: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return upstream's `hidden_states[-2]` `[images, 257, dim]` of `pixels` `[images, 3, 224, 224]`.

    `encoder` is built without its last layer.
    """
    from ...programs.upstream_network import scan_states

    x = encoder.pre_layrnorm(encoder.embeddings(pixels))  # upstream's spelling; [images, 257, dim]
    return scan_states(encoder.encoder.layers, x, attention_mask=None), None


def trim_vision(encoder: Net) -> None:
    """Remove the norm of the class token, whose pooled output is not used."""
    import torch

    encoder.post_layernorm = torch.nn.Identity()


def preprocess_images(images: "torch.Tensor") -> "torch.Tensor":
    """Preprocess `images` `[number, height, width, 3]` in 0..1 as CLIP's image processor: `[number, 3, 224, 224]`.

    The shorter side is scaled to 224 pixels, and the longer side is center-cropped.
    """
    import numpy as np
    import torch
    from PIL import Image

    height, width = images.shape[1:3]
    size = VISION_SIZE * width // min(height, width), VISION_SIZE * height // min(height, width)
    left, top = (size[0] - VISION_SIZE) // 2, (size[1] - VISION_SIZE) // 2
    box = left, top, left + VISION_SIZE, top + VISION_SIZE
    squares = []
    for image in images:
        pillow_image = media.to_pillow(image)
        squares.append(np.asarray(pillow_image.resize(size, Image.Resampling.BICUBIC).crop(box), np.float32))
    pixels = torch.from_numpy(np.stack(squares)) / 255.0
    return ((pixels - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD)).movedim(-1, 1)


IMAGE_ENCODER = Component(
    name="image_encoder",
    library="transformers",
    class_name="CLIPVisionModel",
    # The published class; its projection is not used.
    class_aliases=("CLIPVisionModelWithProjection",),
    config={
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "image_size": VISION_SIZE,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "patch_size": 14,
    },
    tiny={
        "architectures": ["CLIPVisionModel"],
        "hidden_size": 28,
        "intermediate_size": 50,
        "num_attention_heads": 7,
        "num_hidden_layers": 3,
    },
    needs={"image_size": ConfigRequirement((VISION_SIZE,)), "patch_size": ConfigRequirement((14,), required=True)},
    blocks=("encoder.layers",),
    layers=slice(None, -1),
    only=("embeddings.", "pre_layrnorm.", "encoder."),
    # The prefix that transformers 4 wrote, as published.
    aliases={"vision_model.": ""},
    trim=trim_vision,
    rules=layers.VISION_RULES,
)
