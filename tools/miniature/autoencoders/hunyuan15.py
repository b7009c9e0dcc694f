"""The autoencoder of the tiny model of HunyuanVideo 1.5."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..moving import Scene, draw, show
from ..shapes import HEIGHT, WIDTH
from ..training import optimize, upstream
from .common import as_frames, as_input, decoded, differs, encoded, laid_out, steady
from .wan import pieces_of

FRAMES = 9  # what the miniature's defaults ask for
CHANNELS = 32
STEPS, FINER, RATE, FINER_RATE = 7500, 4000, 4e-4, 3e-4
NOISE = 0.08  # of the latents that the decoder learns on with, for a denoiser's are not exact
# Pieces of clips in a step, and their frames, in turn.
PIECES = ((3, 5), (10, 1), (3, 5), (10, 1), (2, 9))
VAE = {
    "block_out_channels": (12, 24, 24, 48, 64),
    "latent_channels": CHANNELS,
    "layers_per_block": 1,
    "scaling_factor": 2.5,
}
# Of a latent's channels, and of so many in the decoder, those of a clip's first frame; the others are those of the
# other frames. Upstream's class lays out the first frame otherwise than the others, by the same weights, so that
# without this they stand in each other's way: 15 dB after 450 steps where these had 18.
FIRST = {32: 12, 64: 24, 48: 16, 24: 0}


def train(out: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    vae = upstream.AutoencoderKLHunyuanVideo15(**VAE)
    begin(vae)
    for name, parameter in vae.named_parameters():
        parameter.requires_grad_(not is_idle(name))
    # What adds nothing takes no time; of the decoder's blocks of 64 channels the second is the first again.
    idle = (vae.encoder.mid_block, vae.decoder.mid_block.attentions)
    vae.encoder.mid_block, vae.decoder.mid_block.attentions = nn.Identity(), nn.ModuleList([nn.Identity()])
    for resnets in (vae.decoder.mid_block.resnets, vae.decoder.up_blocks[0].resnets):
        resnets[1] = resnets[0]
    convolutions = {name: one for name, one in vae.named_modules() if isinstance(one, nn.Conv3d)}
    for name, one in convolutions.items():
        parametrize.register_parametrization(one, "weight", Folded(one.weight.shape, apart(one.weight.shape, name)))

    def pieces(step: int) -> Tensor:
        if step >= 0.8 * STEPS:
            return pieces_of((seed, step), 2, FRAMES if step % 4 else 1, HEIGHT, WIDTH, longest=FRAMES)
        count, frames = PIECES[step % len(PIECES)]
        return pieces_of((seed, step), count, frames, 32, 48, longest=FRAMES)

    def again(scene: Scene, _: int) -> np.ndarray:
        clip = as_input(draw(scene, FRAMES, np.random.default_rng(seed)))
        return as_frames(decoded(vae, encoded(vae, clip)))

    def look() -> None:
        show(again, out, seed, 24)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        seen = pieces(step)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(laid_out(seen)).latent_dist
            mean, logvar = posterior.mean.float(), posterior.logvar.float()
            noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(step))
            again = vae.decode((mean + 0.1 * noise) * counted(mean)).sample.float()
        kl = (mean.square() + (logvar + 6).square()).mean()
        other = (mean * (1 - counted(mean))).square().mean()
        difference, psnr = differs(again, seen)
        return difference + 3e-3 * kl + 0.1 * other, {"psnr": psnr, "kl": kl.item(), "other": other.item()}

    optimize(out / "vae.pt", [vae], STEPS, RATE, loss, look, every=500)
    spread = NOISE * torch.eye(CHANNELS)
    steady(vae, out / "decoder.pt", FINER, FINER_RATE, lambda step: pieces(STEPS + step), look, spread)
    for one in convolutions.values():
        parametrize.remove_parametrizations(one, "weight")
    vae.encoder.mid_block, vae.decoder.mid_block.attentions = idle
    whole = upstream.AutoencoderKLHunyuanVideo15(**VAE)  # with weights of its own for each block
    whole.load_state_dict(vae.state_dict())
    return whole


def begin(vae: Any) -> None:
    """Weights to begin with: plain convolutions mix channels, blocks add hardly anything, those that make the picture
    larger take away what the class passes on anyway.
    """
    for name, module in vae.named_modules():
        if not isinstance(module, nn.Conv3d):
            continue
        assert module.bias is not None
        nn.init.zeros_(module.bias)
        weight = module.weight.data
        deviation = 1 / math.sqrt(weight[0].numel())
        if is_idle(name):
            weight.zero_()
        elif "conv2" in name or name == "decoder.conv_in.conv":
            weight.normal_(std=0.02 * deviation)
        elif "upsample" in name:
            begin_larger(weight, in_time="blocks.0" in name or "blocks.1" in name)
        else:
            weight.normal_(std=0.5 * deviation)
            if "downsample" not in name:
                newest = weight[:, :, -1, weight.shape[3] // 2, weight.shape[4] // 2]
                newest += nn.init.orthogonal_(torch.empty(newest.shape))
    into = vae.encoder.conv_out.conv
    into.weight.data[CHANNELS:] = 0.0
    nn.init.constant_(into.bias[CHANNELS:], -6.0)


def begin_larger(weight: Tensor, *, in_time: bool) -> None:
    """Of `HunyuanVideo15Upsample`: the same to each part of a pixel."""
    rows, channels = weight.shape[:2]
    newest = weight[:, :, -1, 1, 1]
    if not in_time:
        weight.normal_(std=0.2 / math.sqrt(weight[0].numel()))
        mixed = 2 * nn.init.orthogonal_(torch.empty(rows // 4, channels))
        newest += mixed.repeat(4, 1) - torch.eye(channels).repeat_interleave(rows // channels, 0)
        return
    width = rows // 8
    into, out = FIRST[channels], FIRST[width]
    weight.normal_(std=0.1 / math.sqrt(weight[0].numel()))
    of_first = torch.arange(rows) % width < (out or width)
    weight[of_first & (torch.arange(rows) % width < out), into:] = 0.0
    weight[~of_first, :into] = 0.0
    for row in range(rows):
        part, channel = divmod(row, width)
        passed = [row * channels // rows]  # to the other frames; to the first one by every other part
        if part % 2 == 0:
            passed.append(part // 2 * (channels // 4) + channel * channels // (4 * width))
        for number, source in enumerate(passed):
            if (source < into) == (number == 1):
                newest[row, source] -= 1.0
    first = 2 * nn.init.orthogonal_(torch.empty(out or width, into))
    others = 2 * nn.init.orthogonal_(torch.empty(width - out, channels - into))
    for start in range(0, rows, width):
        newest[start : start + (out or width), :into] += first
        newest[start + out : start + width, into:] += others


def is_idle(name: str) -> bool:
    """What is nothing, and stays so."""
    return "encoder.mid_block" in name or "mid_block.attentions" in name


def apart(shape: torch.Size, name: str) -> Tensor | None:
    """Which weights of a kernel count, `[out, in]`, where the first frame and the others have channels of their own;
    None elsewhere.
    """
    inner = ("decoder.mid_block.resnets", "decoder.up_blocks.0.resnets", "decoder.up_blocks.1.resnets")
    if not name.startswith((*inner, "decoder.conv_in")):
        return None
    of_first = [torch.arange(count) < FIRST[count] for count in shape[:2]]
    return (of_first[0][:, None] == of_first[1]).float()


def counted(latents: Tensor) -> Tensor:
    """Return which elements of `[clips, channels, frames, height, width]` count."""
    found = torch.ones_like(latents)
    found[:, FIRST[CHANNELS] :, :1] = 0.0
    found[:, : FIRST[CHANNELS], 1:] = 0.0
    return found


class Folded(nn.Module):
    """A kernel as a matrix for Muon; only the elements in `kept` `[out, in]` are trained."""

    def __init__(self, shape: torch.Size, kept: Tensor | None) -> None:
        super().__init__()
        self.shape = shape
        self.kept = torch.ones(shape[:2]) if kept is None else kept

    def forward(self, matrix: Tensor) -> Tensor:
        return laid_out(matrix.view(self.shape) * self.kept[:, :, None, None, None])

    def right_inverse(self, kernel: Tensor) -> Tensor:
        return kernel.flatten(1)


def latents_of(vae: Any, clip: Tensor) -> Tensor:
    """Encode `[3, frames, height, width]` to `[channels, latent frames, height, width]` in the denoiser's scale."""
    return encoded(vae, clip) * vae.config.scaling_factor
