"""Measure the seconds from a process's start to a model's first step, by part, and to the first step of a new size.

Run: python benchmarks/cold_start.py [--model wan2.1-t2v-14b] [--opening-s 10] [--disk-gb-s 2]. It takes minutes, needs
no TPU, and libtpu compiles nothing.

Measured, in separate processes: imports; tracing and lowering of the model's real programs for a described v6e:2x4; and
a complete cold start of the family's tiny model on the CPU. The latter runs with an empty cache, with programs on the
disk, and with a new size in the same process; opening the chips is a sleep of `--opening-s`. Imports and tracing are
CPU seconds, so other work on the machine does not count.

Not measured: the time to open the chips and the disk's rate are assumed; compile times are those in `predicted.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOPOLOGY = "v6e:2x4"
# Which sizes of the tiny model: the first one twice, then a new one.
SIZES = (64, 64, 80)
TINY = "tiny/wan21"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}


def run_child(part: str, *words: str, **environment: str) -> Any:
    """Return what `part` prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", part, *words],
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# --- in the child -----------------------------------------------------------------------------------------------------


@contextmanager
def timed(parts: dict[str, float], name: str) -> Iterator[None]:
    """Add the CPU seconds of the block to `parts`."""
    before = time.process_time()
    yield
    parts[name] = parts.get(name, 0.0) + time.process_time() - before


def measure_imports(model: str) -> dict[str, float]:
    """Return CPU seconds of each group of imports, in the order of a cold start."""
    from comfyui_tpu.tpu_runtime.models import lookup_spec

    parts = {"interpreter": time.process_time()}
    with timed(parts, "pack"):
        pass
    with timed(parts, "jax"):
        import jax  # noqa: F401
    with timed(parts, "engine, torch, torchax"):
        import comfyui_tpu.tpu_runtime.engine.engine  # noqa: F401
    from comfyui_tpu.tpu_runtime.programs import upstream_network

    with timed(parts, "diffusers, transformers"):
        upstream_network.import_libraries()
    with timed(parts, "the model's classes"):
        upstream_network.import_upstream(lookup_spec(model).components)
    return parts


def measure_tracing(model: str) -> dict[str, float]:
    """Return CPU seconds of tracing and lowering the programs of each stage, as the first prompt does."""
    from comfyui_tpu.tpu_runtime.cost_model import chips
    from comfyui_tpu.tpu_runtime.models import lookup_spec
    from comfyui_tpu.tpu_runtime.plan.compile import PlanRequest
    from comfyui_tpu.tpu_runtime.programs import upstream_network

    spec, topology = lookup_spec(model), chips.topology(TOPOLOGY)
    upstream_network.import_upstream(spec.components)
    chips.compile_devices(topology)
    parts: dict[str, float] = {}
    for stage in ("encode", "image", "denoise", "decode"):
        if stage == "image" and not spec.needs_condition:
            continue
        with timed(parts, stage):
            request = PlanRequest(spec=spec, settings=spec.settings(), topology=topology, stages=(stage,))
            for program in request.programs():
                program.lower().as_text()
    return parts


def start_tiny(opening_s: str, width: str, then: str = "") -> list[float]:
    """Return the seconds from this process's start to the first step, and from the next prompt to that of a new size.

    opening_s: what opening the chips takes. width: of the video. then: width of the second prompt; "" for none.
    """
    started = _process_start()
    from comfyui_tpu.tpu_runtime import api
    from comfyui_tpu.tpu_runtime.engine import lifecycle

    open_devices: Callable[..., Any] = lifecycle.open_devices

    def open_slowly(*given: Any) -> Any:
        time.sleep(float(opening_s))  # without Python's lock, as the driver
        return open_devices(*given)

    lifecycle.open_devices = open_slowly  # type: ignore[assignment]
    seconds = []
    for each in filter(None, (width, then)):
        seconds.append(_first_step(api, int(each)) - started)
        started = time.time()
    return seconds


