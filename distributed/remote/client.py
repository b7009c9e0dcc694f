"""Client of `comfyui-tpu serve`: runs a model's stages on another machine, with the engine's interface.

Progress, previews and errors are received while it works. Cancel closes the connection, which stops the work there.
"""

import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...tpu_runtime import versions
from ...tpu_runtime.checkpoints.model_ref import Lora, ModelRef, PlannedGeneration
from ...tpu_runtime.engine.memory_advice import OutOfMemory
from ...tpu_runtime.messages import compose, transform
from ...tpu_runtime.progress import Preview, Progress
from ..rpc import auth
from ..rpc.auth import Address
from ..rpc.connection import Connection, ConnectionLost, HandshakeRejected, connect, run_on_loop
from ..rpc.messages import FileHeader, FileRequest, Invoke, ServerLoad, StageFailed, StageResult, StatusText, StepDone

log = logging.getLogger(__name__)

# Most bytes of a result, more than a minute of video at 720p; bytes of a chunk.
_MAX_RESULT_BYTES, _PIECE = 2**34, 2**20
_COMMAND = "comfyui-tpu serve"
# Seconds for which a failed machine is tried last, doubled with each failure up to the second number.
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 10.0, 600.0


class RemoteError(RuntimeError):
    """The other machine is unreachable, rejects the request, or failed; the message is a sentence for the user."""


