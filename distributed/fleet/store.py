"""Results of a batch and the state of every job, as files in a folder or at an address that fsspec supports.

| file | content |
|---|---|
| `done/<job>.json` | the job is done: its record, written by the worker after its results |
| `failed/<job>.json` | the job is set aside, and why |
| `tries/<job>.json` | how often the job failed or lost its worker; it is to run again |
| `results/<job>/...` | its results |
| `named/<line> <prompt>.mp4` | a readable link to a result, if the file system supports links |
| `journal.jsonl` | a line per finished job, for people and scripts; rebuilt from the others |

A second run reads these files and continues. The file names are the state, so that a restart lists three folders and
reads few files. A file is written completely or not at all. Names are relative, with slashes. A location that cannot be
used raises `StoreError`.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]  # a JSON object
DONE, FAILED, TRIES, RESULTS, JOURNAL, MARK = "done", "failed", "tries", "results", "journal.jsonl", "batch.json"
NAMED = "named"
# Characters of a prompt in a link's name.
MAX_NAME_LENGTH = 60
_PARTIAL, _LOCK = ".partial", ".lock"
_MADE_BY = "comfyui-tpu batch"
# Seconds between rewrites of the journal, and the largest share of the time that they may take.
_JOURNAL_S, _JOURNAL_SHARE = 5.0, 0.05


class StoreError(RuntimeError):
    """The location of the results cannot be used; the message is a sentence for the user."""


def make_record(state: str, job: str, line: int, **more: Any) -> dict[str, Any]:
    """Return the record of a job that is done or set aside.

    state: `DONE` or `FAILED`. job: its id. line: of the batch's file. more: further entries.
    """
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"job": job, "state": state, "line": line, **more, "ended": ended}


@contextlib.contextmanager
def lock_path(path: Path) -> Iterator[None]:
    """Lock a folder, or a file, which is created. Raises BlockingIOError if another process holds the lock."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


