"""Asks another machine for a model's stages (`comfyui-tpu serve`), as the engine is asked for them here.

Progress, previews and errors come back while it works. Cancel ends the connection, which ends the work there.
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

from .. import versions
from ..checkpoints.model_ref import Expected, Lora, ModelRef
from ..engine.memory_advice import OutOfMemory
from ..line import trust
from ..line.link import Gone, MachineLink, Refused, connect, run
from ..line.records import Ask, Failed, File, Load, NeedFile, Result, Step, Text
from ..line.trust import Address
from ..progress import Preview, Progress

log = logging.getLogger(__name__)

# A minute of video at 720p is less; so is any preview.
_MOST_RESULT, _PIECE = 2**34, 2**20
_COMMAND = "comfyui-tpu serve"
# For how long a machine that failed is asked after the others, doubled each time.
_FIRST_REST_S, _LONGEST_REST_S = 10.0, 600.0


class RemoteError(RuntimeError):
    """The other machine is not there, refuses, or failed, in a sentence for the user."""


class _Rests:
    """Which machines failed lately: of all clients of this process."""

    def __init__(self) -> None:
        self._until: dict[Address, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def has(self, address: Address) -> bool:
        return self._until.get(address, (0.0, 0.0))[0] > time.monotonic()

    def note(self, address: Address, is_well: bool) -> None:
        with self._lock:
            _, last = self._until.pop(address, (0.0, 0.0))
            if not is_well:
                pause = min(max(_FIRST_REST_S, 2 * last), _LONGEST_REST_S)
                self._until[address] = (time.monotonic() + pause, pause)


RESTS = _Rests()


def parse_all(text: str) -> tuple[Address, ...]:
    """One address or several, with commas between them; ValueError where one is none, or is not listed."""
    found = tuple(dict.fromkeys(trust.parse(part) for part in text.split(",")))
    for address in found:
        trust.check_listed(address)
    return found


class Client:
    """The stages of models at one of the `addresses`, with the engine's `run`.

    Of several each stage goes to the one that has least to do, and of these to one that ran the model last; when it is
    gone or fails, to another. What travels between stages is complete, so that they need not run at the same place.
    `expected` is the generation that they are of: where a stage runs, programs of the next are compiled behind it.
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
        following = one and replace(one, model=_described(replace(one.model, loras=())))
        return self._ask(stage, progress, model, expected=following, **arguments)

    def add_lora(self, model: ModelRef, lora: Lora, progress: Progress) -> tuple[ModelRef, str]:
        changed = replace(model, loras=(*model.loras, lora))
        return changed, _named(self._ask("report_lora", progress, changed), changed.loras)

    def _ask(self, verb: str, progress: Progress, wanted: ModelRef | None = None, **given: Any) -> Any:
        """One request's result, from the first machine that gives one; else what the last said."""
        left, errors, loras = list(self.addresses), [], wanted.loras if wanted else ()
        if wanted is not None:
            given["model"] = _described(wanted)
        while found := self._free_one(left, wanted, progress, errors):
            address, link = found
            try:
                link.send(Ask(verb, given), progress.check_cancelled)
                result = _result(address, link, progress, loras)
                RESTS.note(address, is_well=True)
                return result
            except (Gone, RemoteError, OutOfMemory) as failed:
                errors.append(_sentence(address, failed) if isinstance(failed, Gone) else failed)
                RESTS.note(address, is_well=False)
                log.warning("%s", errors[-1])
                if left:
                    progress.text(f"{address} failed: asking another machine")
            finally:
                link.close()
        if len(self.addresses) > 1 and isinstance(errors[-1], RemoteError):
            raise RemoteError(f"none of {', '.join(map(str, self.addresses))} is there; the last: {errors[-1]}")
        raise errors[-1]

    def _free_one(
        self, left: list[Address], wanted: ModelRef | None, progress: Progress, errors: list[Exception]
    ) -> tuple[Address, MachineLink] | None:
        """The machine to ask, which leaves `left`; so do those that do not answer, with their `errors`."""
        found: dict[Address, tuple[Any, MachineLink]] = {}
        try:
            for address in sorted(left, key=RESTS.has):
                if found and RESTS.has(address):
                    break  # only where no other is there
                try:
                    load, link = _open(address, progress)
                    found[address] = (load.requests, wanted is not None and load.model != wanted.model_id), link
                except OSError as failed:  # `Gone` and `Refused` among them
                    left.remove(address)
                    RESTS.note(address, is_well=False)
                    errors.append(_sentence(address, failed))
            if not found:
                return None
            chosen = min(found, key=lambda address: found[address][0])
            left.remove(chosen)
            return chosen, found.pop(chosen)[1]
        finally:
            for _, link in found.values():
                link.close()


