"""Loading of weights from files to their shards on the chips, in the target format, at the speed of the disk.

Several threads read and decode layers of a stacked weight while earlier shards are copied to the chips. The host holds
the shards that are read ahead and those on their way to the chips, at most `READ_AHEAD_BYTES` together or else one
shard. A weight with a value that is not finite is an error.
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

from ...kernels.number_formats import BY_DTYPE
from .. import host_memory
from ..files import CheckpointError, Index, TensorFile
from ..messages import compose
from ..programs.upstream_network import Network, Weight
from ..programs.weights import SCALE_SUFFIX, Weights, find_quantizable_weights, quantize_weight
from ..progress import Progress
from ..units import GB, MIB
from .placement import PutsInFlight, list_shards, place

# Threads that read: more than cores, because they also wait for the disk. They do not hold Python's lock.
READ_THREADS = min(16, 2 * (os.cpu_count() or 1))
READ_AHEAD_BYTES = 2**30
SECONDS_BETWEEN_TEXTS = 0.5
NUMPY_VIEWS = {torch.bfloat16: (torch.int16, jax.numpy.bfloat16), torch.float32: (torch.float32, np.float32)}


class ModifiedWeights(Protocol):
    """Weights that differ from the files, and a method that reads one."""

    names: frozenset[str]  # of the weights

    def read(
        self, reader: "TensorReader", name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
    ) -> jax.Array: ...


def load_weights(
    network: Network,
    files: Mapping[str, tuple[TensorFile, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    title: str,
    progress: Progress,
    changed: ModifiedWeights | None = None,
    weights: Weights | None = None,
    check: Callable[[str], None] = lambda what: None,
) -> Weights:
    """Read weights of a network onto its devices and return them by name.

    progress: where to report; a cancel raises.
    files: of each weight, by its name.
    wanted: shape, dtype and sharding by name, from `abstract`: of all weights, or of those to replace in `weights`.
    title: of the weights, for messages.
    changed: weights that differ from the files; None if none do.
    weights: loaded weights, of which those in `wanted` are freed one by one and replaced; None for an empty dict.
    check: called before the chips quantize a weight, which follows all changes.
    A cancel stops between two tensors and discards the weights read so far. Raises `HostMemoryError` before any byte
    is read if the host's memory is too small.
    """
    size_bytes = _host_bytes(network, files, wanted, replaces=weights is not None)
    host_memory.require(size_bytes, f"Loading {title}")
    meter = _TransferMeter(
        title, sum(int(np.prod(want.shape)) * want.dtype.itemsize for want in wanted.values()), progress
    )
    weights = {} if weights is None else weights
    merged = frozenset() if changed is None else changed.names
    with host_memory.translate_errors(f"Loading {title}"), contextlib.ExitStack() as stack:
        reader = TensorReader(stack, progress.check_cancelled)
        numbers = {name: want for name, want in wanted.items() if not name.endswith(SCALE_SUFFIX)}
        plain = {name: want for name, want in numbers.items() if name not in merged}
        axes = find_quantizable_weights(network) if len(numbers) < len(wanted) else {}
        in_flight = PutsInFlight()
        # Nested, so that the reading threads end before their files are closed.
        with read_shards(reader.for_background_threads(), network, files, plain, in_flight) as ahead:
            for name, want in numbers.items():
                progress.check_cancelled()
                for old_name in (name, name + SCALE_SUFFIX):
                    if old_name in weights:
                        weights[old_name].delete()
                if changed is not None and name in merged:
                    weights[name] = changed.read(reader, name, files[name], _as_read(want))
                else:
                    weights[name] = place(want.shape, want.sharding, lambda index: next(ahead), in_flight)
                if want.dtype in BY_DTYPE:
                    check(f"round {name}")
                    in_flight.wait_for_all()  # it refers to the weight that is rounded
                    weights[name], weights[name + SCALE_SUFFIX] = quantize_weight(
                        weights[name], axes[name], want, wanted[name + SCALE_SUFFIX]
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
    """Return the host memory that loading needs: the largest shard, and the weights of devices that are the host.

    replaces: the loaded weights replace others of the same size.
    Shards that are read ahead are not counted, because their number follows the available memory.
    """
    numbers = {name: want for name, want in wanted.items() if not name.endswith(SCALE_SUFFIX)}
    pieces = (
        shard.size_bytes
        for name, want in numbers.items()
        for shard in _PendingShard.list_for_weight(network, name, files[name], want)
    )
    return max(pieces, default=0) + (0 if replaces else sum(map(_host_weight_bytes, wanted.values())))


def _host_weight_bytes(want: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of a weight on devices that use the host's memory, as without a TPU."""
    shard = int(np.prod(want.sharding.shard_shape(want.shape))) * want.dtype.itemsize
    return shard * sum(device.platform == "cpu" for device in want.sharding.addressable_devices)


