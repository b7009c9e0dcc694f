"""Runs stages of models for other processes: the other end of `tpu_runtime/remote`.

One stage at a time, in the order of asking. Who asks may go away at any moment, which is how Cancel arrives. It listens
on this machine alone unless it is told otherwise, and then wants a token: whoever may ask can use the chips, let models
be downloaded and fill the memory, and sees whether a folder of this machine holds a model. Nothing is encrypted.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..tpu_runtime import pipeline
from ..tpu_runtime.pipeline import (
    STAGES,
    Expected,
    Lora,
    ModelRef,
    Preview,
    cache_folder,
    choose_model,
    redact,
    spec_by_name,
    spec_for_family,
    wire,
)

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# A sign of life while a stage says nothing; how often is looked whether somebody still waits.
_ALIVE_S, _LOOK_S = 5.0, 0.2
# Sending previews takes at most this share of the time.
_PREVIEW_S, _PREVIEW_SHARE = 0.5, 0.1
_PIECE_BYTES = _WORDS_BYTES = 2**20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Gone(Exception):
    """Nobody waits for the result any more."""


class Asker:
    """Who asked: takes messages in any thread, and is the stage's `Progress`."""

    def __init__(self, connection: socket.socket, write: Callable[[memoryview], object]) -> None:
        self._connection, self._write = connection, write
        self._lock = threading.Lock()
        self._sent = time.monotonic()
        self._next_preview = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `Gone` where nobody takes it."""
        content = memoryview(wire.pack(message))
        with self._lock:
            try:
                # In pieces: the connection's timeout is for each call, and a video takes a slow line minutes.
                for start in range(0, len(content), _PIECE_BYTES):
                    self._write(content[start : start + _PIECE_BYTES])
            except OSError:
                raise Gone from None
            self._sent = time.monotonic()

    def keep_alive(self) -> None:
        if time.monotonic() > self._sent + _ALIVE_S:
            self.send({"kind": "alive"})

    def text(self, message: str) -> None:
        self.send({"kind": "text", "text": message})

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        message: dict[str, Any] = {"kind": "step", "done": done, "total": total, "unit": unit}
        begun = time.monotonic()
        if preview is not None and begun >= self._next_preview:
            # Half the precision is more than a preview shows.
            message |= {"latent_format": preview.latent_format, "latents": preview.latents().half()}
        self.send(message)
        if "latents" in message:
            ended = time.monotonic()
            self._next_preview = ended + max(_PREVIEW_S, (ended - begun) / _PREVIEW_SHARE)

    def check_cancelled(self) -> None:
        """Nothing more is to come from who asked: what can be read is the end of the connection."""
        watched = select.poll()  # unlike select.select, for descriptors of any number
        watched.register(self._connection, select.POLLIN)
        if watched.poll(0):
            with contextlib.suppress(OSError):
                if self._connection.recv(1, socket.MSG_PEEK):
                    return
            raise Gone


class Stages:
    """What may be asked for. `models` are folders that model ids are looked for in."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self._models = tuple(models)
        self._turn = threading.Lock()
        self._asking = 0
        self._ran = ""

    def load(self) -> dict[str, Any]:
        """How many requests run and wait, and the model that ran last."""
        return {"requests": self._asking, "model": self._ran}

    def run(self, verb: str, given: Mapping[str, Any], asker: Asker) -> Any:
        """The result of one request, when it is its turn. ValueError for what cannot be asked."""
        work = {"choose": self._choose, "report_lora": self._report_lora}.get(verb)
        if work is None and verb not in (*STAGES, "warmup"):
            raise ValueError(f"{verb!r} is no stage. Update the pack on both machines.")
        self._asking += 1
        try:
            with self._my_turn(asker):
                return work(asker, **given) if work else self._stage(verb, asker, **given)
        except TypeError as error:
            # Values of a kind that no node sends.
            log.exception("%s cannot be understood", verb)
            raise ValueError(f"{verb}: the request cannot be understood ({error}).") from error
        finally:
            self._asking -= 1

    @contextlib.contextmanager
    def _my_turn(self, asker: Asker) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            asker.text("Waiting: another request is running")
            while not self._turn.acquire(timeout=_LOOK_S):
                asker.check_cancelled()
        try:
            yield
        finally:
            self._turn.release()

    def _model(self, described: Mapping[str, Any], asker: Asker) -> ModelRef:
        self._ran = str(described["model_id"])
        loras = tuple(
            Lora(path=str(lora_path(lora["digest"])), strength=float(lora["strength"]), expert=str(lora["expert"]))
            for lora in described["loras"]
        )
        return choose_model(
            spec_by_name(described["name"]), described["model_id"], precision=described["precision"],
            folders=self._models, loras=loras, progress=asker,
        )  # fmt: skip

    def _stage(
        self, name: str, asker: Asker, *, model: Mapping[str, Any], expected: Mapping[str, Any] | None, **given: Any
    ) -> Any:
        """One of the engine's stages, behind which what is `expected` to follow may be compiled."""
        chosen, generations = self._model(model, asker), []
        # Who asks may take a model that it does not have for another of its family.
        if expected is not None and expected["name"] == chosen.spec_name:
            if (settings := expected["settings"]) is not None:
                chosen.spec.check_settings(settings)
            generations.append(Expected(model=chosen, stages=tuple(expected["stages"]), settings=settings))
        pipeline.expect_here(generations, progress=asker)
        return pipeline.run(name, chosen, asker, **given)

    def _choose(self, asker: Asker, *, family: str, model_id: str, precision: str) -> str:
        spec = spec_for_family(family)
        return choose_model(spec, model_id, precision=precision, folders=self._models, progress=asker).spec_name

    def _report_lora(self, asker: Asker, *, model: Mapping[str, Any]) -> str:
        whole = self._model(model, asker)
        base = self._model({**model, "loras": model["loras"][:-1]}, asker)
        return pipeline.add_lora(base, whole.loras[-1], progress=asker)[1]


