"""The language model of Qwen2.5-VL as a text encoder: conversation, tokens, states without those of a prefix."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...model_spec import Component, Need
from . import causal

if TYPE_CHECKING:
    import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode_text(
    encoder: Any,
    ids: "torch.Tensor",
    mask: "torch.Tensor",
    positions: "torch.Tensor | None" = None,
    places: "torch.Tensor | None" = None,
    seen: "torch.Tensor | None" = None,
) -> "tuple[torch.Tensor, None]":
    """Tokens `[rows, prefix + length]` to states `[rows, length, dim]` after the last layer, or after the final norm
    where the encoder has it. `mask` `[rows, length]` says which tokens behind the prefix are real.

    `places` `[rows, prefix + length]` are those of tokens of pictures in `seen` `[1, number, dim]`, below 0 of words;
    `positions` are then `[3, rows, prefix + length]`.
    """
    import torch

    from ...programs.modules import scan_states

    rows, length = ids.shape
    prefix = length - mask.shape[1]
    real = torch.cat([torch.ones_like(ids[:, :prefix]), mask], dim=1).bool()
    position = torch.arange(length, device=ids.device)
    allowed = (position[:, None] >= position[None, :])[None, None] & real[:, None, None, :]
    words = encoder.embed_tokens(ids)
    if seen is not None and places is not None:
        pictures = torch.nn.functional.embedding(places.clamp(min=0), seen.flatten(0, 1)).type_as(words)
        words = torch.where((places >= 0)[..., None], pictures, words)
    rotary = encoder.rotary_emb(words, position.expand(3, rows, length) if positions is None else positions)
    states = encoder.norm(scan_states(encoder.layers, words, attention_mask=allowed, position_embeddings=rotary))
    return states[:, prefix:], None


def tokenizer_writer(*texts: str, special: Sequence[str] = ()) -> Any:
    """See `causal.write_qwen_tokenizer`; with merges of the words that it will see first."""
    return partial(
        causal.write_qwen_tokenizer,
        texts=texts,
        vocab_size=700 - len(special),
        special=("<|im_start|>", "<|im_end|>", *special),
        chat_template=CHAT_TEMPLATE,
    )


def encoder(
    *, layers: slice | None = None, only: Sequence[str] = ("embed_tokens.", "layers.", "norm."), **more: Any
) -> Component:
    """Qwen2.5-VL 7B without what it sees with, or `layers` of it; `more` are `Component`'s."""
    return Component(
        name="text_encoder",
        library="transformers",
        class_name="Qwen2_5_VLTextModel",
        # The whole model, in the folder of which this is a part.
        class_aliases=("Qwen2_5_VLForConditionalGeneration",),
        config_part="text_config",
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
        needs={"use_sliding_window": Need((False,)), **more.pop("needs", {})},
        blocks=("layers",),
        layers=layers,
        only=tuple(only),
        # The whole model's names: before and since transformers 4.52, and its part without the head.
        aliases={"model.": "", "model.language_model.": "", "language_model.": ""},
        rules=causal.rules(),
        **more,
    )