def _open(address: Address, progress: Progress) -> tuple[Load, MachineLink]:
    """A link to a machine, and what it says of itself."""
    link = connect(address, {"source": versions.source_digest()}, progress.check_cancelled)
    try:
        return link.receive((Load,), progress.check_cancelled), link
    except BaseException:
        link.close()
        raise


def _result(address: Address, link: MachineLink, progress: Progress, loras: Sequence[Lora]) -> Any:
    """Shows what comes back, and sends the files that are not there, up to the result."""
    expected = (Failed, NeedFile, Result, Step, Text)
    while True:
        message = link.receive(expected, progress.check_cancelled, most_bytes=_MOST_RESULT)
        if isinstance(message, Text):
            progress.text(_named(message.text, loras))
        elif isinstance(message, Step):
            latents = message.latents
            preview = None if latents is None else Preview(latent_format=message.latent_format, sample=latents.float)
            progress.step(message.done, message.total, message.unit, preview)
        elif isinstance(message, NeedFile):
            _send(address, link, message.digest, progress, loras)
        elif isinstance(message, Result):
            return message.value
        else:
            text = _named(message.text, loras)
            kinds: Mapping[str, Callable[[str], Exception]] = {"ValueError": ValueError, "OutOfMemory": OutOfMemory}
            raise kinds.get(message.kind, lambda text: RemoteError(f"{address}: {text}"))(text)


def _send(address: Address, link: MachineLink, digest: str, progress: Progress, loras: Sequence[Lora]) -> None:
    """A LoRA's file, one of those that the request is about."""
    path = next((Path(lora.path) for lora in loras if _digest(lora) == digest), None)
    if path is None:
        raise RemoteError(f"{address} asks for a file that is none of this model's LoRAs.")
    progress.text(f"Sending {path.name} to {address}")
    with path.open("rb") as file:
        link.send(File(os.fstat(file.fileno()).st_size), progress.check_cancelled)
        for piece in iter(lambda: file.read(_PIECE), b""):
            run(link.put("", piece), progress.check_cancelled)


def _sentence(address: Address, error: Exception) -> RemoteError:
    """Why a machine cannot be asked, or not any more."""
    if isinstance(error, Refused):
        return RemoteError(f"{address} refuses: {error}")
    if isinstance(error, TimeoutError):
        return RemoteError(f"{address} does not answer. Is the machine there, and does `{_COMMAND}` run on it?")
    if isinstance(error, ConnectionRefusedError):
        return RemoteError(
            f"nothing listens at {address}. Start `{_COMMAND}` there; from elsewhere it is reached through an ssh "
            "tunnel, or with --host."
        )
    return RemoteError(
        f"the connection to {address} broke off ({error}). Look at what `{_COMMAND}` printed there, and queue again."
    )


def _named(text: str, loras: Sequence[Lora]) -> str:
    """A text of the other machine, which knows LoRAs by their digests, with their own names."""
    for lora in loras:
        text = text.replace(f"{_digest(lora)}.safetensors", Path(lora.path).name)
    return text


def _described(model: ModelRef) -> ModelRef:
    """As another machine knows it: LoRAs by their digests, and nothing of where files are here."""
    return replace(model, address="", folders=(), loras=tuple(replace(one, path=_digest(one)) for one in model.loras))


def _digest(lora: Lora) -> str:
    status = os.stat(lora.path)
    return _digest_of(lora.path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of(path: str, size: int, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
