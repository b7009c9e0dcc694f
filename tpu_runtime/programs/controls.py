"""Control networks in the program of a denoiser (see `model_spec.ControlSpec`): weights, operations and inputs.

The program's weights are those of all its networks. The names of the further ones have a prefix, `control_0/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import torch

from ...sharding.mesh import Mesh
from ...sharding.rules import Layout
from ..model_spec import ControlSpec
from ..precision import Precision
from . import torch_bridge, weights
from .program import CONTROL_MARK, Config
from .sharded_ops import ShardedOps
from .upstream_network import LAYER, Network, ScannedBlocks, layer_index

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ControlShape:
    """A control network, as a program is compiled for it."""

    spec: ControlSpec
    config: Config
    hint_shape: tuple[int, ...]  # `[1 or rows, channels, (1,) height, width]`

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for networks that one program can serve."""
        return self.spec.component.class_name, self.config, self.hint_shape


@dataclass(frozen=True, kw_only=True)
class Control:
    """A control network while a program is traced."""

    module: Any  # upstream's, with the program's weights
    config: Config
    run: ShardedOps  # operations on the mesh with the image tokens of the denoiser
    hint: torch.Tensor  # `[rows, channels, (1,) height, width]`
    strength: torch.Tensor  # `[]` float32

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` `[...]` times the strength, computed in float32."""
        return (x.float() * self.strength).type_as(x)

    def at_layer(self, blocks: torch.nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(block, *args)`, with the weights of the layer that a scan of the denoiser is tracing.

        blocks: a list of the component's `blocks`. args: tensors `[...]`.
        """
        assert isinstance(blocks, ScannedBlocks)
        stacked = torch_bridge.to_jax(dict(blocks.block.named_parameters()))
        layer = {
            name: jax.lax.dynamic_index_in_dim(stack, layer_index(), 0, keepdims=False)
            for name, stack in stacked.items()
        }
        layer = self.run.gather_weights(layer, prefix=f"{blocks.path}.{LAYER}.")
        result = torch_bridge.call_functional(blocks.block, layer, function, *torch_bridge.to_jax(args))
        return torch_bridge.to_torch(result)


@dataclass(frozen=True, kw_only=True)
class BuiltControl:
    """The network of a `ControlShape`, and the layouts of its weights by name."""

    shape: ControlShape
    network: Network
    layouts: Mapping[str, Layout]

    @classmethod
    def create(cls, shape: ControlShape, mesh: Mesh, precision: Precision) -> "BuiltControl":
        network = weights.private_network(shape.spec.component, shape.config)
        return cls(shape=shape, network=network, layouts=weights.layouts(network, mesh, precision))

    def operations(self, run: ShardedOps) -> ShardedOps:
        """Return the denoiser's operations with this network's weights, which are not quantized and bound no scores.

        Tokens are padded alike, because hints are added to the denoiser's.
        """
        policy = replace(run.policy, bounded=False)
        return replace(run, layouts=self.layouts, policy=policy, quantize_tokens=None)


class JoinedNetworks(torch.nn.Module):
    """A denoiser and the control networks, as one module."""

    def __init__(self, denoiser: torch.nn.Module, controls: Sequence[BuiltControl]) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.controls = torch.nn.ModuleList(control.network.module for control in controls)


def join_weights(denoiser: Mapping[str, Value], controls: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the weights of a program by name, from those of its denoiser and of each control network."""
    named = {
        f"control_{index}{CONTROL_MARK}{name}": value
        for index, part in enumerate(controls)
        for name, value in part.items()
    }
    return {**denoiser, **named}


def split_weights(joined: Mapping[str, Value], count: int) -> tuple[dict[str, Value], list[dict[str, Value]]]:
    """Undo `join_weights` of `count` control networks."""
    parts: list[dict[str, Value]] = [{} for _ in range(count)]
    denoiser = {}
    for name, value in joined.items():
        start, mark, rest = name.partition(CONTROL_MARK)
        if mark:
            parts[int(start.removeprefix("control_"))][rest] = value
        else:
            denoiser[name] = value
    return denoiser, parts


def name_in_module(
    denoiser: Mapping[str, jax.Array], controls: Sequence[Mapping[str, jax.Array]]
) -> dict[str, jax.Array]:
    """Return the parameters `[...]` of `JoinedNetworks` by name. denoiser, controls: see `join_weights`."""
    parts = [("denoiser", denoiser), *((f"controls.{index}", part) for index, part in enumerate(controls))]
    return {f"{start}.{name}": value for start, part in parts for name, value in part.items()}
