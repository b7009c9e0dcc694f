"""Buffers of decoded frames: fetched from the chips while the next call computes, into one tensor."""

import copy
from collections.abc import Callable, Iterable

import jax
import numpy as np
import torch


class PendingFrames:
    """Frames `[n, height, width, 3]` float32 of a launched program, on the chips until `copy_into` waits for them.

    Every chip starts its copy to the host when the program ends. Indexing with a slice keeps some of the frames.
    """

    def __init__(self, array: jax.Array, is_finite: jax.Array, failure: Callable[[], Exception]) -> None:
        self._array, self._is_finite, self._failure = array, is_finite, failure
        self._kept = slice(None)
        self._shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        is_finite.copy_to_host_async()
        for shard in self._shards:
            shard.data.copy_to_host_async()

    def __getitem__(self, kept: slice) -> "PendingFrames":
        selection = copy.copy(self)
        selection._kept = kept
        return selection

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the frames that are kept."""
        num_frames, *size = self._array.shape
        return (len(range(*self._kept.indices(num_frames))), *size)

    def wait(self) -> None:
        """Wait for the program. Raises the error of `failure` if its values are not finite."""
        if not np.asarray(self._is_finite):
            raise self._failure()

    def copy_into(self, out: torch.Tensor) -> None:
        """Wait for the frames, and write them into `out` `[n, height, width, 3]`.

        Their layout on the chips may be any.
        """
        self.wait()
        for shard in self._shards:
            _, rows, columns, _ = shard.index
            out[:, rows, columns].copy_(to_tensor(np.asarray(shard.data))[self._kept])


class FrameBuffer:
    """One tensor for all frames of a stage, allocated once for `expected` frames with the first chunk's size."""

    def __init__(self, expected: int) -> None:
        self._expected, self._count = expected, 0
        self._frames = torch.empty(0)

    def add(self, chunk: PendingFrames) -> None:
        """Append a chunk, and wait for it."""
        num_frames, *size = chunk.shape
        end = self._count + num_frames
        if self._count == 0:
            self._frames = torch.empty(max(self._expected, end), *size)
        elif end > len(self._frames):
            self._frames = torch.cat([self._frames, torch.empty(end - len(self._frames), *size)])
        chunk.copy_into(self._frames[self._count : end])
        self._count = end

    @property
    def frames(self) -> torch.Tensor:
        """Frames `[n, height, width, 3]` added so far."""
        return self._frames[: self._count]


def consume_with_lookahead(chunks: Iterable[PendingFrames], take: Callable[[PendingFrames], None]) -> int:
    """Pass each chunk to `take` after the next one was launched. Return the number of chunks."""
    count, before = 0, None
    for chunk in chunks:
        if before is not None:
            take(before)
        count, before = count + 1, chunk
    if before is not None:
        take(before)
    return count


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a read-only array `[...]` as a tensor, without a copy if NumPy allows it."""
    try:
        return torch.from_dlpack(array)
    except BufferError:  # NumPy before 2.1, of a read-only array
        return torch.from_numpy(array.copy())