class LocalFiles:
    """A folder, with the methods of fsspec's file systems.

    A file is flushed to the disk before it gets its name, so that a machine failure leaves no empty file of this name.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def cat_file(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def pipe_file(self, name: str, content: bytes) -> None:
        with self._replacing(name) as file:
            file.write(content)

    def put_file(self, path: str, name: str) -> None:
        with self._replacing(name) as file, open(path, "rb") as source:
            shutil.copyfileobj(source, file)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Any]:
        target, scratch = self._root / name, self._root / _PARTIAL / secrets.token_hex(8)
        try:
            for folder in (target.parent, scratch.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)

    def rm_file(self, name: str) -> None:
        (self._root / name).unlink()

    def ls(self, folder: str, detail: bool) -> list[str]:
        return os.listdir(self._root / folder)


class BatchStore:
    """The files of a batch. One process drives it and records decisions; workers add `results` and `done`."""

    def __init__(self, location: str) -> None:
        scheme, separator, rest = location.partition("://")
        self.root: Path | None = None  # None at an address
        if separator and scheme != "file":
            self.location, self._files = location.rstrip("/"), _open_filesystem(location.rstrip("/"))
        else:
            self.root = Path("/" + rest.lstrip("/")) if separator else Path(location).expanduser().absolute()
            self.location, self._files = str(self.root), LocalFiles(self.root)
        # The jobs with a document in each folder; a job is in one folder at most.
        self.jobs: dict[str, set[str]] = {DONE: set(), FAILED: set(), TRIES: set()}
        self._journal: dict[tuple[str, str], bytes] = {}  # by job and state
        self._next_journal = 0.0

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{self.location}/{name}: {error.strerror or error}. Fix this, or choose another --out."
            ) from error

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if it does not exist."""
        with self._errors(name):
            try:
                return self._files.cat_file(name)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, content: bytes | Path | Document) -> None:
        """Write or replace a file.

        name: relative. content: bytes, the path of a local file, or a document to be written as JSON.
        """
        if isinstance(content, Mapping):
            content = json.dumps(content, ensure_ascii=False, indent=2).encode()
        with self._errors(name):
            if isinstance(content, bytes):
                self._files.pipe_file(name, content)
            else:
                self._files.put_file(str(content), name)

    def document(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file; empty if the file does not exist or is damaged."""
        try:
            value = json.loads(self.read(name) or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def token(self) -> str:
        """Return the random token of this store, by which a worker checks that it writes to the same location."""
        mark = self.document(MARK)
        return str(mark.get("token", "")) if mark.get("made_by") == _MADE_BY else ""

    # -- for the driving process ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_as_driver(self) -> Iterator[None]:
        """Open the store as its only driver: read the state, and complete the journal of a killed driver.

        Raises StoreError while another process drives it. Locks do not work at an address, where this is not detected.
        """
        with self._alone() if self.root else contextlib.nullcontext():
            if not self.token():
                if self.read(MARK):
                    raise StoreError(f"{self.location} has a {MARK} of something else. Choose another --out.")
                self.write(MARK, {"made_by": _MADE_BY, "token": secrets.token_hex(8)})
            for folder in self.jobs:
                with self._errors(folder), contextlib.suppress(FileNotFoundError):
                    names = [path.rpartition("/")[2] for path in self._files.ls(folder, detail=False)]
                    self.jobs[folder] = {name.removesuffix(".json") for name in names if name.endswith(".json")}
            self.jobs[FAILED] -= self.jobs[DONE]
            self._rebuild_journal()
            try:
                yield
            finally:
                self._write_journal()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        assert self.root is not None
        with contextlib.ExitStack() as stack:
            with self._errors(_LOCK):
                self.root.mkdir(parents=True, exist_ok=True)
                try:
                    stack.enter_context(lock_path(self.root / _LOCK))
                except BlockingIOError:
                    raise StoreError(
                        f"another `comfyui-tpu batch` works on {self.root}. Wait for it, end it, or choose another "
                        "--out."
                    ) from None
            # Remove incomplete files of killed processes.
            shutil.rmtree(self.root / _PARTIAL, ignore_errors=True)
            yield

    def note(self, folder: str, job: str, document: Document) -> None:
        """Record the state of a job: its `document` in `folder`. The document of a finished job is already there.

        folder: `DONE`, `FAILED` or `TRIES`. job: its id.
        """
        if folder != DONE:
            self.write(f"{folder}/{job}.json", document)
        self.forget(job, but=folder)
        self.jobs[folder].add(job)
        if folder != TRIES:
            self._add_to_journal(job, folder, document)

    def link(self, line: int, text: str, files: Sequence[str]) -> None:
        """Create readable links to a job's results, named by its line and the longest text that it sets.

        line: its number. text: its JSON. files: the results.
        """
        if self.root is None:
            return
        texts = [value for value in json.loads(text).values() if isinstance(value, str)]
        words = " ".join(re.findall(r"\w+", max(texts, key=len, default="")))[:MAX_NAME_LENGTH].strip()
        for number, file in enumerate(files, 1):
            name = " ".join(filter(None, (f"{line:04}", words, str(number) if number > 1 else "")))
            link = self.root / NAMED / f"{name}{Path(file).suffix}"
            with contextlib.suppress(OSError):  # some file systems do not support links
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(Path("..") / file)

    def forget(self, job: str, but: str = "") -> None:
        """Remove the documents of a job, except that in the folder `but`."""
        for folder, jobs in self.jobs.items():
            if folder != but and job in jobs:
                with self._errors(folder), contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(f"{folder}/{job}.json")
                jobs.discard(job)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _add_to_journal(self, job: str, state: str, record: Document) -> None:
        self._journal[job, state] = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        if time.monotonic() > self._next_journal:
            self._write_journal()

    def _write_journal(self) -> None:
        """Rewrite the journal, because object stores cannot append. The larger it is, the less often it is written."""
        started = time.monotonic()
        self.write(JOURNAL, b"".join(self._journal.values()))
        ended = time.monotonic()
        self._next_journal = ended + max(_JOURNAL_S, (ended - started) / _JOURNAL_SHARE)

    def _rebuild_journal(self) -> None:
        """Add missing and replace damaged lines of the journal, for jobs that a killed driver did not record."""
        for line in (self.read(JOURNAL) or b"").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                self._journal[record["job"], record["state"]] = line + b"\n"
        for folder in (DONE, FAILED):
            for job in sorted(self.jobs[folder]):
                if (job, folder) not in self._journal and (record := self.document(f"{folder}/{job}.json")):
                    self._add_to_journal(job, folder, record)


def _open_filesystem(url: str) -> Any:
    """Return the fsspec file system below an address."""
    try:
        import fsspec.core
        from fsspec.implementations.dirfs import DirFileSystem
    except ImportError:
        raise StoreError(f"--out {url} is an address; that needs fsspec: pip install 'comfyui-tpu[fleet]'.") from None
    try:
        files, folder = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StoreError(f"--out {url}: {error}. Install the package it names, or choose another --out.") from error
    return DirFileSystem(folder, files)
