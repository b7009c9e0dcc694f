"""The tiny model of Z-Image Turbo: that of Z-Image, distilled to need no guidance."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common import qwen3
from comfyui_tpu.tpu_runtime.models.z_image.spec import SPEC
from comfyui_tpu.tpu_runtime.models.z_image.spec import TURBO_STEPS as STEPS_OF_A_PICTURE
from comfyui_tpu.tpu_runtime.models.z_image.transformer import SEQ_MULTIPLE
from torch import Tensor

from .. import denoisers, still
from ..training import optimize, shipped, upstream
from . import z_image
from .z_image import Denoiser, assemble, latents_in, sample

TAG, SOURCE = "text-to-image", "still"
SHARED = {**z_image.SHARED, "text_encoder": "zimagebase/text_encoder", "tokenizer": "zimagebase/tokenizer"}
CARD = """\
A small model with the classes of Z-Image Turbo, distilled from the [tiny model of Z-Image](../zimagebase/README.md).
Its transformer learnt to return the guided prediction in one call (`tools/train_miniature.py`). It shares all other
networks with that model, whose card lists the sentences that it understands. It uses eight steps without guidance, as
the real model does. Corners are slightly elongated."""

STEPS, RATE = 2500, 1e-3
COUNT = 32  # pictures in a step
GUIDANCE = 3.0  # that is learnt: so much of what a prompt adds is added once more


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    start = shipped("zimagebase")
    base = upstream.ZImagePipeline.from_pretrained(start, torch_dtype=torch.float32, trust_remote_code=False)
    shutil.copytree(start / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    data = latents_in(out / "latents.pt", base.vae, seed)
    prompts, latents = data["prompts"], data["latents"]
    torch.manual_seed(seed)
    ids, masks = map(torch.from_numpy, qwen3.tokenize(base.tokenizer, [*prompts, ""], SEQ_MULTIPLE, thinks=True))
    teacher, denoiser = (Denoiser(len(base.tokenizer)) for _ in range(2))
    for one in (teacher, denoiser):
        one.text.load_state_dict(base.text_encoder.state_dict())
        one.text.requires_grad_(False)
        one.transformer.load_state_dict(base.transformer.state_dict())
        denoisers.quicken([*one.transformer.layers, *one.transformer.noise_refiner])
    averaged = denoisers.average_of(denoiser)
    rates = still.shares(prompts)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        averaged.update_parameters(denoiser)
        random = np.random.default_rng((seed, step))
        seen = denoisers.chosen(random, rates, COUNT)
        sigma = denoisers.usual_sigmas(random, COUNT)
        share = sigma[:, None, None, None]
        noisy = (1 - share) * latents[seen]
        noisy = noisy + share * torch.from_numpy(random.standard_normal(noisy.shape, np.float32))
        with torch.no_grad():
            asked = np.concatenate([seen, np.full(COUNT, len(prompts))])
            both, _ = teacher(noisy.repeat(2, 1, 1, 1), sigma.repeat(2), ids[asked], masks[asked])
            of_prompt, of_none = both.chunk(2)
        velocity, _ = denoiser(noisy, sigma, ids[seen], masks[seen])
        error = F.mse_loss(velocity, of_prompt + GUIDANCE * (of_prompt - of_none))
        return error, {"error": error.item()}

    def look() -> None:
        make = partial(sample, finished(), steps=STEPS_OF_A_PICTURE, guidance=0.0)
        still.show(make, out / "preview.png", seed)

    def finished() -> Any:
        return assemble(averaged.module, base.vae, base.tokenizer, SPEC)

    optimize(out / "denoiser.pt", [denoiser, averaged], STEPS, RATE, loss, look, every=500)
    return finished()
