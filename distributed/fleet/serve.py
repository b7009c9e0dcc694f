"""Server that runs stages of models for other processes; its client is `distributed/remote`.

Stages run one at a time, in the order of requests. A client may disconnect at any moment, which cancels its request. A
client with the token may use the chips, have models downloaded, and learn whether a folder of this machine holds a
model.
"""

import asyncio
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...tpu_runtime import api
from ...tpu_runtime.cache.store import cache_folder, trim
from ...tpu_runtime.checkpoints.model_ref import ModelRef, PlannedGeneration, choose_model
from ...tpu_runtime.engine.memory_advice import OutOfMemory
from ...tpu_runtime.files import open_atomic
from ...tpu_runtime.messages import transform
from ...tpu_runtime.model_spec import STAGES
from ...tpu_runtime.models import spec_for_family
from ...tpu_runtime.progress import Preview
from ...tpu_runtime.redact import redact
from ..rpc import codec, messages

log = logging.getLogger(__name__)

# Seconds between pings; a client without an answer for 1.5 times as long loses its turn.
HEARTBEAT_S = 10.0
# Seconds between previews, and the largest share of the time that sending them may take.
_PREVIEW_S, _PREVIEW_SHARE = 0.5, 0.1
# Concurrent clients; bytes of a stage's arguments, of a LoRA, and of all LoRAs in the cache.
MAX_CLIENTS, MAX_ARGUMENT_BYTES, MAX_LORA_BYTES, MAX_LORA_CACHE_BYTES = 32, 2**30, 2**33, 2**35
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ClientDisconnected(Exception):
    """The client has disconnected."""


class ClientProgress:
    """A client, as the `Progress` of its stage; used by the thread that runs the stage."""

    def __init__(self, link: Any) -> None:
        self._link, self.is_gone, self._next_preview = link, False, 0.0

    def send(self, message: object) -> None:
        """Send a message. Raises NobodyWaits if the client has disconnected."""
        try:
            self._link.send(message, self.check_cancelled)
        except ConnectionError:
            raise ClientDisconnected from None

    def text(self, message: str) -> None:
        self.send(messages.StatusText(message))

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        begun = time.monotonic()
        if preview is None or begun < self._next_preview:
            return self.send(messages.StepDone(done, total, unit))
        # float16 is precise enough for a preview.
        self.send(messages.StepDone(done, total, unit, preview.latent_format, preview.sample().half()))
        ended = time.monotonic()
        self._next_preview = ended + max(_PREVIEW_S, (ended - begun) / _PREVIEW_SHARE)

    def check_cancelled(self) -> None:
        if self.is_gone:
            raise ClientDisconnected


class StageService:
    """The requests that a client may make. `models` are folders in which model ids are looked up."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self._models = tuple(models)
        self.ran = ""

    def run(self, verb: str, given: Mapping[str, Any], asker: ClientProgress) -> Any:
        """Run one request and return its result. Raises ValueError for an invalid request.

        verb: a stage, or another request. given: its arguments. asker: the client.
        """
        work = {"choose": self._choose, "report_lora": self._report_lora}.get(verb)
        if work is None and verb not in (*STAGES, "warmup"):
            raise ValueError(f"{verb!r} is not a stage. Update the pack on both machines.")
        try:
            return work(asker, **given) if work else self._stage(verb, asker, **given)
        except (KeyError, TypeError) as error:
            # Arguments of types that no node sends.
            log.exception("%s cannot be understood", verb)
            raise ValueError(f"{verb}: the request cannot be understood ({error}).") from error

    def _model(self, described: ModelRef, asker: ClientProgress) -> ModelRef:
        """Return a model of this machine, with the client's LoRAs."""
        self.ran = described.model_id
        loras = tuple(replace(lora, path=str(lora_path(lora.path))) for lora in described.loras)
        return choose_model(
            described.spec, described.model_id, precision=described.precision, quality=described.quality,
            folders=self._models, loras=loras,
            progress=asker,
        )  # fmt: skip

    def _stage(
        self, name: str, asker: ClientProgress, *, model: ModelRef, expected: PlannedGeneration | None, **given: Any
    ) -> Any:
        """Run one of the engine's stages; programs of the `expected` generation may be compiled in the background."""
        chosen, generations = self._model(model, asker), []
        # A client may mistake a model that it does not have for another of the family.
        if expected is not None and expected.model.spec_name == chosen.spec_name:
            if expected.settings is not None:
                chosen.spec.check_settings(expected.settings)
            generations.append(replace(expected, model=chosen))
        api.announce_local_generations(generations, progress=asker)
        if (settings := given.get("settings")) is not None:
            chosen.spec.check_settings(settings)
        return api.run_stage(name, chosen, asker, **given)

    def _choose(self, asker: ClientProgress, *, family: str, model_id: str, precision: str) -> str:
        spec = spec_for_family(family)
        return choose_model(spec, model_id, precision=precision, folders=self._models, progress=asker).spec_name

    def _report_lora(self, asker: ClientProgress, *, model: ModelRef) -> str:
        changed = self._model(model, asker)
        return api.add_lora(replace(changed, loras=changed.loras[:-1]), changed.loras[-1], progress=asker)[1]


