"""Weights from files to their shards, in the target format, as fast as the disk gives them.

Several threads read and decode layers of a stacked weight while the shards before it are put on the chips. The host
holds the shards that are read ahead and those on their way to the chips, together `AHEAD_BYTES` at most, or one larger
shard alone. A weight with a value that is not finite is an error.
"""

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
import torch
from jax.sharding import Sharding

from .. import host_memory
from ..files import CheckpointError, Index, TensorFile
from ..programs.modules import Network, Weight
from ..programs.weights import WORTH, Weights, round_weight, summed
from ..progress import Progress
from ..units import GB, MIB
from .placement import PutsInFlight, place, shards_of

# Of the threads that read: more than cores, for they also wait for the disk. Their work does not hold Python's lock.
READERS = min(16, 2 * (os.cpu_count() or 1))
AHEAD_BYTES = 2**30
SECONDS_BETWEEN_TEXTS = 0.5
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
    check: Callable[[str], None] = lambda what: None,
) -> Weights:
    """Reads weights of a network onto its devices. `wanted` comes from `abstract`: all of them, or those that replace
    those of the same names in `weights`, which are freed one by one. Weights in int8 are rounded on the chips, after
    all changes; `check` is called before the chips do so.

    A cancel stops between two tensors of the files and drops what was read so far. Raises `HostFull` where the host's
    memory is too small, before a byte is read.
    """
    size_bytes = _host_bytes(network, files, wanted, replaces=weights is not None)
    host_memory.require(size_bytes, f"Loading {title}")
    meter = _Meter(title, sum(int(np.prod(want.shape)) * want.dtype.itemsize for want in wanted.values()), progress)
    weights = {} if weights is None else weights
    merged = frozenset() if changed is None else changed.names
    with host_memory.explained(f"Loading {title}"), contextlib.ExitStack() as stack:
        reader = Reader(stack, progress.check_cancelled)
        numbers = {name: want for name, want in wanted.items() if not name.endswith(WORTH)}
        plain = {name: want for name, want in numbers.items() if name not in merged}
        axes = summed(network) if len(numbers) < len(wanted) else {}
        in_flight = PutsInFlight()
        # Inside: the threads that read end before the files are closed that they opened.
        with read_shards(reader.unchecked(), network, files, plain, in_flight) as ahead:
            for name, want in numbers.items():
                progress.check_cancelled()
                for held in (name, name + WORTH):
                    if held in weights:
                        weights[held].delete()
                if changed is not None and name in merged:
                    weights[name] = changed.read(reader, name, files[name], _read_as(want))
                else:
                    weights[name] = place(want.shape, want.sharding, lambda index: next(ahead), in_flight)
                if want.dtype == jax.numpy.int8:
                    check(f"round {name}")
                    in_flight.wait_for_all()  # which holds what is rounded
                    weights[name], weights[name + WORTH] = round_weight(
                        weights[name], axes[name], want, wanted[name + WORTH]
                    )
                meter.add(int(np.prod(want.shape)) * want.dtype.itemsize)
    jax.block_until_ready(weights)
    return weights


