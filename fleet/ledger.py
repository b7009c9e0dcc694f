"""What is known of every job of a batch, as files: a second call reads them and goes on.

| file | says |
|---|---|
| `done/<job>.json` | the job is done: its record, written by the worker after its results |
| `failed/<job>.json` | it is set aside, and why |
| `tries/<job>.json` | how often it failed, or lost its worker, and is to run again |
| `results/<job>/...` | what it made |
| `journal.jsonl` | a line for each job that was decided, for people and scripts; rebuilt from the others |

The names of a folder are the state, so that starting again lists three folders and reads few files.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .store import BatchStore, StoreError

DONE, FAILED, TRIES, RESULTS, JOURNAL, MARK = "done", "failed", "tries", "results", "journal.jsonl", "batch.json"
_MADE_BY = "comfyui-tpu batch"


@dataclass(slots=True, kw_only=True)
class Tries:
    """What went wrong with a job so far: its own failures, and how often its worker went away."""

    failures: list[str] = field(default_factory=list)
    losses: int = 0


class Ledger:
    """The state of a batch in its store. One process writes it; workers add `results` and `done`."""

    def __init__(self, store: BatchStore) -> None:
        self.store = store
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self._unsaid: list[bytes] = []  # journal lines of a store that cannot be added to
        self._said = 0
        self.token = ""

    def open(self) -> None:
        """Reads the state, and brings the journal up to date after a process that was killed."""
        self.token = _token(self.store)
        self.done = _ids(self.store.names(DONE))
        self.failed = _ids(self.store.names(FAILED)) - self.done
        self._rebuild_journal()

    def tries(self, jobs: Iterable[str]) -> dict[str, Tries]:
        """What is known of those jobs that did not go well so far."""
        found = {}
        for job in _ids(self.store.names(TRIES)) & set(jobs):
            if kept := self._read(f"{TRIES}/{job}.json"):
                found[job] = Tries(failures=list(kept.get("failures", ())), losses=int(kept.get("losses", 0)))
        return found

    def is_done(self, job: str) -> dict[str, Any] | None:
        """The record of a job that its worker may have finished before it went away."""
        return self._read(f"{DONE}/{job}.json")

    def note_done(self, job: str, record: Mapping[str, Any], had_tries: bool) -> None:
        self.done.add(job)
        self._say(record)
        if had_tries:
            self.store.remove(f"{TRIES}/{job}.json")
        if job in self.failed:
            self.failed.discard(job)
            self.store.remove(f"{FAILED}/{job}.json")

    def note_tries(self, job: str, tries: Tries) -> None:
        self._write(f"{TRIES}/{job}.json", {"failures": tries.failures, "losses": tries.losses})

    def set_aside(self, job: str, record: Mapping[str, Any]) -> None:
        self.failed.add(job)
        self._write(f"{FAILED}/{job}.json", record)
        self.store.remove(f"{TRIES}/{job}.json")
        self._say(record)

    def take_back(self, jobs: Iterable[str]) -> None:
        """Lets jobs that were set aside be tried again."""
        for job in self.failed & set(jobs):
            self.store.remove(f"{FAILED}/{job}.json")
            self.failed.discard(job)

    def close(self) -> None:
        """Writes what the journal of a store that cannot be added to still lacks."""
        if len(self._unsaid) != self._said:
            self.store.write(JOURNAL, b"".join(self._unsaid))
            self._said = len(self._unsaid)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _say(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        if not self._unsaid and self.store.append(JOURNAL, line):
            return
        self._unsaid.append(line)
        # Written whole, whenever it has doubled: a store of objects adds nothing to one.
        if len(self._unsaid) >= 2 * self._said:
            self.close()

    def _rebuild_journal(self) -> None:
        """Adds lines for jobs that were decided when nobody could say so any more, and drops those that are damaged:
        the records have what they said.
        """
        content = self.store.read(JOURNAL) or b""
        said = {line: key for line in content.splitlines(keepends=True) if (key := _said(line)) is not None}
        if sum(map(len, said)) != len(content):
            self.store.write(JOURNAL, b"".join(said))
        if not self.store.append(JOURNAL, b""):
            self._unsaid, self._said = list(said), len(said)
        for folder, jobs in ((DONE, self.done), (FAILED, self.failed)):
            for job in sorted(jobs - {name for name, state in said.values() if state == folder}):
                if record := self._read(f"{folder}/{job}.json"):
                    self._say(record)

    def _read(self, name: str) -> dict[str, Any] | None:
        """A document; None where there is none, or what is there is damaged."""
        try:
            found = json.loads(self.store.read(name) or b"null")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        self.store.write(name, json.dumps(document, ensure_ascii=False, indent=2).encode())


def _ids(names: Iterable[str]) -> set[str]:
    return {name.removesuffix(".json") for name in names if name.endswith(".json")}


def _said(line: bytes) -> tuple[str, str] | None:
    """The job and the state that a line of the journal is about; None where it is damaged."""
    try:
        record = json.loads(line)
        return (str(record["job"]), str(record["state"])) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _mark(store: BatchStore) -> dict[str, Any]:
    """What `batch.json` says; nothing where it is no batch's."""
    try:
        found = json.loads(store.read(MARK) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("made_by") == _MADE_BY else {}


def _token(store: BatchStore) -> str:
    """What only this store holds: by it a worker sees that it writes to the same place. StoreError if it is strange."""
    if token := _mark(store).get("token"):
        return str(token)
    if store.read(MARK):
        raise StoreError(f"{store.location} has a {MARK} that is no batch's. Choose another --out.")
    token = secrets.token_hex(8)
    store.write(MARK, json.dumps({"made_by": _MADE_BY, "token": token}).encode())
    return token


def check_same_place(store: BatchStore, token: str, who: str) -> None:
    """Raises StoreError where a worker's store is not that of the batch."""
    if _mark(store).get("token") != token:
        raise StoreError(
            f"{who} does not see the batch's folder at {store.location}. With several machines --out must be a folder "
            "that all of them share, or an address such as gs://bucket/folder."
        )
