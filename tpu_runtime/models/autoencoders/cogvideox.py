"""CogVideoX's VAE: decoding two latent frames at a time, as upstream does, without what only a GPU needs; encoding one
picture.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...spec import Call, Component, Need, Report, has_length
from .frames import pixels
from .layers import convolved, enlarged, normed

if TYPE_CHECKING:
    import torch

Caches = dict[str, Any]
FRAMES_A_CALL = 2


def decode(call: Call, latents: "torch.Tensor", report: Report) -> "Iterator[Any]":
    """Two latent frames a call, an odd one with the first two, the causal caches carried from one call to the next."""
    total = latents.shape[2]
    start = min(total, FRAMES_A_CALL + total % FRAMES_A_CALL)
    report(0, total)
    frames, caches = call("vae_decoder", decode_first, latents[:, :, :start], partition="spatial")
    while start < total:
        yield frames
        report(start, total)
        chunk = latents[:, :, start : start + FRAMES_A_CALL]
        frames, caches = call("vae_decoder", decode_next, chunk, caches, partition="spatial", carries=True)
        start += FRAMES_A_CALL
    yield frames
    report(total, total)


def decode_first(vae: Any, latents: "torch.Tensor") -> "tuple[torch.Tensor, Caches]":
    """The first one to three latent frames: one frame for an odd one, four for each other."""
    return _decode_frames(vae, latents, None)


def decode_next(vae: Any, latents: "torch.Tensor", caches: Caches) -> "tuple[torch.Tensor, Caches]":
    """Two latent frames `[1, 16, 2, h, w]` to frames `[8, 8h, 8w, 3]` in 0..1, and the causal caches after them."""
    return _decode_frames(vae, latents, caches)


def _decode_frames(vae: Any, latents: "torch.Tensor", caches: Caches | None) -> "tuple[torch.Tensor, Caches]":
    prepare_decoder(vae.decoder)
    if vae.post_quant_conv is not None:
        latents = vae.post_quant_conv(latents)
    frames, after = vae.decoder(latents, conv_cache=caches)
    return pixels(frames[0].permute(1, 2, 3, 0)), after


def prepare_decoder(decoder: Any) -> None:
    """Puts forms of upstream's layers that can be split over chips where upstream's cannot.

    Upstream also cuts large convolutions in pieces for CuDNN's sake, and carries caches of pointwise convolutions,
    which need none: whole videos of 16 channels.
    """
    from diffusers.models.autoencoders import autoencoder_kl_cogvideox as upstream
    from diffusers.models.upsampling import CogVideoXUpsample3D

    for module in decoder.modules():
        if isinstance(module, upstream.CogVideoXSafeConv3d):
            module.forward = partial(convolved, module)
        elif isinstance(module, upstream.CogVideoXSpatialNorm3D):
            # Upstream says that it returns a tensor; it returns caches too.
            module.forward = partial(_normalise, module)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(module, CogVideoXUpsample3D):
            module.forward = partial(_upsample, module)


def prepare_image_encoder(encoder: Any) -> None:
    """Makes upstream's encoder one for a single frame, that can be split over chips."""
    import torch
    from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSafeConv3d
    from diffusers.models.downsampling import CogVideoXDownsample3D

    for module in encoder.modules():
        if isinstance(module, CogVideoXSafeConv3d):
            module.forward = partial(convolved, module)
        elif isinstance(module, torch.nn.GroupNorm):
            module.forward = partial(normed, module)
        elif isinstance(module, CogVideoXDownsample3D):
            module.forward = partial(_downsample_image, module)


def _downsample_image(downsample: Any, x: "torch.Tensor") -> "torch.Tensor":
    """`CogVideoXDownsample3D` of one frame, of which time does not become less."""
    import torch

    return downsample.conv(torch.nn.functional.pad(x[:, :, 0], (0, 1, 0, 1)))[:, :, None]


def _normalise(
    norm: Any, hidden: "torch.Tensor", latents: "torch.Tensor", conv_cache: None = None
) -> "tuple[torch.Tensor, Caches]":
    """`CogVideoXSpatialNorm3D`. What it enlarges is 16 channels, for all norms of one size the same."""
    from ...programs import torch_bridge

    latents = torch_bridge.call_jax(partial(enlarged, size=tuple(hidden.shape[2:])), latents)
    return normed(norm.norm_layer, hidden) * norm.conv_y.conv(latents) + norm.conv_b.conv(latents), {}


def _upsample(upsample: Any, inputs: "torch.Tensor") -> "torch.Tensor":
    """`CogVideoXUpsample3D` with its convolution over all frames at once."""
    from ...programs import torch_bridge

    *_, frames, height, width = inputs.shape
    if upsample.compress_time:
        frames = 2 * frames - frames % 2
    hidden = torch_bridge.call_jax(partial(enlarged, size=(frames, 2 * height, 2 * width)), inputs)
    return convolved(upsample.conv, hidden)


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
        # Above any size that tests and `--tiny` decode.
        "sample_height": 480,
        "sample_width": 720,
        "scaling_factor": 0.7,
    },
    needs={
        "block_out_channels": Need(fits=has_length(4), wording="4 numbers"),
        "latent_channels": Need((16,)),
        "temporal_compression_ratio": Need((4,)),
    },
    only=("decoder.", "post_quant_conv."),
    # 0.2 GiB in all: whole on every chip.
    rules=(Rule("decoder.**.weight", REPLICATED),),
)
