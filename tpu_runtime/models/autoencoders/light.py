"""TAEHV, a light decoder that may be in a VAE's place: Ollin Boer Bohan's (taew2_1, taew2_2, taehv1_5) and what
LightX2V trained of it (lighttaew2_1, lighttaew2_2, lighttaehy1_5).

Theirs differ in nothing that a file's tensors tell. Ollin's take latents as the denoiser has them, LightX2V's as the
VAE does; LightX2V's for HunyuanVideo has another activation, and pixels in -1..1.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Component, LightVae, Need, Report
from . import hunyuan15, wan, wan22
from .frames import decode_by_frame, pixels
from .layers import convolved

if TYPE_CHECKING:
    import jax
    import torch

HUNYUAN_CHANNELS = hunyuan15.VAE_DECODER.config["latent_channels"]
# Where the three blocks of each level are among the decoder's layers.
_LEVELS = (3, 9, 15)
_FRAMES = 4


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[Any]":
    """One latent frame a call, the frames before it carried: 1 frame, then 4 each."""
    only = slice(_FRAMES - 1, None)  # of the first latent frame
    return decode_by_frame(call, latents, report, before_first=before_light, decode_next=decode_light, only=only)


def before_light(vae: Any, latent: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The memory before the first latent frame: zeros. Of its result nothing is used."""
    import torch

    from ...programs import torch_bridge

    shapes = torch_bridge.shapes(lambda latent: decode_light(vae, latent, [])[1], latent)
    return latent[:, :1], [torch.zeros(shape, dtype=latent.dtype, device=latent.device) for shape in shapes]


def decode_light(
    vae: Any, latent: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The next latent frame `[1, channels, 1, h, w]` to frames `[4, height, width, 3]` in 0..1, and the memory after
    it: the last input of each block, in the order of use.
    """
    import torch
    from torch.nn.functional import leaky_relu

    from ...programs import torch_bridge

    config, layers = vae.config, vae.decoder
    is_hunyuans = config.is_lightx2v and config.latent_channels == HUNYUAN_CHANNELS
    activated = partial(leaky_relu, negative_slope=0.2 if is_hunyuans else 0.0)
    given, kept = iter(memory), []

    def remember(block: Any, x: "torch.Tensor") -> "torch.Tensor":
        past = next(given, torch.zeros_like(x[:, :, :1]))
        kept.append(x[:, :, -1:])
        first, second, third = block.conv[0], block.conv[2], block.conv[4]
        # Upstream's has a frame and the one before it side by side as channels: a kernel of two frames.
        now, before = first.weight.chunk(2, dim=1)
        over_time = SimpleNamespace(weight=torch.stack([before, now], dim=2), bias=first.bias)
        out = activated(convolved(over_time, x, past=(past,), kernel=True))
        return activated(convolved(third, activated(convolved(second, out, kernel=True)), kernel=True) + x)

    x = activated(convolved(layers[1], torch_bridge.call_jax(partial(clamped, config=config), latent), kernel=True))
    for start in _LEVELS:
        for block in layers[start : start + 3]:
            x = remember(block, x)
        # Upstream makes frames of pixels that it doubled before, each of them alone: the same, of fewer.
        x = grown(convolved(layers[start + 4].conv, x, kernel=True), x.shape[1])
        x = convolved(layers[start + 5], x, doubled=True, kernel=True)
    frames = unshuffled(convolved(layers[-1], activated(x))[0], config.patch_size)
    return pixels(frames if is_hunyuans else frames.float() * 2.0 - 1.0), kept


def clamped(latent: "jax.Array", *, config: Any) -> "jax.Array":
    """Latents of the VAE's scale in the decoder's own, within -3..3."""
    import jax.numpy as jnp
    import numpy as np

    x = latent.astype(jnp.float32)
    if not config.is_lightx2v and config.latents_mean:
        mean, std = (np.float32(row).reshape(1, -1, 1, 1, 1) for row in (config.latents_mean, config.latents_std))
        x = (x - mean) / std
    elif not config.is_lightx2v:
        x = x * config.scaling_factor
    return (jnp.tanh(x / 3.0) * 3.0).astype(latent.dtype)


def grown(x: "torch.Tensor", channels: int) -> "torch.Tensor":
    """`[1, several * channels, frames, h, w]`, of each frame several, to `[1, channels, several * frames, h, w]`."""
    return x.unflatten(1, (-1, channels)).movedim(1, 3).flatten(2, 3)


def unshuffled(patches: "torch.Tensor", size: int) -> "torch.Tensor":
    """`[3 * size * size, frames, h, w]`, a patch's rows before its columns, to `[frames, height, width, 3]`."""
    cells = patches.unflatten(0, (3, size, size)).permute(3, 4, 1, 5, 2, 0)
    return cells.flatten(3, 4).flatten(1, 2)


def _taehv() -> type:
    from .taehv import TAEHV

    return TAEHV


def _light(channels: int, patch_size: int, scale: Mapping[str, Any]) -> LightVae:
    """For latents of so many channels, whose scale a VAE's config says so."""
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
            "latent_channels": Need((channels,), required=True),
            "patch_size": Need((patch_size,), required=True),
            "is_lightx2v": Need((False, True)),
            **{name: Need((value,)) for name, value in scale.items()},
        },
        only=("decoder.",),
        # 10 to 20 MiB in all: replicated.
        rules=(Rule("decoder.**.weight", REPLICATED),),
    )
    return LightVae(component=component, decode=decode)


def _of(vae: Component, *names: str) -> dict[str, Any]:
    return {name: vae.config[name] for name in names}


WAN = _light(16, 1, _of(wan.VAE_DECODER, "latents_mean", "latents_std"))
WAN22 = _light(48, 2, _of(wan22.VAE_DECODER, "latents_mean", "latents_std"))
HUNYUAN15 = _light(HUNYUAN_CHANNELS, 2, _of(hunyuan15.VAE_DECODER, "scaling_factor"))
