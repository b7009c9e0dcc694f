"""The miniature of Qwen-Image: pictures that show what a sentence says, in the latents of Wan's autoencoder."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from comfyui_tpu.tpu_runtime.models.qwen_image import SCHEDULER, SPEC
from comfyui_tpu.tpu_runtime.models.text_encoders import qwen25
from comfyui_tpu.tpu_runtime.models.text_encoders import qwen_image as texts
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from .. import denoisers, still
from ..autoencoders.common import as_input
from ..autoencoders.wan import latents_of
from ..denoisers import rotated, scheduler
from ..shapes import HEIGHT, WIDTH
from ..training import qwen_tokenizer, save, shipped, upstream, without_capitals

TAG, SOURCE = "text-to-image", "still"
SHARED = {"vae": "wan21/vae"}  # parts that another miniature has
CARD = """\
The classes of Qwen-Image, made small and trained by `tools/train_miniature.py` on the latents of the miniature of Wan
2.1, with whose autoencoder it is shared: for demonstrations and tests, of prompts, guidance and seeds, on machines
where the real model does not fit. Of its nine blocks every third is the same, but for what is added to its
modulation, and none changes the text.

It knows sentences such as "a large red circle left on blue" and "a red circle and a small green square on blue": one or
two shapes ({shapes}) in {colours}. Pictures are {width}x{height}. At the default
guidance outlines are a little bent, and some corners have a coloured speck. It knows no other words."""

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
    "tie_word_embeddings": True,
}
WORDS = (*still.COLOURS, *still.SHAPES, *filter(None, still.SIZES), *filter(None, still.PLACES), "a", "and", "on")
TIED = 3  # blocks, which come one after the other until all layers are full
# What of the transformer learns; all else is nothing, and so the text is the same before every block.
LEARNS = ("img_in", "txt_in", "txt_norm", "time_text_embed", "norm_out", "proj_out")
OF_A_BLOCK = ("img_mod.", "img_mlp.", "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out", "attn.norm_")
OF_ITS_TEXT = ("attn.add_k_proj", "attn.add_v_proj")


class Denoiser(nn.Module):
    """Transformer and text encoder, and while they learn a probe of the third block."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text: Any = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(vocab_size=vocabulary, **TEXT_ENCODER))
        nn.init.normal_(self.text.embed_tokens.weight)
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

    def states(self, ids: Tensor) -> Tensor:
        """What the text encoder gives of what follows the prefix, `[rows, tokens, dim]`."""
        x = self.text.embed_tokens(ids)
        rotary = self.text.rotary_emb(x, torch.arange(x.shape[1]).expand(3, 1, -1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        for layer in self.text.layers:
            x = layer(x, attention_mask=seen, position_embeddings=rotary)
        return self.text.norm(x)[:, texts.PREFIX :]

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity of `[rows, 64, height, width]`, and how badly the probe knows the places."""
        dit, size = self.transformer, noisy.shape[2:]
        x = dit.img_in(noisy.flatten(2).transpose(1, 2))
        temb = dit.time_text_embed(sigma, x)
        text = dit.txt_in(dit.txt_norm(self.states(ids)))
        text = F.layer_norm(text, text.shape[-1:], eps=1e-6)
        tables = dit.pos_embed([(1, *size)], max_txt_seq_len=text.shape[1], device=text.device)
        of_image, of_text = (
            [part.repeat_interleave(2, 1)[None, :, None] for part in (table.real, table.imag)] for table in tables
        )
        bias = F.pad(torch.where(mask.bool(), 0.0, -torch.inf), (x.shape[1], 0))[:, None, None]
        asked = x
        for number, block in enumerate(dit.transformer_blocks):
            attn = block.attn
            shift, scale, gate, ff_shift, ff_scale, ff_gate = block.img_mod(temb)[:, None].chunk(6, -1)
            y = block.img_norm1(x) * (1 + scale) + shift
            q, k, v = (part(y).unflatten(2, (attn.heads, -1)) for part in (attn.to_q, attn.to_k, attn.to_v))
            text_k, text_v = (part(text).unflatten(2, (attn.heads, -1)) for part in (attn.add_k_proj, attn.add_v_proj))
            q, k = (rotated(part, *of_image) for part in (attn.norm_q(q), attn.norm_k(k)))
            k, v = torch.cat([k, rotated(attn.norm_added_k(text_k), *of_text)], 1), torch.cat([v, text_v], 1)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
            x = x + gate * attn.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + ff_gate * block.img_mlp(block.img_norm2(x) * (1 + ff_scale) + ff_shift)
            if number == 2:
                asked = x
        velocity = dit.proj_out(dit.norm_out(x, temb)).transpose(1, 2).unflatten(2, size)
        return velocity, self.probe(asked, tuple(size))


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


def batches_of(
    prompts: Sequence[str], latents: Tensor, ids: Tensor, masks: Tensor, count: int
) -> Callable[[int, np.random.Generator], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """What `denoisers.learn` asks for, `count` pictures a step; after the tokens of `prompts` come the empty one's."""
    rates = still.shares(prompts)

    def batch(step: int, random: np.random.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        seen = denoisers.chosen(random, rates, count)
        chosen = denoisers.texts_of(random, seen, len(prompts))
        return latents[seen], denoisers.usual_sigmas(random, count), {"ids": ids[chosen], "mask": masks[chosen]}

    return batch


def train(out: Path, seed: int) -> Any:
    """The pipeline."""
    folder = shipped("wan21") / "vae"
    vae = upstream.AutoencoderKLWan.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=False)

    def encode(picture: np.ndarray) -> Tensor:
        return F.pixel_unshuffle(latents_of(vae, as_input(picture)[:, None])[:, 0], 2)

    data = pictures_in(out / "latents.pt", encode, seed)
    prompts, latents = data["prompts"], data["latents"]
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(
        out / "tokenizer",
        WORDS,
        (texts.TEMPLATE, "user", "assistant", "system"),
        special=("<|im_start|>", "<|im_end|>"),
        chat_template=qwen25.CHAT_TEMPLATE,
    )
    ids, masks = map(torch.from_numpy, texts.tokenize(tokenizer, [*prompts, ""]))
    longest = int(masks.sum(1).max())
    ids, masks = ids[:, : texts.PREFIX + longest], masks[:, :longest]
    denoiser = Denoiser(len(tokenizer))
    averaged = denoisers.average_of(denoiser)
    denoisers.quicken(denoiser.transformer.transformer_blocks)
    batch = batches_of(prompts, latents, ids, masks, COUNT)

    def look() -> None:
        make = partial(sample, assemble(averaged.module, vae, tokenizer), steps=12)
        still.show(make, out / "preview.png", seed)

    denoisers.learn(denoiser, averaged, out / "denoiser.pt", seed, STEPS, RATE, batch, look)
    return assemble(averaged.module, vae, tokenizer)


def assemble(denoiser: Any, vae: Any, tokenizer: Any) -> Any:
    """The pipeline, with weights of its own for each block."""
    without_capitals(tokenizer, denoiser.text.embed_tokens.weight.data, WORDS)
    transformer = upstream.QwenImageTransformer2DModel(**TRANSFORMER)
    transformer.load_state_dict(denoiser.transformer.state_dict())
    pipeline = upstream.QwenImagePipeline(scheduler(SCHEDULER), vae, denoiser.text, tokenizer, transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(pipeline: Any, prompt: str, seed: int, *, steps: int) -> np.ndarray:
    """A picture `[HEIGHT, WIDTH, 3]` uint8 of upstream's pipeline at its default guidance."""
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
