"""The tiny model of Qwen-Image: images that show a sentence, in the latents of Wan's autoencoder."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.common import qwen25
from comfyui_tpu.tpu_runtime.models.qwen_image import text_encoder as texts
from comfyui_tpu.tpu_runtime.models.qwen_image.spec import SCHEDULER, SPEC
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from .. import denoisers, still
from ..autoencoders.common import as_input
from ..autoencoders.wan import latents_of
from ..denoisers import rotated, scheduler
from ..shapes import HEIGHT, WIDTH
from ..training import qwen_tokenizer, save, shipped, upstream, without_capitals

TAG, SOURCE = "text-to-image", "still"
SHARED = {"vae": "wan21/vae"}  # parts that another miniature has
CARD = """\
A small model with the classes of Qwen-Image, trained by `tools/train_miniature.py`. It shares the autoencoder of the
tiny model of Wan 2.1. It is meant for demonstrations and tests of prompts, guidance and seeds, on machines that
cannot hold the real model. Its nine blocks use three sets of weights; only their modulation differs. No block changes
the text. It was trained together with the tiny model of Qwen-Image Edit, which has the same weights. Its vision tower
has no effect.

It understands sentences such as "a large red circle left on blue" and "a red circle and a small green square on
blue": one or two shapes ({shapes}) in {colours}. Images are {width}x{height}. With the default guidance, outlines are
slightly bent, and some corners have a coloured speck. It knows no other words."""

PICTURES, STEPS, RATE = 6000, 10000, 1.5e-3
COUNT = 40  # pictures in a step
TRANSFORMER = {
    "attention_head_dim": 22,
    "axes_dims_rope": (4, 8, 10),
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 48,
    "num_attention_heads": 4,
    "num_layers": 9,
    "out_channels": 16,
    "patch_size": 2,
}
TEXT_ENCODER = {
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_size": TRANSFORMER["joint_attention_dim"],
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_scaling": {"mrope_section": [2, 2, 2], "rope_type": "default", "type": "default"},
}
# The smallest that patches of upstream's processor fit: what it sees with never learns, and gives nothing.
VISION_ENCODER = {
    "depth": 1,
    "fullatt_block_indexes": [0],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "out_hidden_size": TEXT_ENCODER["hidden_size"],
}
WORDS = (*still.COLOURS, *still.SHAPES, *filter(None, still.SIZES), *filter(None, still.PLACES), "a", "and", "on")
OF_CHANGES = ("the", "becomes")
TIED = 3  # blocks, which come one after the other until all layers are full
# What of the transformer learns; all else is nothing, and so the text is the same before every block.
LEARNS = ("img_in", "txt_in", "txt_norm", "time_text_embed", "norm_out", "proj_out")
OF_A_BLOCK = ("img_mod.", "img_mlp.", "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out", "attn.norm_")
OF_ITS_TEXT = ("attn.add_k_proj", "attn.add_v_proj")


def text_encoder(vocabulary: int) -> Any:
    """The whole model, as published; what it sees with adds nothing."""
    parts: dict[str, Any] = {"text_config": {**TEXT_ENCODER, "vocab_size": vocabulary}, "vision_config": VISION_ENCODER}
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**parts, tie_word_embeddings=True))
    nn.init.normal_(encoder.model.language_model.embed_tokens.weight)
    for weight in encoder.model.visual.parameters():
        nn.init.zeros_(weight).requires_grad_(False)
    return encoder


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe of the third block."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.encoder = text_encoder(vocabulary)
        self.transformer: Any = upstream.QwenImageTransformer2DModel(**TRANSFORMER)
        blocks = self.transformer.transformer_blocks
        denoisers.begin(blocks, [self.transformer.norm_out.linear, self.transformer.proj_out])
        for block in blocks:
            nn.init.zeros_(block.img_mod[1].weight)
        for block, first in zip(blocks[TIED:], itertools.cycle(blocks[:TIED]), strict=False):
            block.attn, block.img_mlp = first.attn, first.img_mlp
            block.img_mod[1].weight = first.img_mod[1].weight
        for name, parameter in self.transformer.named_parameters():
            place, _, part = name.partition(".")
            in_block = part.partition(".")[2].startswith((*OF_A_BLOCK, *OF_ITS_TEXT))
            if not (in_block if place == "transformer_blocks" else place in LEARNS):
                nn.init.zeros_(parameter).requires_grad_(False)
        width = TRANSFORMER["attention_head_dim"] * TRANSFORMER["num_attention_heads"]
        self.probe = denoisers.Probe(nn.Identity(), width, (HEIGHT // 16, WIDTH // 16))
        self.recall = nn.Linear(width, TRANSFORMER["in_channels"])  # after the sixth

    def states(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the text encoder gives, `[rows, tokens, dim]`.

        With the `positions` `[3, rows, tokens]` of a text about a picture its ids are below 0 where the picture is, of
        which nothing is seen.
        """
        text = self.encoder.model.language_model
        x = text.embed_tokens(ids.clamp(min=0)) * (ids >= 0)[..., None]
        at = torch.arange(x.shape[1]).expand(3, 1, -1) if positions is None else positions
        rotary = text.rotary_emb(x, at)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        for layer in text.layers:
            x = layer(x, attention_mask=seen, position_embeddings=rotary)
        return text.norm(x)

    def forward(
        self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor, beside: "Beside | None" = None
    ) -> tuple[Tensor, Tensor]:
        """Velocity of `[rows, 64, height, width]`, and how badly the probes know the places, and what the picture shows
        there that is looked at. `mask` `[rows, tokens]` is of the text behind its prefix.
        """
        dit, rows, size = self.transformer, len(noisy), noisy.shape[2:]
        grids = [(1, *size), *([(1, *beside.size)] if beside else [])]
        x = dit.img_in(noisy.flatten(2).transpose(1, 2))
        temb, at_zero = dit.time_text_embed(sigma, x), dit.time_text_embed(torch.zeros(1), x)
        text = dit.txt_in(dit.txt_norm(self.states(ids, beside and beside.positions)[:, -mask.shape[1] :]))
        text = F.layer_norm(text, text.shape[-1:], eps=1e-6)
        tables = dit.pos_embed([grids], max_txt_seq_len=text.shape[1], device=text.device)
        of_image, of_text = (
            [part.repeat_interleave(2, 1)[None, :, None] for part in (table.real, table.imag)] for table in tables
        )
        before, more, words = x.new_zeros(rows, 0, x.shape[2]), 0.0, [text[:1, :0], text]
        if beside:
            before, more = F.layer_norm(dit.img_in(beside.tokens), x.shape[-1:], eps=1e-6), math.log(beside.share)
            words = [text[:1, : beside.common], text[:, beside.common :]]
            kept = torch.cat([torch.arange(x.shape[1]), x.shape[1] + beside.places])
            of_image = [table[:, kept] for table in of_image]
        bias = torch.cat(
            [
                torch.zeros(rows, x.shape[1]),
                torch.full((rows, before.shape[1]), more),
                torch.where(mask.bool(), 0.0, -torch.inf),
            ],
            dim=1,
        )[:, None, None]
        after: list[Tensor] = []  # every block
        for block in dit.transformer_blocks:
            attn, parts = block.attn, block.img_mod(temb)[:, None].chunk(6, -1)
            zeros = block.img_mod(at_zero)[:, None].chunk(6, -1)
            shift, scale, gate, ff_shift, ff_scale, ff_gate = (
                part - zero if index in GATES else part
                for index, (part, zero) in enumerate(zip(parts, zeros, strict=True))
            )
            y = block.img_norm1(x) * (1 + scale) + shift
            seen = torch.cat([y, before * (1 + zeros[1]) + zeros[0]], 1)
            q, k, v = (
                part(tokens).unflatten(2, (attn.heads, -1))
                for part, tokens in ((attn.to_q, y), (attn.to_k, seen), (attn.to_v, seen))
            )
            text_k, text_v = (
                torch.cat([part(each).expand(rows, -1, -1) for each in words], 1).unflatten(2, (attn.heads, -1))
                for part in (attn.add_k_proj, attn.add_v_proj)
            )
            q = rotated(attn.norm_q(q), *(table[:, : q.shape[1]] for table in of_image))
            k = torch.cat([rotated(attn.norm_k(k), *of_image), rotated(attn.norm_added_k(text_k), *of_text)], 1)
            v = torch.cat([v, text_v], 1)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
            x = x + gate * attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + ff_gate * block.img_mlp(block.img_norm2(x) * (1 + ff_scale) + ff_shift)
            after.append(x)
        velocity = dit.proj_out(dit.norm_out(x, temb)).transpose(1, 2).unflatten(2, size)
        unknown = self.probe(after[TIED - 1], tuple(size))
        if beside:
            found = self.recall(after[2 * TIED - 1])
            unknown = unknown + 4 * F.mse_loss(found, beside.there.flatten(2).transpose(1, 2))
        return velocity, unknown


