"""Wan's VAE, one latent frame at a time. Wan 2.2's of 48 channels has shortcuts and patches too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, Need, Report, has_length
from .frames import decode_by_frame, decode_picture, pixels
from .layers import attend_to_picture, convolved, enlarged, in_turn

if TYPE_CHECKING:
    import torch


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[Any]":
    """One latent frame a call, what later ones look back at carried from one to the next: 1 frame, then 4 each."""
    if latents.shape[2] == 1:
        return decode_picture(call, latents, report, decode_alone)
    return decode_by_frame(call, latents, report, before_first=before_first, decode_next=decode_next)


def decode_alone(vae: Any, latent: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """The only latent frame `[1, channels, 1, h, w]` to the frame `[1, height, width, 3]` in 0..1.

    Nothing was before it: of a causal convolution only the last of its frames' weights meet more than zeros.
    """
    from types import SimpleNamespace

    def convolve(conv: Any, x: "torch.Tensor", norm: Any = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        return convolved(
            SimpleNamespace(weight=conv.weight[:, :, -1:], bias=conv.bias), x, kernel=True, norm=norm, onto=onto
        )

    def upsample(sampler: Any, x: "torch.Tensor") -> "torch.Tensor":
        return convolved(sampler.resample[1], x, doubled=True, kernel=True)

    return run_decoder(vae, latent, convolve, upsample, factor_t=1), None


def before_first(vae: Any, latent: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The memory before the first latent frame; of its result nothing is used."""
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.shapes(lambda latent: decode_next(vae, latent, [])[1], latent)
    is_first, *caches = [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]
    return latent[:, :1], [is_first + 1, *caches]


