"""Merging changes into weights, on the chips: `W0 + sum of strength * difference` in float32, then one cast.

`W0` comes from the checkpoint's files each time, so that nothing accumulates. A weight is merged layer by layer and
shard by shard: next to its stack a chip holds a float32 shard of one layer, and the rows and columns of a
change's factors that the shard needs. Only factors are computed on the host.
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
from ..checkpoints import load
from ..checkpoints.model_ref import Lora
from ..files import TensorFile
from ..programs.modules import Network, Weight
from .adapter import Adapter
from .change import Change, LoraError
from .factors import Factors, Shape

# Ranks are padded with zeros to this times a power of two, so that other files run the same programs.
LEAST_RANK = 16
# As LyCORIS: a row of zeros has no direction.
SMALLEST_NORM = float(jnp.finfo(jnp.float32).eps)

Pair = tuple[jax.Array, jax.Array]


class ChangedNorm(NamedTuple):
    """DoRA: what `pairs` make of the weight is brought to the norm `magnitude`; `strength` of the change counts."""

    pairs: tuple[Pair, ...]
    magnitude: jax.Array
    strength: np.float32


class Changes(NamedTuple):
    """All that is added to one layer of a weight: products of pairs (see `Factors`), full differences, DoRA's."""

    products: tuple[tuple[Pair, ...], ...] = ()
    dense: tuple[jax.Array, ...] = ()
    norms: tuple[ChangedNorm, ...] = ()


def merged(weight: jax.Array, changes: Changes) -> jax.Array:
    """One layer of a weight, in float32, with all its changes."""
    start = weight.astype(jnp.float32)
    total = start
    for pairs in changes.products:
        total = total + _difference(pairs)
    for dense in changes.dense:
        total = total + dense
    for pairs, magnitude, strength in changes.norms:
        turned = start + _difference(pairs)
        over = tuple(dim for dim, size in enumerate(magnitude.shape) if size != turned.shape[dim])
        norm = jnp.sqrt(jnp.sum(turned * turned, axis=over, keepdims=True)) + SMALLEST_NORM
        total = total + strength * (turned * (magnitude / norm) - start)
    return total


def _difference(pairs: Sequence[Pair]) -> jax.Array:
    """A TPU multiplies float32 in bfloat16 unless it is told not to."""
    parts = [jnp.tensordot(up, down, 1, precision=jax.lax.Precision.HIGHEST) for up, down in pairs]
    return functools.reduce(jnp.multiply, parts)


def merge_layer(stack: jax.Array, layer: jax.Array, weight: jax.Array, changes: Changes) -> jax.Array:
    """Puts a layer with its changes into its place in `stack`."""
    return jax.lax.dynamic_update_index_in_dim(stack, merged(weight, changes).astype(stack.dtype), layer, 0)


