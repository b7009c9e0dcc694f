"""HunyuanVideo 1.5, image to video: hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v.

The oracle is `diffusers.HunyuanVideo15ImageToVideoPipeline`. The denoiser gets the encoded image as further channels of
the first latent frame, and SigLIP's image tokens before the text. Everything else is as in text to video.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, EqualsConfig, HubCheckpoint, ImageConditioning, Report, Settings
from ...model_spec.upstream import Net, UpstreamConfig
from ..common import IMAGE_PROMPT, frames
from . import spec as t2v
from .image_encoder import IMAGE_ENCODER, VISION_SIZE, VISION_TOKENS, look, preprocess_image
from .text_encoder import GLYPH_ENCODER, NEGATIVE_PROMPT, TEXT_ENCODER
from .transformer import TRANSFORMER
from .vae import VAE_DECODER, encode_to_latents

if TYPE_CHECKING:
    import numpy as np
    import torch

# Pixels on a side of a latent.
STRIDE_HW = 16


def condition_shapes(latent_shape: tuple[int, ...]) -> dict[str, tuple[int | str, ...]]:
    """Return the shapes of `condition` and of `image_embeds` `[1, 729, image_embed_dim]`, SigLIP's tokens.

    `condition` `[1, 32 + 1, frames, height, width]` is the image's latent and the mask as channels.

    latent_shape: `(rows, channels, frames, height, width)`.
    """
    _, channels, *size = latent_shape
    return {"condition": (1, channels + 1, *size), "image_embeds": (1, VISION_TOKENS, "image_embed_dim")}


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Return `condition`, the image's latent and mask in the first frame and zeros after it, and `image_embeds`.

    call: runs a component. image: `[number, height, width, 3]` in 0..1, of which the first is used.
    settings: of the generation. vae_config: the VAE's config.
    """
    import numpy as np
    import torch

    # Pixels are passed in cells of 16 x 16, one per latent, so that they are split over chips as latents are.
    cells = torch.nn.functional.pixel_unshuffle(image[:1].movedim(-1, 1) * 2.0 - 1.0, STRIDE_HW)
    latent, _ = call("vae_encoder", encode_latent, cells, partition="spatial")
    num_later = (settings.num_frames - 1) // 4  # latent frames
    condition = np.zeros((1, latent.shape[1] + 1, 1 + num_later, *latent.shape[3:]), np.float32)
    condition[:, :-1, :1] = latent * np.float32(vae_config["scaling_factor"])
    condition[:, -1, 0] = 1.0
    return {"condition": condition, "image_embeds": look(call, preprocess_image(image))}


def encode_pixels(call: Call, pixels: "torch.Tensor", report: Report) -> "torch.Tensor":
    """Encode an image `[1, 3, 1, height, width]` in -1..1 to the mean of its latent `[1, 32, 1, h, w]`.

    call: runs a component. pixels: the image. report: unused.
    """
    return frames.encode_still(call, pixels, encode_latent, STRIDE_HW)


def encode_latent(vae: Net, cells: "torch.Tensor") -> "tuple[torch.Tensor, tuple]":
    """Encode an image in -1..1, as cells `[1, 3 * 16 * 16, h, w]`, to the mean of its latent `[1, 32, 1, h, w]`."""
    import torch

    return encode_to_latents(vae, torch.nn.functional.pixel_shuffle(cells, STRIDE_HW)), ()


VAE_ENCODER = replace(
    VAE_DECODER, name="vae_encoder", only=("encoder.",), rules=(Rule("encoder.**.weight", REPLICATED),)
)

_TRANSFORMER = TRANSFORMER.derive(
    config={"task_type": "i2v"},
    tiny={"task_type": "i2v"},
    needs={"image_embed_dim": EqualsConfig("image_encoder", "hidden_size")},
)

SPEC = replace(
    t2v.SPEC,
    name="hunyuanvideo1.5-i2v-720p",
    title="HunyuanVideo 1.5 I2V",
    published=HubCheckpoint(
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
        pipeline_classes=("HunyuanVideo15ImageToVideoPipeline",),
        index={**t2v.SPEC.published.index, "feature_extractor": ("transformers", "SiglipImageProcessor")},
        files={
            **t2v.SPEC.published.files,
            "feature_extractor/preprocessor_config.json": {
                "image_processor_type": "SiglipImageProcessor",
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 3,
                "size": {"height": VISION_SIZE, "width": VISION_SIZE},
            },
        },
    ),
    miniature=replace(t2v.SPEC.miniature, id="tiny/hunyuan15i2v", picture="wan_i2v_shapes.png"),
    components=(TEXT_ENCODER, GLYPH_ENCODER, IMAGE_ENCODER, _TRANSFORMER, VAE_ENCODER, VAE_DECODER),
    texts={"prompt": IMAGE_PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    vae=replace(t2v.SPEC.vae, encode=encode_pixels),
    recipe=replace(t2v.SPEC.recipe, scheduler={**t2v.SCHEDULER, "shift": 7.0}),
    pictures=ImageConditioning(encode=encode_image, look=look, condition_shapes=condition_shapes),
)
