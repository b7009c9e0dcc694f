"""Wan's VAE (https://arxiv.org/abs/2503.20314), diffusers' `AutoencoderKLWan`, one latent frame per call.

It is causal in time: 1 + 4 * (T - 1) frames are T latent frames. The decoder's steps for a latent frame of the VAE of
16 channels; the encoder has them in reverse:

    conv_in, mid_block  [1, 16, 1, h, w] -> [1, 384, 1, h, w], with attention within each frame
    up_blocks.0         -> [1, 192, 2, 2h, 2w]
    up_blocks.1         -> [1, 192, 4, 4h, 4w]
    up_blocks.2         -> [1, 96, 4, 8h, 8w]
    up_blocks.3         -> [1, 96, 4, 8h, 8w]
    norm_out, conv_out  -> [1, 3, 4, 8h, 8w]

Wan 2.2's VAE of 48 channels also has shortcuts around its levels, and patches of 2 x 2 pixels (`wan/vae.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, ConfigRequirement, Report, require_length
from ...model_spec.upstream import Net, UpstreamConfig
from .conv_layers import apply_convolution, image_attention, order_computation, repeat_to_size
from .frames import decode_by_frame, decode_still, to_pixels

if TYPE_CHECKING:
    import numpy as np
    import torch


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield frames of `latents` `[1, channels, T, h, w]`, 1 and then 4 per call; each call carries causal caches on.

    call: runs a component. report: progress in latent frames.
    """
    if latents.shape[2] == 1:
        return decode_still(call, latents, report, decode_alone)
    return decode_by_frame(call, latents, report, before_first=before_first, decode_next=decode_next)


