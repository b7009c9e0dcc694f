"""FLUX.2's VAE, diffusers' `AutoencoderKLFlux2`: reference images to latents, latents to an image.

Its networks are those of `kl`, with 32 channels at an eighth of the image's size. 2 x 2 latents are stacked to 128
channels, ordered by channel, row and column. A batch norm without weights normalizes them by its running statistics.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...model_spec import Call, ConfigRequirement, Report, Settings
from ...model_spec.upstream import Net, UpstreamConfig
from ..common.frames import decode_still, encode_still, to_pixels
from ..common.kl import make_vae, run_decoder, run_encoder

if TYPE_CHECKING:
    import numpy as np
    import torch

# Pixels on a side of a token, and the most pixels of a reference image, as in `Flux2Pipeline`.
STRIDE = 16
MAX_REFERENCE_AREA = 1024 * 1024


def denormalize_latents(sample: "torch.Tensor", vae_config: UpstreamConfig) -> "torch.Tensor":
    """Return `sample` `[1, 128, h, w]` unchanged: LATENT has the denoiser's scale, and the decoder rescales it."""
    return sample


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield the image `[1, 16h, 16w, 3]` of `latents` `[1, 128, h, w]`.

    call: runs a component. report: progress.
    """
    return decode_still(call, latents, report, decode_image)


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Return the normalized latents `reference_<index>` `[1, 128, h, w]` of each image, at its own size.

    call: runs a component. image: `[number, height, width, 3]` in 0..1, scaled down to one megapixel and cropped to
    multiples of 16, as upstream. settings: of the generation. vae_config: the VAE's config.
    """
    import numpy as np
    import torch
    from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
    from PIL import Image

    processor, stride = Flux2ImageProcessor(vae_scale_factor=STRIDE), STRIDE
    latents = {}
    for index, array in enumerate(np.asarray(image)):
        pillow_image = processor.check_image_input(Image.fromarray((array * 255.0).round().astype(np.uint8)))
        pillow_image = processor._resize_if_exceeds_area(pillow_image, MAX_REFERENCE_AREA)
        width, height = (size // stride * stride for size in pillow_image.size)
        pixels = processor.preprocess(pillow_image, height=height, width=width, resize_mode="crop")
        # Pixels are passed in cells, one per token, so that they are split over chips as latents are.
        cells = torch.nn.functional.pixel_unshuffle(pixels, stride)
        latents[f"reference_{index}"] = call("vae_encoder", encode_reference, cells, partition="spatial")[0]
    return latents


def encode_pixels(call: Call, frames: "torch.Tensor", report: Report) -> "torch.Tensor":
    """Encode an image `frames` `[1, 3, 1, height, width]` in -1..1 to normalized latents `[1, 128, h, w]`.

    call: runs a component. report: unused.
    """
    return encode_still(call, frames, encode_reference, STRIDE)


def encode_reference(vae: Net, cells: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Encode an image in -1..1, as cells `[1, 3 * 16 * 16, h, w]`, to normalized latents `[1, 128, h, w]`."""
    import torch

    moments = run_encoder(vae.encoder, torch.nn.functional.pixel_shuffle(cells, STRIDE))
    moments = moments if vae.quant_conv is None else vae.quant_conv(moments)
    # The mean [1, 32, 2h, 2w] to [1, 128, h, w].
    latents = torch.nn.functional.pixel_unshuffle(moments.chunk(2, dim=1)[0], 2)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return (latents - vae.bn.running_mean.view(1, -1, 1, 1)) / std, None


def decode_image(vae: Net, latents: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Decode latents `[1, 128, h, w]` to an image `[1, 16h, 16w, 3]` in 0..1."""
    import torch

    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    latents = torch.nn.functional.pixel_shuffle(latents * std + vae.bn.running_mean.view(1, -1, 1, 1), 2)
    latents = latents if vae.post_quant_conv is None else vae.post_quant_conv(latents)
    return to_pixels(run_decoder(vae.decoder, latents).permute(0, 2, 3, 1)), None


# Decoder and encoder of the checkpoint's `vae`.
VAE = make_vae(
    {"latent_channels": 32},
    class_name="AutoencoderKLFlux2",
    needs={"patch_size": ConfigRequirement(((2, 2),))},
    more=("bn.",),
)
