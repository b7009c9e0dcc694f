"""The text encoding of the Wan family: UMT5-XXL's encoder (https://arxiv.org/abs/2304.09151) on cleaned prompts.

It is transformers' `UMT5EncoderModel`: states `[rows, 512, 4096]` after 24 layers and the final norm. Each layer has a
table of relative positions, while T5 has one table for all.
"""

import html
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...model_spec import TextEncoding
from ...model_spec.upstream import Net
from ..common import t5

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

PROMPT = "A cat and a dog baking a cake together in a kitchen."
MAX_TOKENS = 512
# The model authors' published negative prompt: `sample_neg_prompt` in `wan/configs/shared_config.py`.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


def clean_prompt(prompt: str) -> str:
    """Fix the prompt's encoding, resolve HTML entities and collapse whitespace, as upstream's `prompt_clean` does."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return re.sub(r"\s+", " ", text).strip()


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_TOKENS
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids and mask of the cleaned `prompts`, `[rows, length]` int32 each.

    tokenizer: UMT5's. length: tokens that a prompt is padded or truncated to.
    """
    return t5.tokenize(tokenizer, [clean_prompt(prompt) for prompt in prompts], length)


def encode_text(encoder: Net, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Encode `ids` `[rows, length]` to states `[rows, length, dim]`, zero after each prompt's end.

    encoder: transformers' `UMT5EncoderModel`. mask: `[rows, length]`, 0 for padding.
    """
    import torch

    from ...programs.upstream_network import scan_states

    stack, states = encoder.encoder, encoder.shared(ids)  # embeddings [rows, length, dim]
    bias = (torch.finfo(states.dtype).min * ~mask.bool()).to(states.dtype)[:, None, None, :]
    # One row per query: with one row for all, the compiler predicts 8 % more time for the encoder.
    bias = bias.expand(-1, -1, ids.shape[1], -1)  # [rows, 1, length, length], added to the scores
    states = scan_states(stack.block, states, attention_mask=bias)
    states = stack.final_layer_norm(states)
    return states * mask.unsqueeze(-1).to(states.dtype), None


TEXT_ENCODER = t5.make_encoder(
    class_name="UMT5EncoderModel",
    config={"d_ff": 10240, "d_kv": 64, "d_model": 4096, "num_heads": 64, "num_layers": 24, "vocab_size": 256384},
    tiny={"d_ff": 72, "d_kv": 8, "d_model": 40, "num_heads": 5, "num_layers": 2, "vocab_size": 200},
    blocks=("encoder.block",),
)

TEXT = TextEncoding(
    tokenizer_class="T5TokenizerFast",
    max_length=MAX_TOKENS,
    width_key="text_dim",
    tokenize=tokenize,
    encode=encode_text,
    write_tokenizer=partial(t5.write_umt5_tokenizer, texts=(PROMPT,)),
    depth_key="num_layers",
)
