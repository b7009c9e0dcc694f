"""The loop around decoders that take one latent frame a call, and the pixels that all decoders return."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...model_spec import Call, Report

if TYPE_CHECKING:
    import torch


def decode_by_frame(
    call: Call,
    latents: "torch.Tensor",
    report: Report,
    *,
    before_first: Callable[..., tuple[Any, Any]],
    decode_next: Callable[..., tuple[Any, Any]],
    given: "tuple[torch.Tensor, ...]" = (),
    only: slice = slice(1),
) -> Iterator[Any]:
    """Frames `[n, height, width, 3]` of latents `[1, channels, T, h, w]`: 1, then as many as a latent frame stands for.

    `before_first(vae, latent, *given)` makes the memory that `decode_next(vae, latent, memory)` carries from one latent
    frame to the next. One program serves the first too, of whose frames `only` one is meant: that costs it the time of
    the others and spares minutes of compiling.
    """
    total = latents.shape[2]
    _, memory = call("vae_decoder", before_first, latents[:, :, :1], *given, partition="spatial")
    for index in range(total):
        # The chunk before is still on its way while this one is launched.
        report(max(index - 1, 0), total)
        latent = latents[:, :, index : index + 1]
        frames, memory = call(
            "vae_decoder", decode_next, latent, memory, partition="spatial", carries=True, defers=True
        )
        yield frames if index else frames[only]


def decode_picture(
    call: Call, latents: "torch.Tensor", report: Report, decode: Callable[..., tuple[Any, Any]]
) -> Iterator[Any]:
    """The one chunk of a picture, which `decode(vae, latents)` makes."""
    report(0, 1)
    yield call("vae_decoder", decode, latents, partition="spatial", defers=True)[0]


def encode_picture(
    call: Call, pixels: "torch.Tensor", encode: Callable[..., tuple[Any, Any]], stride: int
) -> "torch.Tensor":
    """What `encode(vae, cells)` makes of a video's only frame `[1, 3, 1, height, width]` in -1..1, by the cell of
    `stride` pixels on a side: so pixels are split over chips as latents are.
    """
    import numpy as np
    import torch

    if pixels.shape[2] != 1:
        raise ValueError(
            f"There are {pixels.shape[2]} frames to encode, and on the TPU this VAE encodes one picture. Encode one, "
            "or load the VAE with ComfyUI's own loader."
        )
    cells = torch.nn.functional.pixel_unshuffle(pixels[:, :, 0], stride)
    found, _ = call("vae_encoder", encode, cells, partition="spatial")
    return torch.from_numpy(np.array(found))


def pixels(decoded: "torch.Tensor") -> "torch.Tensor":
    """What a decoder returns, around -1..1, as float32 pixels in 0..1.

    Infinite ones become NaN: clamped they would pass for black and white, and nobody would be told (see `finite`).
    """
    import torch

    scaled = decoded.float() / 2 + 0.5
    return torch.where(torch.isfinite(scaled), scaled.clamp(0.0, 1.0), torch.nan)