def decode_alone(vae: Net, latent: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Decode the only latent frame `[1, channels, 1, h, w]` to the frame `[1, height, width, 3]` in 0..1.

    Only zeros precede it, so only the weights for the last frame of a causal convolution are used.
    """
    from types import SimpleNamespace

    def convolve(conv: Net, x: "torch.Tensor", norm: Net = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        return apply_convolution(
            SimpleNamespace(weight=conv.weight[:, :, -1:], bias=conv.bias), x, kernel=True, norm=norm, onto=onto
        )

    def upsample(sampler: Net, x: "torch.Tensor") -> "torch.Tensor":
        return apply_convolution(sampler.resample[1], x, doubled=True, kernel=True)

    return run_decoder(vae, latent, convolve, upsample, factor_t=1), None


def before_first(vae: Net, latent: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Return the memory before the first latent frame `[1, channels, 1, h, w]`; the first result is unused."""
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.infer_shapes(lambda latent: decode_next(vae, latent, [])[1], latent)
    is_first, *caches = [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]
    return latent[:, :1], [is_first + 1, *caches]


def decode_next(
    vae: Net, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Decode a latent frame `[1, channels, 1, h, w]` to frames `[4, height, width, 3]` in 0..1.

    vae: diffusers' `AutoencoderKLWan`. memory: an image of ones before the first frame and of zeros later, then the
        last two inputs of each causal convolution, in the order of use. Also returns the memory for the next latent
        frame.

    Upstream does not double the time of the first latent frame. Only the first of its four frames is valid, and only
    that one is cached.
    """
    import torch

    caches = iter(memory[1:])
    is_first = memory[0].amax() > 0 if memory else torch.ones((), dtype=torch.bool, device=latent.device)
    new_caches = [torch.zeros_like(latent[:, :1])]

    def convolve(conv: Net, x: "torch.Tensor", norm: Net = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        blank = torch.zeros_like(x[:, :, :1])
        past = next(caches, blank), next(caches, blank)
        out = apply_convolution(conv, x, past=past, kernel=True, norm=norm, onto=onto)
        # Update the cache after the convolution, because it replaces the past, but before anything else: the compiler
        # would do it last, and keep all inputs until then.
        out, x, *past = order_computation(out, x, *past)
        before, last = [*past, *x.split(1, dim=2)][-2:]
        out, *cached = order_computation(
            out, torch.where(is_first, blank, before), torch.where(is_first, x[:, :, :1], last)
        )
        new_caches.extend(cached)
        return out

    def upsample(sampler: Net, x: "torch.Tensor") -> "torch.Tensor":
        if sampler.mode == "upsample3d":
            doubled = convolve(sampler.time_conv, x).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            # The first frame is not cached here either.
            new_caches[-1] = torch.where(is_first, torch.zeros_like(new_caches[-1]), new_caches[-1])
            x = torch.where(is_first, x.repeat_interleave(2, dim=2), doubled)
        return apply_convolution(sampler.resample[1], x, doubled=True, kernel=True)

    return run_decoder(vae, latent, convolve, upsample), new_caches


def run_decoder(
    vae: Net,
    latent: "torch.Tensor",
    convolve: "Callable[..., torch.Tensor]",
    upsample: "Callable[[Net, torch.Tensor], torch.Tensor]",
    factor_t: int | None = None,
) -> "torch.Tensor":
    """Decode `latent` `[1, channels, 1, h, w]` to frames `[frames, height, width, 3]` in 0..1.

    vae: diffusers' `AutoencoderKLWan`. convolve: `convolve(conv, x, norm, onto)`, a causal convolution.
    upsample: `upsample(sampler, x)`, to the next size. factor_t: frames per frame of the shortcuts; None: as upstream.
    """
    decoder = vae.decoder
    x = convolve(decoder.conv_in, vae.post_quant_conv(latent))
    (before, after), (attention,) = decoder.mid_block.resnets, decoder.mid_block.attentions
    x = run_residual_block(after, run_attention_block(attention, run_residual_block(before, x, convolve)), convolve)
    for block in decoder.up_blocks:
        small = x
        for resnet in block.resnets:
            x = run_residual_block(resnet, x, convolve)
        for sampler in getattr(block, "upsamplers", None) or ():
            x = upsample(sampler, x)
        if getattr(block, "avg_shortcut", None) is not None:
            x = upsample(block.upsampler, x) + duplicate_channels(block.avg_shortcut, small, factor_t)
    patches = convolve(decoder.conv_out, x, decoder.norm_out)
    return to_pixels(unpatchify(patches[0], vae.config.patch_size or 1))


def duplicate_channels(shortcut: Net, x: "torch.Tensor", factor_t: int | None = None) -> "torch.Tensor":
    """Run `DupUp3D` on `x` `[1, channels, frames, h, w]`: repeat each element as frames, rows and columns.

    shortcut: diffusers' module. factor_t: frames per frame; None: as upstream. With twice the output's channels, two
    channels are two rows. The video's first frame is repeated too, as in `decode_next`.
    """
    from functools import partial

    from ...programs import torch_bridge

    *_, frames, height, width = x.shape
    assert len(x[0]) == shortcut.out_channels * (1 if shortcut.factor_t > 1 else 2)
    rows = x.unflatten(1, (shortcut.out_channels, -1)).movedim(2, 4).flatten(3, 4)
    repeats = int(factor_t or shortcut.factor_t)
    rows = rows.repeat_interleave(repeats, dim=2)
    size = (repeats * frames, 2 * height, 2 * width)
    return torch_bridge.call_jax(partial(repeat_to_size, size=size), rows)


def unpatchify(patches: "torch.Tensor", size: int) -> "torch.Tensor":
    """Unpatchify `[3 * size * size, frames, h, w]`, a patch's columns before its rows: `[frames, height, width, 3]`."""
    if size == 1:
        return patches.permute(1, 2, 3, 0)
    pixels = patches.unflatten(0, (3, size, size)).permute(3, 4, 2, 5, 1, 0)
    return pixels.flatten(3, 4).flatten(1, 2)


def encode_next(
    vae: Net, frames: "torch.Tensor", memory: "Sequence[torch.Tensor]" = ()
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Encode the next `frames` `[1, channels, frames, height, width]` in -1..1 to the mean of their latent frame.

    The mean is `[1, z_dim, 1, height / 8, width / 8]`.

    vae: diffusers' `AutoencoderKLWan`. frames: the video's first alone, later ones by four.
    memory: the last two inputs of each causal convolution, and the last one of those that halve time, in the order of
        use; empty before the first frame. Also returns the memory for the next frames.
    """
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample

    caches, new_caches = iter(memory), []

    def convolve(conv: Net, x: "torch.Tensor", norm: Net = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        blank = torch.zeros_like(x[:, :, :1])
        past = next(caches, blank), next(caches, blank)
        new_caches.extend([*past, *x.split(1, dim=2)][-2:])
        return apply_convolution(conv, x, past=past, kernel=True, norm=norm, onto=onto)

    def downsample(sampler: Net, x: "torch.Tensor") -> "torch.Tensor":
        x = apply_convolution(sampler.resample[1], x, halved=True, kernel=True)
        if sampler.mode == "downsample2d":
            return x
        new_caches.append(x[:, :, -1:])
        # The video's first frame is a latent frame by itself.
        return apply_convolution(sampler.time_conv, x, past=(next(caches),), kernel=True)[:, :, ::2] if memory else x

    encoder = vae.encoder
    x = convolve(encoder.conv_in, frames)
    for block in encoder.down_blocks:
        if vae.config.is_residual:
            large = x
            for resnet in block.resnets:
                x = run_residual_block(resnet, x, convolve)
            x = x if block.downsampler is None else downsample(block.downsampler, x)
            x = x + block.avg_shortcut(large)
        else:
            x = downsample(block, x) if isinstance(block, WanResample) else run_residual_block(block, x, convolve)
    (before, after), (attention,) = encoder.mid_block.resnets, encoder.mid_block.attentions
    x = run_residual_block(after, run_attention_block(attention, run_residual_block(before, x, convolve)), convolve)
    moments = vae.quant_conv(convolve(encoder.conv_out, x, encoder.norm_out))
    return moments.chunk(2, dim=1)[0], new_caches


def run_residual_block(block: Net, x: "torch.Tensor", convolve: "Callable[..., torch.Tensor]") -> "torch.Tensor":
    """Run `WanResidualBlock` on `x` `[1, channels, frames, h, w]`.

    block: diffusers' module. convolve: `convolve(conv, x, norm, onto)`, a causal convolution with a cache.
    """
    import torch

    out = convolve(block.conv1, x, block.norm1)
    shortcut = block.conv_shortcut
    shortcut = x if isinstance(shortcut, torch.nn.Identity) else apply_convolution(shortcut, x, kernel=True)
    return convolve(block.conv2, out, block.norm2, shortcut)


def run_attention_block(block: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run `WanAttentionBlock` on `x` `[1, channels, frames, h, w]`: self-attention within each frame, in one head."""
    from ...programs import torch_bridge

    qkv = block.to_qkv(block.norm(x[0].movedim(1, 0))).movedim(1, -1)  # [frames, h, w, 3 * channels]
    attended = torch_bridge.call_jax(image_attention, *qkv.chunk(3, dim=-1))
    return x + block.proj(attended.movedim(-1, 1)).movedim(0, 1)[None]


def denormalize_latents(sample: "torch.Tensor", vae_config: UpstreamConfig) -> "torch.Tensor":
    """Scale normalized latents `[1, channels, frames, h, w]` to the VAE's own scale.

    The arithmetic is that of `WanPipeline`, so that results are equal to the bit.
    """
    mean, std = latent_stats(vae_config)
    return sample / (1.0 / std) + mean


def latent_stats(config: UpstreamConfig) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return mean and standard deviation of the latents, `[1, channels, 1, 1, 1]` each, from the VAE's config."""
    import torch

    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    return mean, std


# Those of the published VAE, which are also the defaults of `AutoencoderKLWan`.
LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip

LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

VAE_DECODER = Component(
    name="vae_decoder",
    folder="vae",
    library="diffusers",
    class_name="AutoencoderKLWan",
    # Qwen-Image's class: the same network with another name.
    class_aliases=("AutoencoderKLQwenImage",),
    config={"base_dim": 96, "z_dim": 16, "latents_mean": LATENTS_MEAN, "latents_std": LATENTS_STD},
    tiny={"base_dim": 8, "num_res_blocks": 1},
    # Wan 2.2's 5B model has another VAE of the same class, see `wan/vae.py`.
    needs={
        "is_residual": ConfigRequirement((False,)),
        "latents_mean": ConfigRequirement(fits=require_length(16), wording="16 numbers"),
        "latents_std": ConfigRequirement(fits=require_length(16), wording="16 numbers"),
        "patch_size": ConfigRequirement((None,)),
        "scale_factor_spatial": ConfigRequirement((8,)),
        "scale_factor_temporal": ConfigRequirement((4,)),
        "temperal_downsample": ConfigRequirement(((False, True, True),)),
        "z_dim": ConfigRequirement((16,)),
    },
    only=("decoder.", "post_quant_conv."),
    # 0.1 GiB in all: replicated.
    rules=(Rule("decoder.**.weight", REPLICATED),),
)
