"""Measure how long the chips wait for the host between two denoising steps, with steps dispatched ahead and in order.

The engine's own loop runs, with progress and a preview after every step. Instead of chips, a clock takes a fixed time
for each program. The model is a tiny checkpoint on eight simulated chips: apart from the preview, the host's work for a
step does not depend on the size.

    python benchmarks/host/step_gap.py --model flux2-klein-4b --step-ms 13 65 500 2400
"""

import argparse
import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

STEPS = 20


class Flag:
    """Of whether a step is finite: known when the step has ended."""

    def __init__(self, ends: float) -> None:
        self.ends = ends

    def __bool__(self) -> bool:
        time.sleep(max(0.0, self.ends - time.perf_counter()))
        return True

    def is_ready(self) -> bool:
        return time.perf_counter() >= self.ends


class Clock:
    """In the place of a compiled step: what it gave once, after a set time."""

    seconds = 0.0
    free_at = waited = 0.0
    calls = 0

    def __init__(self, compiled: Any) -> None:
        self._compiled, self._results = compiled, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any) -> Any:
        now = time.perf_counter()
        if self._results is None:
            self._results = self._compiled(*args)
        elif Clock.calls:
            Clock.waited += max(0.0, now - Clock.free_at)
        Clock.calls += 1
        Clock.free_at = max(now, Clock.free_at) + self.seconds
        return (*self._results[:-1], Flag(Clock.free_at))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["flux2-klein-4b", "wan2.1-t2v-14b"])
    parser.add_argument("--step-ms", nargs="+", type=float, default=[13, 65, 500, 2400])
    options = parser.parse_args()
    for name in options.model:
        for row in _measured(name, options.step_ms):
            print(json.dumps({"model": name, **row}), flush=True)


def _measured(name: str, all_ms: list[float]) -> Any:
    import jax
    from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
    from comfyui_tpu.tpu_runtime.engine import denoise
    from comfyui_tpu.tpu_runtime.engine.engine import Engine
    from comfyui_tpu.tpu_runtime.models import lookup_spec
    from comfyui_tpu.tpu_runtime.programs import executables
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    class Host(SilentProgress):
        def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
            if preview is not None:
                preview.sample()

    obtain, ahead = executables.compile_or_load, denoise._can_dispatch_ahead

    def clocked(program: Any) -> Any:
        found, is_new = obtain(program)
        if program.name == "denoise_step":
            found.compiled = Clock(found.compiled)  # type: ignore[assignment]
        return found, is_new

    executables.compile_or_load = clocked
    spec = lookup_spec(name)
    model = ModelRef(spec_name=name, model_id=spec.miniature.random_id, precision="float32")
    size = {key: value for key, value in spec.miniature.inputs.items() if key in spec.inputs}
    settings = spec.settings(**{**size, "num_inference_steps": STEPS, "guidance_scale": 1.0})
    engine = Engine(jax.devices())
    positive, _ = engine.run("encode", model, Host(), prompt="a cat", negative_prompt="")
    arguments: dict[str, Any] = {"settings": settings, "prompt_embeds": positive, "negative_prompt_embeds": None}
    for ms in [all_ms[0], *all_ms]:  # once for what is done once
        row: dict[str, Any] = {"step_ms": ms}
        Clock.seconds = ms / 1000
        for what, goes_ahead in (("in order", lambda *_: False), ("ahead", ahead)):
            denoise._can_dispatch_ahead = goes_ahead
            Clock.calls, Clock.waited = 0, 0.0
            engine.run("denoise", model, Host(), condition=None, latents=None, **arguments)
            row[f"chips wait, ms a step, {what}"] = round(1000 * Clock.waited / (STEPS - 1), 3)
        yield row


if __name__ == "__main__":
    main()
