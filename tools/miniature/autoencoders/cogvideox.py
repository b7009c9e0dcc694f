"""The autoencoder of the tiny model of CogVideoX 1.5."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..moving import Scene, draw, show
from ..shapes import HEIGHT, WIDTH
from ..training import upstream
from .common import align, as_frames, as_input, decoded, encoded, learn, steady
from .wan import colours_of_latents, pieces_of

FRAMES = 17  # of the longest clips; the miniature's default are 9
CHANNELS = 16
# Of the 16 dimensions of a latent: a token has eight of them.
KEPT = 8
STEPS, FINER, RATE = 2600, 1500, 6e-4
NOISE = 0.3  # of the latents that the decoder learns on with, for a denoiser's are not exact
VAE = {
    "block_out_channels": (16, 16, 20, 24),
    "invert_scale_latents": True,
    "latent_channels": CHANNELS,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_height": 480,
    "sample_width": 720,
    "scaling_factor": 0.7,
}
# ComfyUI has no colours for this model's channels: three of them, and nothing to add.
PREVIEW = (((0.65, 0.0, 0.0), (0.0, 0.65, 0.0), (0.0, 0.0, 0.65), *[(0.0, 0.0, 0.0)] * (CHANNELS - 3)), (0.0,) * 3)


def train(out: Path, seed: int) -> tuple[Any, Tensor]:
    """Train the autoencoder, then the decoder alone. Returns it and the basis of its used latent dimensions."""
    torch.manual_seed(seed)
    vae = upstream.AutoencoderKLCogVideoX(**VAE)

    def pieces(step: int) -> Tensor:
        # Now and then with the second chunk, which looks back at the first.
        frames, whole = 17 if step % 6 == 5 else 9, step >= 0.7 * STEPS
        count, height, width = (1, HEIGHT, WIDTH) if whole else (4, HEIGHT // 2, WIDTH // 2)
        return pieces_of((seed, step), (2 if frames == 9 and whole else count), frames, height, width, longest=FRAMES)

    def again(scene: Scene, _: int) -> np.ndarray:
        clip = as_input(draw(scene, 9, np.random.default_rng(seed)))
        return as_frames(decoded(vae, encoded(vae, clip)))

    def look() -> None:
        show(again, out, seed, 40)

    learn(vae, out / "vae.pt", STEPS, pieces, look, KEPT)
    std = torch.full((CHANNELS,), 1 / VAE["scaling_factor"])
    basis = align(vae, *colours_of_latents(vae, seed), PREVIEW, torch.zeros(CHANNELS), std, KEPT)

    spread = basis @ basis.T * NOISE * std[0]
    steady(vae, out / "decoder.pt", FINER, RATE, lambda step: pieces(STEPS + step), look, spread)
    return vae, basis


def latents_of(vae: Any, clip: Tensor) -> Tensor:
    """Encode `[3, frames, height, width]` to `[channels, latent frames, height, width]` in the denoiser's scale."""
    return encoded(vae, clip) * VAE["scaling_factor"]
