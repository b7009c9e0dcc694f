"""Merging of changes into weights on the chips: `W0 + sum of strength * difference` in float32, then one cast.

`W0` is read from the checkpoint each time, so that nothing accumulates. A weight is merged layer by layer and shard by
shard. In addition to the stack, a chip holds a float32 shard of one layer, and the rows and columns of a change's
factors that the shard needs. Only factors are computed on the host.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ...sharding import placement
from ..checkpoints import weight_loader
from ..checkpoints.model_ref import Lora
from ..files import TensorFile
from ..messages import compose
from ..programs.upstream_network import Network, Weight
from .adapter import Adapter
from .change import LoraError, WeightChange
from .factors import DeltaFactors, Shape

# Ranks are padded with zeros to this times a power of two, so that different files run the same programs.
MIN_RANK = 16
# Added to norms, as LyCORIS does: a row of zeros has no direction.
MIN_NORM = float(jnp.finfo(jnp.float32).eps)

Pair = tuple[jax.Array, jax.Array]


class NormDelta(NamedTuple):
    """A DoRA change."""

    pairs: tuple[Pair, ...]  # factors of the difference (see `DeltaFactors`)
    magnitude: jax.Array  # norm that weight plus difference is scaled to
    strength: np.float32  # of the change


class WeightDeltas(NamedTuple):
    """All changes of one layer of a weight."""

    products: tuple[tuple[Pair, ...], ...] = ()  # pairs of each difference (see `DeltaFactors`)
    dense: tuple[jax.Array, ...] = ()  # full differences
    norms: tuple[NormDelta, ...] = ()  # DoRA changes


def apply_deltas(weight: jax.Array, changes: WeightDeltas) -> jax.Array:
    """Return one layer of a weight `[*out, *in]` with all its changes, in float32."""
    start = weight.astype(jnp.float32)
    total = start
    for pairs in changes.products:
        total = total + _difference(pairs)
    for dense in changes.dense:
        total = total + dense
    for pairs, magnitude, strength in changes.norms:
        changed = start + _difference(pairs)
        over = tuple(dim for dim, size in enumerate(magnitude.shape) if size != changed.shape[dim])
        norm = jnp.sqrt(jnp.sum(changed * changed, axis=over, keepdims=True)) + MIN_NORM
        total = total + strength * (changed * (magnitude / norm) - start)
    return total


def _difference(pairs: Sequence[Pair]) -> jax.Array:
    """Return the product of all pairs. A TPU multiplies float32 in bfloat16 unless the precision is set."""
    parts = [jnp.tensordot(up, down, 1, precision=jax.lax.Precision.HIGHEST) for up, down in pairs]
    return functools.reduce(jnp.multiply, parts)


def merge_layer(stack: jax.Array, layer: jax.Array, weight: jax.Array, changes: WeightDeltas) -> jax.Array:
    """Return `stack` `[layers, *out, *in]` with one layer replaced by the merged weight.

    layer: its index, a scalar.
    weight: `[*out, *in]` from the checkpoint.
    changes: of this layer.
    """
    return jax.lax.dynamic_update_index_in_dim(stack, apply_deltas(weight, changes).astype(stack.dtype), layer, 0)


@functools.cache
def _layer_program(sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(merge_layer, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _program(sharding: NamedSharding, dtype: Any) -> Callable[..., jax.Array]:
    return jax.jit(lambda weight, changes: apply_deltas(weight, changes).astype(dtype), out_shardings=sharding)


class LoraMerge:
    """The changes of several files to one network; implements `load.ModifiedWeights`."""

    def __init__(
        self, adapters: Sequence[tuple[Adapter, Lora]], network: Network, check: Callable[[str], None]
    ) -> None:
        self._adapters, self._network, self._check = adapters, network, check
        changed = {source for adapter, _ in adapters for source in adapter.changes}
        self.names = frozenset(
            name for name, weight in network.weights.items() if not changed.isdisjoint(weight.sources)
        )

    def read(
        self, reader: weight_loader.TensorReader, name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Return a weight in `names` with its changes, `[layers, *out, *in]` or one layer, with the sharding of `want`.

        reader: of the checkpoint and the LoRA files.
        name: of the weight.
        files: of the checkpoint, one per layer.
        want: shape, dtype and sharding.
        """
        weight, sharding = self._network.weights[name], want.sharding
        assert isinstance(sharding, NamedSharding)
        spec = (*sharding.spec, *[None] * (len(want.shape) - len(sharding.spec)))
        if not weight.stacked:
            place = _LayerSharding(sharding.mesh, spec, want.shape)
            start = weight_loader.read_layer(reader, files[0], weight, sharding)
            changes = self._changes(reader, weight, weight.sources[0], place)
            self._check(f"merge into {name}")
            return _program(sharding, want.dtype)(start, changes)
        assert spec[0] is None  # layers are never split
        place = _LayerSharding(sharding.mesh, spec[1:], want.shape[1:])
        stack: Any = None
        for layer, (source, file) in enumerate(zip(weight.sources, files, strict=True)):
            start = weight_loader.read_layer(reader, file, weight, place.sharding(place.spec))
            changes = self._changes(reader, weight, source, place)
            self._check(f"merge into layer {layer} of {name}")
            stack = jnp.zeros(want.shape, want.dtype, device=sharding) if stack is None else stack
            stack = _layer_program(sharding)(stack, layer, start, changes)
        return stack

    def vectors(self, reader: weight_loader.TensorReader) -> dict[str, torch.Tensor]:
        """Return the sum of the differences of each one-dimensional weight, `[size]`, by its name in a checkpoint."""
        sums: dict[str, torch.Tensor] = {}
        for weight in self._network.weights.values():
            for source in weight.sources if len(weight.layer_shape) == 1 else ():
                for adapter, lora in self._adapters:
                    for change in adapter.changes.get(source, ()):
                        delta, scale = _read(reader, adapter, change, weight)
                        assert delta.dense is not None  # a vector has no factors
                        sums[source] = sums.get(source, 0) + scale * lora.strength * delta.dense
        return sums

    def _changes(
        self, reader: weight_loader.TensorReader, weight: Weight, source: str, place: "_LayerSharding"
    ) -> WeightDeltas:
        """Return the changes of all files to one layer of a weight on the chips.

        `source` is the weight's name in a checkpoint.
        """
        low_rank: list[tuple[torch.Tensor, torch.Tensor]] = []
        products, dense, norms = [], [], []
        for adapter, lora in self._adapters:
            for change in adapter.changes.get(source, ()):
                delta, scale = _read(reader, adapter, change, weight)
                if delta.dense is not None:
                    dense.append(place.dense(delta.dense * (scale * lora.strength)))
                    continue
                strength = scale if delta.magnitude is not None else scale * lora.strength
                (up, down), *others = delta.pairs
                pairs = [(up * strength, down), *others]
                if delta.magnitude is not None:
                    placed = tuple(place.pair(*pair) for pair in pairs)
                    norms.append(NormDelta(placed, place.magnitude(delta.magnitude), np.float32(lora.strength)))
                elif others:
                    products.append(tuple(place.pair(*pair) for pair in pairs))
                else:
                    low_rank += pairs
        if low_rank:  # one product for all of them
            ups, downs = zip(*low_rank, strict=True)
            products.append((place.pair(torch.cat(ups, -1), torch.cat(downs, 0)),))
        return WeightDeltas(tuple(products), tuple(dense), tuple(norms))


