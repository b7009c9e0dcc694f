"""Upstream modules with their blocks scanned."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import torch_bridge, upstream_network, weights


class Block(torch.nn.Module):
    """Adds its weight; gives a tuple, as T5's does, or a tensor."""

    def __init__(self, gives_tuple: bool) -> None:
        super().__init__()
        self.gives_tuple = gives_tuple
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
        added = hidden_states + self.weight
        return (added,) if self.gives_tuple else added


@pytest.mark.parametrize("gives_tuple", [True, False])
def test_scanned_blocks_run_every_layer(gives_tuple: bool):
    blocks = upstream_network.ScannedBlocks(torch.nn.ModuleList([Block(gives_tuple) for _ in range(2)]))
    stacked = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])

    states = jnp.ones((2, 5, 3))
    out = torch_bridge.call_functional(
        blocks, {f"{upstream_network.LAYER}.weight": stacked}, upstream_network.scan_states, states
    )
    np.testing.assert_array_equal(out, states + jnp.array([11.0, 22.0, 33.0]))


@pytest.mark.parametrize("ties", [True, False], ids=["tied by upstream", "untied by upstream"])
def test_tied_embedding_saved_once_is_one_weight(ties: bool, monkeypatch: pytest.MonkeyPatch):
    """Published configs of UMT5 say that it is not tied, and some versions of transformers believe them."""
    from transformers import UMT5EncoderModel

    if not ties:
        monkeypatch.setattr(UMT5EncoderModel, "tie_weights", lambda *_, **__: None)
    component = spec_for_family("Wan21").component("text_encoder")
    network = upstream_network.build_network(component, {**component.tiny, "tie_word_embeddings": False})
    assert [name for name in network.weights if "embed_tokens" in name or "shared" in name] == ["shared.weight"]


def test_shared_network_is_built_once_per_config(monkeypatch: pytest.MonkeyPatch):
    """Who traces a network may change its module, so that each has one of its own."""
    component, build, built = spec_for_family("Wan21").component("text_encoder"), upstream_network.build_network, []
    monkeypatch.setattr(upstream_network, "build_network", lambda *asked: built.append(build(*asked)) or built[-1])
    monkeypatch.setattr(weights, "_built", weights.OrderedDict())
    config = {**component.tiny, "d_ff": 48}
    first = weights.shared_network(component, config)
    assert (
        weights.shared_network(component, dict(config)) is first and weights.private_network(component, config) is first
    )
    assert len(built) == 1
    second = weights.private_network(component, config)
    assert second.module is not first.module and weights.shared_network(component, config) is first
    assert weights.shared_network(component, {**config, "d_ff": 64}) is not first and len(built) == 3
