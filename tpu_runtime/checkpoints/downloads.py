"""Weight files of the Hub: sizes, local bytes, and resumable downloads.

huggingface_hub discards a partial file when a download ends early (from 1.18 on, its #4228), which loses everything of
several parallel 10 GB files. Therefore bytes are written here to a file with the suffix `.part`, which the next
download continues. It gets its final name when it is complete and has the Hub's SHA-256. Two downloads of one file
write the same bytes at the same offsets, so they need no lock.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ..messages import compose
from ..progress import Progress
from ..units import MIB

MAX_PARALLEL = 4
# Attempts without a new byte before a download fails, and the first pause between attempts, which doubles.
MAX_RETRIES, PAUSE_S = 5, 1.0
# Interval of progress reports and checks for cancellation.
POLL_S = 0.2


class DamagedError(OSError):
    """A file whose bytes differ from the Hub's."""


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file of a commit on the Hub, and its local paths."""

    model_id: str
    commit: str
    name: str
    size_bytes: int
    sha256: str | None  # None for a file that is not in LFS
    target: Path  # path when complete; `part` until then
    is_here: bool  # whether it is complete

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    @property
    def local_bytes(self) -> int:
        """Bytes of it on this machine."""
        if self.is_here:
            return self.size_bytes
        with contextlib.suppress(OSError):
            return min(self.part.stat().st_size, self.size_bytes)
        return 0


def list_hub_files(
    model_id: str, commit: str, names: Sequence[str], target: Callable[[str, str], Path], is_here: Callable[[str], bool]
) -> list[WeightFile]:
    """Return those of `names` that the Hub has, by one listing of the commit.

    model_id, commit: the repository.
    target: returns the local path for a name and etag.
    is_here: returns whether a file is complete.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    requested, files = set(names), []
    for entry in HfApi().list_repo_tree(model_id, recursive=True, revision=commit):
        if isinstance(entry, RepoFile) and entry.path in requested:
            sha256 = entry.lfs.sha256 if entry.lfs else None
            files.append(
                WeightFile(
                    model_id=model_id, commit=commit, name=entry.path, size_bytes=entry.size, sha256=sha256,
                    target=target(entry.path, sha256 or entry.blob_id), is_here=is_here(entry.path),
                )
            )  # fmt: skip
    return files


def download(files: Sequence[WeightFile], progress: Progress) -> None:
    """Complete the files, several in parallel. Partial files stay if it fails or is cancelled."""
    transfer = _Download(done=sum(file.local_bytes for file in files))
    total = sum(file.size_bytes for file in files)
    with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="download") as pool:
        futures = [pool.submit(transfer.run, file) for file in files if not file.target.exists()]
        try:
            _watch(futures, transfer, total, progress)
        finally:
            transfer.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _watch(futures: Sequence[Future[None]], transfer: "_Download", total: int, progress: Progress) -> None:
    """Report progress until all are done. Raises the first error, or that of a cancel."""
    while True:
        done, pending = wait(futures, timeout=POLL_S, return_when=FIRST_EXCEPTION)
        progress.check_cancelled()
        progress.step(int(transfer.done // MIB), max(1, int(total // MIB)), "MiB")
        for future in done:
            future.result()
        if not pending:
            return


@dataclass
class _Download:
    """The state of a download of several files, each in a thread."""

    done: int  # bytes of all files
    stop: threading.Event = field(default_factory=threading.Event)  # set to end the threads
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, file: WeightFile) -> None:
        file.part.parent.mkdir(parents=True, exist_ok=True)
        # Not in append mode: another process may write the same file, each at its own offset.
        with open(os.open(file.part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as part:
            digest = hashlib.sha256()
            for chunk in iter(lambda: part.read(MIB), b""):
                digest.update(chunk)
                if self.stop.is_set():
                    return
            failures = 0
            while (start := part.tell()) < file.size_bytes and not self.stop.is_set():
                lost: Exception | None = None
                try:
                    for chunk in _bytes(file, start):
                        part.write(chunk)
                        digest.update(chunk)
                        self._count(len(chunk))
                        if self.stop.is_set():
                            return
                except _connection_error() as error:
                    answer = getattr(error, "response", None)
                    if answer is not None and answer.status_code < 500:
                        raise  # a refusal; other errors are broken connections and server errors
                    lost = error
                failures = 0 if part.tell() > start else failures + 1
                if failures == MAX_RETRIES:
                    raise lost or DamagedError(f"{file.name} ends early")
                if lost:
                    self.stop.wait(PAUSE_S * 2**failures)
            part.flush()
            os.fsync(part.fileno())
        if not self.stop.is_set():
            self._finish(file, start, digest.hexdigest())

    def _count(self, size: int) -> None:
        with self.lock:
            self.done += size

    def _finish(self, file: WeightFile, size: int, digest: str) -> None:
        if size != file.size_bytes or (file.sha256 and digest != file.sha256):
            file.part.unlink(missing_ok=True)
            raise DamagedError(compose("hub.file_of_model", name=file.name, model_id=file.model_id))
        try:
            os.replace(file.part, file.target)
        except FileNotFoundError:
            # Another process was first.
            if not file.target.exists():
                raise


def _connection_error() -> type[Exception]:
    from huggingface_hub import errors

    return errors.HTTPError  # pyright: ignore[reportPrivateImportUsage]


def _bytes(file: WeightFile, start: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on."""
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(file.model_id, file.name, revision=file.commit)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    stalled_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=stalled_s) as response:
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == 206 else start  # a server without range requests sends the whole file
        for chunk in response.iter_bytes():
            kept = chunk[skipped:]
            skipped = max(0, skipped - len(chunk))
            if kept:
                yield kept