@functools.cache
def _layer_program(sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(merge_layer, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _program(sharding: NamedSharding, dtype: Any) -> Callable[..., jax.Array]:
    return jax.jit(lambda weight, changes: merged(weight, changes).astype(dtype), out_shardings=sharding)


class Merge:
    """The changes of several files to one network, as `load.load` asks for them."""

    def __init__(
        self, adapters: Sequence[tuple[Adapter, Lora]], network: Network, check: Callable[[str], None]
    ) -> None:
        self._adapters, self._network, self._check = adapters, network, check
        changed = {source for adapter, _ in adapters for source in adapter.changes}
        self.names = frozenset(
            name for name, weight in network.weights.items() if not changed.isdisjoint(weight.sources)
        )

    def read(
        self, reader: load.Reader, name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """A weight of `names` with its changes and the sharding of `want`; `files` are the checkpoint's."""
        weight, sharding = self._network.weights[name], want.sharding
        assert isinstance(sharding, NamedSharding)
        spec = (*sharding.spec, *[None] * (len(want.shape) - len(sharding.spec)))
        if not weight.stacked:
            place = _LayerSharding(sharding.mesh, spec, want.shape)
            start = load.read_layer(reader, files[0], weight, sharding)
            changes = self._changes(reader, weight, weight.sources[0], place)
            self._check(f"merge into {name}")
            return _program(sharding, want.dtype)(start, changes)
        assert spec[0] is None  # layers are never split
        place = _LayerSharding(sharding.mesh, spec[1:], want.shape[1:])
        stack: Any = None
        for layer, (source, file) in enumerate(zip(weight.sources, files, strict=True)):
            start = load.read_layer(reader, file, weight, place.sharding(place.spec))
            changes = self._changes(reader, weight, source, place)
            self._check(f"merge into layer {layer} of {name}")
            stack = jnp.zeros(want.shape, want.dtype, device=sharding) if stack is None else stack
            stack = _layer_program(sharding)(stack, layer, start, changes)
        return stack

    def vectors(self, reader: load.Reader) -> dict[str, torch.Tensor]:
        """The sum of what is added to each weight of one dimension, by its name in a checkpoint."""
        sums: dict[str, torch.Tensor] = {}
        for weight in self._network.weights.values():
            for source in weight.sources if len(weight.layer_shape) == 1 else ():
                for adapter, lora in self._adapters:
                    for change in adapter.changes.get(source, ()):
                        found, scale = _read(reader, adapter, change, weight)
                        assert found.dense is not None  # a vector has no factors
                        sums[source] = sums.get(source, 0) + scale * lora.strength * found.dense
        return sums

    def _changes(self, reader: load.Reader, weight: Weight, source: str, place: "_LayerSharding") -> Changes:
        """What all files change in one layer of a weight, `source` in a checkpoint, on the chips."""
        low_rank: list[tuple[torch.Tensor, torch.Tensor]] = []
        products, dense, norms = [], [], []
        for adapter, lora in self._adapters:
            for change in adapter.changes.get(source, ()):
                found, scale = _read(reader, adapter, change, weight)
                if found.dense is not None:
                    dense.append(place.dense(found.dense * (scale * lora.strength)))
                    continue
                strength = scale if found.magnitude is not None else scale * lora.strength
                (up, down), *others = found.pairs
                pairs = [(up * strength, down), *others]
                if found.magnitude is not None:
                    placed = tuple(place.pair(*pair) for pair in pairs)
                    norms.append(ChangedNorm(placed, place.magnitude(found.magnitude), np.float32(lora.strength)))
                elif others:
                    products.append(tuple(place.pair(*pair) for pair in pairs))
                else:
                    low_rank += pairs
        if low_rank:  # one product for all of them
            ups, downs = zip(*low_rank, strict=True)
            products.append((place.pair(torch.cat(ups, -1), torch.cat(downs, 0)),))
        return Changes(tuple(products), tuple(dense), tuple(norms))


def _read(reader: load.Reader, adapter: Adapter, change: Change, weight: Weight) -> tuple[Factors, float]:
    """The factors of a change in float32, and what multiplies them besides the strength."""
    tensors = {}
    for part, name in change.parts.items():
        tensors[part] = adapter.tensor(reader, name)
        if not torch.isfinite(tensors[part]).all():
            raise LoraError(f"The LoRA {adapter.path}: {name} holds NaN or infinity; the file is damaged.")
    found, scale = change.read(adapter.path, tensors, weight.tensor_shape)
    return found.of(weight.cut), scale


@dataclass(frozen=True)
class _LayerSharding:
    """The sharding of one layer of a weight of `shape`; `spec` has the mesh axes of each of its dimensions."""

    mesh: Mesh | AbstractMesh
    spec: tuple[Any, ...]
    shape: Shape

    def sharding(self, spec: tuple[Any, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def _put(self, tensor: torch.Tensor, spec: tuple[Any, ...]) -> jax.Array:
        return placement.put(tensor.numpy(), self.sharding(spec))

    def dense(self, tensor: torch.Tensor) -> jax.Array:
        return self._put(tensor, self.spec)

    def magnitude(self, tensor: torch.Tensor) -> jax.Array:
        axes = zip(self.spec, tensor.shape, self.shape, strict=True)
        return self._put(tensor, tuple(axis if size == full else None for axis, size, full in axes))

    def pair(self, up: torch.Tensor, down: torch.Tensor) -> Pair:
        """Rows of `up` and columns of `down` on the chips of the weight's; the rank is padded, and replicated."""
        rank = LEAST_RANK
        while rank < up.shape[-1]:
            rank *= 2
        missing, cut = rank - up.shape[-1], up.ndim - 1
        up = torch.nn.functional.pad(up, (0, missing))
        down = torch.cat([down, down.new_zeros(missing, *down.shape[1:])])
        return self._put(up, (*self.spec[:cut], None)), self._put(down, (None, *self.spec[cut:]))
