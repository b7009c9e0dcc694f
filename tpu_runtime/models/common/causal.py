"""Functions that causal language models share as text encoders: hidden states of some layers; Qwen's tokenizer.

The models are transformers' Mistral, Qwen3 and Qwen2.5. Their layers are equal but for the norms of queries and keys.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....sharding.rules import Rule
from ...model_spec import ConfigRequirement
from ...model_spec.upstream import Net

if TYPE_CHECKING:
    import torch


def make_rules(before: str = "") -> tuple[Rule, ...]:
    """Return the sharding rules: heads and feed-forward columns are split over all chips.

    before: prefix of the model's keys.
    """
    return (
        Rule(f"{before}embed_tokens.weight", (None, "all_embed")),
        Rule(f"{before}layers.*.self_attn.o_proj.weight", (None, None, "all_heads")),
        Rule(f"{before}layers.*.self_attn.*_proj.weight", (None, "all_heads", None)),
        Rule(f"{before}layers.*.mlp.down_proj.weight", (None, None, "all_mlp")),
        Rule(f"{before}layers.*.mlp.*.weight", (None, "all_mlp", None)),
    )


def require_layers(states: Sequence[int]) -> ConfigRequirement:
    """Return the requirement that a config has all layers after which `states` are taken."""
    least = max(states)
    return ConfigRequirement(
        fits=lambda layers: isinstance(layers, int) and layers >= least, wording=f"{least} or more"
    )


def hidden_states(model: Net, ids: "torch.Tensor", mask: "torch.Tensor", layers: Sequence[int]) -> "torch.Tensor":
    """Return the hidden states after each of `layers`, concatenated: `[rows, length, len(layers) * dim]`.

    model: a Mistral or Qwen3 without its head. ids, mask: `[rows, length]`; mask is 0 for padding, whose states are
    returned too. Positions count from the first token, padding or not, as upstream's.
    """
    import types

    import torch

    from ...programs.upstream_network import scan_layers

    attn = model.layers.block.self_attn
    attn.forward = types.MethodType(causal_attention, attn)
    embeds = model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    allowed = mask.to(torch.bool)[:, None, None, :] & (positions <= positions.T)
    rotary = model.rotary_emb(embeds, position_ids=positions)

    def body(block: Net, x: "torch.Tensor") -> "torch.Tensor":
        return block(x, attention_mask=allowed, position_embeddings=rotary)

    _, states = scan_layers(model.layers, embeds, body, collect=True)
    return torch.cat([states[layer - 1] for layer in layers], dim=-1)


def causal_attention(
    attn: Net,
    hidden_states: "torch.Tensor",
    position_embeddings: "tuple[torch.Tensor, torch.Tensor]",
    attention_mask: "torch.Tensor",
    **_: Any,
) -> "tuple[torch.Tensor, None]":
    """Run `MistralAttention.forward`, or Qwen3's, which norms queries and keys per head.

    attn: the module. hidden_states: `[rows, length, dim]`. position_embeddings: cosines and sines `[1, length,
        head_dim]`.
    attention_mask: `[rows, 1, length, length]`, true where attended to. A row without any key, as padding before a
    text, gives zeros, as in torch.
    """
    import torch
    from transformers.models.mistral.modeling_mistral import apply_rotary_pos_emb, repeat_kv

    heads = [
        project(hidden_states).unflatten(-1, (-1, attn.head_dim)) for project in (attn.q_proj, attn.k_proj, attn.v_proj)
    ]
    if hasattr(attn, "q_norm"):
        heads[:2] = attn.q_norm(heads[0]), attn.k_norm(heads[1])
    heads = [x.transpose(1, 2) for x in heads]
    query, key = apply_rotary_pos_emb(heads[0], heads[1], *position_embeddings)
    # Grouped-query attention: several heads share a key and a value.
    key, value = (repeat_kv(x, attn.num_key_value_groups) for x in (key, heads[2]))
    scores = (query @ key.transpose(2, 3)).float() * attn.scaling
    weights = torch.where(attention_mask, scores, torch.finfo(torch.float32).min).softmax(dim=-1)
    weights = torch.where(attention_mask, weights, 0.0).to(value.dtype)
    return attn.o_proj((weights @ value).transpose(1, 2).flatten(2)), None


def write_qwen_tokenizer(
    folder: Path, *, texts: Sequence[str], vocab_size: int, special: Sequence[str], chat_template: str
) -> None:
    """Write a real Qwen2 tokenizer into `folder`, with merges learnt from `texts`.

    vocab_size: of the learnt merges. special: tokens after that of padding. chat_template: of the tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    bpe = learner.model
    bpe_folder = folder / "learnt"
    bpe_folder.mkdir(parents=True)
    vocab, merges = models.BPE.read_file(*bpe.save(str(bpe_folder)))
    for path in bpe_folder.iterdir():
        path.unlink()
    bpe_folder.rmdir()
    Qwen2Tokenizer(
        vocab={**vocab, "<|endoftext|>": len(vocab)},
        merges=merges,  # pyright: ignore[reportArgumentType] - pairs, whatever the hint says
        additional_special_tokens=list(special),
        chat_template=chat_template,
        padding_side="right",
    ).save_pretrained(folder)
