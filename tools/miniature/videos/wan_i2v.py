"""The tiny model of Wan 2.2 image to video: Wan 2.1's, trained further with and without a first frame."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_tpu.tpu_runtime.models.wan.i2v import SPEC
from comfyui_tpu.tpu_runtime.models.wan.spec import SCHEDULER
from PIL import Image
from torch import Tensor

from .. import denoisers
from ..autoencoders.wan import CHANNELS, FRAMES, encode_clips, latents_of
from ..denoisers import scheduler
from ..moving import Scene, draw, show
from ..training import shipped, upstream
from .wan import Denoiser, sample

TAG, SOURCE = "image-to-video", "moving"
CARD = """\
A small model with the classes of Wan 2.2's image-to-video model. It is the tiny model of Wan 2.1, trained further
with and without a first frame (`tools/train_miniature.py`). Both experts are one network. Only its first projection,
which also gets that frame, differs from the weights of Wan 2.1's tiny model.

It understands first frames with one or two shapes ({shapes}) in {colours}. The sentence says what they do, such as "a
red circle moves right on blue": {motions}. Videos are {width}x{height} with up to 17 frames."""

CLIPS, STEPS, RATE = 4800, 8000, 1e-3
# Latent frames of the clips of a step, and whether their first frame is given, in turn; latent frames in a step.
KINDS = ((5, False), (3, True), (5, False), (5, True), (9, False), (5, True))
LATENT_FRAMES = 72
# How much oftener what is learnt last is seen: in the first half of the steps, and then.
HARDEST = ({"turns": 2.5}, {"turns": 6.0})
# Parts that another miniature has, from which this one begins.
SHARED = {name: f"wan21/{name}" for name in ("text_encoder", "tokenizer", "transformer", "vae")}
SHARED["transformer_2"] = "wan21/transformer"
FIRST = "patch_embedding.weight"  # of the transformer: all that the two do not share


def before_grey(clip: Tensor) -> Tensor:
    """Return a clip's first frame, followed by grey ones."""
    return torch.cat([clip[:, :1], torch.zeros_like(clip[:, 1:])], 1)


def with_mask(given: Tensor) -> Tensor:
    """`[channels, latent frames, height, width]` with four channels before it, which say what is given."""
    mask = torch.zeros(4, *given.shape[1:])
    mask[:, 0] = 1.0
    return torch.cat([mask, given])


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    start = shipped("wan21")
    base = upstream.WanPipeline.from_pretrained(start, torch_dtype=torch.float32, trust_remote_code=False)
    shutil.copytree(start / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    clips = encode_clips(
        partial(latents_of, base.vae),
        out / "latents.pt",
        seed,
        CLIPS,
        lambda index: FRAMES if index % 6 == 0 else 17,
        before_grey,
    )
    prompts, latents, pictures = clips["prompts"], clips["latents"], [with_mask(one) for one in clips["given"]]
    tokens = base.tokenizer([*prompts, ""], padding="longest", return_tensors="pt")
    ids, masks = tokens["input_ids"], tokens["attention_mask"]
    torch.manual_seed(seed)
    # The sample, a mask of four, and what is given.
    denoiser = Denoiser(
        base.text_encoder.requires_grad_(False),
        denoisers.widened(base.transformer, FIRST, (0, 4 + CHANNELS), in_channels=36),
    )
    averaged = denoisers.average_of(denoiser)
    denoiser.quicken(ids.shape[1])
    lengths = np.array([one.shape[1] for one in latents])
    rates = [denoisers.rates_of(prompts, hardest) for hardest in HARDEST]

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        length, is_given = KINDS[step % len(KINDS)]
        count = LATENT_FRAMES // length
        chosen = denoisers.chosen(random, rates[2 * step // STEPS] * (lengths >= length), count)
        clean, shown = (torch.stack([of[number][:, :length] for number in chosen]) for of in (latents, pictures))
        texts = denoisers.texts_of(random, chosen, len(prompts))
        more = {"ids": ids[texts], "mask": masks[texts], "given": shown if is_given else torch.zeros_like(shown)}
        return clean, denoisers.usual_sigmas(random, count), more

    def look() -> None:
        pipeline = assemble(base, averaged.module.transformer)

        def make(scene: Scene, number: int) -> np.ndarray:
            first = Image.fromarray(draw(scene, 1, np.random.default_rng(number))[0])
            return sample(pipeline, scene, number, frames=17, steps=8, guidance_scale=3.5, image=first)

        show(make, out, seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    transformer = averaged.module.transformer
    denoisers.narrowed(transformer, FIRST, CHANNELS).to(torch.bfloat16).save_pretrained(out / "wan21" / "transformer")
    return assemble(base, transformer)


def assemble(base: Any, transformer: Any) -> Any:
    """Return the pipeline, whose two experts are one network."""
    pipeline = upstream.WanImageToVideoPipeline(
        tokenizer=base.tokenizer,
        text_encoder=base.text_encoder,
        vae=base.vae,
        scheduler=scheduler(SCHEDULER),
        transformer=transformer,
        transformer_2=transformer,
        boundary_ratio=SPEC.published.index["boundary_ratio"],
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
