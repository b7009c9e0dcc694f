"""The tiny model of CogVideoX 1.5 image to video: that of text to video, trained further for both tasks."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_tpu.tpu_runtime.models.cogvideox.spec import SCHEDULER
from PIL import Image
from torch import Tensor

from .. import denoisers
from ..autoencoders.cogvideox import CHANNELS, KEPT, VAE, latents_of
from ..autoencoders.wan import encode_clips
from ..denoisers import scheduler
from ..moving import Scene, draw, show
from ..training import shipped, upstream
from . import cogvideox

TAG, SOURCE = "image-to-video", "moving"
CARD = """\
A small model with the classes of CogVideoX 1.5's image-to-video model. It is the tiny model for text to video,
trained further with and without a first frame (`tools/train_miniature.py`). Only its first projection, which also
gets that frame, differs from that model's weights.

It understands first frames with one or two shapes ({shapes}) in {colours}. The sentence says what they do, such as "a
red circle moves right on blue": {motions}. Videos are {width}x{height} with 9 frames."""

STEPS, RATE = 7000, 1e-3
# Parts that another miniature has, from which this one begins.
SHARED = {name: f"cogvideox/{name}" for name in ("text_encoder", "tokenizer", "transformer", "vae")}
FIRST = "patch_embed.proj.weight"
OFS_DIM = cogvideox.TRANSFORMER["time_embed_dim"]


def basis_of(latents: Tensor) -> Tensor:
    """Return an orthonormal basis `[channels, kept]` of the varying dimensions of latents `[clips, channels, ...]`."""
    flat = latents.transpose(0, 1).flatten(1)
    return torch.linalg.svd(flat - flat.mean(1, keepdim=True), full_matrices=False).U[:, :KEPT]


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    start = shipped("cogvideox")
    base = upstream.CogVideoXPipeline.from_pretrained(start, torch_dtype=torch.float32, trust_remote_code=False)
    shutil.copytree(start / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    encode = partial(latents_of, base.vae)
    clips = encode_clips(encode, out / "latents.pt", seed, cogvideox.CLIPS, lambda _: 9, lambda clip: clip[:, :1])
    prompts, latents, pictures = clips["prompts"], torch.stack(clips["latents"]), torch.stack(clips["given"])
    basis = basis_of(latents)
    latents = cogvideox.filled(latents)
    # As upstream scales pictures (see `cogvideox_i2v.encode_image`): not as samples.
    pictures = pictures / VAE["scaling_factor"] ** 2
    ids, length = cogvideox.ids_of(base.tokenizer, prompts)
    torch.manual_seed(seed)
    wide = denoisers.widened(base.transformer, FIRST, (0, CHANNELS), in_channels=2 * CHANNELS, ofs_embed_dim=OFS_DIM)
    # Nothing else says that there is no picture, or the two would differ in more than their first product.
    for parameter in wide.ofs_embedding.linear_2.parameters():
        torch.nn.init.zeros_(parameter.requires_grad_(False))
    denoiser = cogvideox.Denoiser(base.text_encoder.requires_grad_(False), length, wide)
    averaged = denoisers.average_of(denoiser)
    rates = denoisers.rates_of(prompts, cogvideox.HARDEST)
    denoiser.quicken()

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        count = 2 * cogvideox.TOKEN_FRAMES // latents.shape[2]
        chosen = denoisers.chosen(random, rates, count)
        picture = torch.zeros_like(latents[chosen])
        if step % 2:
            picture[:, :, :1] = pictures[chosen]
        texts = denoisers.texts_of(random, chosen, len(prompts))
        return latents[chosen], cogvideox.times(random, count), {"ids": ids[texts], "picture": picture}

    def look() -> None:
        pipeline = assemble(base, averaged.module.transformer)

        def make(scene: Scene, number: int) -> np.ndarray:
            first = Image.fromarray(draw(scene, 1, np.random.default_rng(number))[0])
            return cogvideox.sample(pipeline, scene, number, steps=12, image=first)

        show(make, out, seed)

    counted, file = partial(cogvideox.counted, basis), out / "denoiser.pt"
    denoisers.learn(denoiser, averaged, file, seed, STEPS, RATE, batch, look, counted, cogvideox.path)
    transformer = averaged.module.transformer
    narrow = denoisers.narrowed(transformer, FIRST, CHANNELS, ofs_embed_dim=None)
    narrow.to(torch.bfloat16).save_pretrained(out / "cogvideox" / "transformer")
    return assemble(base, transformer)


def assemble(base: Any, transformer: Any) -> Any:
    pipeline = upstream.CogVideoXImageToVideoPipeline(
        base.tokenizer, base.text_encoder, base.vae, transformer, scheduler(SCHEDULER)
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
