"""The loop around decoders that take one latent frame per call, and the conversion of their output to pixels."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...messages import compose
from ...model_spec import Call, Report

if TYPE_CHECKING:
    import numpy as np
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
) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield frames `[n, height, width, 3]` of `latents` `[1, channels, T, h, w]`, one chunk per latent frame.

    call: runs a component. report: progress in latent frames.
    before_first: `before_first(vae, latent, *given)` returns the initial memory.
    decode_next: `decode_next(vae, latent, memory)` returns frames and the memory for the next latent frame.
    given: further tensors of `before_first`. only: the frames of the first chunk that are shown, by default one.

    One program decodes the first latent frame too. Its other frames cost some time, but save minutes of compilation.
    """
    total = latents.shape[2]
    _, memory = call("vae_decoder", before_first, latents[:, :, :1], *given, partition="spatial")
    for index in range(total):
        # The previous chunk is still being fetched when this one is launched.
        report(max(index - 1, 0), total)
        latent = latents[:, :, index : index + 1]
        frames, memory = call(
            "vae_decoder", decode_next, latent, memory, partition="spatial", carries=True, defers=True
        )
        yield frames if index else frames[only]


def decode_still(
    call: Call, latents: "torch.Tensor", report: Report, decode: Callable[..., tuple[Any, Any]]
) -> "Iterator[np.ndarray | torch.Tensor]":
    """Yield the only chunk of an image, `[1, height, width, 3]`, the result of `decode(vae, latents)`.

    call: runs a component. latents: `[1, channels, ...]`. report: progress in latent frames.
    """
    report(0, 1)
    yield call("vae_decoder", decode, latents, partition="spatial", defers=True)[0]


def encode_still(
    call: Call, pixels: "torch.Tensor", encode: Callable[..., tuple[Any, Any]], stride: int
) -> "torch.Tensor":
    """Return `encode(vae, cells)` of an image `pixels` `[1, 3, 1, height, width]` in -1..1, as a tensor.

    call: runs a component. Cells are `stride` pixels on a side, so that pixels are split over chips as latents are.
    Raises ValueError for more than one frame.
    """
    import numpy as np
    import torch

    if pixels.shape[2] != 1:
        raise ValueError(compose("model.vae_encodes_one_image", frame_count=pixels.shape[2]))
    cells = torch.nn.functional.pixel_unshuffle(pixels[:, :, 0], stride)
    latents, _ = call("vae_encoder", encode, cells, partition="spatial")
    return torch.from_numpy(np.array(latents))


def to_pixels(decoded: "torch.Tensor") -> "torch.Tensor":
    """Convert a decoder's output `[...]`, around -1..1, to float32 pixels in 0..1.

    Infinite values become NaN. Clamped they would look like black and white, and go unnoticed (see `finite_check`).
    """
    import torch

    scaled = decoded.float() / 2 + 0.5
    return torch.where(torch.isfinite(scaled), scaled.clamp(0.0, 1.0), torch.nan)