def lora_path(digest: str) -> Path:
    """Return the cache path of a client's LoRA. Raises ValueError if `digest` is not a SHA-256."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a SHA-256.")
    return cache_folder() / "loras" / f"{digest}.safetensors"


class Server:
    """Listens at `host` and `port` within its context; `port` is then the actual one. Each request has a connection."""

    def __init__(self, host: str, port: int, stages: StageService) -> None:
        from ..rpc.connection import RpcServer

        self.host, self.port, self.stages = host, port, stages
        self.clients, self.asking, self._ended = 0, 0, {"done": 0, "failed": 0, "given_up": 0}
        # One stage at a time, in the order of requests; waiting ones can be cancelled.
        self._one = ThreadPoolExecutor(1, "comfyui-tpu-serve")
        pages = {"/health": lambda: "ok\n", "/metrics": self._metrics}
        self._door = RpcServer(self._problem, self._speak, pages, HEARTBEAT_S)

    def __enter__(self) -> "Server":
        try:
            self.port = self._door.listen(self.host, self.port)
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen at --host {self.host} --port {self.port} ({error}).") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()
        self._one.shutdown(wait=False, cancel_futures=True)

    def _problem(self, hello: Mapping[str, Any], address: str) -> str | None:
        from ...tpu_runtime import versions

        if hello["source"] != versions.source_digest():
            return "this machine has another version of the pack. Update the pack on both machines."
        return f"it has {MAX_CLIENTS} clients already." if self.clients >= MAX_CLIENTS else None

    def _metrics(self) -> str:
        numbers = {"clients": self.clients, "requests": self.asking, **self._ended}
        return "".join(f"comfyui_tpu_serve_{name} {value}\n" for name, value in numbers.items())

    async def _speak(self, link: Any, hello: Mapping[str, Any], address: str) -> None:
        """Handle one client's request. Any further message, or a disconnect, cancels it."""
        self.clients += 1
        asker, work, watch = ClientProgress(link), None, None
        try:
            await link.say(messages.ServerLoad(self.asking, self.stages.ran))
            call = await link.get((messages.Invoke,), codec.MODEL_RECORDS, MAX_ARGUMENT_BYTES)
            problem = await _bring_all(link, call)
            self.asking += 1
            work = asyncio.get_running_loop().run_in_executor(self._one, self._run, call, asker, address, problem)
            if self.asking > 1:
                await link.say(messages.StatusText("Waiting: another request is running"))
            watch = asyncio.ensure_future(link.get(()))
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await link.say(work.result())
                await watch
            asker.is_gone = True
            work.cancel()
        finally:
            asker.is_gone = True
            self.clients -= 1
            self.asking -= work is not None
            if watch is not None:
                watch.cancel()

    def _run(self, call: Any, asker: ClientProgress, address: str, problem: Exception | None) -> Any:
        """Run a request and return the message with its outcome; never raises."""
        started, outcome = time.monotonic(), "failed"
        try:
            if problem is not None:
                raise problem
            asker.check_cancelled()
            reply = messages.StageResult(self.stages.run(call.name, call.arguments, asker))
            outcome = "done"
            return reply
        except ClientDisconnected:
            outcome = "given_up"
            return messages.StageFailed("", outcome)
        except Exception as error:  # of any kind: the client receives it
            kinds = {OutOfMemory: "OutOfMemory", ValueError: "ValueError"}
            kind = next((name for known, name in kinds.items() if isinstance(error, known)), "")
            text = str(error) if kind or isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            if not kind:
                log.error("%s for %s failed", call.name, address, exc_info=error)
            return messages.StageFailed(kind, transform(text, redact))
        finally:
            self._ended[outcome] += 1
            log.info("%s for %s: %s after %.1f s", call.name, address, outcome, time.monotonic() - started)


async def _bring_all(link: Any, call: Any) -> Exception | None:
    """Fetch the LoRAs of a request that are not in the cache. Returns the error, or None."""
    try:
        model = call.arguments.get("model")
        for path in [lora_path(lora.path) for lora in model.loras] if model else ():
            if path.is_file():
                os.utime(path)  # the least recently used ones are evicted
            else:
                await _bring(link, path)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, ConnectionError):
            raise
        return ValueError(f"the LoRA cannot be kept ({error}).")
    return None


async def _bring(link: Any, path: Path) -> None:
    await link.say(messages.FileRequest(path.stem))
    size = (await link.get((messages.FileHeader,))).size
    if not 0 < size <= MAX_LORA_BYTES:
        raise ValueError(f"it has {size} bytes; it may have {MAX_LORA_BYTES}")
    path.parent.mkdir(parents=True, exist_ok=True)
    trim(path.parent, MAX_LORA_CACHE_BYTES - size)
    digest, problem = hashlib.sha256(), None
    with open_atomic(path) as scratch:
        with scratch.open("wb", buffering=0) as file:
            async for piece in link.pieces(size):  # all of them, even after an error: the reply follows the last one
                digest.update(piece)
                try:
                    file.write(piece if problem is None else b"")
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem
        if digest.hexdigest() != path.stem:
            raise ValueError("the received file has another digest than announced")
