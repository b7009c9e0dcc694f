"""Where a batch keeps its results and its state: files below a folder, or below an address that fsspec knows.

A file is there whole or not at all. Names are relative, with slashes.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

_PARTIAL = ".partial"
_LOCK = ".lock"


class StoreError(RuntimeError):
    """The place of results cannot be used, in a sentence for the user."""


class Store(Protocol):
    """Files by name. What cannot be read or written raises `StoreError`."""

    location: str

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Makes or replaces a file, whole or not at all."""
        ...

    def add(self, name: str, path: Path) -> None:
        """Makes or replaces a file from a local one, which may be moved."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        ...

    def names(self, folder: str) -> set[str]:
        """Names of a folder's files, without the folder's; none where there is no such folder."""
        ...

    def append(self, name: str, lines: bytes) -> bool:
        """Adds whole lines to a file; False where this kind of place cannot."""
        ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Entered by the one process that drives; `StoreError` while another does, where that can be seen."""
        ...


def open_store(location: str) -> Store:
    """The store at a folder's path, or at a URL such as `gs://bucket/batch`."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return FolderStore(Path(location).expanduser().absolute())
    if scheme == "file":
        return FolderStore(Path("/" + rest.lstrip("/")))
    return UrlStore(location)


class FolderStore:
    """Files in a folder, which other machines may share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = str(root)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _sentence(self.root / name, error) from error

    def write(self, name: str, content: bytes) -> None:
        with self._replacing(name) as scratch, scratch.open("wb") as file:
            file.write(content)
            _keep(file)

    def add(self, name: str, path: Path) -> None:
        with self._replacing(name) as scratch, path.open("rb") as source, scratch.open("wb") as file:
            shutil.copyfileobj(source, file)
            _keep(file)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        """A path to write, which then takes the place of the file `name`."""
        target, scratch = self.root / name, self.root / _PARTIAL / secrets.token_hex(8)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.parent.mkdir(exist_ok=True)
            yield scratch
            os.replace(scratch, target)
        except OSError as error:
            raise _sentence(target, error) from error
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()

    def remove(self, name: str) -> None:
        try:
            (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise _sentence(self.root / name, error) from error

    def names(self, folder: str) -> set[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                return {entry.name for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise _sentence(self.root / folder, error) from error

    def append(self, name: str, lines: bytes) -> bool:
        try:
            with (self.root / name).open("ab") as file:
                file.write(lines)
        except OSError as error:
            raise _sentence(self.root / name, error) from error
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        path = self.root / _LOCK
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        except OSError as error:
            raise _sentence(path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another `comfyui-tpu batch` works on {self.root}. Wait for it, end it, or choose another --out."
                ) from None
            # What killed processes began to write.
            shutil.rmtree(self.root / _PARTIAL, ignore_errors=True)
            yield


def _keep(file: Any) -> None:
    """Puts what was written on the disk, so that a machine that goes away leaves no empty file of this name."""
    file.flush()
    os.fsync(file.fileno())


def _sentence(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: {error.strerror or error}. Mend this, or choose another --out.")


class UrlStore:
    """Objects below an address. They cannot be added to, and no lock is kept: only one process may drive a batch."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec.core
        except ImportError:
            raise StoreError(
                f"--out {url} is an address; that needs fsspec: pip install 'comfyui-tpu[fleet]'."
            ) from None
        self.location = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.location)
        except (ImportError, ValueError) as error:
            raise StoreError(f"--out {url}: {error}. Install what it names, or choose another --out.") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        try:
            return self._files.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(self._path(name), content)

    def add(self, name: str, path: Path) -> None:
        self._files.put_file(str(path), self._path(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def names(self, folder: str) -> set[str]:
        self._files.invalidate_cache()
        try:
            return {path.rpartition("/")[2] for path in self._files.ls(self._path(folder), detail=False)}
        except FileNotFoundError:
            return set()

    def append(self, name: str, lines: bytes) -> bool:
        return False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        yield
