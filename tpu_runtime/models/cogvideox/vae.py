"""CogVideoX's VAE (https://arxiv.org/abs/2408.06072), diffusers' `AutoencoderKLCogVideoX`.

It decodes two latent frames per call, as upstream does, and encodes one image. It is causal in time: 1 + 4 * (T - 1)
frames are T latent frames. The decoder's steps, for three latent frames:

    conv_in, mid_block  [1, 16, 3, h, w] -> [1, 512, 3, h, w], without attention
    up_blocks.0         -> [1, 512, 5, 2h, 2w]
    up_blocks.1         -> [1, 256, 9, 4h, 4w]
    up_blocks.2         -> [1, 256, 9, 8h, 8w]
    up_blocks.3         -> [1, 128, 9, 8h, 8w]
    norm_out, conv_out  -> [1, 3, 9, 8h, 8w]

Every norm of the decoder is a group norm whose scale and offset are convolutions of the latents
(https://arxiv.org/abs/2209.09002).

Upstream also splits large convolutions for CuDNN, and caches inputs of pointwise convolutions. Neither is needed here;
the caches would be full videos of 16 channels.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, ConfigRequirement, Report, require_length
from ...model_spec.upstream import Net
from ..common.conv_layers import apply_convolution, apply_group_norm, group_moments, order_computation, repeat_to_size
from ..common.frames import to_pixels

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

# Latent frames of a call: upstream's `num_latent_frames_batch_size`.
FRAMES_PER_CALL = 2


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield frames of `latents` `[1, 16, T, h, w]`: two latent frames per call, an odd one with the first two.

    call: runs a component. report: progress in latent frames.

    Causal caches are carried from call to call. Norms are over all frames of a call, so no frame may be left out. One
    program serves every call, and can take the odd frame too, which only the first call uses. That costs the other
    calls an eighth more time, but saves minutes of compilation.
    """
    import torch

    total, odd = latents.shape[2], latents.shape[2] % FRAMES_PER_CALL
    alone, memory = latents[:, :, :1], None
    for start in range(odd, max(total, FRAMES_PER_CALL), FRAMES_PER_CALL):
        # The previous chunk is still being fetched when this one is launched.
        report(max(start - FRAMES_PER_CALL, 0), total)
        pair, is_first = latents[:, :, start : start + FRAMES_PER_CALL], start == odd
        flags = torch.tensor([is_first, is_first and odd, len(pair[0, 0])], dtype=latents.dtype).view(1, 3, 1, 1, 1)
        flags = flags.clamp(max=1).repeat(1, 1, 1, *latents.shape[3:])
        chunk = torch.cat([alone, pair if len(pair[0, 0]) else torch.cat([alone, alone], dim=2)], dim=2)
        if memory is None:
            _, memory = call("vae_decoder", before_first, chunk, flags, partition="spatial")
        frames, memory = call(
            "vae_decoder", decode_next, chunk, flags, memory, partition="spatial", carries=True, defers=True
        )
        yield frames[0 if is_first and odd else 1 : None if len(pair[0, 0]) else 1]


