"""Weights from safetensors files to their shards, one shard at a time, in the target format.

The host never holds more than one shard of one (stacked) weight. A weight with a value that is not finite is an error.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import torch
from jax.sharding import Sharding

from ..files import CheckpointError, TensorFile
from ..programs.modules import Network, Weight
from ..programs.weights import Weights
from ..progress import Progress
from ..units import GIB, MIB

SECONDS_BETWEEN_TEXTS = 0.5
Index = tuple[slice, ...]
NUMPY_VIEWS = {torch.bfloat16: (torch.int16, jax.numpy.bfloat16), torch.float32: (torch.float32, np.float32)}


class Changed(Protocol):
    """Weights that differ from the files: their `names`, and how to read one."""

    names: frozenset[str]

    def read(
        self, reader: "Reader", name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
    ) -> jax.Array: ...


def load(
    network: Network,
    files: Mapping[str, tuple[TensorFile, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    title: str,
    progress: Progress,
    changed: Changed | None = None,
    weights: Weights | None = None,
) -> Weights:
    """Reads weights of a network onto its devices. `wanted` comes from `abstract`: all of them, or those that replace
    those of the same names in `weights`, which are freed one by one.

    A cancel stops between two tensors of the files and drops what was read so far.
    """
    meter = _Meter(title, sum(int(np.prod(want.shape)) * want.dtype.itemsize for want in wanted.values()), progress)
    weights = {} if weights is None else weights
    with contextlib.ExitStack() as stack:
        reader = Reader(stack, progress.check_cancelled)
        for name, want in wanted.items():
            if name in weights:
                weights[name].delete()
            if changed is not None and name in changed.names:
                weights[name] = changed.read(reader, name, files[name], want)
            else:
                weights[name] = _load_one(reader, network, name, files[name], want)
            meter.add(int(np.prod(want.shape)) * want.dtype.itemsize)
    jax.block_until_ready(weights)
    return weights


class _Meter:
    """Reports how much is loaded, and how fast."""

    def __init__(self, title: str, total_bytes: int, progress: Progress) -> None:
        self.title, self.total, self.progress = title, total_bytes, progress
        self.done, self.started, self.said = 0, time.monotonic(), 0.0
        progress.text(f"Loading {title}: {self._size(total_bytes)}")

    def _size(self, size: int) -> str:
        return f"{size / GIB:.1f} GiB" if self.total >= GIB else f"{size / MIB:.1f} MiB"

    def add(self, size: int) -> None:
        self.done += size
        self.progress.step(self.done // MIB, max(1, self.total // MIB), "MiB")
        elapsed = time.monotonic() - self.started
        if elapsed - self.said >= SECONDS_BETWEEN_TEXTS:
            self.said = elapsed
            rate = self.done / MIB / elapsed
            sizes = f"{self._size(self.done)} of {self._size(self.total)}"
            self.progress.text(f"Loading {self.title}: {sizes}, {rate:.0f} MiB a second")


class Reader:
    """Open safetensors files, closed by the stack. `check` raises if the user cancelled."""

    def __init__(self, stack: contextlib.ExitStack, check: Callable[[], None]) -> None:
        self.stack = stack
        self.check = check
        self.files: dict[str, Any] = {}

    def slice(self, file: TensorFile, index: Index) -> torch.Tensor:
        from safetensors import safe_open

        self.check()
        key = str(file.path)
        if key not in self.files:
            self.files[key] = self.stack.enter_context(safe_open(key, framework="pt"))
        # A zero-dimensional slice is not indexable.
        return self.files[key].get_slice(file.name)[index] if index else self.files[key].get_tensor(file.name)


def _load_one(
    reader: Reader, network: Network, name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
) -> jax.Array:
    return _placed(want.shape, want.sharding, lambda index: _read(reader, network, name, files, index, want))


def read_layer(reader: Reader, file: TensorFile, weight: Weight, sharding: Sharding) -> jax.Array:
    """One layer of a weight with this `sharding`: bfloat16 if the file is, else float32."""

    def read(index: Index) -> np.ndarray:
        piece = _slice(reader, file, index, weight)
        piece = (piece if piece.dtype == torch.bfloat16 else piece.float()).contiguous()
        _check_finite(piece, file)
        return _array(piece)

    return _placed(weight.layer_shape, sharding, read)


def _placed(shape: tuple[int, ...], sharding: Sharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """An array of the shards that `read` returns for their indices."""
    pieces: dict[tuple, np.ndarray] = {}
    arrays = []
    placed = sharding.addressable_devices_indices_map(shape).items()
    for device, index in sorted(placed, key=lambda item: str(item[1])):  # equal shards follow each other: read once
        assert index is not None  # every shard has a place
        key = tuple((part.start, part.stop) for part in index)
        if key not in pieces:
            pieces = {key: read(index)}
        arrays.append(jax.device_put(pieces[key], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read(
    reader: Reader, network: Network, name: str, files: tuple[TensorFile, ...], index: Index, want: jax.ShapeDtypeStruct
) -> np.ndarray:
    """One shard of a weight, in its final format on the host."""
    weight = network.weights[name]
    torch_dtype = torch.float32 if want.dtype == jax.numpy.float32 else torch.bfloat16
    layers = range(*index[0].indices(len(files))) if weight.stacked else range(1)
    inner = index[1:] if weight.stacked else index
    shape = want.sharding.shard_shape(want.shape)
    piece = torch.empty((len(layers), *(shape[1:] if weight.stacked else shape)), dtype=torch_dtype)
    for row, layer in enumerate(layers):
        piece[row] = _slice(reader, files[layer], inner, weight)
        _check_finite(piece[row], files[layer])
    array = _array(piece)
    return array if weight.stacked else array[0]


def _check_finite(piece: torch.Tensor, file: TensorFile) -> None:
    if not torch.isfinite(piece).all():
        raise CheckpointError(
            f"{file.path}: the weight {file.name} holds NaN or infinity; the file is damaged. Download it again."
        )


def _array(piece: torch.Tensor) -> np.ndarray:
    view, dtype = NUMPY_VIEWS[piece.dtype]
    return piece.view(view).numpy().view(dtype)


def _slice(reader: Reader, file: TensorFile, index: Index, weight: Weight) -> torch.Tensor:
    """Part of one layer of a weight, which may be cut out of the file's tensor."""
    read = functools.partial(reader.slice, file)
    return read(index) if weight.cut is None else weight.cut.read(index, read)
