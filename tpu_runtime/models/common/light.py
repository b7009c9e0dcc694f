"""TAEHV (https://github.com/madebyollin/taehv), a small decoder that can replace a VAE's decoder.

There are Ollin Boer Bohan's weights (taew2_1, taew2_2, taehv1_5) and LightX2V's (lighttaew2_1, lighttaew2_2,
lighttaehy1_5). The tensors of a file do not tell them apart. Ollin's take latents in the denoiser's scale, LightX2V's
in the VAE's; LightX2V's for HunyuanVideo has another activation, and pixels in -1..1.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, ConfigRequirement, LightVae, Report
from ...model_spec.upstream import Net
from . import wan_vae
from .conv_layers import apply_convolution
from .frames import decode_by_frame, to_pixels

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

# Index of the first of each level's three blocks in the decoder's layers.
_LEVELS = (3, 9, 15)
_FRAMES = 4


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield frames, 1 and then 4 per call; each call decodes a latent frame and carries the memory to the next.

    call: runs a component. latents: `[1, channels, T, h, w]`. report: progress in latent frames.
    """
    only = slice(_FRAMES - 1, None)  # of the first latent frame
    return decode_by_frame(call, latents, report, before_first=before_light, decode_next=decode_light, only=only)


def before_light(vae: Net, latent: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Return the memory before the first latent frame `[1, channels, 1, h, w]`: zeros. The first result is unused."""
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.infer_shapes(lambda latent: decode_light(vae, latent, [])[1], latent)
    return latent[:, :1], [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]


def decode_light(
    vae: Net, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Decode the next latent frame `[1, channels, 1, h, w]` to frames `[4, height, width, 3]` in 0..1.

    vae: a TAEHV. memory: the last input of each block, in the order of use. Also returns the memory for the next frame.
    """
    import torch
    from torch.nn.functional import leaky_relu

    from ...programs import torch_bridge

    config, layers = vae.config, vae.decoder
    # LightX2V's for HunyuanVideo, whose VAE scales latents by a factor.
    is_hunyuans = config.is_lightx2v and not config.latents_mean
    activated = partial(leaky_relu, negative_slope=0.2 if is_hunyuans else 0.0)
    caches, new_caches = iter(memory), []

    def remember(block: Net, x: "torch.Tensor") -> "torch.Tensor":
        past = next(caches, torch.zeros_like(x[:, :, :1]))
        new_caches.append(x[:, :, -1:])
        first, second, third = block.conv[0], block.conv[2], block.conv[4]
        # Upstream concatenates a frame and the previous one as channels. This is a kernel of two frames.
        now, before = first.weight.chunk(2, dim=1)
        over_time = SimpleNamespace(weight=torch.stack([before, now], dim=2), bias=first.bias)
        out = activated(apply_convolution(over_time, x, past=(past,), kernel=True))
        return activated(
            apply_convolution(third, activated(apply_convolution(second, out, kernel=True)), kernel=True) + x
        )

    x = activated(
        apply_convolution(layers[1], torch_bridge.call_jax(partial(clamp_latent, config=config), latent), kernel=True)
    )
    for start in _LEVELS:
        for block in layers[start : start + 3]:
            x = remember(block, x)
        # Upstream doubles rows and columns before it splits frames; each pixel by itself, so the order does not matter.
        x = split_frames(apply_convolution(layers[start + 4].conv, x, kernel=True), x.shape[1])
        x = apply_convolution(layers[start + 5], x, doubled=True, kernel=True)
    frames = unshuffle_pixels(apply_convolution(layers[-1], activated(x))[0], config.patch_size)
    return to_pixels(frames if is_hunyuans else frames.float() * 2.0 - 1.0), new_caches


def clamp_latent(latent: "jax.Array", *, config: Any) -> "jax.Array":
    """Scale latents `[1, channels, frames, h, w]` from the VAE's scale to the decoder's, softly limited to -3..3."""
    import jax.numpy as jnp
    import numpy as np

    x = latent.astype(jnp.float32)
    if not config.is_lightx2v and config.latents_mean:
        mean, std = (np.float32(row).reshape(1, -1, 1, 1, 1) for row in (config.latents_mean, config.latents_std))
        x = (x - mean) / std
    elif not config.is_lightx2v:
        x = x * config.scaling_factor
    return (jnp.tanh(x / 3.0) * 3.0).astype(latent.dtype)


def split_frames(x: "torch.Tensor", channels: int) -> "torch.Tensor":
    """Split channels into frames: `[1, n * channels, frames, h, w]` to `[1, channels, n * frames, h, w]`."""
    return x.unflatten(1, (-1, channels)).movedim(1, 3).flatten(2, 3)


def unshuffle_pixels(patches: "torch.Tensor", size: int) -> "torch.Tensor":
    """Unpatchify `[3 * size * size, frames, h, w]`, a patch's rows before its columns: `[frames, height, width, 3]`."""
    cells = patches.unflatten(0, (3, size, size)).permute(3, 4, 1, 5, 2, 0)
    return cells.flatten(3, 4).flatten(1, 2)


def _taehv() -> type:
    from .taehv import TAEHV

    return TAEHV


def make_light(vae: Component, patch_size: int, channels_key: str, *scale_keys: str) -> LightVae:
    """Return the small decoder for the latents of `vae`.

    channels_key, scale_keys: keys of the config of `vae` with the number of channels, and with the scale.
    """
    channels, scale = vae.config[channels_key], {key: vae.config[key] for key in scale_keys}
    config = {"latent_channels": channels, "patch_size": patch_size, "is_lightx2v": False, **scale}
    component = Component(
        name="vae_decoder",
        folder="vae_light",
        library="diffusers",
        class_name="TAEHV",
        own_class=_taehv,
        config=config,
        tiny={},
        needs={
            "latent_channels": ConfigRequirement((channels,), required=True),
            "patch_size": ConfigRequirement((patch_size,), required=True),
            "is_lightx2v": ConfigRequirement((False, True)),
            **{name: ConfigRequirement((value,)) for name, value in scale.items()},
        },
        only=("decoder.",),
        # 10 to 20 MiB in all: replicated.
        rules=(Rule("decoder.**.weight", REPLICATED),),
    )
    return LightVae(component=component, decode=decode)


WAN = make_light(wan_vae.VAE_DECODER, 1, "z_dim", "latents_mean", "latents_std")