def _host_bytes(
    network: Network,
    files: Mapping[str, tuple[TensorFile, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    *,
    replaces: bool,
) -> int:
    """What loading takes of the host's memory: the largest shard, and what stays where the devices are the host.

    Shards that are read ahead are not counted: they are as many as there is memory for.
    """
    numbers = {name: want for name, want in wanted.items() if not name.endswith(WORTH)}
    pieces = (
        piece.size_bytes for name, want in numbers.items() for piece in _Piece.of(network, name, files[name], want)
    )
    return max(pieces, default=0) + (0 if replaces else sum(map(_kept_bytes, wanted.values())))


def _kept_bytes(want: jax.ShapeDtypeStruct) -> int:
    """Of a weight on devices that compute in the host's memory, as where there is no TPU."""
    shard = int(np.prod(want.sharding.shard_shape(want.shape))) * want.dtype.itemsize
    return shard * sum(device.platform == "cpu" for device in want.sharding.addressable_devices)


def _read_as(want: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What is read of a weight: before it is rounded to int8 it is bfloat16."""
    if want.dtype != jax.numpy.int8:
        return want
    return jax.ShapeDtypeStruct(want.shape, jax.numpy.bfloat16, sharding=want.sharding)


@dataclass
class _Piece:
    """One shard of a weight on the host, to be filled layer by layer: `array` is `[layers, ...]`."""

    weight: Weight
    files: tuple[TensorFile, ...]
    index: Index
    shape: tuple[int, ...]
    dtype: torch.dtype
    array: torch.Tensor | None = None
    layers: list[Future[None]] = field(default_factory=list)

    @classmethod
    def of(
        cls, network: Network, name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
    ) -> "list[_Piece]":
        """The pieces of a weight, one for each index that shards have, in the order in which they are placed."""
        dtype = torch.float32 if want.dtype == jax.numpy.float32 else torch.bfloat16
        shape, weight = want.sharding.shard_shape(want.shape), network.weights[name]
        return [cls(weight, files, index, shape, dtype) for index, _ in shards_of(want.sharding, want.shape)]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def begin(self, pool: ThreadPoolExecutor, reader: "Reader") -> None:
        layers = range(*self.index[0].indices(len(self.files))) if self.weight.stacked else range(1)
        inner = self.index[1:] if self.weight.stacked else self.index
        shape = self.shape[1:] if self.weight.stacked else self.shape
        self.array = torch.empty((len(layers), *shape), dtype=self.dtype)
        self.layers = [
            pool.submit(self._read, reader, row, self.files[layer], inner) for row, layer in enumerate(layers)
        ]

    def _read(self, reader: "Reader", row: int, file: TensorFile, index: Index) -> None:
        assert self.array is not None
        self.array[row] = _slice(reader, file, index, self.weight)
        _check_finite(self.array[row], file)

    def finish(self) -> np.ndarray:
        for layer in self.layers:
            layer.result()
        assert self.array is not None
        array, self.array = _array(self.array), None
        return array if self.weight.stacked else array[0]


@contextlib.contextmanager
def read_shards(
    reader: "Reader",
    network: Network,
    files: Mapping[str, tuple[TensorFile, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    in_flight: PutsInFlight,
) -> Iterator[Iterator[np.ndarray]]:
    """The shards of all weights that this host has, in their order, equal ones once: each is read before it is asked
    for, as far as `AHEAD_BYTES` and half of the host's memory allow beside those `in_flight`.
    """
    pieces = [piece for name, want in wanted.items() for piece in _Piece.of(network, name, files[name], want)]
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
    available = host_memory.available_bytes()
    most = AHEAD_BYTES if available is None else min(AHEAD_BYTES, available // 2)

    def results() -> Iterator[np.ndarray]:
        waiting, begun = deque(pieces), deque[_Piece]()
        while waiting or begun:
            while waiting:
                held = in_flight.size_bytes
                if sum(piece.size_bytes for piece in begun) + held + waiting[0].size_bytes > most:
                    if begun:
                        break
                    if held:
                        in_flight.wait_for_oldest()
                        continue
                begun.append(waiting.popleft())
                begun[-1].begin(pool, reader)
            yield begun.popleft().finish()

    try:
        yield results()
    finally:
        reader.stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


class _Meter:
    """Reports how much is loaded, and how fast."""

    def __init__(self, title: str, total_bytes: int, progress: Progress) -> None:
        self.title, self.total, self.progress = title, total_bytes, progress
        self.done, self.started, self.said = 0, time.monotonic(), 0.0
        progress.text(f"Loading {title}: {self._size(total_bytes)}")

    def _size(self, size: int) -> str:
        return f"{size / GB:.1f} GB" if self.total >= GB else f"{size / 1e6:.1f} MB"

    def add(self, size: int) -> None:
        self.done += size
        self.progress.step(self.done // MIB, max(1, self.total // MIB), "MiB")
        elapsed = time.monotonic() - self.started
        if elapsed - self.said >= SECONDS_BETWEEN_TEXTS:
            self.said = elapsed
            minutes, seconds = divmod(round((self.total - self.done) * elapsed / self.done), 60)
            sizes = f"{self._size(self.done)} of {self._size(self.total)}, {self.done / GB / elapsed:.2f} GB/s"
            self.progress.text(f"Loading {self.title}: {sizes}, {minutes}:{seconds:02} left")


class Reader:
    """Open safetensors files, closed by the stack. `check` raises if the user cancelled."""

    def __init__(self, stack: contextlib.ExitStack, check: Callable[[], None]) -> None:
        self.stack = stack
        self.check = check
        self.files: dict[str, Any] = {}
        self.stats: dict[str, os.stat_result] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def unchecked(self) -> "Reader":
        """For other threads: one that asks nobody, and ends with `stop`."""
        reader = Reader(self.stack, lambda: None)
        reader.check = reader._end
        return reader

    def _end(self) -> None:
        if self.stop.is_set():
            raise RuntimeError("nobody waits for what is read")

    def slice(self, file: TensorFile, index: Index) -> torch.Tensor:
        """Part of a tensor, in whatever format it comes."""
        self.check()
        return self._part(file, index)

    def _part(self, file: TensorFile, index: Index) -> torch.Tensor:
        return self._stored(file, index) if file.made is None else file.made.read(index, self._part)

    def _stored(self, file: TensorFile, index: Index) -> torch.Tensor:
        from safetensors import safe_open

        key = str(file.path)
        with self.lock:
            if key not in self.files:
                self.stats[key] = os.stat(key)
                self.files[key] = self.stack.enter_context(safe_open(key, framework="pt"))
        _check_whole(key, self.stats[key])
        # A zero-dimensional slice is not indexable.
        return self.files[key].get_slice(file.name)[index] if index else self.files[key].get_tensor(file.name)


def _check_whole(path: str, before: os.stat_result) -> None:
    """Raises `CheckpointError` for a file that was cut off since: the kernel ends a process that reads a mapped place
    behind the end.
    """
    try:
        now = os.stat(path)
    except OSError:
        return  # what is mapped of a deleted file stays
    if os.path.samestat(now, before) and now.st_size < before.st_size:
        raise CheckpointError(
            f"{path} was cut off while it was read: it has {now.st_size} bytes, and had {before.st_size}. Get it again."
        )


def read_layer(reader: Reader, file: TensorFile, weight: Weight, sharding: Sharding) -> jax.Array:
    """One layer of a weight with this `sharding`: bfloat16 if the file is, else float32."""

    def read(index: Index) -> np.ndarray:
        piece = _slice(reader, file, index, weight)
        piece = (piece if piece.dtype == torch.bfloat16 else piece.float()).contiguous()
        _check_finite(piece, file)
        return _array(piece)

    return place(weight.layer_shape, sharding, read, PutsInFlight())


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