def before_first(vae: Net, latents: "torch.Tensor", flags: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Return zero caches for `decode_next`; the first result is unused.

    vae: diffusers' `AutoencoderKLCogVideoX`. latents: `[1, 16, 3, h, w]`. flags: `[1, 3, 1, h, w]`.
    """
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.infer_shapes(lambda latents, flags: decode_next(vae, latents, flags, [])[1], latents, flags)
    return latents[:, :1], [torch.zeros(shape, dtype=latents.dtype, device=latents.device) for shape in shapes]


def decode_next(
    vae: Net, latents: "torch.Tensor", flags: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Decode three latent frames `[1, 16, 3, h, w]` to frames `[9, 8h, 8w, 3]` in 0..1: one, then four for each other.

    vae: diffusers' `AutoencoderKLCogVideoX`. memory: the last two inputs of each causal convolution, in the order of
        use.
    flags: `[1, 3, 1, h, w]`, images of ones or zeros: whether this call is the first, whether its first latent frame is
        valid, and whether the others are. Invalid frames are left out of all norms, and no valid frame depends on them.
    Also returns the memory for the next call.
    """
    import torch

    is_first, has_alone, has_pair = (flags[0, index].amax() > 0 for index in range(3))
    caches, new_caches = iter(memory), []

    def convolve(conv: Net, x: "torch.Tensor", onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        """Apply `CogVideoXCausalConv3d` to `x` `[1, channels, frames, h, w]`, after its first frame twice."""
        opening = torch.where(has_alone, x[:, :, :1], x[:, :, 1:2])
        past = [torch.where(is_first, opening, next(caches, opening)) for _ in range(2)]
        # Between the first frame and the others.
        out = apply_convolution(conv.conv, x, past=past, past_at=1, kernel=True, onto=onto)
        # Update the cache after the convolution, because it replaces the past, but before anything else: the compiler
        # would do it last, and keep all inputs until then.
        out, x = order_computation(out, x)
        out, *cached = order_computation(out, *x[:, :, -2:].split(1, dim=2))
        new_caches.extend(cached)
        return out

    def normalize(norm: Net, x: "torch.Tensor") -> "torch.Tensor":
        counted = torch.stack([has_alone, *[has_pair] * (x.shape[2] - 1)])
        return apply_spatial_norm(norm, x, latents, counted)

    def residual(block: Net, x: "torch.Tensor") -> "torch.Tensor":
        """Run `CogVideoXResnetBlock3D` on `x` `[1, channels, frames, h, w]`; its activations are in the norms."""
        out = convolve(block.conv1, normalize(block.norm1, x))
        shortcut = (
            x if block.in_channels == block.out_channels else apply_convolution(block.conv_shortcut, x, kernel=True)
        )
        return convolve(block.conv2, normalize(block.norm2, out), shortcut)

    decoder = vae.decoder
    if vae.post_quant_conv is not None:
        latents = vae.post_quant_conv(latents)
    x = convolve(decoder.conv_in, latents)
    for block in (decoder.mid_block, *decoder.up_blocks):
        for resnet in block.resnets:
            x = residual(resnet, x)
        for upsampler in getattr(block, "upsamplers", None) or ():
            x = upsample(upsampler, x)
    frames = convolve(decoder.conv_out, normalize(decoder.norm_out, x))
    return to_pixels(frames[0].permute(1, 2, 3, 0)), new_caches


def encode_to_latents(vae: Net, image: "torch.Tensor") -> "torch.Tensor":
    """Encode an image `[1, 3, height, width]` in -1..1, as a video of one frame, to `[1, 2 * 16, 1, h, w]`.

    vae: diffusers' `AutoencoderKLCogVideoX`. Returns mean and log variance of the latent.
    """
    import torch
    from torch.nn.functional import pad, silu

    def convolve(conv: Net, x: "torch.Tensor") -> "torch.Tensor":
        """Apply `CogVideoXCausalConv3d` to the only frame `x` `[1, channels, 1, h, w]`, after two copies of it."""
        return apply_convolution(conv.conv, torch.cat([x, x, x], dim=2))

    def residual(block: Net, x: "torch.Tensor") -> "torch.Tensor":
        out = convolve(block.conv1, silu(apply_group_norm(block.norm1, x)))
        out = convolve(block.conv2, silu(apply_group_norm(block.norm2, out)))
        return out + (x if block.in_channels == block.out_channels else apply_convolution(block.conv_shortcut, x))

    encoder = vae.encoder
    x = convolve(encoder.conv_in, image.unsqueeze(2))
    for block in (*encoder.down_blocks, encoder.mid_block):
        for resnet in block.resnets:
            x = residual(resnet, x)
        for downsampler in getattr(block, "downsamplers", None) or ():
            # A single frame is not downsampled in time.
            x = downsampler.conv(pad(x[:, :, 0], (0, 1, 0, 1)))[:, :, None]
    moments = convolve(encoder.conv_out, silu(apply_group_norm(encoder.norm_out, x)))
    return moments if vae.quant_conv is None else vae.quant_conv(moments)


def apply_spatial_norm(
    norm: Net, hidden: "torch.Tensor", latents: "torch.Tensor", counted: "torch.Tensor"
) -> "torch.Tensor":
    """Apply `CogVideoXSpatialNorm3D` and SiLU to `hidden` `[1, channels, frames, height, width]`.

    norm: diffusers' module. latents: `[1, 16, T, h, w]`, which give scale and offset.
    counted: `[frames]`, true for frames that count in the norm's sums.

    Scale and offset have the latents' resolution, and are repeated in frames and columns. The rows that share them
    become a dimension, so that everything is one pass.
    """
    from ...programs import torch_bridge

    *_, frames, _, width = hidden.shape
    enlarge = partial(repeat_to_size, size=(frames, latents.shape[3], width))
    vectors = [
        torch_bridge.call_jax(enlarge, apply_convolution(conv.conv, latents, kernel=True))
        for conv in (norm.conv_y, norm.conv_b)
    ]
    group = norm.norm_layer
    run = partial(modulate_norm, groups=group.num_groups, eps=group.eps)
    return torch_bridge.call_jax(run, hidden, counted, group.weight, group.bias, *vectors)


def modulate_norm(
    x: "jax.Array",
    counted: "jax.Array",
    weight: "jax.Array",
    bias: "jax.Array",
    scale: "jax.Array",
    offset: "jax.Array",
    *,
    groups: int,
    eps: float,
) -> "jax.Array":
    """Return SiLU of the group norm of `x` `[1, channels, frames, height, width]`, scaled and shifted.

    counted: `[frames]`, true for frames that count. weight, bias: `[channels]`, of the norm. scale, offset:
    `[1, channels, frames, h, width]`, with fewer rows than `x`. groups, eps: of the norm.
    """
    from ....kernels import dispatch, modulation

    mean, factor = group_moments(x, counted, groups=groups, eps=eps)
    factor = factor * weight
    run = modulation.modulate if dispatch.should_use(modulation.check_support()) else modulation.reference
    return run(x, factor, bias - mean * factor, scale, offset)


def upsample(sampler: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Run `CogVideoXUpsample3D` on `x` `[1, channels, frames, h, w]`.

    Frames are repeated after the convolution, because equal frames stay equal in it.
    """
    from ...programs import torch_bridge

    hidden = apply_convolution(sampler.conv, x, doubled=True, kernel=True)
    if not sampler.compress_time:
        return hidden
    *_, frames, height, width = hidden.shape
    return torch_bridge.call_jax(partial(repeat_to_size, size=(2 * frames - frames % 2, height, width)), hidden)


VAE_DECODER = Component(
    name="vae_decoder",
    folder="vae",
    library="diffusers",
    class_name="AutoencoderKLCogVideoX",
    config={
        "block_out_channels": (128, 256, 256, 512),
        "latent_channels": 16,
        "layers_per_block": 3,
        "norm_num_groups": 32,
        "sample_height": 480,
        "sample_width": 720,
        "invert_scale_latents": True,
        "scaling_factor": 0.7,
    },
    tiny={
        "block_out_channels": (6, 12, 12, 18),
        "latent_channels": 16,
        "layers_per_block": 1,
        "norm_num_groups": 3,
        # Larger than any size that tests and `--tiny` decode.
        "sample_height": 480,
        "sample_width": 720,
        "scaling_factor": 0.7,
    },
    needs={
        "block_out_channels": ConfigRequirement(fits=require_length(4), wording="4 numbers"),
        "latent_channels": ConfigRequirement((16,)),
        "temporal_compression_ratio": ConfigRequirement((4,)),
    },
    only=("decoder.", "post_quant_conv."),
    # 0.2 GiB in all: replicated.
    rules=(Rule("decoder.**.weight", REPLICATED),),
)