def _first_step(api: Any, width: int) -> float:
    """Return the time at which the first step of a prompt has ended."""
    from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
    from comfyui_tpu.tpu_runtime.models import lookup_spec
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    class Reached(SilentProgress):
        at = 0.0

        def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
            if unit == "step" and done >= 1 and not self.at:
                self.at = time.time()

    spec, reached = lookup_spec("wan2.1-t2v-14b"), Reached()
    model = ModelRef(spec_name=spec.name, model_id=TINY)
    settings = spec.settings(**{**spec.miniature.inputs, "width": width, "num_inference_steps": 2})
    embeds = api.encode_prompt(model, f"a cat of {width}", "", progress=reached)
    api.denoise(model, settings, *embeds, progress=reached)
    return reached.at


def _process_start() -> float:
    """Return the time at which this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    return booted + ticks / os.sysconf("SC_CLK_TCK")


# --- the report -------------------------------------------------------------------------------------------------------


def measure_tiny(opening_s: float) -> dict[str, float]:
    """Return the seconds of cold starts of the tiny model, one after the other with one cache."""
    first, again, new = map(str, SIZES)
    with tempfile.TemporaryDirectory() as cache:
        run_child("tiny", "0", first, COMFYUI_TPU_CACHE=cache)  # makes the tiny model's files
        for folder in ("xla", "prompts"):
            subprocess.run(["rm", "-rf", str(Path(cache) / folder)], check=True)
        (empty,) = run_child("tiny", str(opening_s), first, COMFYUI_TPU_CACHE=cache)
        stored, size = run_child("tiny", str(opening_s), again, new, COMFYUI_TPU_CACHE=cache)
    return {"empty cache": empty, "programs on the disk": stored, "new size, same process": size}


def report(model: str, opening_s: float, disk_gb_s: float) -> Iterator[str]:
    """Yield the lines of the report."""
    # Run as a file, this folder is where Python looks first.
    import predict

    imports, tracing = run_child("imports", model), run_child("trace", model)
    beside = imports["engine, torch, torchax"] + imports["diffusers, transformers"]
    before = sum(imports.values()) - beside
    record = predict.read(predict.recorded(TOPOLOGY))[model]
    compile_s = {program["name"]: program["compile_s"] for program in record["programs"]}
    new = [seconds for name, seconds in compile_s.items() if not name.startswith("text_encoder")]
    opening, weights = max(opening_s, beside), record["weights_bytes"] / 1e9 / disk_gb_s
    until_step = sum(seconds for stage, seconds in tracing.items() if stage != "decode")
    yield f"{model} on {TOPOLOGY}, to the first step, programs on the disk:"
    yield from _lines(imports, "import")
    yield f"  imports before the chips are opened and after them   {before:6.1f} s  measured"
    yield f"  opening the chips, the other imports beside it       {opening:6.1f} s  assumed ({opening_s:.0f} s)"
    yield from _lines(tracing, "trace")
    yield f"  tracing up to the first step                         {until_step:6.1f} s  measured"
    yield f"  all weights from a disk of {disk_gb_s:.1f} GB/s                  {weights:6.1f} s  assumed"
    yield f"  sum                                                  {before + opening + until_step + weights:6.1f} s"
    yield f"to the first step of a new size: tracing {until_step:.1f} s and compiling, recorded in predicted.json:"
    yield f"  the denoiser {compile_s[predict.step_of(record)['name']]:.0f} s; all programs of a size {sum(new):.0f} s"
    yield f"{TINY} on this machine's CPU, opening the chips {opening_s:.0f} s, measured:"
    yield from _lines(measure_tiny(opening_s), "to the first step,")


def _lines(parts: Mapping[str, float], kind: str) -> Iterator[str]:
    for name, seconds in parts.items():
        yield f"    {f'{kind} {name}':<50} {seconds:6.2f} s  measured"


CHILDREN: dict[str, Callable[..., Any]] = {"imports": measure_imports, "trace": measure_tracing, "tiny": start_tiny}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](*sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.1-t2v-14b")
    parser.add_argument("--opening-s", type=float, default=10.0)
    parser.add_argument("--disk-gb-s", type=float, default=2.0)
    options = parser.parse_args()
    for line in report(options.model, options.opening_s, options.disk_gb_s):
        print(line, flush=True)


if __name__ == "__main__":
    main()