def lora_path(digest: str) -> Path:
    """Where a LoRA that was sent is kept; ValueError for what is no digest."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no SHA-256.")
    return cache_folder() / "loras" / f"{digest}.safetensors"


class Handler(BaseHTTPRequestHandler):
    """One connection: one request, and messages until its result."""

    server: "Server"
    # Without it a client of HTTP/1.0 would be told nothing of the connection's end.
    protocol_version = "HTTP/1.1"
    timeout = 60
    _read = 0

    def do_POST(self) -> None:
        if self._is_refused():
            return
        if self.path != wire.RUN:
            return self._refuse(404, f"there is nothing at {self.path}.")
        try:
            content = self.rfile.read(self._size())
            self._read = len(content)
            request = wire.unpack(content)
            verb, given = str(request["verb"]), dict(request["given"])
        except (wire.WireError, KeyError, TypeError, ValueError) as error:
            return self._refuse(400, f"the request cannot be read ({error}).")
        asker = self._begin()
        is_over = threading.Event()
        threading.Thread(target=_keep_alive, args=(asker, is_over), daemon=True).start()
        started = time.monotonic()
        try:
            asker.send({"kind": "result", "result": self.server.stages.run(verb, given, asker)})
            log.info("%s for %s: %.1f s", verb, self.client_address[0], time.monotonic() - started)
        except Gone:
            log.info("%s for %s: given up after %.1f s", verb, self.client_address[0], time.monotonic() - started)
        except Exception as error:  # whatever it is, who asked is told
            self._say_error(asker, verb, error)
        finally:
            is_over.set()

    def do_GET(self) -> None:
        """How much there is to do, or whether a LoRA's file is here."""
        if self._is_refused():
            return
        if self.path == wire.LOAD:
            self._begin().send({"kind": "result", "result": self.server.stages.load()})
        elif (path := self._file()) is not None:
            self._begin().send({"kind": "result", "result": path.is_file()})

    def do_PUT(self) -> None:
        """Takes a LoRA's file."""
        if self._is_refused() or (path := self._file()) is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch, digest, left = path.with_name(f".{path.stem}-{os.urandom(4).hex()}"), hashlib.sha256(), self._size()
        try:
            with scratch.open("wb") as file:
                while left and (piece := self.rfile.read(min(left, 2**20))):
                    file.write(piece)
                    digest.update(piece)
                    left -= len(piece)
                    self._read += len(piece)
            if digest.hexdigest() != path.stem:
                return self._refuse(400, "the file did not come whole.")
            scratch.replace(path)
            self._begin().send({"kind": "result", "result": True})
        except OSError as error:
            self._refuse(507, f"the LoRA cannot be kept ({error.strerror or error}).")
        finally:
            scratch.unlink(missing_ok=True)

    def _file(self) -> Path | None:
        try:
            return lora_path(self.path.removeprefix(wire.FILE))
        except ValueError as error:
            return self._refuse(404, str(error))

    def _size(self) -> int:
        size = int(self.headers.get("Content-Length") or 0)
        if not 0 <= size <= wire.MOST_BYTES:
            raise ValueError(f"it has {size} bytes")
        return size

    def _is_refused(self) -> bool:
        """Answers who may not ask, or speaks otherwise."""
        self.close_connection = True
        said = self.headers.get("Authorization", "")
        if self.server.token and not hmac.compare_digest(said.encode(), f"Bearer {self.server.token}".encode()):
            self._refuse(401, f"the token is wrong or missing: set {wire.VARIABLE} to the one it was started with.")
            return True
        if self.headers.get("X-Protocol") != str(wire.PROTOCOL):
            self._refuse(400, "it speaks another version. Update the pack on both machines.")
            return True
        return False

    def _refuse(self, status: int, sentence: str) -> None:
        # What was sent is read first: the connection's end would otherwise come before these words.
        with contextlib.suppress(OSError):
            self.rfile.read(min(int(self.headers.get("Content-Length") or 0) - self._read, _WORDS_BYTES))
        body = json.dumps({"error": sentence}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _begin(self) -> Asker:
        """The answer's head; what follows are messages, up to the end of the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        return Asker(self.connection, self.wfile.write)

    def _say_error(self, asker: Asker, verb: str, error: Exception) -> None:
        kinds = {pipeline.OutOfMemory: "OutOfMemory", ValueError: "ValueError"}
        kind = next((name for known, name in kinds.items() if isinstance(error, known)), "")
        text = str(error) if kind or isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        if kind:
            log.info("%s for %s: %s", verb, self.client_address[0], redact(text))
        else:
            log.error("%s for %s failed", verb, self.client_address[0], exc_info=error)
        with contextlib.suppress(Gone):
            asker.send({"kind": "error", "type": kind, "text": redact(text)})

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _keep_alive(asker: Asker, is_over: threading.Event) -> None:
    while not is_over.wait(_LOOK_S):
        try:
            asker.keep_alive()
        except Gone:
            return


class Server(ThreadingHTTPServer):
    """Listens at `host` and `port`; ValueError for an address that others reach, without a token."""

    daemon_threads = True

    def __init__(self, host: str, port: int, stages: Stages, token: str = "") -> None:
        if not token and host not in LOOPBACK:
            raise ValueError(
                f"--host {host} lets other machines ask, and there is no token: whoever reaches the port could use the "
                f"chips. Set {wire.VARIABLE} here and where ComfyUI runs, or use an ssh tunnel to 127.0.0.1."
            )
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.stages, self.token = stages, token
        super().__init__((host, port), Handler)