def _as_read(want: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the abstract weight as it is read: bfloat16 if it is quantized afterwards."""
    if want.dtype not in BY_DTYPE:
        return want
    return jax.ShapeDtypeStruct(want.shape, jax.numpy.bfloat16, sharding=want.sharding)


@dataclass
class _PendingShard:
    """One shard of a weight on the host, filled layer by layer."""

    weight: Weight
    files: tuple[TensorFile, ...]
    index: Index  # of the shard in the weight
    shape: tuple[int, ...]  # of the shard
    dtype: torch.dtype
    array: torch.Tensor | None = None  # [layers, ...]; None before `begin` and after `finish`
    layers: list[Future[None]] = field(default_factory=list)  # one pending read per layer

    @classmethod
    def list_for_weight(
        cls, network: Network, name: str, files: tuple[TensorFile, ...], want: jax.ShapeDtypeStruct
    ) -> "list[_PendingShard]":
        """Return the shards of a weight that differ, in the order in which they are copied to the devices.

        network, name, files: the weight, and the tensors that it consists of.
        want: its shape, dtype and sharding.
        """
        dtype = torch.float32 if want.dtype == jax.numpy.float32 else torch.bfloat16
        shape, weight = want.sharding.shard_shape(want.shape), network.weights[name]
        return [cls(weight, files, index, shape, dtype) for index, _ in list_shards(want.sharding, want.shape)]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def begin(self, pool: ThreadPoolExecutor, reader: "TensorReader") -> None:
        layers = range(*self.index[0].indices(len(self.files))) if self.weight.stacked else range(1)
        inner = self.index[1:] if self.weight.stacked else self.index
        shape = self.shape[1:] if self.weight.stacked else self.shape
        self.array = torch.empty((len(layers), *shape), dtype=self.dtype)
        self.layers = [
            pool.submit(self._read, reader, row, self.files[layer], inner) for row, layer in enumerate(layers)
        ]

    def _read(self, reader: "TensorReader", row: int, file: TensorFile, index: Index) -> None:
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
    reader: "TensorReader",
    network: Network,
    files: Mapping[str, tuple[TensorFile, ...]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    in_flight: PutsInFlight,
) -> Iterator[Iterator[np.ndarray]]:
    """Yield an iterator of the shards of all weights on this host in order, equal ones once.

    network: whose weights are read.
    reader: for other threads.
    files: of each weight, by its name.
    wanted: shape, dtype and sharding of each weight, by name.
    in_flight: shards on their way to the chips; they count towards the limit.
    Shards are read ahead up to `READ_AHEAD_BYTES` and half of the host's available memory.
    """
    pieces = [
        piece
        for name, want in wanted.items()
        for piece in _PendingShard.list_for_weight(network, name, files[name], want)
    ]
    pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="weights")
    available = host_memory.available_bytes()
    most = READ_AHEAD_BYTES if available is None else min(READ_AHEAD_BYTES, available // 2)

    def results() -> Iterator[np.ndarray]:
        waiting, begun = deque(pieces), deque[_PendingShard]()
        while waiting or begun:
            while waiting:
                in_flight_bytes = in_flight.size_bytes
                if sum(piece.size_bytes for piece in begun) + in_flight_bytes + waiting[0].size_bytes > most:
                    if begun:
                        break
                    if in_flight_bytes:
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


class _TransferMeter:
    """A reporter of loaded bytes and speed."""

    def __init__(self, title: str, total_bytes: int, progress: Progress) -> None:
        self.title, self.total, self.progress = title, total_bytes, progress
        self.done, self.started, self.said = 0, time.monotonic(), 0.0
        progress.text(compose("checkpoint.loading", title=title, size=self._size(total_bytes)))

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
            self.progress.text(compose(
                "checkpoint.loading_with_time_left", title=self.title, sizes=sizes, minutes=minutes,
                seconds=f"{seconds:02}",
            ))  # fmt: skip


class TensorReader:
    """Open safetensors files, closed by the stack. `check` raises if the user cancelled."""

    def __init__(self, stack: contextlib.ExitStack, check: Callable[[], None]) -> None:
        self.stack = stack
        self.check = check
        self.files: dict[str, Any] = {}
        self.stats: dict[str, os.stat_result] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def for_background_threads(self) -> "TensorReader":
        """Return a reader for other threads, which does not ask for cancellation and ends with `stop`."""
        reader = TensorReader(self.stack, lambda: None)
        reader.check = reader._end
        return reader

    def _end(self) -> None:
        if self.stop.is_set():
            raise RuntimeError("weight loading was cancelled")

    def slice(self, file: TensorFile, index: Index) -> torch.Tensor:
        """Return part of a tensor, decoded if need be, in the file's shape `[...]`."""
        self.check()
        return self._read_part(file, index)

    def _read_part(self, file: TensorFile, index: Index) -> torch.Tensor:
        return self._read_stored(file, index) if file.made is None else file.made.read(index, self._read_part)

    def _read_stored(self, file: TensorFile, index: Index) -> torch.Tensor:
        from safetensors import safe_open

        key = str(file.path)
        with self.lock:
            if key not in self.files:
                self.stats[key] = os.stat(key)
                self.files[key] = self.stack.enter_context(safe_open(key, framework="pt"))
        _check_whole(key, self.stats[key])
        # A zero-dimensional slice cannot be indexed.
        return self.files[key].get_slice(file.name)[index] if index else self.files[key].get_tensor(file.name)


def _check_whole(path: str, before: os.stat_result) -> None:
    """Raise `CheckpointError` for a file that was truncated since.

    Reading mapped bytes after its end would kill the process.
    """
    try:
        now = os.stat(path)
    except OSError:
        return  # a deleted file stays mapped
    if os.path.samestat(now, before) and now.st_size < before.st_size:
        raise CheckpointError(
            compose("checkpoint.cut_off_while_read", path=path, now=now.st_size, before=before.st_size)
        )


def read_layer(reader: TensorReader, file: TensorFile, weight: Weight, sharding: Sharding) -> jax.Array:
    """Return one layer of a weight with this `sharding`: bfloat16 if the file is, else float32.

    reader, file: the source.
    weight: of the network; the layer has its `layer_shape`.
    """

    def read(index: Index) -> np.ndarray:
        piece = _slice(reader, file, index, weight)
        piece = (piece if piece.dtype == torch.bfloat16 else piece.float()).contiguous()
        _check_finite(piece, file)
        return _array(piece)

    return place(weight.layer_shape, sharding, read, PutsInFlight())


def _check_finite(piece: torch.Tensor, file: TensorFile) -> None:
    if not torch.isfinite(piece).all():
        raise CheckpointError(compose("checkpoint.weight_not_finite", path=file.path, name=file.name))


def _array(piece: torch.Tensor) -> np.ndarray:
    view, dtype = NUMPY_VIEWS[piece.dtype]
    return piece.view(view).numpy().view(dtype)


def _slice(reader: TensorReader, file: TensorFile, index: Index, weight: Weight) -> torch.Tensor:
    """Return part of one layer of a weight, which may be a slice of the file's tensor."""
    read = functools.partial(reader.slice, file)
    return read(index) if weight.cut is None else weight.cut.read(index, read)
