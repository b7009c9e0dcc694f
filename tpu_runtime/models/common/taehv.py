"""TAEHV's decoder as a torch module, because no library has one. Parameters are named as in its published files.

Source: `taehv.py` of https://github.com/madebyollin/taehv.
"""

import itertools
from collections.abc import Sequence

from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import nn

# Channels of the levels, and the number of frames that each level returns per frame; each doubles rows and columns.
WIDTHS, GROWTH = (256, 128, 64, 64), (1, 2, 2)


class MemBlock(nn.Module):
    """Three convolutions of a frame, concatenated with the previous frame as channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second, third = (nn.Conv2d(number, width, 3, padding=1) for number in (2 * width, width, width))
        self.conv = nn.Sequential(first, nn.Identity(), second, nn.Identity(), third)


class TGrow(nn.Module):
    """A pointwise convolution that turns a frame into several."""

    def __init__(self, width: int, frames: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * frames, 1, bias=False)


class TAEHV(nn.Module, ConfigMixin):
    """Parameters and config only: `light` computes with them. `nn.Identity` fills indices without weights."""

    config_name = "config.json"

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 16,
        patch_size: int = 1,
        is_lightx2v: bool = False,
        latents_mean: Sequence[float] | None = None,
        latents_std: Sequence[float] | None = None,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Identity(), nn.Conv2d(latent_channels, WIDTHS[0], 3, padding=1), nn.Identity()]
        for (width, following), frames in zip(itertools.pairwise(WIDTHS), GROWTH, strict=True):
            layers += [*(MemBlock(width) for _ in range(3)), nn.Identity(), TGrow(width, frames)]
            layers.append(nn.Conv2d(width, following, 3, padding=1, bias=False))
        layers += [nn.Identity(), nn.Conv2d(WIDTHS[-1], 3 * patch_size**2, 3, padding=1)]
        self.decoder = nn.Sequential(*layers)
