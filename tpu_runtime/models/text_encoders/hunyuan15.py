"""HunyuanVideo 1.5's two texts: the prompt by Qwen2.5-VL, and what it has in quotes by ByT5."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model_spec import Component, Need, TextEncoding
from . import causal, t5

if TYPE_CHECKING:
    import numpy as np
    import torch

PROMPT = 'A girl holds up a paper that says "Hello" in a sunny garden, a cat sleeps beside her.'
NEGATIVE_PROMPT = ""
# Tokens of the two texts, and of the system message before the first, which upstream cuts off the states.
MAX_TOKENS, MAX_GLYPHS, PREFIX = 1000, 256, 108
# Upstream takes the states before the last layers and before the final norm.
LAYERS_SKIPPED = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def system_message() -> str:
    """What upstream tells the language model before the prompt."""
    import inspect

    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import HunyuanVideo15Pipeline

    return inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default


def tokenize(tokenizer: Any, prompts: Sequence[str], length: int = MAX_TOKENS) -> "tuple[np.ndarray, np.ndarray]":
    """Ids `[rows, 108 + length]` of a conversation with the prompt; the mask `[rows, length]` of what follows 108."""
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

    from ... import tokens

    chats = format_text_input(list(prompts), system_message())
    ids, mask = tokens.tokenize_chats(
        tokenizer, chats, PREFIX + length, padding_side="right", add_generation_prompt=True
    )
    if not mask[:, : PREFIX + 1].all():
        raise ValueError("the checkpoint's tokenizer has another chat template; it cannot be used.")
    return ids, mask[:, PREFIX:]


def tokenize_glyphs(
    tokenizer: Any, prompts: Sequence[str], length: int = MAX_GLYPHS
) -> "tuple[np.ndarray, np.ndarray]":
    """Ids and mask `[rows, length]` of what a prompt has in quotes; zeros where it has nothing."""
    import numpy as np
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    ids, mask = (np.zeros((len(prompts), length), np.int32) for _ in range(2))
    for row, prompt in enumerate(prompts):
        if (glyphs := extract_glyph_texts(prompt)) is not None:
            tokens = tokenizer(glyphs, padding="max_length", max_length=length, truncation=True)
            ids[row], mask[row] = tokens["input_ids"], tokens["attention_mask"]
    return ids, mask


def encode_text(encoder: Any, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Tokens `[rows, 108 + length]` to states `[rows, length, dim]` of the layers that `trim_text` leaves."""
    import torch

    rows, length = ids.shape
    prefix = length - mask.shape[1]
    real = torch.cat([torch.ones_like(ids[:, :prefix]), mask], dim=1).bool()
    position = torch.arange(length, device=ids.device)
    allowed = (position[:, None] >= position[None, :])[None, None] & real[:, None, None, :]
    # Upstream makes this mask itself, but asks its values on the way; a prepared one is taken as it is.
    states = encoder(ids, attention_mask={"full_attention": allowed}, use_cache=False).last_hidden_state
    return states[:, prefix:], None


def trim_text(encoder: Any) -> None:
    """Drops the final norm: what is read comes before it."""
    import torch

    encoder.norm = torch.nn.Identity()


def encode_glyphs(encoder: Any, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Tokens `[rows, 256]` to states; zeros for a row without any."""
    import torch

    states = encoder(ids, mask).last_hidden_state
    return torch.where(mask.any(dim=1)[:, None, None], states, torch.zeros_like(states)), None


def write_tokenizer(folder: Path) -> None:
    """With merges of the words that it will see first."""
    causal.write_qwen_tokenizer(
        folder,
        texts=(system_message(), PROMPT),
        vocab_size=700,
        special=("<|im_start|>", "<|im_end|>"),
        chat_template=CHAT_TEMPLATE,
    )


def write_glyph_tokenizer(folder: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(folder)


TEXT_ENCODER = Component(
    name="text_encoder",
    library="transformers",
    class_name="Qwen2_5_VLTextModel",
    config={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "vocab_size": 152064,
    },
    tiny={
        "architectures": ["Qwen2_5_VLTextModel"],
        "hidden_size": 60,
        "intermediate_size": 100,
        "max_position_embeddings": 2048,
        "max_window_layers": 5,
        "num_attention_heads": 6,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 2, 2], "rope_type": "default", "type": "default"},
        "vocab_size": 703,
        "bos_token_id": None,
        "eos_token_id": 700,
        # Large enough that a prompt's words matter.
        "initializer_range": 0.2,
    },
    needs={
        "num_hidden_layers": Need(
            fits=lambda layers: isinstance(layers, int) and layers > LAYERS_SKIPPED,
            wording=f"more than {LAYERS_SKIPPED}",
        ),
        "use_sliding_window": Need((False,)),
    },
    blocks=("layers",),
    layers=slice(-LAYERS_SKIPPED),
    only=("embed_tokens.", "layers."),
    # The whole model's names: before and since transformers 4.52, and its part without the head.
    aliases={"model.": "", "model.language_model.": "", "language_model.": ""},
    trim=trim_text,
    rules=causal.rules(),
)

GLYPH_ENCODER = t5.encoder(
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
        encode=encode_text,
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
