"""Wan's VAE, encoding: pictures as frames of a grey video, which are more channels of a denoiser's sample."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Call, Report, Settings
from . import wan

if TYPE_CHECKING:
    import numpy as np
    import torch

# Pixels on a side of a latent; frames in a latent after the first, which is also how many channels the mask has.
STRIDE_HW, STRIDE_T = 8, 4


def condition_shapes(latent_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Mask and encoded video, channels joined."""
    return {"condition": (1, STRIDE_T + latent_shape[1], *latent_shape[2:])}


def encode_image(
    call: Call, image: "torch.Tensor", settings: Settings, vae_config: Mapping[str, Any]
) -> "dict[str, np.ndarray]":
    """The picture as the first frame of a video that is grey after it, encoded; and the mask of what is given. A second
    picture is the last frame.

    One latent frame a call, what later ones look back at carried from one to the next: from 1 frame, then from 4 each.
    """
    import numpy as np
    import torch

    # Pixels travel by the cell of 8 x 8 that becomes a latent: so they are split over chips as latents are.
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
    mean, std = wan.latent_stats(vae_config)
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
    first: "Callable[..., Any] | None" = None,
    later: "Callable[..., Any] | None" = None,
) -> "torch.Tensor":
    """The mean of the latents of 1 frame and then of 4 each; frames beyond the last four are left out, as upstream.

    `first(vae, cells)` and `later(vae, cells, memory)` encode them, by the cell of `stride` pixels on a side.
    """
    import numpy as np
    import torch

    total = 1 + (pixels.shape[2] - 1) // STRIDE_T
    start = cells_of(pixels[:, :, :1], stride)
    latent, memory = call("vae_encoder", first or encode_first, start, partition="spatial")
    latents = [latent]
    for index in range(1, total):
        report(index, total)
        begin = 1 + STRIDE_T * (index - 1)
        frames = cells_of(pixels[:, :, begin : begin + STRIDE_T], stride)
        latent, memory = call("vae_encoder", later or encode_frames, frames, memory, partition="spatial", carries=True)
        latents.append(latent)
    report(total, total)
    return torch.from_numpy(np.concatenate(latents, axis=2))


def cells_of(frames: "torch.Tensor", stride: int) -> "torch.Tensor":
    """`[1, 3, frames, height, width]` by the cell: `[1, 3 * stride * stride, frames, h, w]`."""
    import torch

    return torch.nn.functional.pixel_unshuffle(frames[0].movedim(1, 0), stride).movedim(0, 1)[None]


def frames_of(cells: "torch.Tensor", stride: int) -> "torch.Tensor":
    """The frames of `cells_of`."""
    import torch

    return torch.nn.functional.pixel_shuffle(cells[0].movedim(1, 0), stride).movedim(0, 1)[None]


def encode_frames(
    vae: Any, cells: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Four frames, by the cell."""
    return wan.encode_next(vae, frames_of(cells, STRIDE_HW), memory)


def encode_grey(vae: Any, memory: "list[torch.Tensor]") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Four frames of zeros, which is what follows the image."""
    return wan.encode_next(vae, grey(STRIDE_T, memory), memory)


def encode_last(
    vae: Any, cells: "torch.Tensor", memory: "list[torch.Tensor]"
) -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """Three frames of zeros and the last image, by the cell: `[1, 3 * 8 * 8, 1, h, w]`."""
    import torch

    image = torch.nn.functional.pixel_shuffle(cells[:, :, 0], STRIDE_HW).unsqueeze(2)
    return wan.encode_next(vae, torch.cat([grey(STRIDE_T - 1, memory), image], dim=2), memory)


def grey(number: int, memory: "list[torch.Tensor]") -> "torch.Tensor":
    """Frames of zeros, of the size of those that were seen."""
    import torch

    seen = memory[0]
    return torch.zeros((*seen.shape[:2], number, *seen.shape[3:]), dtype=seen.dtype, device=seen.device)


def encode_first(vae: Any, cells: "torch.Tensor") -> "tuple[torch.Tensor, list[torch.Tensor]]":
    """The image, by the cell: `[1, 3 * 8 * 8, 1, h, w]`."""
    import torch

    image = torch.nn.functional.pixel_shuffle(cells[:, :, 0], STRIDE_HW)
    return wan.encode_next(vae, image.unsqueeze(2))


VAE_ENCODER = replace(
    wan.VAE_DECODER,
    name="vae_encoder",
    only=("encoder.", "quant_conv."),
    # 0.1 GiB in all: replicated.
    rules=(Rule("encoder.**.weight", REPLICATED),),
)
