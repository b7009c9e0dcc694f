"""Mistral Small 3 as the text encoder of FLUX.2: conversation, tokens, the states of three layers.

It is the language model of transformers' `Mistral3ForConditionalGeneration`, of width 5120. The result is
`[rows, 512, 15360]`. There is no paper; FLUX.2 klein has Qwen3 instead (`common/qwen3.py`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...files import read_json
from ...model_spec import Component, TextEncoding
from ..common import causal

MAX_TOKENS = 512
# The prompt embedding concatenates the states after these layers, `hidden_states_layers` of diffusers' `Flux2Pipeline`;
# later layers are not needed.
STATES = (10, 20, 30)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase


# Upstream's template for a system message and a prompt, in the syntax of the tokenizer's own template.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set text = message['content'] | map(attribute='text') | join('') %}"
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ text }}[/INST]{% endif %}{% endfor %}"
)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with the real one's special tokens and template into `folder`.

    As in the real one, its config names the class `LlamaTokenizerFast` and no padding side.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "<pad>")
    pieces = (*special, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {k: v for k, v in read_json(path).items() if k not in ("backend", "padding_side")}
    config |= {"processor_class": "PixtralProcessor", "tokenizer_class": "LlamaTokenizerFast"}
    path.write_text(json.dumps(config, indent=2), "utf-8")


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int = MAX_TOKENS
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids and mask of the prompts in upstream's conversation, `[rows, length]` int32 each, padded on the left.

    tokenizer: Mistral's. prompts: a conversation each. length: tokens that a conversation is padded or truncated to.

    The model authors used transformers 4, which pads a `LlamaTokenizerFast` on the left, as ComfyUI does
    (`comfy/text_encoders/flux.py`).
    """
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    from ... import tokenization

    chats = format_input(prompts=list(prompts), system_message=SYSTEM_MESSAGE)
    return tokenization.tokenize_chats(
        tokenizer, chats, length, padding_side="left", template=CHAT_TEMPLATE, add_generation_prompt=False
    )


def encode_text(module: "torch.nn.Module", ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return the states `[rows, 512, 3 * dim]` of three layers for `ids` `[rows, 512]`, those of padding included.

    module: transformers' `Mistral3ForConditionalGeneration`. mask: `[rows, 512]`, 0 for padding.
    """
    return causal.hidden_states(module.get_submodule("model.language_model"), ids, mask, STATES), None


# Prefixes of the language model in checkpoints with a vision tower: as transformers 4 wrote it (and as published), as
# the model without its head writes it, and as in checkpoints with merged adapters.
TEXT_NAMES = {
    name: "model.language_model."
    for name in (
        "language_model.model.",
        "language_model.",
        "language_model.model.model.",
        "model.language_model.model.",
    )
}

TEXT_ENCODER = Component(
    name="text_encoder",
    library="transformers",
    class_name="Mistral3ForConditionalGeneration",
    # The vision tower is never used and keeps upstream's defaults.
    config={
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        }
    },
    tiny={
        "image_token_index": 7,
        "text_config": {
            "head_dim": 12,
            "hidden_size": 40,
            "intermediate_size": 72,
            "max_position_embeddings": 1024,
            "model_type": "mistral",
            "num_attention_heads": 6,
            "num_hidden_layers": 31,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "vocab_size": 280,
        },
        "vision_config": {
            "head_dim": 8,
            "hidden_size": 16,
            "image_size": 28,
            "intermediate_size": 24,
            "model_type": "pixtral",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
        },
    },
    needs={"text_config.num_hidden_layers": causal.require_layers(STATES)},
    blocks=("model.language_model.layers",),
    layers=slice(max(STATES)),
    only=("model.language_model.embed_tokens.", "model.language_model.layers."),
    aliases=TEXT_NAMES,
    rules=causal.make_rules("model.language_model."),
)

TEXT = TextEncoding(
    tokenizer_class="PixtralProcessor",
    max_length=MAX_TOKENS,
    width_key="joint_attention_dim",
    tokenize=tokenize,
    encode=encode_text,
    write_tokenizer=write_tokenizer,
)
