"""Qwen3 (https://arxiv.org/abs/2505.09388) as a text encoder: conversation, tokens, and the states of three layers.

It is transformers' `Qwen3ForCausalLM` without its head. FLUX.2 klein takes the states here; Z-Image takes those before
the last layer (`z_image/text_encoder.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...model_spec import Component, ConfigRequirement, TextEncoding
from ...model_spec.upstream import Net
from . import causal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 512
# The prompt embedding concatenates the states after layers 9, 18 and 27, `hidden_states_layers` in diffusers'
# `Flux2KleinPipeline`; later layers are not needed.
STATES = (9, 18, 27)

# Qwen3's template for a prompt, with and without thinking.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PROMPT = "A cat holding a sign that says hello world"


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_TOKENS, *, thinks: bool = False
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids and mask of a conversation with each prompt, `[rows, length]` int32 each, padded on the right.

    tokenizer: Qwen2's. prompts: one per conversation. length: tokens that a conversation is padded or truncated to.
    thinks: without it the template starts the answer with an empty thought.
    """
    from ... import tokenization

    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenization.tokenize_chats(
        tokenizer,
        chats,
        length,
        padding_side="right",
        template=CHAT_TEMPLATE,
        add_generation_prompt=True,
        template_options={"enable_thinking": thinks},
    )


def encode_text(encoder: Net, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return the states `[rows, 512, 3 * dim]` of three layers for `ids` `[rows, 512]`, those of padding included.

    encoder: transformers' `Qwen3ForCausalLM`. mask: `[rows, 512]`, 0 for padding.
    """
    return causal.hidden_states(encoder.model, ids, mask, STATES), None


TEXT_ENCODER = Component(
    name="text_encoder",
    library="transformers",
    class_name="Qwen3ForCausalLM",
    # Qwen3-4B.
    config={
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    tiny={
        "head_dim": 12,
        "hidden_size": 40,
        # Large enough that a prompt affects the result.
        "initializer_range": 0.2,
        "intermediate_size": 72,
        "max_position_embeddings": 1024,
        "max_window_layers": 28,
        "num_attention_heads": 6,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "vocab_size": 307,
    },
    needs={"num_hidden_layers": causal.require_layers(STATES), "use_sliding_window": ConfigRequirement((False,))},
    blocks=("model.layers",),
    layers=slice(max(STATES)),
    only=("model.embed_tokens.", "model.layers."),
    # The model without its head.
    class_aliases=("Qwen3Model",),
    aliases={"embed_tokens.": "model.embed_tokens.", "layers.": "model.layers."},
    rules=causal.make_rules("model."),
)
# Qwen3-8B, as published.
LARGER = {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}

TEXT = TextEncoding(
    tokenizer_class="Qwen2TokenizerFast",
    max_length=MAX_TOKENS,
    width_key="joint_attention_dim",
    tokenize=tokenize,
    encode=encode_text,
    write_tokenizer=partial(
        causal.write_qwen_tokenizer,
        texts=(PROMPT,),
        vocab_size=290,
        special=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        chat_template=CHAT_TEMPLATE,
    ),
)
