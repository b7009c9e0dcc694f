"""Prefetch of weight files into the kernel's page cache: loading then reads memory, not the disk."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from ..host_memory import available_bytes
from ..progress import run_in_daemon_thread
from ..units import GIB
from .checkpoint import Checkpoint
from .model_ref import ModelRef

log = logging.getLogger(__name__)

THREAD = "comfyui-tpu-read"
CHUNK_BYTES = 16 * 2**20
# Share of the available memory. Reading more of one model would only evict the files read first.
MAX_MEMORY_SHARE = 0.5


class _ModelFile(NamedTuple):
    model: ModelRef
    path: Path


class FilePrefetch:
    """Background reading of weight files: one thread, in the order of the requests, each file once.

    A request that is cancelled and made again continues where it stopped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_ModelFile] = deque()
        self._read_bytes: dict[_ModelFile, int] = {}
        self._is_running = False

    def request(self, model: ModelRef, files: Iterable[Path]) -> None:
        """Read the `files` of a model after those requested before, as many as memory holds."""
        with self._lock:
            self._waiting.extend(_ModelFile(model, path) for path in files)
            if self._waiting and not self._is_running:
                self._is_running = True
                run_in_daemon_thread(self._read_waiting, THREAD)

    def cancel(self, keep: Collection[ModelRef] = ()) -> None:
        """Drop the requests of all models except those in `keep`, and forget which of their files were read.

        A file that is being read ends with its current chunk.
        """
        with self._lock:
            self._waiting = deque(file for file in self._waiting if file.model in keep)
            self._read_bytes = {file: size for file, size in self._read_bytes.items() if file.model in keep}

    def _read_waiting(self) -> None:
        while (file := self._next()) is not None:
            try:
                self._read(file)
            except OSError as error:  # the stage that needs the file meets the same error and reports it
                log.warning("%s is not read ahead: %s", file.path.name, error)

    def _next(self) -> _ModelFile | None:
        with self._lock:
            if not self._waiting:
                self._is_running = False
                return None
            file = self._waiting.popleft()
            self._read_bytes.setdefault(file, 0)
            return file

    def _read(self, file: _ModelFile) -> None:
        available, size = available_bytes() or 0, file.path.stat().st_size
        with self._lock:
            start = self._read_bytes.get(file, size)
            if start >= size:  # read before, or cancelled
                return
            others = sum(done for other, done in self._read_bytes.items() if other.model == file.model) - start
            if others + size > available * MAX_MEMORY_SHARE:
                log.info("%s is not read ahead: %.1f GiB of memory are available.", file.path.name, available / GIB)
                self._waiting = deque(other for other in self._waiting if other.model != file.model)
                return
        piece = bytearray(CHUNK_BYTES)
        with file.path.open("rb", buffering=0) as content:
            content.seek(start)
            while count := content.readinto(piece):
                with self._lock:
                    if file not in self._read_bytes:  # cancelled
                        return
                    self._read_bytes[file] += count


def list_call_stages(arguments: Collection[str]) -> list[str]:
    """Return the stages that load the same weights as a single call with `arguments` (see `Engine.prepare`)."""
    stages = {"prediction": "denoise", "decoded": "decode", "encoded": "decode"}
    return [stage for name, stage in stages.items() if name in arguments]


def list_files(found: Checkpoint, stages: Collection[str], resident: Collection[str] = ()) -> list[Path]:
    """Return the weight files on this machine that `stages` load, each once, in order of use. Makes no request.

    resident: components that need not be loaded.
    Text encoders are left out: an encoded prompt is often in the cache, else its stage reads the encoder at once.
    A component that cannot be read is left out, because its stage reports the problem.
    """
    spec = found.spec
    names = [
        *(sorted(spec.image_encoders) if "image" in stages else ()),
        *(spec.denoiser.experts if "denoise" in stages else ()),
        *((spec.vae.component,) if "decode" in stages else ()),
    ]
    files: dict[Path, None] = {}
    for name in names:
        if name not in resident:
            with contextlib.suppress(Exception):
                files |= dict.fromkeys(found.local_weight_files(spec.component(name)))
    return list(files)
