"""Where a batch keeps its results, and what is known of every job: files below a folder, or below an address that
fsspec knows. A second call reads them and goes on.

| file | says |
|---|---|
| `done/<job>.json` | the job is done: its record, written by the worker after its results |
| `failed/<job>.json` | it is set aside, and why |
| `tries/<job>.json` | how often it failed, or lost its worker, and is to run again |
| `results/<job>/...` | what it made |
| `named/<line> <prompt>.mp4` | a link to that, for people, where a folder holds links |
| `journal.jsonl` | a line for each job that was decided, for people and scripts; rebuilt from the others |

The names of a folder are the state, so that starting again lists three folders and reads few files. A file is there
completely or not at all. Names are relative, with slashes. What cannot be used raises `StoreError`.
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

DONE, FAILED, TRIES, RESULTS, JOURNAL, MARK = "done", "failed", "tries", "results", "journal.jsonl", "batch.json"
NAMED = "named"
# How much of a prompt a name has.
MOST_WORDS = 60
_PARTIAL, _LOCK = ".partial", ".lock"
_MADE_BY = "comfyui-tpu batch"
# How often the journal is written again while jobs are decided, and the share of the time that this takes at most.
_JOURNAL_S, _JOURNAL_SHARE = 5.0, 0.05


class StoreError(RuntimeError):
    """The place of results cannot be used, in a sentence for the user."""


def decided(state: str, job: str, line: int, **more: Any) -> dict[str, Any]:
    """The record of a job that is done or set aside."""
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"job": job, "state": state, "line": line, **more, "ended": ended}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """BlockingIOError where another process has the folder, or the file, which is made where there is none."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


class LocalFiles:
    """A folder, with the methods that fsspec's file systems have. A file is on the disk before it has its name, so that
    a machine that goes away leaves no empty file of this name.
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
    """One process drives, and notes what it decides; workers add `results` and `done`. `root` is None at an address.
    `jobs` are those of which there is a document, by its folder, one at most for each.
    """

    def __init__(self, location: str) -> None:
        scheme, separator, rest = location.partition("://")
        self.root: Path | None = None
        if separator and scheme != "file":
            self.location, self._files = location.rstrip("/"), _files_at(location.rstrip("/"))
        else:
            self.root = Path("/" + rest.lstrip("/")) if separator else Path(location).expanduser().absolute()
            self.location, self._files = str(self.root), LocalFiles(self.root)
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
        """A file's content; None if there is none."""
        with self._errors(name):
            try:
                return self._files.cat_file(name)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, content: bytes | Path | Mapping[str, Any]) -> None:
        """Makes or replaces a file: of bytes, from a local one, or a `document`."""
        if isinstance(content, Mapping):
            content = json.dumps(content, ensure_ascii=False, indent=2).encode()
        with self._errors(name):
            if isinstance(content, bytes):
                self._files.pipe_file(name, content)
            else:
                self._files.put_file(str(content), name)

    def document(self, name: str) -> dict[str, Any]:
        """What a JSON file says; nothing where there is none, or what is there is damaged."""
        try:
            found = json.loads(self.read(name) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def token(self) -> str:
        """What only this store holds: by it a worker sees that it writes to the same place."""
        mark = self.document(MARK)
        return str(mark.get("token", "")) if mark.get("made_by") == _MADE_BY else ""

    # -- for the one process that drives -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def driven(self) -> Iterator[None]:
        """Entered by the one process that drives: reads the state, and brings the journal up to date after one that was
        killed. `StoreError` while another does, where that can be seen: at an address no lock is kept.
        """
        with self._alone() if self.root else contextlib.nullcontext():
            if not self.token():
                if self.read(MARK):
                    raise StoreError(f"{self.location} has a {MARK} that is no batch's. Choose another --out.")
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
        with contextlib.ExitStack() as held:
            with self._errors(_LOCK):
                self.root.mkdir(parents=True, exist_ok=True)
                try:
                    held.enter_context(locked(self.root / _LOCK))
                except BlockingIOError:
                    raise StoreError(
                        f"another `comfyui-tpu batch` works on {self.root}. Wait for it, end it, or choose another "
                        "--out."
                    ) from None
            # What killed processes began to write.
            shutil.rmtree(self.root / _PARTIAL, ignore_errors=True)
            yield

    def note(self, folder: str, job: str, document: Mapping[str, Any]) -> None:
        """What is known of a job from now on: `document`, in `folder`. That of one that is done is there already."""
        if folder != DONE:
            self.write(f"{folder}/{job}.json", document)
        self.forget(job, but=folder)
        self.jobs[folder].add(job)
        if folder != TRIES:
            self._say(job, folder, document)

    def link(self, line: int, text: str, files: Sequence[str]) -> None:
        """Links to what a job made, named by its line and the longest text that this sets."""
        if self.root is None:
            return
        texts = [value for value in json.loads(text).values() if isinstance(value, str)]
        words = " ".join(re.findall(r"\w+", max(texts, key=len, default="")))[:MOST_WORDS].strip()
        for number, file in enumerate(files, 1):
            name = " ".join(filter(None, (f"{line:04}", words, str(number) if number > 1 else "")))
            link = self.root / NAMED / f"{name}{Path(file).suffix}"
            with contextlib.suppress(OSError):  # some disks hold no links; the results are where they are
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(Path("..") / file)

    def forget(self, job: str, but: str = "") -> None:
        """Removes what is known of a job `but` in one folder."""
        for folder, jobs in self.jobs.items():
            if folder != but and job in jobs:
                with self._errors(folder), contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(f"{folder}/{job}.json")
                jobs.discard(job)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _say(self, job: str, state: str, record: Mapping[str, Any]) -> None:
        self._journal[job, state] = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        if time.monotonic() > self._next_journal:
            self._write_journal()

    def _write_journal(self) -> None:
        """As a whole: a store of objects adds nothing to one. A long one takes long, and is written less often."""
        begun = time.monotonic()
        self.write(JOURNAL, b"".join(self._journal.values()))
        ended = time.monotonic()
        self._next_journal = ended + max(_JOURNAL_S, (ended - begun) / _JOURNAL_SHARE)

    def _rebuild_journal(self) -> None:
        """Adds lines for jobs that were decided when nobody could say so any more, in place of damaged ones too."""
        for line in (self.read(JOURNAL) or b"").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                self._journal[record["job"], record["state"]] = line + b"\n"
        for folder in (DONE, FAILED):
            for job in sorted(self.jobs[folder]):
                if (job, folder) not in self._journal and (record := self.document(f"{folder}/{job}.json")):
                    self._say(job, folder, record)


def _files_at(url: str) -> Any:
    """What fsspec has below an address."""
    try:
        import fsspec.core
        from fsspec.implementations.dirfs import DirFileSystem
    except ImportError:
        raise StoreError(f"--out {url} is an address; that needs fsspec: pip install 'comfyui-tpu[fleet]'.") from None
    try:
        files, at = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StoreError(f"--out {url}: {error}. Install what it names, or choose another --out.") from error
    return DirFileSystem(at, files)
