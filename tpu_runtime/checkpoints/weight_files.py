"""Weight files of the Hub: how large they are, what of them is here, and their bytes, which go on where they stopped.

huggingface_hub throws away what it had of a file when a download ends early (from 1.18 on, its #4228): of several files
of 10 GB side by side that is everything. So the bytes come here, into a file with `.part` behind its name, which the
next download continues. It gets its final name when it is complete and its SHA-256 is the Hub's. Two downloads of one
file write the same bytes to the same places, so they need no lock.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from ..progress import Progress
from ..units import MIB

AT_ONCE = 4
# Tries without a new byte, before a download ends, and the first of the pauses between them, which double.
TRIES, PAUSE_S = 5, 1.0
# How often the host's bar moves and Cancel is looked at.
LOOK_S = 0.2


class DamagedError(OSError):
    """A file whose bytes are not the Hub's."""


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A file of a commit on the Hub, and where its bytes go: `target` when complete, its `part` until then."""

    model_id: str
    commit: str
    name: str
    size_bytes: int
    sha256: str | None
    target: Path
    is_here: bool

    @property
    def part(self) -> Path:
        return self.target.with_name(self.target.name + ".part")

    @property
    def here_bytes(self) -> int:
        """What of it is on this machine."""
        if self.is_here:
            return self.size_bytes
        with contextlib.suppress(OSError):
            return min(self.part.stat().st_size, self.size_bytes)
        return 0


def find(
    model_id: str, commit: str, names: Sequence[str], target: Callable[[str, str], Path], is_here: Callable[[str], bool]
) -> list[WeightFile]:
    """Those of `names` that the Hub has, by one listing. `target(name, etag)` is where a file's bytes go."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    wanted, found = set(names), []
    for entry in HfApi().list_repo_tree(model_id, recursive=True, revision=commit):
        if isinstance(entry, RepoFile) and entry.path in wanted:
            sha256 = entry.lfs.sha256 if entry.lfs else None
            found.append(
                WeightFile(
                    model_id=model_id, commit=commit, name=entry.path, size_bytes=entry.size, sha256=sha256,
                    target=target(entry.path, sha256 or entry.blob_id), is_here=is_here(entry.path),
                )
            )  # fmt: skip
    return found


def download(files: Sequence[WeightFile], progress: Progress) -> None:
    """Completes the files, several at once. What is here of them stays when it fails or is cancelled."""
    transfer = _Download(done=sum(file.here_bytes for file in files))
    total = sum(file.size_bytes for file in files)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="download") as pool:
        futures = [pool.submit(transfer.run, file) for file in files if not file.target.exists()]
        try:
            _watch(futures, transfer, total, progress)
        finally:
            transfer.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _watch(futures: Sequence[Future[None]], transfer: "_Download", total: int, progress: Progress) -> None:
    """Shows how far it is until all is done; raises the first error, and the host's own if it is cancelled."""
    while True:
        done, pending = wait(futures, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
        progress.check_cancelled()
        progress.step(int(transfer.done // MIB), max(1, int(total // MIB)), "MiB")
        for future in done:
            future.result()
        if not pending:
            return


@dataclass
class _Download:
    """The files that one download brings, each in a thread: `done` bytes of all, and whether to `stop`."""

    done: int
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, file: WeightFile) -> None:
        file.part.parent.mkdir(parents=True, exist_ok=True)
        # Not for appending: another process may be at the same file, each writes at its own place.
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
                        raise  # a refusal; the others are connections that were cut, and a Hub in trouble
                    lost = error
                failures = 0 if part.tell() > start else failures + 1
                if failures == TRIES:
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
            raise DamagedError(f"{file.name} of {file.model_id}")
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
    """The bytes of a file from `start` on."""
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(file.model_id, file.name, revision=file.commit)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-", "Accept-Encoding": "identity"}
    stalled_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=stalled_s) as response:
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == 206 else start  # one that knows no ranges sends all of it
        for chunk in response.iter_bytes():
            kept = chunk[skipped:]
            skipped = max(0, skipped - len(chunk))
            if kept:
                yield kept
