"""The miniature of Wan 2.2 image to video: Wan 2.1's, which learns on with a first frame given."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_tpu.tpu_runtime.models.wan.wan22_i2v import SPEC
from PIL import Image
from torch import Tensor

from . import denoisers
from .moving import Scene, draw, show
from .wan import Denoiser, sample, scheduler
from .wan_vae import encode_clips, latents_of, upstream

TAG, SOURCE = "image-to-video", "moving"
CARD = """\
The classes of Wan 2.2's image-to-video model, made small: the miniature of Wan 2.1, which learnt on with a first frame
given (`tools/train_miniature.py`). Both experts are one network. Text encoder, tokenizer and autoencoder are
those of the miniature of Wan 2.1, and lie with it.

It knows first frames with one or two shapes ({shapes}) in {colours}, and
the sentence that says what they do, such as "a red circle moves right on blue": {motions}.
Videos are {width}x{height}, of up to 17 frames."""

CLIPS, STEPS, RATE = 1500, 2000, 1e-3
LENGTHS, LATENT_FRAMES = (5, 5, 3), 60
# Parts that another miniature has, from which this one begins.
SHARED = {name: f"wan21/{name}" for name in ("text_encoder", "tokenizer", "vae")}
SHARED["transformer_2"] = "wan22i2v/transformer"
START = Path(__file__).resolve().parents[2] / "miniatures" / "wan21"


def widened(transformer: Any) -> Any:
    """With channels for a mask of four, of which nothing is seen yet, and for latents, seen as the sample's are:
    from nothing, the place of what is given was not learnt in 400 steps.
    """
    wide = upstream.WanTransformer3DModel.from_config({**transformer.config, "in_channels": 36})
    weights = transformer.state_dict()
    kernel = torch.zeros_like(wide.patch_embedding.weight)
    for first in (0, 4 + transformer.config.in_channels):
        kernel[:, first : first + transformer.config.in_channels] = weights["patch_embedding.weight"]
    wide.load_state_dict({**weights, "patch_embedding.weight": kernel})
    return wide


def with_mask(given: Tensor) -> Tensor:
    """`[channels, latent frames, height, width]` with four channels before it, which say what is given."""
    mask = torch.zeros(4, *given.shape[1:])
    mask[:, 0] = 1.0
    return torch.cat([mask, given])


def train(out: Path, seed: int) -> Any:
    """The pipeline."""
    base = upstream.WanPipeline.from_pretrained(START, torch_dtype=torch.float32, trust_remote_code=False)
    shutil.copytree(START / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    encode = partial(latents_of, base.vae)
    clips = encode_clips(encode, out / "latents.pt", seed, CLIPS, lambda _: 17, given=True)
    prompts, latents, given = clips["prompts"], clips["latents"], [with_mask(one) for one in clips["given"]]
    tokens = base.tokenizer([*prompts, ""], padding="longest", return_tensors="pt")
    ids, masks = tokens["input_ids"], tokens["attention_mask"]
    torch.manual_seed(seed)
    denoiser = Denoiser(base.text_encoder.requires_grad_(False), widened(base.transformer))
    averaged = denoisers.average_of(denoiser, 0.98)  # few steps
    denoiser.quicken(ids.shape[1])

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        length = LENGTHS[step % len(LENGTHS)]
        count = LATENT_FRAMES // length
        chosen = random.choice(len(latents), count, replace=False)
        clean, shown = (torch.stack([of[number][:, :length] for number in chosen]) for of in (latents, given))
        texts = denoisers.texts_of(random, chosen, len(prompts))
        more = {"ids": ids[texts], "mask": masks[texts], "given": shown}
        return clean, denoisers.usual_sigmas(random, count), more

    def look() -> None:
        pipeline = assemble(base, averaged.module.transformer)

        def make(scene: Scene, number: int) -> np.ndarray:
            first = Image.fromarray(draw(scene, 1, np.random.default_rng(number))[0])
            return sample(pipeline, scene, number, frames=17, steps=8, guidance_scale=3.5, image=first)

        show(make, out, seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    return assemble(base, averaged.module.transformer)


def assemble(base: Any, transformer: Any) -> Any:
    """The pipeline, whose two experts are one network."""
    pipeline = upstream.WanImageToVideoPipeline(
        tokenizer=base.tokenizer,
        text_encoder=base.text_encoder,
        vae=base.vae,
        scheduler=scheduler(),
        transformer=transformer,
        transformer_2=transformer,
        boundary_ratio=SPEC.published.index["boundary_ratio"],
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
