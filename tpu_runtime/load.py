"""Weights from safetensors files to their shards, one shard at a time, in the target format.

The host never holds more than one shard of one (stacked) weight. A weight with a value that is not finite is an error.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..sharding import rules
from ..sharding.mesh import shape_of
from .checkpoint import CheckpointError, TensorFile, folded_dimension
from .modules import Network
from .precision import Precision
from .progress import Progress

Weights = dict[str, jax.Array]
MIB = 2**20
NUMPY_VIEWS = {torch.bfloat16: (torch.int16, jax.numpy.bfloat16), torch.float32: (torch.float32, np.float32)}


def weight_dtype(network: Network, name: str, precision: Precision) -> jax.numpy.dtype:
    """The format of a weight in use: upstream keeps some modules in float32 whatever the rest is in."""
    float32 = precision == "float32" or network.weights[name].keep_float32
    return jax.numpy.dtype(jax.numpy.float32 if float32 else jax.numpy.bfloat16)


def params(network: Network, precision: Precision) -> dict[str, rules.Param]:
    """Shapes and sizes, for the sharding rules."""
    return {
        name: rules.Param(
            shape=weight.shape, size_bytes=int(np.prod(weight.shape)) * weight_dtype(network, name, precision).itemsize
        )
        for name, weight in network.weights.items()
    }


def layouts(network: Network, mesh: Mesh, precision: Precision) -> dict[str, rules.Layout]:
    return rules.lay_out(params(network, precision), network.component.rules, shape_of(mesh))


def abstract(network: Network, mesh: Mesh, precision: Precision) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights as shapes with their shardings: what a program is compiled for."""
    placed = layouts(network, mesh, precision)
    return {
        name: jax.ShapeDtypeStruct(
            weight.shape,
            weight_dtype(network, name, precision),
            sharding=NamedSharding(mesh, PartitionSpec(*placed[name].at_rest)),
        )
        for name, weight in network.weights.items()
    }


def bytes_per_chip(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of the weights on one chip, at rest."""
    return sum(int(np.prod(w.sharding.shard_shape(w.shape))) * w.dtype.itemsize for w in wanted.values())


def load(
    network: Network,
    files: Mapping[str, tuple[TensorFile, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    title: str,
    progress: Progress,
) -> Weights:
    """Reads every weight of a network onto its devices. `wanted` comes from `abstract`.

    Cancelling between two weights drops what was read so far.
    """
    total = sum(int(np.prod(want.shape)) * want.dtype.itemsize for want in wanted.values())
    progress.text(
        f"Loading {title}: {total / 2**30:.1f} GiB" if total >= 2**30 else f"Loading {title}: {total / MIB:.1f} MiB"
    )
    weights: Weights = {}
    done = 0
    with contextlib.ExitStack() as stack:
        reader = _Reader(stack)
        for name, want in wanted.items():
            progress.check_cancelled()
            weights[name] = _load_one(reader, network, name, files[name], want)
            done += int(np.prod(want.shape)) * want.dtype.itemsize
            progress.step(done // MIB, max(1, total // MIB), "MiB")
    jax.block_until_ready(weights)
    return weights


class _Reader:
    """Open safetensors files, closed by the stack."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.files: dict[str, Any] = {}

    def slice(self, file: TensorFile, index: tuple[slice, ...]) -> torch.Tensor:
        from safetensors import safe_open

        key = str(file.path)
        if key not in self.files:
            self.files[key] = self.stack.enter_context(safe_open(key, framework="pt"))
        # A zero-dimensional slice is not indexable.
        return self.files[key].get_slice(file.name)[index] if index else self.files[key].get_tensor(file.name)


def _load_one(
    reader: _Reader, network: Network, name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
) -> jax.Array:
    sharding = want.sharding
    pieces: dict[tuple, np.ndarray] = {}
    arrays = []
    placed = sharding.addressable_devices_indices_map(want.shape).items()
    for device, index in sorted(placed, key=lambda item: str(item[1])):  # equal shards follow each other: read once
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:
            pieces = {key: _read(reader, network, name, files, index, want)}
        arrays.append(jax.device_put(pieces[key], device))
    return jax.make_array_from_single_device_arrays(want.shape, sharding, arrays)


def _read(
    reader: _Reader,
    network: Network,
    name: str,
    files: tuple[TensorFile, ...],
    index: tuple[slice, ...],
    want: jax.ShapeDtypeStruct,
) -> np.ndarray:
    """One shard of a weight, in its final format on the host."""
    weight = network.weights[name]
    torch_dtype = torch.float32 if want.dtype == jax.numpy.float32 else torch.bfloat16
    layers = range(*index[0].indices(len(files))) if weight.stacked else range(1)
    inner = index[1:] if weight.stacked else index
    shape = want.sharding.shard_shape(want.shape)
    piece = torch.empty((len(layers), *(shape[1:] if weight.stacked else shape)), dtype=torch_dtype)
    for row, layer in enumerate(layers):
        piece[row] = _slice(reader, files[layer], inner, weight.shape[1:] if weight.stacked else weight.shape)
        if not torch.isfinite(piece[row]).all():
            raise CheckpointError(
                f"{files[layer].path}: the weight {weight.sources[layer]} holds NaN or infinity; the file is damaged. "
                "Download it again."
            )
    view, dtype = NUMPY_VIEWS[torch_dtype]
    array = piece.view(view).numpy().view(dtype)
    return array if weight.stacked else array[0]


def _slice(reader: _Reader, file: TensorFile, index: tuple[slice, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Part of a file's tensor, which may be folded (see `spec.Component`): one piece of each group then."""
    dim = folded_dimension(file.shape, shape)
    if dim is None:
        return reader.slice(file, index)
    size = shape[dim + 1]
    start, stop, _ = index[dim + 1].indices(size)
    groups = range(*index[dim].indices(shape[dim]))
    places = [slice(group * size + start, group * size + stop) for group in groups]
    return torch.stack([reader.slice(file, (*index[:dim], place, *index[dim + 2 :])) for place in places], dim)