class _Backoffs:
    """Machines that failed recently, shared by all clients of this process."""

    def __init__(self) -> None:
        self._until: dict[Address, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def is_backing_off(self, address: Address) -> bool:
        return self._until.get(address, (0.0, 0.0))[0] > time.monotonic()

    def note(self, address: Address, is_well: bool) -> None:
        with self._lock:
            _, last = self._until.pop(address, (0.0, 0.0))
            if not is_well:
                pause = min(max(_FIRST_BACKOFF_S, 2 * last), _MAX_BACKOFF_S)
                self._until[address] = (time.monotonic() + pause, pause)


BACKOFFS = _Backoffs()


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parse addresses separated by commas. Raises ValueError if one is invalid or not listed."""
    addresses = tuple(dict.fromkeys(auth.parse_address(word) for word in text.split(",")))
    for address in addresses:
        auth.check_listed(address)
    return addresses


class Client:
    """The stages of models on one of several machines, with the engine's `run`.

    Each stage runs on the machine with the fewest requests, preferably one that ran the model last; if that machine
    fails, on another. Values passed between stages are complete, so that stages may run on different machines.
    addresses: of the machines, separated by commas. expected: the generation that follows; its programs are compiled in
    the background on the machine that runs a stage.
    """

    def __init__(self, addresses: str, expected: PlannedGeneration | None = None) -> None:
        self.addresses = parse_addresses(addresses)
        self._expected = expected

    def choose(self, family: str, model_id: str, precision: str, progress: Progress) -> str:
        """Return the name of the model that `model_id` means on the other machine. Raises ValueError with its reason.

        family, precision: of the model. progress: of the request.
        """
        return self._ask("choose", progress, family=family, model_id=model_id, precision=precision)

    def run(self, stage: str, model: ModelRef, progress: Progress, **arguments: Any) -> Any:
        """Run a stage like the engine. The expected generation is sent with the request.

        stage: its name. model: without its files' paths on this machine. progress: of the request. arguments: of the
            stage.
        """
        following = self._expected
        following = following and replace(following, model=_describe(replace(following.model, loras=())))
        return self._ask(stage, progress, model, expected=following, **arguments)

    def add_lora(self, model: ModelRef, lora: Lora, progress: Progress) -> tuple[ModelRef, str]:
        """Return `model` with `lora`, and the other machine's report of the changed weights.

        progress: where to report.
        """
        changed = replace(model, loras=(*model.loras, lora))
        return changed, _restore_names(self._ask("report_lora", progress, changed), changed.loras)

    def _ask(self, verb: str, progress: Progress, model: ModelRef | None = None, **arguments: Any) -> Any:
        """Return the result of the first machine that has one; raise the error of the last machine otherwise."""
        left, errors, loras = list(self.addresses), [], model.loras if model else ()
        if model is not None:
            arguments["model"] = _describe(model)
        while chosen := self._free_one(left, model, progress, errors):
            address, link = chosen
            try:
                link.send(Invoke(verb, arguments), progress.check_cancelled)
                result = _result(address, link, progress, loras)
                BACKOFFS.note(address, is_well=True)
                return result
            except (ConnectionLost, RemoteError, OutOfMemory) as failed:
                errors.append(_sentence(address, failed) if isinstance(failed, ConnectionLost) else failed)
                BACKOFFS.note(address, is_well=False)
                log.warning("%s", errors[-1])
                if left:
                    progress.text(f"{address} failed: trying another machine")
            finally:
                link.close()
        if len(self.addresses) > 1 and isinstance(errors[-1], RemoteError):
            raise RemoteError(
                compose("remote.no_machine_usable", addresses=", ".join(map(str, self.addresses)), errors=errors[-1])
            )
        raise errors[-1]

    def _free_one(
        self, left: list[Address], model: ModelRef | None, progress: Progress, errors: list[Exception]
    ) -> tuple[Address, Connection] | None:
        """Choose and connect a machine, and remove it from `left`, with those that fail, whose `errors` are added."""
        links: dict[Address, tuple[tuple[int, bool], Connection]] = {}
        try:
            for address in sorted(left, key=BACKOFFS.is_backing_off):
                if links and BACKOFFS.is_backing_off(address):
                    break  # used only if no other machine is available
                try:
                    load, link = _open(address, progress)
                    links[address] = (load.requests, model is not None and load.model != model.model_id), link
                except OSError as failed:  # `ConnectionLost` and `HandshakeRejected` among them
                    left.remove(address)
                    BACKOFFS.note(address, is_well=False)
                    errors.append(_sentence(address, failed))
            if not links:
                return None
            chosen = min(links, key=lambda address: links[address][0])
            left.remove(chosen)
            return chosen, links.pop(chosen)[1]
        finally:
            for _, link in links.values():
                link.close()


def _open(address: Address, progress: Progress) -> tuple[ServerLoad, Connection]:
    """Connect to a machine. Also returns its load."""
    link = connect(address, {"source": versions.source_digest()}, progress.check_cancelled)
    try:
        return link.receive((ServerLoad,), progress.check_cancelled), link
    except BaseException:
        link.close()
        raise


def _result(address: Address, link: Connection, progress: Progress, loras: Sequence[Lora]) -> Any:
    """Return the result of a request; meanwhile show progress, and send the files that the other machine lacks."""
    expected = (StageFailed, FileRequest, StageResult, StepDone, StatusText)
    while True:
        message = link.receive(expected, progress.check_cancelled, most_bytes=_MAX_RESULT_BYTES)
        if isinstance(message, StatusText):
            progress.text(_restore_names(message.text, loras))
        elif isinstance(message, StepDone):
            latents = message.latents
            preview = None if latents is None else Preview(latent_format=message.latent_format, sample=latents.float)
            progress.step(message.done, message.total, message.unit, preview)
        elif isinstance(message, FileRequest):
            _send(address, link, message.digest, progress, loras)
        elif isinstance(message, StageResult):
            return message.value
        else:
            text = _restore_names(message.text, loras)
            kinds: Mapping[str, Callable[[str], Exception]] = {"ValueError": ValueError, "OutOfMemory": OutOfMemory}
            raise kinds.get(message.kind, lambda text: RemoteError(compose("remote.from", address=address, text=text)))(
                text
            )


def _send(address: Address, link: Connection, digest: str, progress: Progress, loras: Sequence[Lora]) -> None:
    """Send the file of a LoRA of the request."""
    path = next((Path(lora.path) for lora in loras if _digest(lora) == digest), None)
    if path is None:
        raise RemoteError(compose("remote.foreign_file_requested", address=address))
    progress.text(f"Sending {path.name} to {address}")
    with path.open("rb") as file:
        link.send(FileHeader(os.fstat(file.fileno()).st_size), progress.check_cancelled)
        for piece in iter(lambda: file.read(_PIECE), b""):
            run_on_loop(link.put("", piece), progress.check_cancelled)


def _sentence(address: Address, error: Exception) -> RemoteError:
    """Return an error that explains why a machine cannot be used."""
    if isinstance(error, HandshakeRejected):
        return RemoteError(f"{address} rejected the connection: {error}")
    if isinstance(error, TimeoutError):
        return RemoteError(compose("remote.does_not_answer", address=address, command=_COMMAND))
    if isinstance(error, ConnectionRefusedError):
        return RemoteError(compose("remote.nothing_listens", address=address, command=_COMMAND))
    return RemoteError(compose("remote.connection_lost", address=address, error=error, command=_COMMAND))


def _restore_names(text: str, loras: Sequence[Lora]) -> str:
    """Replace the digests of LoRAs in a text of the other machine by their names."""
    for lora in loras:
        digest, name = f"{_digest(lora)}.safetensors", Path(lora.path).name
        text = transform(text, lambda part, digest=digest, name=name: part.replace(digest, name))
    return text


def _describe(model: ModelRef) -> ModelRef:
    """Return the model for another machine: LoRAs by digest, without paths of this machine."""
    loras = tuple(replace(lora, path=_digest(lora)) for lora in model.loras)
    return replace(model, address="", folders=(), loras=loras)


def _digest(lora: Lora) -> str:
    status = os.stat(lora.path)
    return _hash_file(lora.path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _hash_file(path: str, size: int, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
