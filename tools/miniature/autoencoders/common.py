"""Shared parts of autoencoders: initial weights, training, and a published model's basis of latents."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import optimize

RATE = 1e-3


def begin(vae: Any) -> None:
    """Initialize weights. With PyTorch's defaults the signal vanishes in this deep network: images stay grey for hours.

    Plain convolutions mix channels, keep the scale of their input and see only the newest frame. Convolutions that
    resize an image blur it; those in time repeat or copy. Residual blocks and attention add nothing at first, and
    samples have almost no noise.
    """
    for name, module in vae.named_modules():
        if "to_out" in name and isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
        if not isinstance(module, nn.Conv2d | nn.Conv3d):
            continue
        assert module.bias is not None
        nn.init.zeros_(module.bias)
        weight = module.weight.data.zero_()
        if "conv_y" in name or "conv_b" in name:
            # What latents scale and offset: nothing yet.
            nn.init.constant_(module.bias, float("conv_y" in name))
        elif "time_conv" in name:
            rows = torch.arange(weight.shape[0])
            weight[rows, rows % weight.shape[1], -1] = 1.0
        elif "conv2" in name or name.endswith("proj"):
            continue
        else:
            newest = weight[:, :, -1] if weight.ndim == 5 else weight
            newest.normal_(std=0.5 / math.sqrt(newest[0].numel()))
            mixed = nn.init.orthogonal_(torch.empty(newest.shape[:2]))
            if "sample" in name:
                newest += mixed[..., None, None] / newest[0, 0].numel()
            else:
                newest[:, :, newest.shape[2] // 2, newest.shape[3] // 2] += mixed
    into, _ = at_latents(vae)
    channels = into.weight.shape[0] // 2
    into.weight.data[channels:] = 0.0
    nn.init.constant_(into.bias[channels:], -5.0)


def at_latents(vae: Any) -> tuple[Any, list[Any]]:
    """Return the convolution that outputs latents, and those that read them."""
    if vae.quant_conv is not None:
        return vae.quant_conv, [vae.post_quant_conv]
    if isinstance(vae.encoder.conv_out, nn.Conv2d):
        return vae.encoder.conv_out, [vae.decoder.conv_in]
    norms = [one for name, one in vae.decoder.named_modules() if name.endswith(("conv_y.conv", "conv_b.conv"))]
    return vae.encoder.conv_out.conv, [vae.decoder.conv_in.conv, *norms]


def as_input(frames: np.ndarray) -> Tensor:
    """Convert uint8 `[..., height, width, 3]` to `[3, ..., height, width]` in -1..1."""
    return torch.from_numpy(frames).movedim(-1, 0).float() / 127.5 - 1


def as_frames(video: Tensor) -> np.ndarray:
    """Convert `[3, ..., height, width]` in -1..1 to uint8 `[..., height, width, 3]`."""
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().byte().movedim(0, -1).numpy()


def laid_out(x: Tensor) -> Tensor:
    """Store channels last in memory, which bfloat16 convolutions need to be fast."""
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def learn(
    vae: Any, file: Path, steps: int, pieces: Callable[[int], Tensor], look: Callable[[], None], kept: int | None = None
) -> None:
    """Train an autoencoder on `pieces(step)`, `[number, 3, ..., height, width]`.

    kept: number of latent dimensions that are used; the others are zeros.
    """
    begin(vae)
    if kept is not None:
        into, _ = at_latents(vae)
        for one in (into.weight, into.bias):
            one.data[kept : len(one) // 2] = 0.0
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.weight.data = laid_out(module.weight.data)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        seen = pieces(step)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(laid_out(seen)).latent_dist
            latents = posterior.sample(torch.Generator().manual_seed(step))
            latents = torch.cat([latents[:, :kept], torch.zeros_like(latents[:, len(latents[0, :kept]) :])], 1)
            again = vae.decode(latents).sample.float()
        mean, var = posterior.mean[:, :kept], posterior.var[:, :kept]
        kl = 0.5 * (mean.square() + var - 1 - var.log()).mean()
        difference, psnr = differs(again, seen)
        return difference + 1e-3 * kl, {"psnr": psnr, "kl": kl.item()}

    optimize(file, [vae], steps, RATE, loss, look, every=400)


def steady(
    vae: Any,
    file: Path,
    steps: int,
    rate: float,
    pieces: Callable[[int], Tensor],
    look: Callable[[], None],
    spread: Tensor,
) -> None:
    """Train the decoder alone, on latents with errors like a denoiser's.

    spread: `[channels, channels]`, multiplied with the normal noise that is added.
    """

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        seen = pieces(step)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(laid_out(seen)).latent_dist.mode().float()
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(step))
        latents = latents + torch.einsum("ncthw,cd->ndthw", noise, spread)
        with torch.autocast("cpu", torch.bfloat16):
            again = vae.decode(latents).sample.float()
        difference, psnr = differs(again, seen)
        return difference, {"psnr": psnr}

    optimize(file, [vae.decoder], steps, rate, loss, look, every=250)


def differs(again: Tensor, seen: Tensor) -> tuple[Tensor, float]:
    """Return the loss of images or clips `[number, 3, ..., height, width]`, and the signal-to-noise ratio."""
    # Edges count for themselves: blurred ones cost little of the plain difference.
    edges = sum(F.l1_loss(again.diff(dim=axis), seen.diff(dim=axis)) for axis in range(2, seen.ndim))
    psnr = -10 * math.log10(F.mse_loss(again.clamp(-1, 1), seen).item() / 4)
    return F.l1_loss(again, seen) + 0.5 * edges, psnr


def encoded(vae: Any, seen: Tensor) -> Tensor:
    """Encode `[3, ..., height, width]` to latents `[channels, ..., height, width]`."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return vae.encode(laid_out(seen[None])).latent_dist.mode()[0].float().contiguous()


