"""Measure the seconds from a process's start to a model's first step, by part, and to the first step of a new size.

Run: python benchmarks/cold_start.py [--model wan2.1-t2v-14b] [--opening-s 10] [--disk-gb-s 2] [--no-tiny]. Takes
minutes; no TPU is needed, and libtpu compiles only the text encoder.
`--record` measures imports, and each flagship's tracing, for `ranges.py`, and writes them to `cold_start.json`.

Measured here, in processes of their own: imports; tracing and lowering of the model's real programs for a described
v6e:2x4; the text encoder's compiled program, read from the disk and decompressed as JAX's cache does it; a whole cold
start of the family's tiny model on the CPU, where opening the chips is a sleep of `--opening-s`, with an empty cache,
with compiled programs on the disk, and with a new size in the same process. Imports and tracing are seconds of one core
(CPU time), so that other work on the machine does not count.

Not measured: opening the chips and the disk's rate are assumed, compile times are those that `predicted.json` records.
No TPU's program can be loaded without a TPU: that part is missing, and a CPU's programs stand in its place.
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

RECORDED = Path(__file__).with_name("cold_start.json")
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


def measure_stored(model: str) -> dict[str, Any]:
    """Return the seconds of reading the text encoder's compiled program from the disk, and its sizes in bytes.

    It is the program that the compiler makes in seconds. The file is as JAX's cache writes it.
    """
    from comfyui_tpu.tpu_runtime.cost_model import chips
    from comfyui_tpu.tpu_runtime.models import lookup_spec
    from comfyui_tpu.tpu_runtime.plan.compile import PlanRequest
    from jax._src import compilation_cache

    spec, topology = lookup_spec(model), chips.topology(TOPOLOGY)
    program = PlanRequest(spec=spec, settings=spec.settings(), topology=topology, stages=("encode",)).programs()[0]
    serialized = program.compile().runtime_executable().serialize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "program")
        file.write_bytes(compilation_cache.compress_executable(serialized))
        _forget_pages(file)
        started = time.perf_counter()
        content = file.read_bytes()
        read = time.perf_counter()
        compilation_cache.decompress_executable(content)
        return {
            "name": program.name, "bytes": len(serialized), "file_bytes": len(content), "read_s": read - started,
            "decompress_s": time.perf_counter() - read,
        }  # fmt: skip


def _forget_pages(file: Path) -> None:
    """Write a file to the disk and drop it from the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_tiny(opening_s: str, width: str, then: str = "") -> list[float]:
    """Return the seconds from this process's start to the first step, and from the next prompt to that of a new size.

    The last one is the sum that JAX took to read, decompress and load programs from its cache before the first step.
    opening_s: what opening the chips takes. width: of the video. then: width of the second prompt; "" for none.
    """
    started = _process_start()
    import jax

    retrieved = [0.0]

    def count(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_retrieval_time_sec":
            retrieved[-1] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
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
        retrieved.append(0.0)
    return [*seconds, retrieved[0]]


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
        empty, _ = run_child("tiny", str(opening_s), first, COMFYUI_TPU_CACHE=cache)
        stored, size, loading = run_child("tiny", str(opening_s), again, new, COMFYUI_TPU_CACHE=cache)
    return {
        "empty cache": empty, "programs on the disk": stored, "of it reading and loading programs": loading,
        "new size, same process": size,
    }  # fmt: skip


def summarize(imports: Mapping[str, float], tracing: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of imports before and beside the opening of the chips, and of tracing up to the first step."""
    beside = imports["engine, torch, torchax"] + imports["diffusers, transformers"]
    return {
        "imports_before": sum(imports.values()) - beside,
        "imports_beside": beside,
        "tracing": sum(seconds for stage, seconds in tracing.items() if stage != "decode"),
    }


def write_record() -> None:
    """Measure imports and tracing of every flagship, and write the least of this and earlier runs to `RECORDED`.

    Other work on the machine only adds to a run. Delete the file after a change that makes a part slower.
    """
    from comfyui_tpu.tpu_runtime.models import FLAGSHIPS

    found = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in (spec.name for spec in FLAGSHIPS):
        parts = summarize(run_child("imports", name), run_child("trace", name))
        before = found.get(name, parts)
        found[name] = {part: round(min(seconds, before[part]), 2) for part, seconds in parts.items()}
        print(name, found[name], flush=True)
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")


def report(model: str, opening_s: float, disk_gb_s: float, *, is_tiny_run: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    # Run as a file, this folder is where Python looks first.
    import predict

    imports, tracing, stored = (run_child(part, model) for part in ("imports", "trace", "stored"))
    parts = summarize(imports, tracing)
    record = predict.read(predict.recorded(TOPOLOGY))[model]
    compile_s = {program["name"]: program["compile_s"] for program in record["programs"]}
    new = [seconds for name, seconds in compile_s.items() if not name.startswith("text_encoder")]
    opening, weights = max(opening_s, parts["imports_beside"]), record["weights_bytes"] / 1e9 / disk_gb_s
    # The denoiser's weights are read from the disk from the opening on, and the text encoder's after it.
    until_step = parts["imports_before"] + max(opening + parts["tracing"], weights)
    yield f"{model} on {TOPOLOGY}, to the first step, programs on the disk:"
    yield from _lines(imports, "import")
    yield f"  imports before the chips are opened and after them   {parts['imports_before']:6.1f} s  measured"
    yield f"  opening the chips, the other imports beside it       {opening:6.1f} s  assumed ({opening_s:.0f} s)"
    yield from _lines(tracing, "trace")
    yield f"  tracing up to the first step                         {parts['tracing']:6.1f} s  measured"
    yield f"    {stored['name']}: {stored['file_bytes'] / 1e6:.1f} MB read in {stored['read_s']:.3f} s, decompressed to"
    yield f"      {stored['bytes'] / 1e6:.1f} MB in {stored['decompress_s']:.3f} s  measured; loading: unknown"
    yield f"  all weights from a disk of {disk_gb_s:.1f} GB/s                  {weights:6.1f} s  assumed"
    yield f"  one after the other                                  {sum(parts.values()) + opening_s + weights:6.1f} s"
    yield f"  weights read from the opening on                     {until_step:6.1f} s"
    yield f"to the first step of a new size: tracing {parts['tracing']:.1f} s and compiling, as predicted.json has it:"
    yield f"  the denoiser {compile_s[predict.step_of(record)['name']]:.0f} s; all programs of a size {sum(new):.0f} s"
    if is_tiny_run:
        yield f"{TINY} on this machine's CPU, opening the chips {opening_s:.0f} s, measured:"
        yield from _lines(measure_tiny(opening_s), "to the first step,")


def _lines(parts: Mapping[str, float], kind: str) -> Iterator[str]:
    for name, seconds in parts.items():
        yield f"    {f'{kind} {name}':<50} {seconds:6.2f} s  measured"


CHILDREN: dict[str, Callable[..., Any]] = {
    "imports": measure_imports, "trace": measure_tracing, "stored": measure_stored, "tiny": start_tiny,
}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](*sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wan2.1-t2v-14b")
    parser.add_argument("--opening-s", type=float, default=10.0)
    parser.add_argument("--disk-gb-s", type=float, default=2.0)
    parser.add_argument("--no-tiny", action="store_true", help="without the cold starts of the tiny model")
    parser.add_argument("--record", action="store_true", help="only measure what ranges.py uses, of every flagship")
    options = parser.parse_args()
    if options.record:
        write_record()
        return
    for line in report(options.model, options.opening_s, options.disk_gb_s, is_tiny_run=not options.no_tiny):
        print(line, flush=True)


if __name__ == "__main__":
    main()
