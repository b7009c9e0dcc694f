"""The VAE of Wan 2.2's 5B model: encoding, and its sizes. `wan_vae` has the networks of both VAEs, and decodes.

It is diffusers' `AutoencoderKLWan` with `is_residual`: 48 channels, and a latent per 4 x 16 x 16 pixels. `patchify`
turns 2 x 2 pixels into 12 channels; the network then halves rows and columns three times.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, ConfigRequirement, Report, Settings, require_length
from ...model_spec.upstream import Net, UpstreamConfig
from ..common import wan_vae, wan_vae_encoder
from ..common.light import make_light
from ..common.wan_vae_encoder import to_frames

if TYPE_CHECKING:
    import numpy as np
    import torch

# Pixels on a side of a latent.
STRIDE_HW = 16


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Return `first_frame`, the image as a normalized latent frame `[1, 48, 1, h, w]`, and `is_given` `[1]`: 1.

    call: runs a component. image: `[number, height, width, 3]` in 0..1, of which the first is used.
    settings: of the generation. vae_config: the VAE's config.
    """
    import numpy as np
    import torch

    # Pixels are passed in cells of 16 x 16, one per latent, so that they are split over chips as latents are.
    cells = torch.nn.functional.pixel_unshuffle(image[:1].movedim(-1, 1) * 2.0 - 1.0, STRIDE_HW)
    latent, _ = call("vae_encoder", encode_first, cells.unsqueeze(2), partition="spatial")
    mean, std = wan_vae.latent_stats(vae_config)
    first_frame = (torch.from_numpy(np.array(latent)) - mean) * (1.0 / std)
    return {"first_frame": first_frame.numpy(), "is_given": np.ones(1, np.float32)}


def encode_first(vae: Net, cells: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Encode an image, as cells `[1, 3 * 16 * 16, 1, h, w]`, to the mean of the first latent `[1, 48, 1, h, w]`."""
    return encode_frames(vae, cells)[0], None


def encode_frames(
    vae: Net, cells: "torch.Tensor", memory: "Sequence[torch.Tensor]" = ()
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Encode the next frames of a video, as cells `[1, 3 * 16 * 16, frames, h, w]`, to a latent `[1, 48, 1, h, w]`.

    The network's input is `[1, 12, frames, 8h, 8w]`.

    vae: diffusers' `AutoencoderKLWan`. memory: see `wan_vae.encode_next`; it is returned too.
    """
    from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

    return wan_vae.encode_next(vae, patchify(to_frames(cells, STRIDE_HW), vae.config.patch_size), memory)


def encode_video(call: Call, pixels: "torch.Tensor", report: Report) -> "torch.Tensor":
    """Encode `pixels` `[1, 3, frames, height, width]` in -1..1 to the mean of the latents `[1, 48, T, h, w]`.

    The loop is that of `wan_vae_encoder.encode_video`.

    call: runs a component. report: progress in latent frames.
    """
    return wan_vae_encoder.encode_video(
        call, pixels, report, stride=STRIDE_HW, first=encode_frames, later=encode_frames
    )


# Those of `vae22_diffusers_config` in diffusers' `scripts/convert_wan_to_diffusers.py`.
LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip

LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip

VAE_DECODER = replace(
    wan_vae.VAE_DECODER,
    config={
        "base_dim": 160,
        "decoder_base_dim": 256,
        "in_channels": 12,
        "is_residual": True,
        "latents_mean": LATENTS_MEAN,
        "latents_std": LATENTS_STD,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": STRIDE_HW,
        "z_dim": 48,
    },
    tiny={"base_dim": 6, "decoder_base_dim": 10, "num_res_blocks": 1},
    needs={
        # The shortcuts' shapes depend on these.
        "dim_mult": ConfigRequirement(((1, 2, 4, 4),)),
        "in_channels": ConfigRequirement((12,), required=True),
        "is_residual": ConfigRequirement((True,), required=True),
        "latents_mean": ConfigRequirement(fits=require_length(48), wording="48 numbers", required=True),
        "latents_std": ConfigRequirement(fits=require_length(48), wording="48 numbers", required=True),
        "out_channels": ConfigRequirement((12,), required=True),
        "patch_size": ConfigRequirement((2,), required=True),
        "scale_factor_spatial": ConfigRequirement((STRIDE_HW,), required=True),
        "scale_factor_temporal": ConfigRequirement((4,)),
        "temperal_downsample": ConfigRequirement(((False, True, True),)),
        "z_dim": ConfigRequirement((48,), required=True),
    },
    # 1.0 GiB in bfloat16: replicated.
)

LIGHT_VAE = make_light(VAE_DECODER, 2, "z_dim", "latents_mean", "latents_std")

VAE_ENCODER = replace(
    VAE_DECODER, name="vae_encoder", only=("encoder.", "quant_conv."), rules=(Rule("encoder.**.weight", REPLICATED),)
)