# Of what a modulation gives: the gates. At the time 0 they are none, and so is a picture that is looked at the same
# before every block.
GATES = (2, 5)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A picture that is looked at: `tokens` `[rows, number, 64]` at `places` in a grid of `size`, each of which stands
    for `share` of them; `there` `[rows, 64, height, width]` is it as large as what is made. Texts have `positions` and
    begin with so many tokens that are `common` to all.
    """

    tokens: Tensor
    places: Tensor
    size: tuple[int, int]
    share: int
    there: Tensor
    positions: Tensor
    common: int


def pictures_in(file: Path, encode: Callable[[np.ndarray], Tensor], seed: int) -> dict[str, Any]:
    """`prompts` of pictures and their `latents`, `[number, channels, height / 16, width / 16]`, which `encode` gives of
    each.
    """
    if not file.is_file():
        random = np.random.default_rng(seed + 1)
        drawn = list(itertools.islice(still.pictures(seed + 1, held_out=False), PICTURES))
        shown = (still.draw(one, still.random_jitter(random)) for one in drawn)
        latents = [encode(picture) for picture in tqdm(shown, "latents", PICTURES, mininterval=10)]
        save({"prompts": [str(one) for one in drawn], "latents": torch.stack(latents)}, file)
    return torch.load(file)


Batch = tuple[Tensor, Tensor, dict[str, Any]]
Batches = Callable[[int, np.random.Generator], Batch]


def batches_of(prompts: Sequence[str], latents: Tensor, ids: Tensor, masks: Tensor, count: int) -> Batches:
    """What `denoisers.learn` asks for, `count` pictures a step; after the tokens of `prompts` come the empty one's."""
    rates = still.shares(prompts)

    def batch(step: int, random: np.random.Generator) -> Batch:
        seen = denoisers.chosen(random, rates, count)
        chosen = denoisers.texts_of(random, seen, len(prompts))
        return latents[seen], denoisers.usual_sigmas(random, count), {"ids": ids[chosen], "mask": masks[chosen]}

    return batch