def decode_next(
    vae: Any, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """A latent frame `[1, channels, 1, h, w]` to frames `[4, height, width, 3]` in 0..1, and the memory after it.

    `memory` is an image of ones before the first frame and of zeros later, then the last two inputs of each causal
    convolution, each in the order of use. Of the first latent frame, whose time upstream does not double, only the
    first of the four frames is meant, and it alone is remembered.
    """
    import torch

    given = iter(memory[1:])
    is_first = memory[0].amax() > 0 if memory else torch.ones((), dtype=torch.bool, device=latent.device)
    kept = [torch.zeros_like(latent[:, :1])]

    def convolve(conv: Any, x: "torch.Tensor", norm: Any = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        blank = torch.zeros_like(x[:, :, :1])
        past = next(given, blank), next(given, blank)
        out = convolved(conv, x, past=past, kernel=True, norm=norm, onto=onto)
        # What is kept is taken behind the convolution, for it takes the place of the past, and before all else: the
        # compiler would do it last, and keep all inputs until then.
        out, x, *past = in_turn(out, x, *past)
        before, last = [*past, *x.split(1, dim=2)][-2:]
        out, *seen = in_turn(out, torch.where(is_first, blank, before), torch.where(is_first, x[:, :, :1], last))
        kept.extend(seen)
        return out

    def upsample(sampler: Any, x: "torch.Tensor") -> "torch.Tensor":
        if sampler.mode == "upsample3d":
            doubled = convolve(sampler.time_conv, x).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            # Nor is the first frame remembered here.
            kept[-1] = torch.where(is_first, torch.zeros_like(kept[-1]), kept[-1])
            x = torch.where(is_first, x.repeat_interleave(2, dim=2), doubled)
        return convolved(sampler.resample[1], x, doubled=True, kernel=True)

    return run_decoder(vae, latent, convolve, upsample), kept


def run_decoder(
    vae: Any,
    latent: "torch.Tensor",
    convolve: "Callable[..., torch.Tensor]",
    upsample: "Callable[[Any, torch.Tensor], torch.Tensor]",
    factor_t: int | None = None,
) -> "torch.Tensor":
    """A latent frame to frames `[frames, height, width, 3]` in 0..1: `convolve(conv, x, norm, onto)` is a causal
    convolution, `upsample(sampler, x)` the next size. Shortcuts make `factor_t` frames of one, by default as many as
    upstream's.
    """
    decoder = vae.decoder
    x = convolve(decoder.conv_in, vae.post_quant_conv(latent))
    (before, after), (attention,) = decoder.mid_block.resnets, decoder.mid_block.attentions
    x = residual(after, attend(attention, residual(before, x, convolve)), convolve)
    for block in decoder.up_blocks:
        small = x
        for resnet in block.resnets:
            x = residual(resnet, x, convolve)
        for sampler in getattr(block, "upsamplers", None) or ():
            x = upsample(sampler, x)
        if getattr(block, "avg_shortcut", None) is not None:
            x = upsample(block.upsampler, x) + duplicated(block.avg_shortcut, small, factor_t)
    patches = convolve(decoder.conv_out, x, decoder.norm_out)
    return pixels(unpatched(patches[0], vae.config.patch_size or 1))


def duplicated(shortcut: Any, x: "torch.Tensor", factor_t: int | None = None) -> "torch.Tensor":
    """`DupUp3D`: each element as `factor_t` frames, by default as upstream, and two rows and columns; of twice the
    channels two are two rows. The video's first frame comes out several times too, as in `decode_next`.
    """
    from functools import partial

    from ...programs import torch_bridge

    *_, frames, height, width = x.shape
    assert len(x[0]) == shortcut.out_channels * (1 if shortcut.factor_t > 1 else 2)
    rows = x.unflatten(1, (shortcut.out_channels, -1)).movedim(2, 4).flatten(3, 4)
    repeats = int(factor_t or shortcut.factor_t)
    rows = rows.repeat_interleave(repeats, dim=2)
    size = (repeats * frames, 2 * height, 2 * width)
    return torch_bridge.call_jax(partial(enlarged, size=size), rows)


def unpatched(patches: "torch.Tensor", size: int) -> "torch.Tensor":
    """`[3 * size * size, frames, h, w]`, a patch's columns before its rows, to `[frames, height, width, 3]`."""
    if size == 1:
        return patches.permute(1, 2, 3, 0)
    pixels = patches.unflatten(0, (3, size, size)).permute(3, 4, 2, 5, 1, 0)
    return pixels.flatten(3, 4).flatten(1, 2)


def encode_next(
    vae: Any, frames: "torch.Tensor", memory: "Sequence[torch.Tensor]" = ()
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The next frames `[1, channels, frames, height, width]` in -1..1, the video's first alone and later ones by four,
    to the mean of their latent frame, and the memory after them.

    `memory` is, each in the order of use, the last two inputs of each causal convolution, and the last one of those
    that halve time; nothing before the first frame.
    """
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample

    given, kept = iter(memory), []

    def convolve(conv: Any, x: "torch.Tensor", norm: Any = None, onto: "torch.Tensor | None" = None) -> "torch.Tensor":
        blank = torch.zeros_like(x[:, :, :1])
        past = next(given, blank), next(given, blank)
        kept.extend([*past, *x.split(1, dim=2)][-2:])
        return convolved(conv, x, past=past, kernel=True, norm=norm, onto=onto)

    def downsample(sampler: Any, x: "torch.Tensor") -> "torch.Tensor":
        x = convolved(sampler.resample[1], x, halved=True, kernel=True)
        if sampler.mode == "downsample2d":
            return x
        kept.append(x[:, :, -1:])
        # The video's first frame is a latent frame by itself.
        return convolved(sampler.time_conv, x, past=(next(given),), kernel=True)[:, :, ::2] if memory else x

    encoder = vae.encoder
    x = convolve(encoder.conv_in, frames)
    for block in encoder.down_blocks:
        if vae.config.is_residual:
            large = x
            for resnet in block.resnets:
                x = residual(resnet, x, convolve)
            x = x if block.downsampler is None else downsample(block.downsampler, x)
            x = x + block.avg_shortcut(large)
        else:
            x = downsample(block, x) if isinstance(block, WanResample) else residual(block, x, convolve)
    (before, after), (attention,) = encoder.mid_block.resnets, encoder.mid_block.attentions
    x = residual(after, attend(attention, residual(before, x, convolve)), convolve)
    moments = vae.quant_conv(convolve(encoder.conv_out, x, encoder.norm_out))
    return moments.chunk(2, dim=1)[0], kept


def residual(block: Any, x: "torch.Tensor", convolve: "Callable[..., torch.Tensor]") -> "torch.Tensor":
    """`WanResidualBlock`; `convolve(conv, x, norm, onto)` is a causal convolution that remembers what came before."""
    import torch

    out = convolve(block.conv1, x, block.norm1)
    shortcut = block.conv_shortcut
    shortcut = x if isinstance(shortcut, torch.nn.Identity) else convolved(shortcut, x, kernel=True)
    return convolve(block.conv2, out, block.norm2, shortcut)


def attend(block: Any, x: "torch.Tensor") -> "torch.Tensor":
    """`WanAttentionBlock`: each frame's pixels attend to its own."""
    from ...programs import torch_bridge

    qkv = block.to_qkv(block.norm(x[0].movedim(1, 0))).movedim(1, -1)
    found = torch_bridge.call_jax(attend_to_picture, *qkv.chunk(3, dim=-1))
    return x + block.proj(found.movedim(-1, 1)).movedim(0, 1)[None]


def denormalize_latents(sample: "torch.Tensor", vae_config: Mapping[str, Any]) -> "torch.Tensor":
    """Normalised latents in the VAE's own scale; upstream's own arithmetic, to the bit."""
    mean, std = latent_stats(vae_config)
    return sample / (1.0 / std) + mean


def latent_stats(config: Mapping[str, Any]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Mean and standard deviation of the latent channels, `[1, channels, 1, 1, 1]` each, from the VAE's config."""
    import torch

    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    return mean, std


# The published VAE's, which are upstream's defaults too.
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
    # Qwen-Image's: the same network by another name.
    class_aliases=("AutoencoderKLQwenImage",),
    config={"base_dim": 96, "z_dim": 16, "latents_mean": LATENTS_MEAN, "latents_std": LATENTS_STD},
    tiny={"base_dim": 8, "num_res_blocks": 1},
    # Wan 2.2's 5B model has a VAE of another form by the same name, see `wan22`.
    needs={
        "is_residual": Need((False,)),
        "latents_mean": Need(fits=has_length(16), wording="16 numbers"),
        "latents_std": Need(fits=has_length(16), wording="16 numbers"),
        "patch_size": Need((None,)),
        "scale_factor_spatial": Need((8,)),
        "scale_factor_temporal": Need((4,)),
        "temperal_downsample": Need(((False, True, True),)),
        "z_dim": Need((16,)),
    },
    only=("decoder.", "post_quant_conv."),
    # 0.1 GiB in all: replicated.
    rules=(Rule("decoder.**.weight", REPLICATED),),
)
