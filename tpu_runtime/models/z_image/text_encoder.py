"""The text encoding of Z-Image: the states `[rows, 512, 2560]` of Qwen3-4B before its last layer.

The network, transformers' `Qwen3ForCausalLM`, and the conversation are in `common/qwen3.py`. As in `ZImagePipeline`,
the conversation has `enable_thinking`, so it does not end with an empty thought.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...model_spec import ConfigRequirement
from ...model_spec.upstream import Net
from ..common import causal, qwen3

if TYPE_CHECKING:
    import torch

# The prompt embedding is the states after this many of 36 layers: upstream's `hidden_states[-2]`.
STATE = 35


def encode_late(encoder: Net, ids: "torch.Tensor", mask: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return the states `[rows, 512, dim]` before the last layer for `ids` `[rows, 512]`.

    encoder: transformers' `Qwen3ForCausalLM`. mask: `[rows, 512]`, 0 for padding.
    """
    return causal.hidden_states(encoder.model, ids, mask, (STATE,)), None


TEXT_ENCODER = replace(
    qwen3.TEXT_ENCODER,
    tiny={**qwen3.TEXT_ENCODER.tiny, "num_hidden_layers": STATE + 1, "max_window_layers": STATE + 1},
    needs={**qwen3.TEXT_ENCODER.needs, "num_hidden_layers": ConfigRequirement((STATE + 1,), required=True)},
    layers=slice(STATE),
)
TEXT = replace(qwen3.TEXT, width_key="cap_feat_dim", tokenize=partial(qwen3.tokenize, thinks=True), encode=encode_late)