def decoded(vae: Any, latents: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return vae.decode(latents[None]).sample[0]


def align(
    vae: Any,
    latents: Tensor,
    colours: Tensor,
    preview: tuple[Sequence[Sequence[float]], Sequence[float]],
    mean: Tensor,
    std: Tensor,
    kept: int | None = None,
) -> Tensor:
    """Fold another basis of the latents into the two convolutions next to them.

    Without `mean` and `std` the latents are then in the denoiser's scale. `preview`, ComfyUI's factors from channels to
    red, green and blue, then shows the right colours. Decoded results do not change.

    Latents are `[number, channels]`, the mean colours of their pixels `[number, 3]` in -1..1. kept: number of used
    dimensions; the others are constant, and the decoder ignores them. Returns an orthonormal basis of the used ones,
    `[channels, kept]`.
    """
    factors, bias = map(torch.tensor, preview)  # colour = latent @ factors + bias
    channels = len(factors)
    middle, identity = latents.mean(0), torch.eye(channels)
    centred = latents - middle
    to_colour = torch.linalg.lstsq(centred, colours - colours.mean(0)).solution
    shown = centred @ to_colour
    rest = identity - to_colour @ torch.linalg.lstsq(shown, centred).solution  # what colours tell nothing of
    _, sizes, directions = torch.linalg.svd(centred @ rest, full_matrices=False)
    count = (kept or channels) - 3
    sizes, directions = sizes[:count] / len(latents) ** 0.5, directions[:count].T
    # What carries nothing stays small: as unit noise it would ask the denoiser for what nobody sees.
    unseen = torch.linalg.svd(factors).U[:, 3 : 3 + count]
    matrix = to_colour @ torch.linalg.pinv(factors)
    matrix += rest @ directions / sizes.clamp(min=0.3 * sizes.max().item()) @ unseen.T
    shift = (colours.mean(0) - bias) @ torch.linalg.pinv(factors) - middle @ matrix
    back = torch.linalg.pinv(matrix, rtol=1e-4) / std[:, None]
    basis = torch.linalg.svd(matrix).Vh[: count + 3].T
    matrix, shift = matrix * std, shift * std + mean

    into, others = at_latents(vae)
    into.weight.data[:channels] = torch.tensordot(matrix.T, into.weight.data[:channels], 1)
    into.bias.data[:channels] = into.bias.data[:channels] @ matrix + shift
    for one in others:
        weight = one.weight.data
        one.weight.data = torch.tensordot(back, weight.movedim(1, 0), 1).movedim(0, 1).contiguous()
        # At the borders of a picture a kernel that sees beyond them is given zeros, which have another meaning now.
        one.bias.data += weight.flatten(2).sum(-1) @ (middle - (middle @ matrix + shift) @ back)
    return basis
