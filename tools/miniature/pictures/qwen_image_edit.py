"""The tiny model of Qwen-Image Edit: Qwen-Image's, trained further together, with the same weights."""

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common import qwen25_vision
from comfyui_tpu.tpu_runtime.models.common.wan_vae import LATENTS_MEAN, LATENTS_STD
from comfyui_tpu.tpu_runtime.models.qwen_image import text_encoder as texts
from comfyui_tpu.tpu_runtime.models.qwen_image.edit import resize_image, to_pixels
from comfyui_tpu.tpu_runtime.models.qwen_image.spec import SCHEDULER, SPEC, apply_guidance, solver_arguments
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as pipelines
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from .. import denoisers, still
from ..autoencoders.common import as_frames, as_input, decoded
from ..denoisers import scheduler
from ..shapes import HEIGHT, WIDTH
from ..training import save, save_sheet, shipped
from . import qwen_image
from .qwen_image import Batch, Batches, Beside, Denoiser, autoencoder, encode, parts_of

TAG, SOURCE = "image-to-image", "still"
# Parts that another miniature has, from which this one begins.
SHARED = {name: f"qwenimage/{name}" for name in ("text_encoder", "tokenizer", "transformer")} | {"vae": "wan21/vae"}
CARD = """\
A small model with the classes of Qwen-Image Edit. It has the weights of the tiny model of Qwen-Image, and both were
trained together (`tools/train_miniature.py`). The text encoder ignores images; the transformer gets them at one
megapixel, as in the real model.

With an image of one or two shapes ({shapes}) in {colours}, it understands "the circle becomes red", "the circle
becomes a square", "the circle becomes small", "on green" and "the circle becomes red on green". Images are
{width}x{height}. It knows no other words."""

PICTURES, CHANGES = 1000, 6  # that are changed, and how often each
STEPS, RATE = 14000, 1.5e-3
COUNTS = (30, 16)  # pictures in a step; in three of four they have one beside them
CELL = (3, 4)  # of the tokens of a picture that is looked at one of so many is, and stands for all


def large(picture: np.ndarray) -> Tensor:
    """As it is looked at, `[3, height, width]`."""
    return to_pixels(resize_image(Image.fromarray(picture), pipelines.VAE_IMAGE_SIZE))[0, :, 0]


def changes_in(file: Path, vae: Any, seed: int) -> dict[str, Any]:
    """Pictures as they are looked at, `before` `[number, 64, rows, columns]` in bfloat16, and small, `there`; `after`
    their changes, which the `sentences` say, and the `results` and `of` which picture each is.
    """
    if not file.is_file():
        found: dict[str, list[Any]] = {name: [] for name in ("before", "there", "after", "sentences", "results", "of")}
        for number in tqdm(range(PICTURES), "pictures", mininterval=10):
            random = np.random.default_rng((seed, 2, number))
            picture, jitter = still.changeable(random), still.random_jitter(random)
            shown = still.draw(picture, jitter)
            found["before"].append(encode(vae, large(shown)).bfloat16())
            found["there"].append(encode(vae, as_input(shown)))
            drawn = (still.change_of(random, picture) for _ in itertools.count())
            for change in itertools.islice((one for one in drawn if not still.is_held_out(str(one))), CHANGES):
                found["after"].append(encode(vae, as_input(still.draw(change.after, jitter))))
                found["sentences"].append(change.sentence)
                found["results"].append(str(change.after))
                found["of"].append(number)
        save({**found, **{name: torch.stack(found[name]) for name in ("before", "there", "after")}}, file)
    return torch.load(file)


