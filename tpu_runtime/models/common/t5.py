"""T5's and UMT5's encoders: the component, tokenization, and tokenizers for tiny checkpoints.

Papers: T5 https://arxiv.org/abs/1910.10683, UMT5 https://arxiv.org/abs/2304.09151. The networks are transformers'
`T5EncoderModel` and `UMT5EncoderModel`.
"""

import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement
from ...model_spec.upstream import Net, UpstreamConfig

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

# Common to every T5 of these families. Tiny ones have no dropout, for tests that run upstream's module.
_CONFIG = {
    "feed_forward_proj": "gated-gelu",
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
}

# For scanned blocks, whose weights have a further dimension: the layers.
SCANNED_RULES = (
    Rule("shared.weight", (None, "all_embed")),
    Rule("encoder.block.*.layer.0.SelfAttention.o.weight", (None, None, "all_heads")),
    *(Rule(f"encoder.block.*.layer.0.SelfAttention.{name}.weight", (None, "all_heads", None)) for name in "qkv"),
    Rule("encoder.block.*.layer.1.DenseReluDense.wo.weight", (None, None, "all_mlp")),
    Rule("encoder.block.*.layer.1.DenseReluDense.*.weight", (None, "all_mlp", None)),
)
SINGLE_RULES = (
    Rule("shared.weight", (None, "all_embed")),
    Rule("encoder.block.*.layer.0.SelfAttention.relative_attention_bias.weight", REPLICATED),
    Rule("encoder.block.*.layer.0.SelfAttention.o.weight", (None, "all_heads")),
    Rule("encoder.block.*.layer.0.SelfAttention.*.weight", ("all_heads", None)),
    Rule("encoder.block.*.layer.1.DenseReluDense.wo.weight", (None, "all_mlp")),
    Rule("encoder.block.*.layer.1.DenseReluDense.*.weight", ("all_mlp", None)),
)


def make_encoder(
    *,
    config: UpstreamConfig,
    tiny: Mapping[str, Any],
    name: str = "text_encoder",
    class_name: str = "T5EncoderModel",
    blocks: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    trim: Callable[[Any], None] | None = None,
) -> Component:
    """Return a T5 encoder in the folder `name`.

    config: sizes. tiny: those of the tiny model. class_name: transformers' class.
    blocks: `("encoder.block",)` if all blocks are equal and are scanned. aliases: further key prefixes and their
        replacements. trim: changes the module before its weights are loaded.
    """
    return Component(
        name=name,
        folder=name,
        library="transformers",
        class_name=class_name,
        config={**_CONFIG, **config},
        tiny={"dropout_rate": 0.0, **tiny},
        needs={"feed_forward_proj": ConfigRequirement(("gated-gelu",), required=True)},
        blocks=blocks,
        # Checkpoints have the embedding under either name; T5 with a head has all keys under `transformer`.
        aliases={"encoder.embed_tokens.weight": "shared.weight", "transformer.": "", **(aliases or {})},
        trim=trim,
        rules=SCANNED_RULES if blocks else SINGLE_RULES,
    )


def tokenize(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], length: int
) -> "tuple[np.ndarray, np.ndarray]":
    """Return ids and mask of `prompts`, `[rows, length]` int32 each, padded and truncated by `tokenizer`."""
    import numpy as np

    encoding = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="np")
    return encoding["input_ids"].astype(np.int32), encoding["attention_mask"].astype(np.int32)


def move_position_bias(encoder: Net) -> None:
    """Move the table of relative positions out of T5's first block, so that all blocks are equal."""
    attention = encoder.encoder.block[0].layer[0].SelfAttention
    encoder.encoder.relative_attention_bias = attention.relative_attention_bias
    del attention.relative_attention_bias
    attention.has_relative_attention_bias = False


def encode_unmasked(encoder: Net, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Encode `ids` `[rows, length]` to states `[rows, length, dim]`, without masking padding, as upstream.

    mask: unused.
    """
    import torch

    from ...programs.upstream_network import scan_states

    stack, config = encoder.encoder, encoder.config
    position = torch.arange(ids.shape[1], device=ids.device)
    buckets = stack.block.block.layer[0].SelfAttention._relative_position_bucket(
        position[None, :] - position[:, None],
        num_buckets=config.relative_attention_num_buckets,
        max_distance=config.relative_attention_max_distance,
    )
    bias = stack.relative_attention_bias(buckets).permute(2, 0, 1)[None]
    return stack.final_layer_norm(scan_states(stack.block, encoder.shared(ids), position_bias=bias)), None


def write_t5_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Write a real T5 tokenizer into `folder`; its vocabulary is the words of `texts` and single characters."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    T5Tokenizer(vocab=[*special, *_pieces(texts)], extra_ids=0).save_pretrained(folder)


def write_umt5_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    """Write a UMT5 tokenizer into `folder`, as published: by transformers 4, with id 3 as the unknown token.

    texts: their words and single characters are the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = ["<pad>", "</s>", "<s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram([*((token, 0.0) for token in special), *_pieces(texts)], unk_id=3))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {**names, "extra_ids": 0, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2), "utf-8")


def _pieces(texts: Iterable[str]) -> list[tuple[str, float]]:
    """Return the words of `texts` and single characters, with their log probabilities in the vocabulary."""
    words = sorted({word.strip(string.punctuation) for text in texts for word in text.split()} - {""})
    characters = string.ascii_letters + string.digits + string.punctuation
    return [("▁", -6.0), *((f"▁{word}", -4.0) for word in words), *((character, -8.0) for character in characters)]
