"""Transfer of arrays from the host to its chips, in which each byte crosses PCIe once.

An array that several chips hold is put in parts, one on each of these chips, and gathered over the links between them.
Eight copies of 12 GB over PCIe take seconds; a gather takes a tenth of a second. A gather uses only chips of this host,
so hosts do not wait for each other.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ...sharding.mesh import Device
from ..files import Index

# Smaller arrays are put on every chip: launching a program takes longer.
MIN_SPLIT_BYTES = 2**20
# Number of pieces whose transfer may be pending while the next is put.
MAX_PUTS_IN_FLIGHT = 2


class Arriving(Protocol):
    """Array returned by `device_put`, which may not have arrived."""

    def is_ready(self) -> bool: ...
    def is_deleted(self) -> bool: ...
    def block_until_ready(self) -> object: ...


class PutsInFlight:
    """Pending transfers to the chips, oldest first.

    `device_put` returns before the transfer ends, and the host holds the bytes until then.
    """

    def __init__(self) -> None:
        self._puts: deque[tuple[Sequence[Arriving], int]] = deque()

    @property
    def size_bytes(self) -> int:
        """Return the bytes on the host that have not arrived."""
        while self._puts and all(array.is_deleted() or array.is_ready() for array in self._puts[0][0]):
            self._puts.popleft()
        return sum(size for _, size in self._puts)

    def add(self, arrays: Sequence[Arriving], size_bytes: int) -> None:
        """Count a piece that was put as `arrays`, and wait for the one that was put `MAX_PUTS_IN_FLIGHT` before it."""
        self._puts.append((arrays, size_bytes))
        while len(self._puts) > MAX_PUTS_IN_FLIGHT:
            self.wait_for_oldest()

    def wait_for_oldest(self) -> None:
        """Wait until the oldest piece has arrived. Raises the transfer's error."""
        for array in self._puts.popleft()[0]:
            if not array.is_deleted():
                array.block_until_ready()

    def wait_for_all(self) -> None:
        """Wait until every piece has arrived, and hold none of the arrays any more."""
        while self._puts:
            self.wait_for_oldest()


def place(
    shape: tuple[int, ...], sharding: Sharding, read: Callable[[Index], np.ndarray], in_flight: PutsInFlight
) -> jax.Array:
    """Return the array `[*shape]` on the chips, with the bits that `read` returned.

    read: returns the shard of an index; called once per index of this host's chips, in the order of `list_shards`.
    in_flight: counts the shards until they have arrived.
    """
    shards = list_shards(sharding, shape)
    counts = {len(devices) for _, devices in shards}
    count = counts.pop() if len(counts) == 1 else 1
    placed, gathered = list[jax.Array](), None
    for index, devices in shards:
        piece = read(index)
        if count > 1 and piece.nbytes >= MIN_SPLIT_BYTES:
            axis = _split_axis(piece.shape, count)
            # As words: a gather of numbers need not keep the bits of each NaN.
            parts = list(_split(piece.view(f"u{piece.dtype.itemsize}"), count, axis))
            gathered = functools.partial(_gather, shape=piece.shape, dtype=piece.dtype, count=count, axis=axis)
        else:
            parts = [piece] * len(devices)
        put = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
        in_flight.add(put, piece.nbytes)
        placed += put
    return jax.make_array_from_single_device_arrays(shape, sharding, gathered(placed) if gathered else placed)


def list_shards(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[Index, list[Device]]]:
    """Return the parts of an array that chips of this host hold, each with these chips."""
    shards: dict[tuple, tuple[Index, list[Device]]] = {}
    indices = sharding.addressable_devices_indices_map(shape).items()
    for device, index in sorted(((device, index) for device, index in indices if index is not None), key=_by_index):
        shards.setdefault(tuple((part.start, part.stop) for part in index), (index, []))[1].append(device)
    return list(shards.values())


def _by_index(item: tuple[Device, Index]) -> str:
    return str(item[1])


def _split_axis(shape: tuple[int, ...], count: int) -> int:
    """Return the first axis that `count` parts share evenly, else the longest."""
    even = (axis for axis, size in enumerate(shape) if size % count == 0)
    return next(even, max(range(len(shape)), key=lambda axis: shape[axis]))


def _split(piece: np.ndarray, count: int, axis: int) -> Iterator[np.ndarray]:
    """Yield `count` equal parts of `piece` along `axis`, padded with zeros."""
    size = -(-piece.shape[axis] // count)
    for start in range(0, count * size, size):
        part = piece[(slice(None),) * axis + (slice(start, start + size),)]
        missing = size - part.shape[axis]
        yield np.pad(part, [(0, missing * (each == axis)) for each in range(piece.ndim)]) if missing else part


def _gather(
    parts: Sequence[jax.Array], *, shape: tuple[int, ...], dtype: np.dtype, count: int, axis: int
) -> list[jax.Array]:
    """Return the shards `[*shape]`, each gathered from `count` consecutive `parts`, one on the chip of each part."""
    devices = tuple(part.device for part in parts)
    program, sharding = _gather_program(devices, shape, dtype, count, axis)
    first, *rest = parts[0].shape
    whole = program(jax.make_array_from_single_device_arrays((len(parts) * first, *rest), sharding, list(parts)))
    by_device = {shard.device: shard.data for shard in whole.addressable_shards}
    return [by_device[device] for device in devices]


@functools.lru_cache(maxsize=128)
def _gather_program(
    devices: tuple[Device, ...], shape: tuple[int, ...], dtype: np.dtype, count: int, axis: int
) -> tuple[Callable[[jax.Array], jax.Array], NamedSharding]:
    """Return the program that gathers parts among each `count` chips, and the sharding of its argument.

    The argument is the concatenation of the parts.
    """
    mesh = Mesh(np.array(devices).reshape(-1, count), ("shard", "replica"))

    def gather_parts(part: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(part, "replica", axis=axis, tiled=True)
        return jax.lax.bitcast_convert_type(jax.lax.slice_in_dim(whole, 0, shape[axis], axis=axis), dtype)

    spec = P(("shard", "replica"))
    mapped = jax.shard_map(gather_parts, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped), NamedSharding(mesh, spec)