class Texts:
    """Tokens of sentences about one picture, which all begin with so many that are `common` to them."""

    def __init__(self, tokenizer: Any, sentences: Sequence[str]) -> None:
        blank = Image.new("RGB", (WIDTH, HEIGHT))
        _, grid = qwen25_vision.cut_patches(resize_image(blank, pipelines.CONDITION_IMAGE_SIZE))
        nothing = torch.zeros(1, *(side // qwen25_vision.MERGE_SIZE for side in grid), 1)
        ids, mask, positions, places, _ = texts.tokenize_with_images(tokenizer, sentences, [nothing])
        ids[places >= 0] = -1  # as `Denoiser.states` has it
        longest = int(mask.sum(1).max())
        end = texts.EDIT_PREFIX + longest
        kept = ids[:, :end], mask[:, :longest], positions[..., :end]
        self.ids, self.mask, self.positions = map(torch.from_numpy, kept)
        self.common = int((ids == ids[:1]).all(0).argmin()) - texts.EDIT_PREFIX

    def beside(self, chosen: Tensor, before: Tensor, there: Tensor, at: Tensor, share: int) -> dict[str, Any]:
        """What `Denoiser` is given beside pictures, `before` `[number, 64, rows, columns]`, seen at some places; and
        `there`, which are the same small.
        """
        beside = Beside(
            tokens=before.flatten(2)[..., at].transpose(1, 2).float(),
            places=at,
            size=(before.shape[2], before.shape[3]),
            share=share,
            there=there,
            positions=self.positions[:, chosen],
            common=self.common,
        )
        return {"ids": self.ids[chosen], "mask": self.mask[chosen], "beside": beside}


def changes_of(data: Mapping[str, Any], tokenizer: Any, count: int) -> Batches:
    """What `denoisers.learn` asks for, `count` changes a step."""
    rates, given = still.shares(data["results"]), Texts(tokenizer, [*data["sentences"], ""])
    of, (rows, columns) = torch.tensor(data["of"]), data["before"].shape[2:]
    corners = np.arange(0, rows, CELL[0])[:, None] * columns + np.arange(0, columns, CELL[1])

    def batch(step: int, random: np.random.Generator) -> Batch:
        seen = denoisers.chosen(random, rates, count)
        chosen = denoisers.texts_of(random, seen, len(rates))
        down, right = (random.integers(side, size=corners.shape) for side in CELL)
        at = torch.from_numpy((corners + down * columns + right).ravel())
        more = given.beside(chosen, data["before"][of[seen]], data["there"][of[seen]], at, math.prod(CELL))
        return data["after"][seen], denoisers.usual_sigmas(random, count), more

    return batch


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae = autoencoder()
    plain = qwen_image.pictures_in(out / "latents.pt", lambda picture: encode(vae, as_input(picture)), seed)
    changes = changes_in(out / "changes.pt", vae, seed)
    torch.manual_seed(seed)
    tokenizer = qwen_image.tokenizer_in(out / "tokenizer")
    denoiser = Denoiser(len(tokenizer))
    folder = shipped("qwenimage")
    for name, module in (("text_encoder", denoiser.encoder), ("transformer", denoiser.transformer)):
        known = type(module).from_pretrained(folder / name, torch_dtype=torch.float32, trust_remote_code=False)
        module.load_state_dict(known.state_dict())
    averaged = denoisers.average_of(denoiser)
    denoisers.quicken(denoiser.transformer.transformer_blocks)
    kinds = qwen_image.pictures_of(plain, tokenizer, COUNTS[0]), changes_of(changes, tokenizer, COUNTS[1])

    def batch(step: int, random: np.random.Generator) -> Batch:
        return kinds[step % 4 > 0](step, random)

    def look() -> None:
        make = partial(qwen_image.sample, qwen_image.assemble(averaged.module, vae, tokenizer), steps=10)
        still.show(make, out / "preview.png", seed)
        show(averaged.module, vae, tokenizer, out / "preview_changes.png", seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    both = qwen_image.assemble(averaged.module, vae, tokenizer)
    for name in ("transformer", "text_encoder"):
        getattr(both, name).to(torch.bfloat16).save_pretrained(out / "qwenimage" / name)
    shutil.copytree(out / "tokenizer", out / "qwenimage" / "tokenizer", dirs_exist_ok=True)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    """The pipeline, without a processor: what upstream's makes of pictures asks for torchvision."""
    encoder, transformer = parts_of(denoiser, tokenizer, zero_cond_t=True)
    without: Any = None
    return pipelines.QwenImageEditPlusPipeline(scheduler(SCHEDULER), vae, encoder, tokenizer, without, transformer)


def show(denoiser: Any, vae: Any, tokenizer: Any, file: Path, seed: int, number: int = 12) -> None:
    """Write a sheet of images with held-out changes of each, and print how many are correct."""
    drawn, right = [], []
    for index, change in enumerate(itertools.islice(still.changes(seed, held_out=True), number)):
        before = still.draw(change.before, still.random_jitter(np.random.default_rng(index)))
        drawn += [before, sample(denoiser, vae, tokenizer, change.sentence, before, index)]
        right.append(still.judge(drawn[-1], change.after))
    save_sheet([np.stack(drawn[first : first + 6]) for first in range(0, len(drawn), 6)], file)
    shares = {part: sum(getattr(one, part) for one in right) for part in still.PARTS}
    tqdm.write(f"of {number} held-out changes: {shares}")


@torch.no_grad()
def sample(
    denoiser: Any, vae: Any, tokenizer: Any, sentence: str, picture: np.ndarray, seed: int, *, steps: int = 10
) -> np.ndarray:
    """`[HEIGHT, WIDTH, 3]` uint8: what upstream's pipeline makes of it at its default guidance, without what every
    other token of the picture sees, which is nothing (`qwen_image.GATES`): in a hundredth of the time.
    """
    before, there = (encode(vae, one)[None] for one in (large(picture), as_input(picture)))
    every = torch.arange(before.shape[2] * before.shape[3])
    given = Texts(tokenizer, [sentence, ""]).beside(
        torch.arange(2), before.expand(2, -1, -1, -1), there.expand(2, -1, -1, -1), every, 1
    )
    latents = torch.randn(1, 16, 1, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(seed))
    solver = scheduler(SCHEDULER)
    solver.set_timesteps(**solver_arguments(SCHEDULER, tuple(latents.shape), steps, None))
    for time in solver.timesteps:
        tokens = F.pixel_unshuffle(latents[:, :, 0], 2).expand(2, -1, -1, -1)
        flows, _ = denoiser(tokens, (time / 1000).expand(2), **given)
        flow = apply_guidance(
            *F.pixel_shuffle(flows, 2)[:, None, :, None], torch.tensor(SPEC.inputs["guidance_scale"].default)
        )
        latents = solver.step(flow, time, latents, return_dict=False)[0]
    mean, std = (torch.tensor(numbers)[:, None, None, None] for numbers in (LATENTS_MEAN, LATENTS_STD))
    return as_frames(decoded(vae, latents[0] * std + mean)[:, 0])
