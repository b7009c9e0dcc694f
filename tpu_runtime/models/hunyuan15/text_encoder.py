"""HunyuanVideo 1.5's two text encodings: the prompt by Qwen2.5-VL 7B, and its quoted text by ByT5.

`text` has the states `[rows, 1000, 3584]` of transformers' `Qwen2_5_VLTextModel` (`common/qwen25.py`) after 26 of 28
layers, without a norm. `text_2` has the states `[rows, 256, 1472]` of transformers' `T5EncoderModel` with the weights
of Glyph-ByT5-v2 (https://arxiv.org/abs/2406.10208), a ByT5-small (https://arxiv.org/abs/2105.13626).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...messages import compose
from ...model_spec import ConfigRequirement, TextEncoding
from ...model_spec.upstream import Net
from ..common import qwen25, t5

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

PROMPT = 'A girl holds up a paper that says "Hello" in a sunny garden, a cat sleeps beside her.'
NEGATIVE_PROMPT = ""
# Tokens of the two texts, and of the system message before the first, whose states upstream removes:
# `tokenizer_max_length`, `tokenizer_2_max_length` and `prompt_template_encode_start_idx` of `HunyuanVideo15Pipeline`.
MAX_TOKENS, MAX_GLYPHS, PREFIX = 1000, 256, 108
# Upstream takes the states before the last layers (`num_hidden_layers_to_skip`) and before the final norm.
NUM_SKIPPED_LAYERS = 2


def system_message() -> str:
    """Return upstream's system message for the language model."""
    import inspect

    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline

    return inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_TOKENS
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids `[rows, 108 + length]` of conversations, and the mask `[rows, length]` after the prefix.

    tokenizer: Qwen2's. prompts: a conversation each. length: tokens that a prompt is padded or truncated to. Raises
    ValueError if the conversations are shorter than the prefix.
    """
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

    from ... import tokenization

    chats = format_text_input(list(prompts), system_message())
    ids, mask = tokenization.tokenize_chats(
        tokenizer,
        chats,
        PREFIX + length,
        padding_side="right",
        template=qwen25.CHAT_TEMPLATE,
        add_generation_prompt=True,
    )
    if not mask[:, : PREFIX + 1].all():
        raise ValueError(
            compose("model.chat_template_too_short", name_or_path=tokenizer.name_or_path, prefix=PREFIX + 1)
        )
    return ids, mask[:, PREFIX:]


def tokenize_glyphs(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_GLYPHS
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids and mask `[rows, length]` of the quoted text of each prompt; zeros without quotes.

    tokenizer: ByT5's. prompts: with text in quotation marks. length: tokens that a text is padded or truncated to.
    """
    import numpy as np
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    ids, mask = (np.zeros((len(prompts), length), np.int32) for _ in range(2))
    for row, prompt in enumerate(prompts):
        if (glyphs := extract_glyph_texts(prompt)) is not None:
            tokens = tokenizer(glyphs, padding="max_length", max_length=length, truncation=True)
            ids[row], mask[row] = tokens["input_ids"], tokens["attention_mask"]
    return ids, mask


def trim_text(encoder: Net) -> None:
    """Remove the final norm: the states before it are used."""
    import torch

    encoder.norm = torch.nn.Identity()


def encode_glyphs(encoder: Net, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Encode `ids` `[rows, 256]` to states `[rows, 256, dim]`; zeros for a row without text.

    encoder: transformers' `T5EncoderModel`. mask: `[rows, 256]`, 0 for padding.
    """
    import torch

    states = encoder(ids, mask).last_hidden_state
    return torch.where(mask.any(dim=1)[:, None, None], states, torch.zeros_like(states)), None


def write_tokenizer(folder: Path) -> None:
    qwen25.make_tokenizer_writer(system_message(), PROMPT)(folder)


def write_glyph_tokenizer(folder: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(folder)


TEXT_ENCODER = qwen25.make_encoder(
    layers=slice(-NUM_SKIPPED_LAYERS),
    only=("embed_tokens.", "layers."),
    needs={
        "num_hidden_layers": ConfigRequirement(
            fits=lambda layers: isinstance(layers, int) and layers > NUM_SKIPPED_LAYERS,
            wording=f"more than {NUM_SKIPPED_LAYERS}",
        )
    },
    trim=trim_text,
)

GLYPH_ENCODER = t5.make_encoder(
    name="text_encoder_2",
    # ByT5-small with the 1126 tokens for fonts and colours of Glyph-SDXL-v2.
    config={"d_ff": 3584, "d_kv": 64, "d_model": 1472, "num_heads": 6, "num_layers": 12, "vocab_size": 1510},
    tiny={"d_ff": 90, "d_kv": 10, "d_model": 44, "num_heads": 3, "num_layers": 2, "vocab_size": 384},
)

TEXT_ENCODERS = (
    TextEncoding(
        tokenizer_class="Qwen2Tokenizer",
        max_length=MAX_TOKENS,
        prefix=PREFIX,
        width_key="text_embed_dim",
        tokenize=tokenize,
        encode=qwen25.encode_text,
        write_tokenizer=write_tokenizer,
    ),
    TextEncoding(
        name="text_2",
        component="text_encoder_2",
        tokenizer_folder="tokenizer_2",
        tokenizer_class="ByT5Tokenizer",
        max_length=MAX_GLYPHS,
        width_key="text_embed_2_dim",
        tokenize=tokenize_glyphs,
        encode=encode_glyphs,
        write_tokenizer=write_glyph_tokenizer,
    ),
)
