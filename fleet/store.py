"""Where a batch keeps its results and its state: files below a folder, or below an address that fsspec knows.

A file is there completely or not at all. Names are relative, with slashes. What cannot be used raises `StoreError`.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PARTIAL = ".partial"
_LOCK = ".lock"


class StoreError(RuntimeError):
    """The place of results cannot be used, in a sentence for the user."""


def open_store(location: str) -> "BatchStore":
    """The store at a folder's path, or at a URL such as `gs://bucket/batch`."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme != "file":
        return UrlStore(location)
    return BatchStore(Path("/" + rest.lstrip("/")) if separator else Path(location).expanduser().absolute())


class BatchStore:
    """Files in a folder, which other machines may share. `root` is None where it is none."""

    def __init__(self, root: Path) -> None:
        self.root: Path | None = root
        self.location, self._folder = str(root), root

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[Path]:
        path = self._folder / name
        try:
            yield path
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}. Fix this, or choose another --out.") from error

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none."""
        with self._errors(name) as path:
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, content: bytes) -> None:
        """Makes or replaces a file."""
        with self._replacing(name) as file:
            file.write(content)

    def add(self, name: str, path: Path) -> None:
        """Makes or replaces a file from a local one."""
        with self._replacing(name) as file, path.open("rb") as source:
            shutil.copyfileobj(source, file)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Any]:
        """A file aside, which then takes the place of the file `name`. It is on the disk before that, so that a machine
        that goes away leaves no empty file of this name.
        """
        scratch = self._folder / _PARTIAL / secrets.token_hex(8)
        with self._errors(name) as target:
            try:
                for folder in (target.parent, scratch.parent):
                    folder.mkdir(parents=True, exist_ok=True)
                with scratch.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(scratch, target)
            finally:
                with contextlib.suppress(OSError):
                    scratch.unlink()

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._errors(name) as path:
            path.unlink(missing_ok=True)

    def names(self, folder: str) -> set[str]:
        """Names of a folder's files, without the folder's; none where there is no such folder."""
        with self._errors(folder) as path:
            try:
                with os.scandir(path) as entries:
                    return {entry.name for entry in entries if entry.is_file()}
            except FileNotFoundError:
                return set()

    def append(self, name: str, lines: bytes) -> bool:
        """Adds lines to a file; False where this kind of place cannot."""
        with self._errors(name) as path, path.open("ab") as file:
            file.write(lines)
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Entered by the one process that drives; `StoreError` while another does, where that can be seen."""
        with self._errors(_LOCK) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another `comfyui-tpu batch` works on {self._folder}. Wait for it, end it, or choose another "
                    "--out."
                ) from None
            # What killed processes began to write.
            shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)
            yield


class UrlStore(BatchStore):
    """Objects below an address. They cannot be added to, and no lock is kept: only one process may drive a batch."""

    root = None

    def __init__(self, url: str) -> None:
        try:
            import fsspec.core
        except ImportError:
            raise StoreError(
                f"--out {url} is an address; that needs fsspec: pip install 'comfyui-tpu[fleet]'."
            ) from None
        self.location = url.rstrip("/")
        try:
            self._files, self._at = fsspec.core.url_to_fs(self.location)
        except (ImportError, ValueError) as error:
            raise StoreError(f"--out {url}: {error}. Install what it names, or choose another --out.") from error

    def read(self, name: str) -> bytes | None:
        try:
            return self._files.cat_file(f"{self._at}/{name}")
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._at}/{name}", content)

    def add(self, name: str, path: Path) -> None:
        self._files.put_file(str(path), f"{self._at}/{name}")

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._at}/{name}")

    def names(self, folder: str) -> set[str]:
        self._files.invalidate_cache()
        try:
            return {path.rpartition("/")[2] for path in self._files.ls(f"{self._at}/{folder}", detail=False)}
        except FileNotFoundError:
            return set()

    def append(self, name: str, lines: bytes) -> bool:
        return False

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
