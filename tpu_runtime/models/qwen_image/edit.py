"""Qwen-Image Edit, image editing: Qwen/Qwen-Image-Edit-2511, and -2509, licensed under Apache-2.0.

The oracle is `diffusers.QwenImageEditPlusPipeline`.

Images enter twice: through the text encoder, as few tokens, and through the denoiser, as latents.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ... import media
from ...messages import compose
from ...model_spec import Call, ConfigRequirement, HubCheckpoint, ImageConditioning, IntInput, Settings
from ...model_spec.upstream import UpstreamConfig
from ..common import qwen25_vision, wan_vae, wan_vae_encoder
from . import spec
from .text_encoder import EDIT_PROMPT, EDIT_TEXT, TEXT_ENCODER
from .transformer import TRANSFORMER

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

# Upstream's image processor refuses aspect ratios above 200; sides are rounded before that.
MAX_ASPECT_RATIO = 50


def encode_images(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Encode every image at about one megapixel for the denoiser, and at a smaller size for the text encoder.

    call: runs a component. image: `[number, height, width, 3]` in 0..1. settings: of the generation.
    vae_config: the VAE's config. Returns `reference_<index>`, normalized latents `[1, 16, 1, h, w]`, and
    `seen_<index>`, vision tokens `[1, rows, columns, dim]`.
    """
    import torch
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as upstream

    mean, std = wan_vae.latent_stats(vae_config)
    arrays: dict[str, np.ndarray] = {}
    for number, pixels in enumerate(image):
        pillow_image = media.to_pillow(pixels)
        large, small = (
            resize_image(pillow_image, area) for area in (upstream.VAE_IMAGE_SIZE, upstream.CONDITION_IMAGE_SIZE)
        )
        cells = wan_vae_encoder.to_cells(to_pixels(large), wan_vae_encoder.STRIDE_HW)
        latents, _ = call("vae_encoder", wan_vae_encoder.encode_first, cells, partition="spatial")
        arrays[f"reference_{number}"] = ((torch.from_numpy(latents.copy()) - mean) * (1.0 / std)).numpy()
        arrays[f"seen_{number}"] = look(call, *qwen25_vision.cut_patches(small))
    return arrays


def look(call: Call, patches: "np.ndarray", grid: tuple[int, int]) -> "np.ndarray":
    """Return the vision tokens `[1, rows, columns, dim]` of `patches` `[patches, 3 * 2 * 14 * 14]`.

    call: runs a component. patches, grid: as returned by `qwen25_vision.cut_patches`; grid is (rows, columns) of
        patches.
    """
    tokens, _ = call("image_encoder", qwen25_vision.look, patches, qwen25_vision.patch_positions(grid))
    return tokens.reshape(1, *(side // qwen25_vision.MERGE_SIZE for side in grid), -1)


def resize_image(image: "Image.Image", area: int) -> "Image.Image":
    """Scale an image to about `area` pixels and sides that are multiples of 32, with upstream's arithmetic.

    Raises ValueError for an aspect ratio above `MAX_ASPECT_RATIO`, whose shorter side would round to 0.
    """
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
    from PIL import Image

    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ValueError(
            compose("model.image_too_elongated", width=width, height=height, max_aspect_ratio=MAX_ASPECT_RATIO)
        )
    return image.resize(calculate_dimensions(area, width / height), Image.Resampling.LANCZOS)


def to_pixels(image: "Image.Image") -> "torch.Tensor":
    """Convert an image to pixels `[1, 3, 1, height, width]` in -1..1."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(image, np.float32) / 255.0 * 2.0 - 1.0).movedim(-1, 0)[None, :, None]


_TRANSFORMER = TRANSFORMER.derive(
    config={"zero_cond_t": True},
    tiny={"zero_cond_t": True},
    # 2509 embeds reference latents at the sample's timestep.
    needs={"zero_cond_t": ConfigRequirement((False, True))},
)

SPEC = replace(
    spec.SPEC,
    name="qwen-image-edit-2511",
    title="Qwen-Image Edit 2511",
    published=HubCheckpoint(hub_id="Qwen/Qwen-Image-Edit-2511", pipeline_classes=("QwenImageEditPlusPipeline",)),
    miniature=replace(
        spec.SPEC.miniature,
        id="tiny/qwenimageedit",
        texts={"prompt": "the circle becomes yellow", "negative_prompt": ""},
        picture="wan_i2v_shapes.png",
    ),
    components=(
        TEXT_ENCODER,
        qwen25_vision.IMAGE_ENCODER,
        _TRANSFORMER,
        wan_vae_encoder.VAE_ENCODER,
        wan_vae.VAE_DECODER,
    ),
    text_encoders=(EDIT_TEXT,),
    inputs={
        **spec.SPEC.inputs,
        "height": IntInput(default=1024, low=64, high=2048, multiple_of=16),
        "width": IntInput(default=1024, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntInput(default=40, low=1, high=100),
    },
    texts={"prompt": EDIT_PROMPT, "negative_prompt": ""},
    # The shapes for a square image.
    pictures=ImageConditioning(
        encode=encode_images, look=look, are_references=True, planned_shapes={"reference_0": (1, 16, 1, 128, 128)}
    ),
)
