"""Encoding by Wan's VAE of 16 channels, whose network is in `wan_vae`.

For image to video, images are frames of a grey video. Its latents and a mask are further channels of the denoiser's
input, as in `prepare_latents` of diffusers' `WanImageToVideoPipeline`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Report, Settings
from ...model_spec.upstream import Net, UpstreamConfig
from . import wan_vae

if TYPE_CHECKING:
    import numpy as np
    import torch

# Pixels on a side of a latent; frames per latent frame after the first, which is also the mask's number of channels.
STRIDE_HW, STRIDE_T = 8, 4


def condition_shapes(latent_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shape of `condition`: a mask of 4 channels, one per frame of a latent frame, then the encoded video.

    latent_shape: `(rows, channels, frames, height, width)`.
    """
    return {"condition": (1, STRIDE_T + latent_shape[1], *latent_shape[2:])}


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: UpstreamConfig
) -> "dict[str, np.ndarray]":
    """Return `condition` `[1, 4 + channels, frames, h, w]`: the mask of given frames, and the encoded video.

    call: runs a component. image: `[number, height, width, 3]` in 0..1: the first frame, and optionally the last. All
    other frames are grey. settings: of the generation. vae_config: the VAE's config.

    Each call encodes a latent frame, from 1 frame and then from 4, and carries the causal caches to the next.
    """
    import numpy as np
    import torch

    # Pixels are passed in cells of 8 x 8, one per latent, so that they are split over chips as latents are.
    cells = torch.nn.functional.pixel_unshuffle(image.movedim(-1, 1) * 2.0 - 1.0, STRIDE_HW)
    first, *last = cells.unsqueeze(2).split(1)
    latent, memory = call("vae_encoder", encode_first, first, partition="spatial")
    latents = [latent]
    for _ in range((settings.num_frames - 1) // STRIDE_T - len(last)):
        latent, memory = call("vae_encoder", encode_grey, memory, partition="spatial", carries=True)
        latents.append(latent)
    for end in last:
        latent, _ = call("vae_encoder", encode_last, end, memory, partition="spatial", carries=True)
        latents.append(latent)
    video = torch.from_numpy(np.concatenate(latents, axis=2))
    mean, std = wan_vae.latent_stats(vae_config)
    mask = torch.zeros(1, STRIDE_T, *video.shape[2:])
    mask[:, :, 0] = 1.0
    if last:
        mask[:, -1, -1] = 1.0
    return {"condition": torch.cat([mask, (video - mean) * (1.0 / std)], dim=1).numpy()}


def encode_video(
    call: Call,
    pixels: "torch.Tensor",
    report: Report,
    *,
    stride: int = STRIDE_HW,
    first: "Callable[..., tuple[torch.Tensor, object]] | None" = None,
    later: "Callable[..., tuple[torch.Tensor, object]] | None" = None,
) -> "torch.Tensor":
    """Encode `pixels` `[1, 3, frames, height, width]` in -1..1 to the mean of the latents `[1, channels, T, h, w]`.

    call: runs a component. report: progress in latent frames. stride: pixels on a side of a latent.
    first: `first(vae, cells)` encodes the first frame. later: `later(vae, cells, memory)` encodes the next four. None:
        those of this module. Frames beyond the last group of four are dropped, as upstream does.
    """
    import numpy as np
    import torch

    total = 1 + (pixels.shape[2] - 1) // STRIDE_T
    start = to_cells(pixels[:, :, :1], stride)
    latent, memory = call("vae_encoder", first or encode_first, start, partition="spatial")
    latents = [latent]
    for index in range(1, total):
        report(index, total)
        begin = 1 + STRIDE_T * (index - 1)
        frames = to_cells(pixels[:, :, begin : begin + STRIDE_T], stride)
        latent, memory = call("vae_encoder", later or encode_frames, frames, memory, partition="spatial", carries=True)
        latents.append(latent)
    report(total, total)
    return torch.from_numpy(np.concatenate(latents, axis=2))


def to_cells(frames: "torch.Tensor", stride: int) -> "torch.Tensor":
    """Convert `frames` `[1, 3, frames, height, width]` to cells `[1, 3 * stride * stride, frames, h, w]`."""
    import torch

    return torch.nn.functional.pixel_unshuffle(frames[0].movedim(1, 0), stride).movedim(0, 1)[None]


def to_frames(cells: "torch.Tensor", stride: int) -> "torch.Tensor":
    """Convert `cells` `[1, 3 * stride * stride, frames, h, w]` back to frames `[1, 3, frames, height, width]`."""
    import torch

    return torch.nn.functional.pixel_shuffle(cells[0].movedim(1, 0), stride).movedim(0, 1)[None]


def encode_frames(
    vae: Net, cells: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Encode four frames, as cells `[1, 3 * 8 * 8, 4, h, w]`, to a latent frame `[1, channels, 1, h, w]`.

    vae: diffusers' `AutoencoderKLWan`. memory: see `wan_vae.encode_next`.
    """
    return wan_vae.encode_next(vae, to_frames(cells, STRIDE_HW), memory)


def encode_grey(vae: Net, memory: "list[torch.Tensor]") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Encode four grey frames, zeros, to a latent frame `[1, channels, 1, h, w]`.

    memory: see `wan_vae.encode_next`.
    """
    return wan_vae.encode_next(vae, make_grey_cells(STRIDE_T, memory), memory)


def encode_last(
    vae: Net, cells: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Encode three grey frames and the last image, as cells `[1, 3 * 8 * 8, 1, h, w]`, to `[1, channels, 1, h, w]`.

    vae: diffusers' `AutoencoderKLWan`. memory: see `wan_vae.encode_next`.
    """
    import torch

    image = torch.nn.functional.pixel_shuffle(cells[:, :, 0], STRIDE_HW).unsqueeze(2)
    return wan_vae.encode_next(vae, torch.cat([make_grey_cells(STRIDE_T - 1, memory), image], dim=2), memory)


def make_grey_cells(number: int, memory: "list[torch.Tensor]") -> "torch.Tensor":
    """Return `number` frames of zeros `[1, 3, number, height, width]`, of the size of those in `memory`."""
    import torch

    previous = memory[0]
    shape = *previous.shape[:2], number, *previous.shape[3:]
    return torch.zeros(shape, dtype=previous.dtype, device=previous.device)


def encode_first(vae: Net, cells: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Encode the first image, as cells `[1, 3 * 8 * 8, 1, h, w]`, to a latent frame `[1, channels, 1, h, w]`."""
    import torch

    image = torch.nn.functional.pixel_shuffle(cells[:, :, 0], STRIDE_HW)
    return wan_vae.encode_next(vae, image.unsqueeze(2))


VAE_ENCODER = replace(
    wan_vae.VAE_DECODER,
    name="vae_encoder",
    only=("encoder.", "quant_conv."),
    # 0.1 GiB in all: replicated.
    rules=(Rule("encoder.**.weight", REPLICATED),),
)
