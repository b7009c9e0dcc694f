"""Asks another machine for a model's stages (`comfyui-tpu serve`), as the engine is asked for them here.

Progress, previews and errors come back while it works. Cancel ends the connection, which ends the work there.
"""

import contextlib
import functools
import hashlib
import http.client
import io
import json
import logging
import os
import queue
import re
import socket
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..checkpoints.model_ref import Expected, Lora, ModelRef
from ..engine.memory_advice import OutOfMemory
from ..progress import Preview, Progress
from ..redact import redact
from . import wire

log = logging.getLogger(__name__)

# Until the other machine answers at all, and between two signs of life of it.
_CONNECT_S, _SILENCE_S = 5.0, 60.0
_LOOK_S = 0.1
_COMMAND = "comfyui-tpu serve"


class RemoteError(RuntimeError):
    """The other machine is not there, refuses, or failed, in a sentence for the user."""


class Unreachable(RemoteError):
    """It is not there, or not any more: another machine may do the same."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where `comfyui-tpu serve` listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_all(text: str) -> tuple[Address, ...]:
    """One address or several, with commas between them; ValueError as `parse`."""
    return tuple(dict.fromkeys(parse(part) for part in text.split(",")))


def parse(text: str) -> Address:
    """HOST or HOST:PORT, also with http:// before it; ValueError for anything else."""
    found = re.fullmatch(r"(?:http://)?(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::(\d{1,5}))?/?", text.strip())
    port = int(found[3] or wire.DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise ValueError(
            f"address is {text!r}; it must be HOST or HOST:PORT of a machine that runs `{_COMMAND}`, such as "
            f"127.0.0.1:{wire.DEFAULT_PORT}."
        )
    return Address(host=found[1] or found[2], port=port)


class Client:
    """The stages of models at one of the `addresses`, with the engine's `run`.

    Of several each stage goes to the one that has least to do, and of these to one that ran the model last; when it is
    gone, to another. What travels between stages is whole, so that they need not run at the same place. `expected` is
    the generation that they are of: where a stage runs, programs of the next are compiled behind it.
    """

    def __init__(self, addresses: str, expected: Expected | None = None) -> None:
        self.addresses = parse_all(addresses)
        self._expected = expected

    def choose(self, family: str, model_id: str, precision: str, progress: Progress) -> str:
        """The name of the model that `model_id` is on the other machine; ValueError with its sentence if none."""
        return self._ask("choose", progress, family=family, model_id=model_id, precision=precision)

    def run(self, stage: str, model: ModelRef, progress: Progress, **arguments: Any) -> Any:
        """As the engine runs it; what is to follow goes with it."""
        one = self._expected
        following = one and {"name": one.model.spec_name, "stages": one.stages, "settings": one.settings}
        return self._about(stage, model, progress, expected=following, **arguments)

    def add_lora(self, model: ModelRef, lora: Lora, progress: Progress) -> tuple[ModelRef, str]:
        changed = replace(model, loras=(*model.loras, lora))
        return changed, _named(self._about("report_lora", changed, progress), changed.loras)

    # -- the line ------------------------------------------------------------------------------------------------------

    def _about(self, verb: str, model: ModelRef, progress: Progress, **given: Any) -> Any:
        """What is asked of a model."""
        loras = [{"digest": _digest(lora), "strength": lora.strength, "expert": lora.expert} for lora in model.loras]
        described = {"name": model.spec_name, "model_id": model.model_id, "precision": model.precision, "loras": loras}
        return self._ask(verb, progress, model, model=described, **given)

    def _ask(self, verb: str, progress: Progress, wanted: ModelRef | None = None, **given: Any) -> Any:
        """One request's result; where a machine goes away meanwhile and there are others, from one of these."""
        left = list(self.addresses)
        while True:
            address = self._free_one(left, wanted, progress)
            try:
                for lora in wanted.loras if wanted else ():
                    self._bring(address, lora, progress)
                loras = wanted.loras if wanted else ()
                return self._result(address, wire.pack({"verb": verb, "given": given}), progress, loras)
            except Unreachable as error:
                left.remove(address)
                if not left:
                    raise
                log.warning("%s", error)
                progress.text(f"{address} is gone: asking another machine")

    def _free_one(self, left: list[Address], wanted: ModelRef | None, progress: Progress) -> Address:
        """Which machine is asked; those that are not there leave `left`. Unreachable where none is."""
        if len(self.addresses) == 1:
            return left[0]
        loads, said = {}, ""
        for address in list(left):
            try:
                with self._answer(address, "GET", wire.LOAD, io.BytesIO(), progress) as messages:
                    load = _only(address, messages)
                loads[address] = (load["requests"], wanted is not None and load["model"] != wanted.model_id)
            except Unreachable as error:
                left.remove(address)
                said = str(error)
        if not loads:
            raise Unreachable(f"none of {', '.join(map(str, self.addresses))} is there; the last: {said}")
        return min(loads, key=lambda address: loads[address])

    def _result(self, address: Address, content: bytes, progress: Progress, loras: Sequence[Lora]) -> Any:
        """Sends one request and shows what comes back, up to its result."""
        with self._answer(address, "POST", wire.RUN, io.BytesIO(content), progress) as messages:
            for message in messages:
                kind = message.get("kind")
                if kind == "text":
                    progress.text(_named(message["text"], loras))
                elif kind == "step":
                    progress.step(message["done"], message["total"], message["unit"], _preview(message))
                elif kind == "error":
                    raise _error(address, {**message, "text": _named(message["text"], loras)})
                elif kind == "result":
                    return message["result"]
        raise Unreachable(f"{address} ended without a result. Look at what `{_COMMAND}` printed there.")

    def _bring(self, address: Address, lora: Lora, progress: Progress) -> None:
        """Sends a LoRA's file, unless it is there."""
        name = f"{wire.FILE}{_digest(lora)}"
        with self._answer(address, "GET", name, io.BytesIO(), progress) as messages:
            if _only(address, messages):
                return
        progress.text(f"Sending {Path(lora.path).name} to {address}")
        with open(lora.path, "rb") as file, self._answer(address, "PUT", name, file, progress) as messages:
            _only(address, messages)

    @contextlib.contextmanager
    def _answer(
        self, address: Address, method: str, path: str, body: BinaryIO, progress: Progress
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages that answer a request; leaving ends the connection, and with it the work on the other side."""
        connection = http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)
        messages = self._messages(address, connection, progress)
        try:
            with _sentences(address):
                connection.connect()
                connection.sock.settimeout(_SILENCE_S)
                size = body.seek(0, os.SEEK_END)
                body.seek(0)
                headers = {"Content-Length": str(size), "X-Protocol": str(wire.PROTOCOL), **_authorization()}
                connection.request(method, path, body, headers)
            yield messages
        finally:
            messages.close()
            connection.close()

    def _messages(
        self, address: Address, connection: http.client.HTTPConnection, progress: Progress
    ) -> Generator[dict[str, Any], None, None]:
        """What comes, read by a thread of its own, while this one looks for Cancel."""
        came: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue(maxsize=2)
        is_over, line = threading.Event(), connection.sock  # which http.client forgets, once it has read the head

        def put(item: dict[str, Any] | Exception | None) -> None:
            while not is_over.is_set():
                with contextlib.suppress(queue.Full):
                    return came.put(item, timeout=_LOOK_S)

        def read() -> None:
            try:
                with _sentences(address):
                    response = connection.getresponse()
                    if response.status != http.client.OK:
                        raise RemoteError(f"{address} refuses: {_reason(response)}")
                    while (message := wire.read(response.read)) is not None:
                        put(message)
                put(None)
            except Exception as error:  # whatever it is, the thread that asked raises it
                put(error)

        threading.Thread(target=read, name="comfyui-tpu-remote", daemon=True).start()
        try:
            while True:
                progress.check_cancelled()
                with contextlib.suppress(queue.Empty):
                    item = came.get(timeout=_LOOK_S)
                    if item is None:
                        return
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            is_over.set()
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # wakes the thread, and tells the other machine


@contextlib.contextmanager
def _sentences(address: Address) -> Iterator[None]:
    """Errors of the line as `Unreachable`."""
    try:
        yield
    except TimeoutError:
        raise Unreachable(
            f"{address} does not answer. Is the machine there, and does `{_COMMAND}` run on it?"
        ) from None
    except ConnectionRefusedError:
        raise Unreachable(
            f"nothing listens at {address}. Start `{_COMMAND}` there; from elsewhere it is reached through "
            "an ssh tunnel, or with --host and a token."
        ) from None
    except (OSError, http.client.HTTPException, wire.WireError) as error:
        raise Unreachable(
            f"the connection to {address} broke off ({redact(str(error)) or type(error).__name__}). Look at "
            f"what `{_COMMAND}` printed there, and queue again."
        ) from None


def _only(address: Address, messages: Iterator[Mapping[str, Any]]) -> Any:
    """The result of a request that one message answers."""
    for message in messages:
        return message.get("result")
    raise Unreachable(f"{address} ended without an answer.")


def _error(address: Address, message: Mapping[str, Any]) -> Exception:
    """The other machine's error: sentences for the user are as they would be here."""
    text = str(message["text"])
    if message["type"] == "ValueError":
        return ValueError(text)
    return OutOfMemory(text) if message["type"] == "OutOfMemory" else RemoteError(f"{address}: {text}")


def _authorization() -> dict[str, str]:
    token = os.environ.get(wire.VARIABLE, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _reason(response: http.client.HTTPResponse) -> str:
    """The sentence of a refusal."""
    try:
        return redact(str(json.loads(response.read(10_000))["error"]))
    except (ValueError, KeyError, TypeError):
        return f"{response.status} {response.reason}. Is it `{_COMMAND}` of this pack?"


def _preview(message: Mapping[str, Any]) -> Preview | None:
    if (latents := message.get("latents")) is None:
        return None
    return Preview(latent_format=message["latent_format"], latents=lambda: latents.float())


def _named(text: str, loras: Sequence[Lora]) -> str:
    """A text of the other machine, which knows LoRAs by their digests, with their own names."""
    for lora in loras:
        text = text.replace(f"{_digest(lora)}.safetensors", Path(lora.path).name)
    return text


def _digest(lora: Lora) -> str:
    status = os.stat(lora.path)
    return _digest_of(lora.path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of(path: str, size: int, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
