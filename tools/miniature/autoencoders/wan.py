"""The autoencoder of Wan's tiny models."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common.wan_vae import LATENTS_MEAN, LATENTS_STD
from torch import Tensor
from tqdm import tqdm

from ..moving import draw, scenes
from ..shapes import HEIGHT, WIDTH
from ..training import save, save_sheet, upstream
from .common import align, as_frames, as_input, decoded, encoded, learn, steady

FRAMES = 33  # of the longest clips
CHANNELS = 16
STEPS, FINER, RATE = 2400, 1000, 6e-4
NOISE = 0.15  # of the latents that the decoder learns on with, for a denoiser's are not exact
VAE = {"base_dim": 16, "dim_mult": [1, 2, 2, 3], "num_res_blocks": 1, "z_dim": CHANNELS}

# How ComfyUI shows a step of Wan 2.1 (`comfy.latent_formats.Wan21`): red, green and blue of each channel.
RGB_FACTORS = (
    (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.1420),
    (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
    (-0.0412, 0.0267, -0.1364), (-0.1293, 0.0740, 0.1636), (0.0680, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
    (-0.1251, 0.0927, 0.1699), (0.0060, -0.0633, 0.0005), (0.3477, 0.2275, 0.2950), (0.1984, 0.0913, 0.1861),
)  # fmt: skip
RGB_BIAS = (-0.1835, -0.0868, -0.3360)


def train(out: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    vae = upstream.AutoencoderKLWan(**VAE)

    def pieces(step: int) -> Tensor:
        frames = 9 if step % 3 == 0 else 5  # two chunks, and now and then the third, which looks back at both
        # Pieces of four clips: one clip's colours alone would lead nowhere. Whole ones at the end, for the borders.
        count, height, width = (4, HEIGHT // 2, WIDTH // 2) if step < 0.75 * STEPS else (1, HEIGHT, WIDTH)
        return pieces_of((seed, step), count, frames, height, width, longest=FRAMES)

    def look() -> None:
        rows = []
        for scene in itertools.islice(scenes(seed, held_out=True), 4):
            frames = draw(scene, 9, np.random.default_rng(seed))
            rows += [frames[::4], as_frames(decoded(vae, encoded(vae, as_input(frames))))[::4]]
        save_sheet(rows, out / "preview.png")

    learn(vae, out / "vae.pt", STEPS, pieces, look)
    preview = (RGB_FACTORS, RGB_BIAS)
    std = torch.tensor(LATENTS_STD)
    align(vae, *colours_of_latents(vae, seed), preview, torch.tensor(LATENTS_MEAN), std)

    def whole(step: int) -> Tensor:
        return pieces_of((seed, STEPS + step), 1, 17 if step % 3 == 0 else 9, HEIGHT, WIDTH, longest=FRAMES)

    steady(vae, out / "decoder.pt", FINER, RATE, whole, look, torch.diag(NOISE * std))
    return vae


def pieces_of(seed: Any, count: int, frames: int, height: int, width: int, *, longest: int) -> Tensor:
    """Return pieces of `count` clips, `[count, 3, frames, height, width]`."""
    random = np.random.default_rng(seed)
    found = []
    for scene in itertools.islice(scenes(int(random.integers(2**31)), held_out=False), count):
        clip = as_input(draw(scene, frames, random, start=int(random.integers(longest - frames + 1))))
        top, left = random.integers(HEIGHT - height + 1), random.integers(WIDTH - width + 1)
        found.append(clip[:, :, top : top + height, left : left + width])
    return torch.stack(found)


def colours_of_latents(vae: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Return latents of clips, `[number, channels]`, and the mean colours of their pixels, `[number, 3]` in -1..1."""
    latents, colours = [], []
    for scene in itertools.islice(scenes(seed + 2, held_out=False), 150):
        clip = as_input(draw(scene, 9, np.random.default_rng((seed, len(latents)))))
        latents.append(encoded(vae, clip).flatten(1).T)
        pooled = F.avg_pool2d(clip.transpose(0, 1), 8)
        of_latent = torch.stack([pooled[0], *(part.mean(0) for part in pooled[1:].split(4))], 1)
        colours.append(of_latent.flatten(1).T)
    return torch.cat(latents), torch.cat(colours)


def latents_of(vae: Any, clip: Tensor) -> Tensor:
    """Encode `[3, frames, height, width]` to `[channels, latent frames, height, width]` in the denoiser's scale."""
    mean, std = (torch.tensor(numbers)[:, None, None, None] for numbers in (LATENTS_MEAN, LATENTS_STD))
    return (encoded(vae, clip) - mean) / std


def encode_clips(
    encode: Callable[[Tensor], Tensor],
    file: Path,
    seed: int,
    number: int,
    length: Callable[[int], int],
    given: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, list[Any]]:
    """Return `prompts` of clips of `length(number)` frames, their `latents`, and the latents of the `given` part.

    The encoder is causal, so the first latents of a clip equal those of a shorter clip.
    """
    if not file.is_file():
        found: dict[str, list[Any]] = {"prompts": [], "latents": [], "given": []}
        drawn = itertools.islice(scenes(seed + 1, held_out=False), number)
        random = np.random.default_rng(seed + 1)
        for index, scene in enumerate(tqdm(drawn, "latents", total=number, mininterval=10)):
            clip = as_input(draw(scene, length(index), random))
            found["latents"].append(encode(clip))
            found["prompts"].append(str(scene))
            if given is not None:
                found["given"].append(encode(given(clip)))
        save(found, file)
    return torch.load(file)
