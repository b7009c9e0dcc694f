"""diffusers' `AutoencoderKL` (https://arxiv.org/abs/2112.10752), and variants that share its networks.

An image is encoded to latents of an eighth of its height and width. It is split over chips by rows and columns. The
decoder's steps with the published widths:

    conv_in, mid_block       [1, channels, h, w] -> [1, 512, h, w], with attention of all pixels
    up_blocks.0              -> [1, 512, 2h, 2w]
    up_blocks.1              -> [1, 512, 4h, 4w]
    up_blocks.2              -> [1, 256, 8h, 8w]
    up_blocks.3              -> [1, 128, 8h, 8w]
    conv_norm_out, conv_out  -> [1, 3, 8h, 8w]

The encoder has them in reverse; its last convolution gives mean and log variance, `[1, 2 * channels, h, w]`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, ConfigRequirement, Report, require_length
from ...model_spec.upstream import Net, UpstreamConfig
from .conv_layers import apply_convolution, apply_group_norm, image_attention
from .frames import decode_still, encode_still, to_pixels

if TYPE_CHECKING:
    import numpy as np
    import torch

convolve = partial(apply_convolution, kernel=True)

# Pixels on a side of a latent.
STRIDE = 8

# --- the networks -----------------------------------------------------------------------------------------------------


def run_encoder(encoder: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run diffusers' `Encoder`: an image `[1, 3, 8h, 8w]` to moments `[1, 2 * channels, h, w]`.

    Here and in `run_decoder` each chip keeps its part of the image.
    """
    x = convolve(encoder.conv_in, x)
    for block in encoder.down_blocks:
        for resnet in block.resnets:
            x = run_resnet(resnet, x)
        for downsampler in block.downsamplers or ():
            x = convolve(downsampler.conv, x, halved=True)
    x = run_mid_block(encoder.mid_block, x)
    return convolve(encoder.conv_out, x, norm=encoder.conv_norm_out)


def run_decoder(decoder: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run diffusers' `Decoder`: latents `[1, channels, h, w]` to an image `[1, 3, 8h, 8w]`."""
    x = run_mid_block(decoder.mid_block, convolve(decoder.conv_in, x))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = run_resnet(resnet, x)
        for upsampler in block.upsamplers or ():
            x = convolve(upsampler.conv, x, doubled=True)
    return convolve(decoder.conv_out, x, norm=decoder.conv_norm_out)


def run_mid_block(block: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run `UNetMidBlock2D` with one attention on `x` `[1, channels, h, w]`."""
    first, last = block.resnets
    return run_resnet(last, run_attention(block.attentions[0], run_resnet(first, x)))


def run_resnet(resnet: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run `ResnetBlock2D` without time embedding on `x` `[1, channels, h, w]`.

    Convolutions are fused with norm and SiLU before them, and the last one with the residual sum.
    """
    update = convolve(resnet.conv1, x, norm=resnet.norm1)
    shortcut = x if resnet.conv_shortcut is None else convolve(resnet.conv_shortcut, x)
    return convolve(resnet.conv2, update, norm=resnet.norm2, onto=shortcut)


def run_attention(attn: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run `Attention` with one head on `x` `[1, channels, h, w]`; rows and columns stay on their chips."""
    from ...programs import torch_bridge

    y = apply_group_norm(attn.group_norm, x).permute(0, 2, 3, 1)  # [1, h, w, channels]
    attended = torch_bridge.call_jax(image_attention, attn.to_q(y), attn.to_k(y), attn.to_v(y))
    return x + attn.to_out[0](attended).permute(0, 3, 1, 2)


# --- an image ---------------------------------------------------------------------------------------------------------


def denormalize_latents(sample: "torch.Tensor", vae_config: UpstreamConfig) -> "torch.Tensor":
    """Scale the solver's `sample` `[1, channels, h, w]` to the VAE's own scale, which LATENT has."""
    return sample / vae_config["scaling_factor"] + (vae_config.get("shift_factor") or 0.0)


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield the image `[1, 8h, 8w, 3]` of `latents` `[1, channels, h, w]`.

    call: runs a component. report: progress.
    """
    return decode_still(call, latents, report, decode_image)


def decode_image(vae: Net, latents: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Decode latents `[1, channels, h, w]` to an image `[1, 8h, 8w, 3]` in 0..1."""
    latents = latents if vae.post_quant_conv is None else vae.post_quant_conv(latents)
    return to_pixels(run_decoder(vae.decoder, latents).permute(0, 2, 3, 1)), None


def encode_pixels(call: Call, frames: "torch.Tensor", report: Report) -> "torch.Tensor":
    """Encode an image `frames` `[1, 3, 1, height, width]` in -1..1 to the mean of its latents `[1, channels, h, w]`.

    call: runs a component. report: unused.
    """
    return encode_still(call, frames, encode_mean, STRIDE)


def encode_mean(vae: Net, cells: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Encode an image in -1..1, as cells `[1, 3 * 8 * 8, h, w]`, to the mean of its latents `[1, channels, h, w]`."""
    import torch

    moments = run_encoder(vae.encoder, torch.nn.functional.pixel_shuffle(cells, STRIDE))
    moments = moments if vae.quant_conv is None else vae.quant_conv(moments)
    return moments.chunk(2, dim=1)[0], None


# --- components -------------------------------------------------------------------------------------------------------

# diffusers' names of the attention's weights before version 0.13.
OLD_ATTENTION_KEYS = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def _old_names(part: str) -> dict[str, str]:
    path = f"{part}.mid_block.attentions.0"
    return {f"{path}.{old}.": f"{path}.{new}." for old, new in OLD_ATTENTION_KEYS.items()}


_PARTS = {"decoder": ("decoder.", "post_quant_conv."), "encoder": ("encoder.", "quant_conv.")}
_SIZES = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "layers_per_block": 2,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_TINY = {"block_out_channels": (6, 6, 12, 12), "layers_per_block": 1, "norm_num_groups": 3}
_NEEDS = {
    "block_out_channels": ConfigRequirement(fits=require_length(4), wording="4 numbers", required=True),
    "mid_block_add_attention": ConfigRequirement((True,)),
}


def make_vae(
    config: UpstreamConfig,
    *,
    class_name: str = "AutoencoderKL",
    needs: Mapping[str, ConfigRequirement] | None = None,
    more: tuple[str, ...] = (),
) -> tuple[Component, Component]:
    """Return decoder and encoder of a checkpoint's `vae`.

    config: entries besides the usual ones; the checkpoint must have its `latent_channels`. class_name: diffusers'
        class.
    needs: further requirements of the config. more: prefixes of parameters that both components use.
    """

    def part(name: str) -> Component:
        return Component(
            name=f"vae_{name}",
            folder="vae",
            library="diffusers",
            class_name=class_name,
            config={**_SIZES, **config},
            tiny=_TINY,
            needs={
                **_NEEDS,
                "latent_channels": ConfigRequirement((config["latent_channels"],), required=True),
                **(needs or {}),
            },
            only=(*_PARTS[name], *more),
            aliases=_old_names(name),
            # 0.1 GiB in all: replicated.
            rules=(Rule(f"{name}.**.weight", REPLICATED),),
        )

    return part("decoder"), part("encoder")
