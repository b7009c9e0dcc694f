"""The language model of Qwen2.5-VL 7B (https://arxiv.org/abs/2502.13923) as a text encoder.

It is transformers' `Qwen2_5_VLTextModel`: 28 layers of width 3584. The states of a fixed prefix, the system message of
the conversation, are removed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model_spec import Component, ConfigRequirement
from ...model_spec.upstream import Net
from . import causal

if TYPE_CHECKING:
    import torch

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode_text(
    encoder: Net,
    ids: "torch.Tensor",
    mask: "torch.Tensor",
    positions: "torch.Tensor | None" = None,
    image_indices: "torch.Tensor | None" = None,
    image_tokens: "torch.Tensor | None" = None,
) -> "tuple[torch.Tensor, None]":
    """Encode `ids` `[rows, prefix + length]` to states `[rows, length, dim]`, without those of the prefix.

    encoder: transformers' `Qwen2_5_VLTextModel`; the states are after its norm if it has one, else after its last
        layer.
    mask: `[rows, length]`, 0 for padding after the prefix.
    positions: time, row and column `[3, rows, prefix + length]` (M-RoPE), for prompts with images; None: 0, 1, 2, ...
    image_indices: `[rows, prefix + length]`, index into `image_tokens`, below 0 for words; None: no images.
    image_tokens: the images' tokens `[1, number, dim]`.
    """
    import torch

    from ...programs.upstream_network import scan_states

    rows, length = ids.shape
    prefix = length - mask.shape[1]
    valid = torch.cat([torch.ones_like(ids[:, :prefix]), mask], dim=1).bool()
    position = torch.arange(length, device=ids.device)
    allowed = (position[:, None] >= position[None, :])[None, None] & valid[:, None, None, :]
    words = encoder.embed_tokens(ids)
    if image_tokens is not None and image_indices is not None:
        images = torch.nn.functional.embedding(image_indices.clamp(min=0), image_tokens.flatten(0, 1)).type_as(words)
        words = torch.where((image_indices >= 0)[..., None], images, words)
    rotary = encoder.rotary_emb(words, position.expand(3, rows, length) if positions is None else positions)
    states = encoder.norm(scan_states(encoder.layers, words, attention_mask=allowed, position_embeddings=rotary))
    return states[:, prefix:], None


def make_tokenizer_writer(*texts: str, special: Sequence[str] = ()) -> "Callable[[Path], None]":
    """Return a function that writes a tokenizer with merges learnt from `texts`; see `causal.write_qwen_tokenizer`."""
    return partial(
        causal.write_qwen_tokenizer,
        texts=texts,
        vocab_size=700 - len(special),
        special=("<|im_start|>", "<|im_end|>", *special),
        chat_template=CHAT_TEMPLATE,
    )


def make_encoder(
    *, layers: slice | None = None, only: Sequence[str] = ("embed_tokens.", "layers.", "norm."), **more: Any
) -> Component:
    """Return the language model of Qwen2.5-VL 7B, or some `layers` of it. `more` are arguments of `Component`.

    only: prefixes of the keys that are loaded.
    """
    return Component(
        name="text_encoder",
        library="transformers",
        class_name="Qwen2_5_VLTextModel",
        # The full model, of which this is a part.
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
            # Large enough that a prompt affects the result.
            "initializer_range": 0.2,
        },
        needs={"use_sliding_window": ConfigRequirement((False,)), **more.pop("needs", {})},
        blocks=("layers",),
        layers=layers,
        only=tuple(only),
        # Prefixes in the full model: before and since transformers 4.52, and in the model without its head.
        aliases={"model.": "", "model.language_model.": "", "language_model.": ""},
        rules=causal.make_rules(),
        **more,
    )
