"""HunyuanVideo 1.5's VAE (https://arxiv.org/abs/2511.18870), diffusers' `AutoencoderKLHunyuanVideo15`.

It decodes one latent frame per call, and encodes one image. It is causal in time: 1 + 4 * (T - 1) frames are T latent
frames. The decoder's steps for a latent frame:

    conv_in, mid_block  [1, 32, 1, h, w] -> [1, 1024, 1, h, w], with attention to all pixels of this and earlier frames
    up_blocks.0         -> [1, 1024, 2, 2h, 2w]
    up_blocks.1         -> [1, 512, 4, 4h, 4w]
    up_blocks.2         -> [1, 256, 4, 8h, 8w]
    up_blocks.3         -> [1, 128, 4, 16h, 16w]
    up_blocks.4         -> [1, 128, 4, 16h, 16w]
    norm_out, conv_out  -> [1, 3, 4, 16h, 16w]

Sizes change by a convolution whose channels become pixels, with a shortcut that repeats or averages channels (DC-AE,
https://arxiv.org/abs/2410.10733).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, ConfigRequirement, Report, require_length
from ...model_spec.upstream import Net, UpstreamConfig
from ..common.conv_layers import apply_convolution, image_attention, order_computation
from ..common.frames import decode_by_frame, to_pixels
from ..common.light import make_light

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

# Applies a module: `(module, x, ...) -> x`.
Layer = Callable[..., "torch.Tensor"]


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield frames of `latents` `[1, 32, T, h, w]`, 1 and then 4 per call; each call carries its memory to the next.

    call: runs a component. report: progress in latent frames.

    Upstream decodes the full video at once. No frame depends on later ones, so the result is the same.
    """
    import torch

    no_frames = torch.zeros(latents[:, :1].shape)
    return decode_by_frame(
        call, latents, report, before_first=before_first, decode_next=decode_next, given=(no_frames,)
    )


