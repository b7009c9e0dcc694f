"""What leads in tests of several hosts: runs generations that come in as lines of JSON, and says in lines of JSON what
happens. Also alone, with JAX's collectives of several processes: `COMFYUI_TPU_TEST_ALONE` is then where to listen.
"""

import hashlib
import json
import logging
import os
import sys
import time
from typing import Any

import torch
from comfyui_tpu.distributed.multihost import distributed, rank
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from comfyui_tpu.tpu_runtime.engine.lifecycle import exit_process
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.monitor import host_stats, snapshot


class Cancelled(Exception):
    pass


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Host:
    """Cancels in `cancel`, a stage and a unit, at the first report of that kind."""

    def __init__(self, cancel: list[str] | None) -> None:
        self.stage, self._cancel, self._is_cancelled = "", cancel, False

    def text(self, message: str) -> None:
        say(text=message)

    def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
        if preview is not None:
            preview.sample()
        say(step=[self.stage, unit], done=done, total=total)
        self._is_cancelled = self._is_cancelled or self._cancel == [self.stage, unit]

    def check_cancelled(self) -> None:
        if self._is_cancelled:
            raise Cancelled("the user cancelled")


def generate(request: dict[str, Any]) -> dict[str, str]:
    """Digests of what the stages gave."""
    spec, host = lookup_spec(request["model"]), Host(request.get("cancel"))
    loras = tuple(Lora(path=path, strength=1.0) for path in request.get("loras", ()))
    model = ModelRef(spec_name=spec.name, model_id=request.get("id") or spec.miniature.random_id, loras=loras)
    frames = {} if spec.is_image else {"num_frames": 9 if spec.family == "CogVideoX" else 5}
    sizes = {**spec.miniature.inputs, **frames, **request.get("sizes", {})}
    settings = spec.settings(**{**sizes, "num_inference_steps": request.get("steps", 2)})
    host.stage = "encode"
    texts = api.encode_prompt(model, request.get("prompt", "a cat"), "", progress=host)
    condition = None
    if spec.pictures.encode is not None and spec.needs_condition:
        host.stage = "encode_image"
        size = {name: getattr(settings, name) for name in ("height", "width", "num_frames")}
        picture = torch.linspace(0, 1, spec.pictures.numbers[0] * size["height"] * size["width"] * 3)
        condition = api.encode_image(
            model, picture.reshape(spec.pictures.numbers[0], size["height"], size["width"], 3), size, progress=host
        )
    host.stage = "denoise"
    latents = api.denoise(model, settings, *texts, progress=host, condition=condition)
    host.stage = "decode"
    frames = api.decode(model, latents, progress=host)
    return {"text": digest(texts[0][0][0]), "latents": digest(latents["samples"]), "frames": digest(frames)}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def chips() -> list[dict[str, Any]]:
    """Those of all hosts, once they had time to answer."""
    snapshot.take_snapshot()
    time.sleep(1.0)
    return host_stats.Sampler().complete(snapshot.take_snapshot())["chips"]


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if alone := os.environ.get("COMFYUI_TPU_TEST_ALONE"):
        distributed.initialize(rank.parse_rank(f"0/1@127.0.0.1:{alone}"))
    say(ready=os.getpid())
    while line := sys.stdin.readline():
        request, began = json.loads(line), time.monotonic()
        try:
            if "model" in request:
                found = generate(request)
                say(ended="done", seconds=time.monotonic() - began, **found)
            elif "free" in request:
                api.free_memory()
                say(ended="done")
            else:
                memory = [one.split()[1] for one in open("/proc/self/status") if one.startswith("RssAnon")]
                say(ended="done", chips=chips(), memory=int(memory[0]) * 1024)
        except (Cancelled, ValueError, RuntimeError) as error:
            say(ended=type(error).__name__, sentence=str(error), seconds=time.monotonic() - began)
    exit_process(0)


if __name__ == "__main__":
    main()
