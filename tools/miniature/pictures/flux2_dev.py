"""The tiny model of FLUX.2 dev: FLUX.2 klein's, trained further together, each with its own text encoder."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_tpu.tpu_runtime.models.common import qwen3
from comfyui_tpu.tpu_runtime.models.flux2 import spec, text_encoder
from comfyui_tpu.tpu_runtime.tokenization import load_tokenizer
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from .. import denoisers, still
from ..denoisers import scheduler
from ..shapes import HEIGHT, WIDTH
from ..training import shipped, upstream, without_case
from . import flux2_klein
from .flux2_klein import Batch, Denoiser, Text, batches_of, counted, encode_pictures, let_learn

TAG, SOURCE = "text-to-image", "still"
# Parts that another miniature has, from which this one begins.
SHARED = {name: f"flux2klein/{name}" for name in ("transformer", "vae")}
CARD = """\
A small model with the classes of FLUX.2 dev. It has the transformer and the autoencoder of the tiny model of FLUX.2
klein. The transformer was trained further with both text encoders (`tools/train_miniature.py`). It ignores its
guidance input.

It understands sentences such as "a large red circle left on blue" and "a red circle and a small green square on
blue": one or two shapes ({shapes}) in {colours}. With a reference image of that kind, it understands the same changes
as klein's. Images are {width}x{height}. It knows no other words."""

STEPS, RATE = 11000, 1.2e-3
# Whose text encoder it is in a step, and whether a picture is changed, in turn.
KINDS = ((0, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0), (0, 1))
TEXT_CONFIG = {
    "head_dim": 16,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "model_type": "mistral",
    "num_attention_heads": 2,
    # The last layer is none of those whose states are used: a norm follows it.
    "num_hidden_layers": max(text_encoder.STATES) + 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": None,
}
VISION_CONFIG = text_encoder.TEXT_ENCODER.tiny["vision_config"]
LAYERS = (0, *text_encoder.STATES[:-1])  # that learn, one before each state that is used; all others add nothing


def tokenizer_in(folder: Path) -> Any:
    """The class's own, to which each word is a token, and so is the system message, which is always the same."""
    if not folder.is_dir():
        text_encoder.write_tokenizer(folder)
        file = str(folder / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.add_special_tokens([SYSTEM_MESSAGE])
        tokenizer.add_tokens(
            [AddedToken(word, single_word=True, lstrip=True, normalized=True) for word in flux2_klein.WORDS]
        )
        tokenizer.save(file)
        without_case(folder)
    return load_tokenizer(folder)


def make_text_encoder(vocabulary: int) -> Any:
    text = {**TEXT_CONFIG, "vocab_size": vocabulary}
    config = Mistral3Config(text_config=text, vision_config=dict(VISION_CONFIG), image_token_index=7)
    encoder: Any = Mistral3ForConditionalGeneration(config)
    for parameter in encoder.parameters():
        parameter.requires_grad_(False)
    for weight in encoder.model.vision_tower.parameters():
        nn.init.zeros_(weight)
    for weight in encoder.model.multi_modal_projector.parameters():
        nn.init.zeros_(weight)
    let_learn(encoder.model.language_model.layers, LAYERS)
    encoder.model.language_model.embed_tokens.weight.requires_grad_(True)
    return encoder


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    start = shipped("flux2klein")
    klein: Any = upstream.Flux2KleinPipeline.from_pretrained(start, torch_dtype=torch.float32, trust_remote_code=False)
    vae = klein.vae.eval()
    data = encode_pictures(vae, out / "latents.pt", seed)
    every = data["latents"].unflatten(1, (-1, 4)).movedim(1, -1).flatten(0, -2)[::7]
    basis = torch.linalg.svd(every - every.mean(0), full_matrices=False).Vh[: flux2_klein.KEPT].T
    torch.manual_seed(seed)
    tokenizer = tokenizer_in(out / "tokenizer")
    encoder = make_text_encoder(len(tokenizer))
    denoiser = Denoiser(
        Text(klein.text_encoder.model, flux2_klein.LAYERS, klein.tokenizer.pad_token_id),
        Text(encoder.model.language_model, LAYERS, tokenizer.pad_token_id, before=True),
    )
    for index, layer in enumerate(klein.text_encoder.model.layers):
        layer.requires_grad_(index in flux2_klein.LAYERS)
    denoiser.transformer.load_state_dict(klein.transformer.state_dict())
    averaged = denoisers.average_of(denoiser)
    denoisers.quicken(denoiser.blocks)
    batches = (
        batches_of(data, partial(qwen3.tokenize, klein.tokenizer)),
        batches_of(data, partial(text_encoder.tokenize, tokenizer), before=True),
    )

    def batch(step: int, random: np.random.Generator) -> Batch:
        text, change = KINDS[step % len(KINDS)]
        clean, sigma, more = batches[text](change, random)
        return clean, sigma, {**more, "text": text}

    def look() -> None:
        flux2_klein.show(flux2_klein.assemble(averaged.module, vae, klein.text_encoder, klein.tokenizer), out, seed)
        still.show(partial(sample, assemble(averaged.module, vae, encoder, tokenizer)), out / "preview_dev.png", seed)

    file = out / "denoiser.pt"
    denoisers.learn(denoiser, averaged, file, seed, STEPS, RATE, batch, look, partial(counted, basis))
    both = flux2_klein.assemble(averaged.module, vae, klein.text_encoder, klein.tokenizer)
    for name in ("transformer", "text_encoder"):
        getattr(both, name).to(torch.bfloat16).save_pretrained(out / "flux2klein" / name)
    return assemble(averaged.module, vae, encoder, tokenizer)


def assemble(denoiser: Any, vae: Any, encoder: Any, tokenizer: Any) -> Any:
    """Return the pipeline; the transformer is klein's, and its guidance input has no effect."""
    encoder.model.language_model = denoiser.texts[1].model
    config = {**denoiser.transformer.config, "guidance_embeds": True}
    transformer = upstream.Flux2Transformer2DModel.from_config(config)
    for parameter in transformer.time_guidance_embed.guidance_embedder.parameters():
        nn.init.zeros_(parameter)
    transformer.load_state_dict({**transformer.state_dict(), **denoiser.transformer.state_dict()})
    pipeline = upstream.Flux2Pipeline(scheduler(spec.SCHEDULER), vae, encoder, tokenizer, transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, prompt: str, seed: int, *, steps: int = 12) -> np.ndarray:
    """A picture `[HEIGHT, WIDTH, 3]` uint8 of upstream's pipeline, which itself would fill up behind a prompt."""
    ids, mask = map(torch.from_numpy, text_encoder.tokenize(pipeline.tokenizer, [prompt]))
    language: Any = pipeline.text_encoder.model.language_model
    found = language(input_ids=ids.long(), attention_mask=mask, output_hidden_states=True).hidden_states
    embeds = torch.cat([found[number] for number in text_encoder.STATES], -1)
    (picture,) = pipeline(
        prompt_embeds=embeds,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return np.round(picture * 255).astype(np.uint8)
