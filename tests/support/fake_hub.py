"""A Hugging Face Hub on 127.0.0.1 that serves folders as repositories, and remembers what it was asked for."""

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

LARGE = ".safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What is answered in place of the real thing."""

    status: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


@dataclasses.dataclass
class FakeHub:
    """`repositories` are folders by id. `answers` hold for addresses that contain their key, the last key first.

    `cuts` are the bytes after which the connection for a file ends, by the file's name, one for each request.
    """

    repositories: dict[str, Path] = dataclasses.field(default_factory=dict)
    answers: dict[str, Answer] = dataclasses.field(default_factory=dict)
    asked: list[str] = dataclasses.field(default_factory=list)
    cuts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    # The first bytes that were asked for, of each request with a range.
    ranges: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    url: str = ""
    # Header of the last request.
    authorization: str | None = None

    def served(self) -> list[str]:
        """The files whose content was asked for, in order."""
        return [path.split("/resolve/", 1)[1].split("/", 1)[1] for path in self._gets() if "/resolve/" in path]

    def weights(self) -> list[str]:
        return [name for name in self.served() if name.endswith(".safetensors")]

    def _gets(self) -> list[str]:
        return [line.removeprefix("GET ") for line in self.asked if line.startswith("GET ")]

    def commit(self, repository: str) -> str:
        """Changes when a file of the repository does."""
        folder = self.repositories[repository]
        state = [(name, (folder / name).stat().st_mtime_ns) for name in self.files(repository)]
        return hashlib.sha1(repr(state).encode()).hexdigest()

    def files(self, repository: str) -> list[str]:
        folder = self.repositories[repository]
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def answer(self, path: str) -> Answer:
        for key, given in reversed(self.answers.items()):
            if key in path:
                return given
        parts = urlsplit(path).path.removeprefix("/api/models").strip("/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        if repository not in self.repositories:
            return Answer(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/"):
            return self._listing(repository, is_tree="tree" in rest)
        return self._file(repository, "/".join(rest[2:]))

    def _listing(self, repository: str, is_tree: bool) -> Answer:
        folder, names = self.repositories[repository], self.files(repository)
        entries: list[dict[str, object]] = [
            {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": _etag(folder / name)}
            for name in names
        ]
        for entry in entries:
            if str(entry["path"]).endswith(LARGE):
                entry["lfs"] = {"oid": entry["oid"], "size": entry["size"], "pointerSize": 134}
        info = {
            "id": repository, "sha": self.commit(repository), "private": False, "gated": False, "downloads": 0,
            "tags": [], "siblings": [{"rfilename": name} for name in names],
        }  # fmt: skip
        body = json.dumps(entries if is_tree else info).encode()
        return Answer(status=200, headers={"Content-Type": "application/json"}, body=body)

    def _file(self, repository: str, name: str) -> Answer:
        headers = {"X-Repo-Commit": self.commit(repository)}
        path = self.repositories[repository] / name
        if not path.is_file():
            return Answer(status=404, headers={**headers, "X-Error-Code": "EntryNotFound"})
        return Answer(status=200, headers={**headers, "ETag": f'"{_etag(path)}"'}, body=path.read_bytes())

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path, repositories: dict[str, Path]) -> None:
        """Begins anew with `repositories`, and points this process's Hub client here, which reads its variables only
        once; downloads go to `cache`.
        """
        from huggingface_hub import constants

        self.repositories = repositories
        for state in (self.answers, self.asked, self.cuts, self.ranges):
            state.clear()
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))


def _etag(path: Path) -> str:
    """As the Hub has it: SHA-256 of what lies in its large storage, a hash of git's for the rest."""
    return hashlib.new("sha256" if path.name.endswith(LARGE) else "sha1", path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeHub]

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        self.hub.authorization = self.headers.get("Authorization")
        answer = self.hub.answer(self.path)
        body, status = answer.body, answer.status
        if status == 200 and (wanted := self.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]):
            self.hub.ranges.append((self.path.rpartition("/")[2], wanted))
            body, status = body[int(wanted) :], 206
        self.send_response(status)
        for name, value in {**answer.headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cuts = self.hub.cuts.get(self.path.rpartition("/")[2])
            self.wfile.write(body[: cuts.pop(0)] if cuts else body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve() -> Iterator[FakeHub]:
    """A hub without repositories, until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