def tokenizer_in(folder: Path) -> Any:
    """Of this model and of Edit's."""
    return qwen_tokenizer(
        folder,
        (*WORDS, *OF_CHANGES),
        (texts.TEMPLATE, texts.EDIT_TEMPLATE, texts.IMAGE_TEMPLATE, "user", "assistant", "system", " 1"),
        special=("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", texts.IMAGE_PAD),
        chat_template=qwen25.CHAT_TEMPLATE,
    )


def autoencoder() -> Any:
    folder = shipped("wan21") / "vae"
    return upstream.AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=False)


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """`[3, height, width]` to `[64, height / 16, width / 16]`."""
    return F.pixel_unshuffle(latents_of(vae, pixels[:, None])[:, 0], 2)


def pictures_of(data: Mapping[str, Any], tokenizer: Any, count: int) -> Batches:
    """Of what `pictures_in` gives."""
    ids, masks = map(torch.from_numpy, texts.tokenize(tokenizer, [*data["prompts"], ""]))
    longest = int(masks.sum(1).max())
    return batches_of(data["prompts"], data["latents"], ids[:, : texts.PREFIX + longest], masks[:, :longest], count)


def train(out: Path, seed: int) -> Any:
    """Train and return the pipeline."""
    vae = autoencoder()
    data = pictures_in(out / "latents.pt", lambda picture: encode(vae, as_input(picture)), seed)
    torch.manual_seed(seed)
    tokenizer = tokenizer_in(out / "tokenizer")
    denoiser = Denoiser(len(tokenizer))
    averaged = denoisers.average_of(denoiser)
    denoisers.quicken(denoiser.transformer.transformer_blocks)
    batch = pictures_of(data, tokenizer, COUNT)

    def look() -> None:
        make = partial(sample, assemble(averaged.module, vae, tokenizer), steps=12)
        still.show(make, out / "preview.png", seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    """Return the pipeline, with separate weights for each block."""
    encoder, transformer = parts_of(denoiser, tokenizer)
    pipeline = upstream.QwenImagePipeline(scheduler(SCHEDULER), vae, encoder, tokenizer, transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def parts_of(denoiser: Any, tokenizer: Any, **config: Any) -> tuple[Any, Any]:
    """Return the text encoder and the transformer of a pipeline."""
    embeddings = denoiser.encoder.model.language_model.embed_tokens.weight.data
    without_capitals(tokenizer, embeddings, (*WORDS, *OF_CHANGES))
    transformer = upstream.QwenImageTransformer2DModel(**TRANSFORMER, **config)
    transformer.load_state_dict(denoiser.transformer.state_dict())
    at_zero = transformer.time_text_embed(torch.zeros(1), torch.zeros(1))
    for block in transformer.transformer_blocks:
        zeros, biases = block.img_mod(at_zero)[0].chunk(6), block.img_mod[1].bias.chunk(6)
        for gate in GATES:
            biases[gate].data -= zeros[gate].data
    return denoiser.encoder, transformer


def sample(pipeline: Any, prompt: str, seed: int, *, steps: int) -> np.ndarray:
    """Return a uint8 image `[HEIGHT, WIDTH, 3]` of upstream's pipeline at its default guidance."""
    (picture,) = pipeline(
        prompt=prompt,
        negative_prompt="",
        true_cfg_scale=SPEC.inputs["guidance_scale"].default,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    return np.round(picture * 255).astype(np.uint8)