def _read(
    reader: weight_loader.TensorReader, adapter: Adapter, change: WeightChange, weight: Weight
) -> tuple[DeltaFactors, float]:
    """Return the factors of a change in float32, and their scale factor other than the strength."""
    tensors = {}
    for part, name in change.parts.items():
        tensors[part] = adapter.tensor(reader, name)
        if not torch.isfinite(tensors[part]).all():
            raise LoraError(compose("lora.not_finite", path=adapter.path, name=name))
    delta, scale = change.read(adapter.path, tensors, weight.tensor_shape)
    return delta.take_slice(weight.cut), scale


@dataclass(frozen=True)
class _LayerSharding:
    """The sharding of one layer of a weight."""

    mesh: Mesh | AbstractMesh
    spec: tuple[Any, ...]  # mesh axes of each dimension
    shape: Shape  # of the layer

    def sharding(self, spec: tuple[Any, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _put(self, tensor: torch.Tensor, spec: tuple[Any, ...]) -> jax.Array:
        return placement.put(tensor.numpy(), self.sharding(spec))

    def dense(self, tensor: torch.Tensor) -> jax.Array:
        """Return a difference `[*out, *in]` on the chips, with the weight's sharding."""
        return self._put(tensor, self.spec)

    def magnitude(self, tensor: torch.Tensor) -> jax.Array:
        """Return norms `[*out, 1...]` or `[1..., *in]` on the chips, with the weight's sharding."""
        axes = zip(self.spec, tensor.shape, self.shape, strict=True)
        return self._put(tensor, tuple(axis if size == full else None for axis, size, full in axes))

    def pair(self, up: torch.Tensor, down: torch.Tensor) -> Pair:
        """Return `up` `[*out, rank]` and `down` `[rank, *in]` on the chips, with the weight's sharding.

        The rank is padded and replicated.
        """
        rank = MIN_RANK
        while rank < up.shape[-1]:
            rank *= 2
        missing, cut = rank - up.shape[-1], up.ndim - 1
        up = torch.nn.functional.pad(up, (0, missing))
        down = torch.cat([down, down.new_zeros(missing, *down.shape[1:])])
        return self._put(up, (*self.spec[:cut], None)), self._put(down, (None, *self.spec[cut:]))