def before_first(
    vae: Net, latent: "torch.Tensor", no_frames: "torch.Tensor"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Return the memory before the first latent frame `[1, 32, 1, h, w]`.

    vae: diffusers' `AutoencoderKLHunyuanVideo15`. latent: its first result, unused, has this size.
    no_frames: zeros `[1, 1, T, h, w]` for a video of T latent frames, of which none exists yet.
    """
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.infer_shapes(lambda first, mask: decode_next(vae, first, [mask])[1], latent, no_frames)
    return latent[:, :1], [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]


def decode_next(
    vae: Net, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Decode the next latent frame `[1, 32, 1, h, w]` to frames `[4, 16h, 16w, 3]` in 0..1.

    vae: diffusers' `AutoencoderKLHunyuanVideo15`. memory: a mask `[1, 1, T, h, w]` of the last T frames that exist;
        then, in the order of use, the last inputs of each convolution, and the last T keys and values of the attention.
        Also returns the memory for the next latent frame.

    Upstream does not double the time of the first latent frame. Only the first of its four frames is valid, and only
    that one is cached.
    """
    import torch

    from ...programs import torch_bridge

    visible, *past_inputs = memory
    caches, is_first = iter(past_inputs), visible.amax() == 0
    visible = torch.cat([visible[:, :, 1:], torch.ones_like(visible[:, :, :1])], dim=2)
    new_memory = [visible]

    def convolve(conv: Net, x: "torch.Tensor", norm: Net = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        alone = x[:, :, :1]
        past = [torch.where(is_first, alone, next(caches, alone)) for _ in range(num_past_frames(conv))]
        out = causal_convolution(conv, x, past, norm, onto)
        # Update the cache after the convolution, because it replaces the past, but before anything else: the compiler
        # would do it last, and keep all inputs until then.
        out, x, *past = order_computation(out, x, *past)
        last = [*past, *x.split(1, dim=2)][-len(past) :]
        out, *cached = order_computation(out, *(torch.where(is_first, x[:, :, :1], frame) for frame in last))
        new_memory.extend(cached)
        return out

    def attend(attention: Net, x: "torch.Tensor") -> "torch.Tensor":
        normed = attention.norm(x)
        for new in (attention.to_k(normed), attention.to_v(normed)):
            past = next(caches, torch.zeros_like(new).repeat_interleave(visible.shape[2], dim=2))
            new_memory.append(torch.cat([past[:, :, 1:], new], dim=2))
        query, keys_and_values = attention.to_q(normed), new_memory[-2:]
        return attention.proj_out(torch_bridge.call_jax(attend_to_past, query, *keys_and_values, visible)) + x

    decoder = vae.decoder
    x = convolve(decoder.conv_in, latent) + latent.repeat_interleave(decoder.repeat, dim=1)
    x = run_mid_block(decoder.mid_block, x, convolve, attend)
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = run_resnet(resnet, x, convolve)
        for sampler in block.upsamplers or ():
            x = upsample(sampler, x, convolve(sampler.conv, x), is_first)
    frames = convolve(decoder.conv_out, x, decoder.norm_out)
    return to_pixels(frames[0].permute(1, 2, 3, 0)), new_memory


def encode_to_latents(vae: Net, image: "torch.Tensor") -> "torch.Tensor":
    """Encode an image `[1, 3, height, width]` in -1..1, as a video of one frame, to the mean of its latent.

    vae: diffusers' `AutoencoderKLHunyuanVideo15`. Returns `[1, 32, 1, h, w]`.
    """

    def convolve(conv: Net, x: "torch.Tensor", norm: Net = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        return causal_convolution(conv, x, [x[:, :, :1]] * num_past_frames(conv), norm, onto)

    encoder = vae.encoder
    x = convolve(encoder.conv_in, image.unsqueeze(2))
    for block in encoder.down_blocks:
        for resnet in block.resnets:
            x = run_resnet(resnet, x, convolve)
        for sampler in block.downsamplers or ():
            x = downsample(sampler, x, convolve(sampler.conv, x))
    x = run_mid_block(encoder.mid_block, x, convolve, attend_to_image)
    shortcut = x.unflatten(1, (-1, encoder.group_size)).mean(dim=2)
    return convolve(encoder.conv_out, x, encoder.norm_out, shortcut).chunk(2, dim=1)[0]


def run_mid_block(block: Net, x: "torch.Tensor", convolve: Layer, attend: Layer) -> "torch.Tensor":
    """Run `HunyuanVideo15MidBlock` on `x` `[1, channels, frames, h, w]`.

    block: diffusers' module. convolve: a causal convolution. attend: applies an attention.
    """
    first, *others = block.resnets
    x = run_resnet(first, x, convolve)
    for attention, resnet in zip(block.attentions, others, strict=True):
        x = run_resnet(resnet, attend(attention, x), convolve)
    return x


def run_resnet(block: Net, x: "torch.Tensor", convolve: Layer) -> "torch.Tensor":
    """Run `HunyuanVideo15ResnetBlock` on `x` `[1, channels, frames, h, w]`.

    block: diffusers' module. convolve: a causal convolution.
    """
    out = convolve(block.conv1, x, block.norm1)
    return convolve(block.conv2, out, block.norm2, x if block.conv_shortcut is None else block.conv_shortcut(x))


def num_past_frames(conv: Net) -> int:
    """Return how many frames a causal convolution needs before the first; copies of the first frame replace them."""
    return conv.time_causal_padding[4]


def causal_convolution(
    conv: Net, x: "torch.Tensor", past: "list[torch.Tensor]", norm: Net = None, onto: "torch.Tensor | None" = None
) -> "torch.Tensor":
    """Apply `HunyuanVideo15CausalConv3d` to `x` `[1, channels, frames, h, w]`, preceded by the frames `past`.

    conv: diffusers' module. past: `[1, channels, 1, h, w]` each. norm, onto: as in `conv_layers.apply_convolution`.
    """
    assert (conv.time_causal_padding[:4], conv.pad_mode) == ((1, 1, 1, 1), "replicate")
    return apply_convolution(conv.conv, x, edges="replicate", past=past, kernel=True, norm=norm, onto=onto)


def upsample(sampler: Net, x: "torch.Tensor", out: "torch.Tensor", is_first: "torch.Tensor") -> "torch.Tensor":
    """Run `HunyuanVideo15Upsample` on `x` `[1, channels, frames, h, w]` and its convolution `out`.

    sampler: diffusers' module. is_first: a boolean scalar; the video's first frame is not doubled in time, but
    repeated. The residual is added before upsampling, while frames are small; upstream upsamples both first.
    """
    import torch

    enlarge, repeats = sampler._dcae_upsample_rearrange, sampler.repeats
    both = out + x.repeat_interleave(repeats, dim=1)
    if not sampler.add_temporal_upsample:
        return enlarge(both, r1=1, r2=2, r3=2)
    later = enlarge(both, r1=2, r2=2, r3=2)
    # Select the channels of the first of two frames.
    first = out[:, :, :1].unflatten(1, (4, 2, -1))[:, :, 0].flatten(1, 2)
    alone = enlarge(first + x[:, :, :1].repeat_interleave(repeats // 2, dim=1), r1=1, r2=2, r3=2)
    return torch.where(is_first, alone, later)


def downsample(sampler: Net, x: "torch.Tensor", out: "torch.Tensor") -> "torch.Tensor":
    """Run `HunyuanVideo15Downsample` on a video's first frame `x` `[1, channels, 1, h, w]` and its convolution `out`.

    sampler: diffusers' module. Time is not halved; where it would be for later frames, the frame counts as two.
    """
    import torch

    out, x = (sampler._dcae_downsample_rearrange(frame, r1=1, r2=2, r3=2) for frame in (out, x))
    out = torch.cat([out, out], dim=1) if sampler.add_temporal_downsample else out
    return out + x.unflatten(1, (out.shape[1], -1)).mean(dim=2)


def attend_to_image(attention: Net, x: "torch.Tensor") -> "torch.Tensor":
    """Apply upstream's attention to one frame `x` `[1, dim, 1, h, w]`, without its mask of pixels by pixels."""
    from ...programs import torch_bridge

    normed = attention.norm(x)
    heads = (project(normed)[:, :, 0].movedim(1, -1) for project in (attention.to_q, attention.to_k, attention.to_v))
    attended = torch_bridge.call_jax(image_attention, *heads)
    return attention.proj_out(attended.movedim(-1, 1)[:, :, None]) + x


def attend_to_past(q: "jax.Array", k: "jax.Array", v: "jax.Array", mask: "jax.Array") -> "jax.Array":
    """Return exact attention of one frame to all pixels of the frames that exist.

    q: `[batch, dim, 1, h, w]`. k, v: `[batch, dim, T, h, w]`. mask: `[batch, 1, T, h, w]`, not zero for frames that
    exist. The one head of 1024 is too wide for the attention kernel; the scores of a 720p frame to 31 frames are 0.2
    GiB on each of 8 chips.
    """
    import jax
    import jax.numpy as jnp

    batch, dim = q.shape[:2]
    keys, values, visible = (x.reshape(batch, x.shape[1], -1) for x in (k, v, mask))
    scores = jnp.einsum("bchw,bcs->bhws", q[:, :, 0], keys, preferred_element_type=jnp.float32) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, :, None] > 0, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhws,bcs->bchw", weights.astype(v.dtype), values)[:, :, None]


def denormalize_latents(sample: "torch.Tensor", vae_config: UpstreamConfig) -> "torch.Tensor":
    """Scale the solver's `sample` `[1, 32, frames, h, w]` to the VAE's own scale."""
    return sample / vae_config["scaling_factor"]


VAE_DECODER = Component(
    name="vae_decoder",
    folder="vae",
    library="diffusers",
    class_name="AutoencoderKLHunyuanVideo15",
    config={
        "block_out_channels": (128, 256, 512, 1024, 1024),
        "latent_channels": 32,
        "layers_per_block": 2,
        "scaling_factor": 1.03682,
    },
    tiny={"block_out_channels": (4, 8, 8, 16, 64), "layers_per_block": 1},
    needs={
        "block_out_channels": ConfigRequirement(fits=require_length(5), wording="5 numbers"),
        "latent_channels": ConfigRequirement((32,)),
        "spatial_compression_ratio": ConfigRequirement((16,)),
        "temporal_compression_ratio": ConfigRequirement((4,)),
    },
    only=("decoder.",),
    rules=(
        # The upsampling convolutions of the first blocks have 216 and 108 million weights, all others at most 27.
        Rule("decoder.up_blocks.*.upsamplers.0.conv.conv.weight", ("fsdp", None, None, None, None)),
        Rule("decoder.**.weight", REPLICATED),
    ),
)

LIGHT_VAE = make_light(VAE_DECODER, 2, "latent_channels", "scaling_factor")
