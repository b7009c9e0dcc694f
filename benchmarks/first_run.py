"""Measure or simulate how long a user with empty caches waits for the compiler at the first video of a size.

Run: python benchmarks/first_run.py simulate [--threads 4]: uses the real sizes, with the compile times and predicted
seconds in `benchmarks/predicted.json`, with and without background compilation, and prints tables. Takes no time.

Run: python benchmarks/first_run.py measure [--pairs 5] [--steps 20] [--step-s 0], on an otherwise idle machine: runs
the built-in tiny model alternately on two real ComfyUI servers, one of which compiles in the background, and prints the
seconds of both. The cores that compile also simulate the chips, so the gain is small. With --step-s 0.3 the host idles
that long in each step, as it does while a TPU computes.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfyui_tpu.tests.support.comfyui_server import Server, prepare, tiny_workflow
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime.engine.program_cache import MAX_BACKGROUND_COMPILES
from comfyui_tpu.tpu_runtime.model_spec import STAGES
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs.program import DENOISE_STEP

RECORDED = Path(__file__).parent / "predicted.json"
MODELS = ("flux2-dev", "cogvideox1.5-5b", "wan2.1-t2v-14b", "wan2.2-i2v-a14b", "hunyuanvideo1.5-t2v-720p")
# What a recorded compile had to itself: both threads of one core.
RECORDED_THREADS = 2
# How fast weights are assumed to come from the disk, the same in all cases.
READ_BYTES_S = 2e9

# --- the real sizes, simulated ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Program:
    """A recorded program: seconds to compile and to run all its calls, and of what weights."""

    name: str
    stage: str
    compile_s: float
    run_s: float
    weights_bytes: dict[str, float]


@dataclass(kw_only=True)
class Timeline:
    """When each program was asked for, was ready, and how long its stage waited; seconds from the prompt on."""

    needed: dict[str, float] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    end: float = 0.0

    def waited(self, name: str) -> float:
        return max(0.0, self.ready[name] - self.needed[name])


def programs_of(record: dict[str, Any]) -> list[Program]:
    """A record's programs in the order of use; of two encodings of text the one recorded last."""
    spec, stages = lookup_spec(record["model"]), {}
    for program in record["programs"]:
        component, function = program["name"].partition(".")[::2]
        stage = "denoise" if not function else "decode" if component == spec.vae.component else "image"
        stage = "encode" if component.startswith("text_encoder") else stage
        if stage == "image" and not spec.needs_condition:
            continue
        weights = {name: program["memory"]["weights"] * record["chips"] for name in program["weights"]}
        stages[component, function if stage != "encode" else ""] = Program(
            name=program["name"], stage=stage, compile_s=program["compile_s"],
            run_s=program["predicted_s"] * program["runs"], weights_bytes=weights,
        )  # fmt: skip
    return sorted(stages.values(), key=lambda program: STAGES.index(program.stage))


def simulate(programs: Sequence[Program], *, is_behind: bool, threads: int) -> Timeline:
    """Plays a generation: each stage compiles, loads and runs one program after another; behind it, what is noted.

    Compilations at the same time share `threads`, and none takes more than `RECORDED_THREADS`.
    """
    line, now = Timeline(), 0.0
    left: dict[str, float] = {}  # recorded seconds that are left of what is being compiled
    behind: set[str] = set()
    queue = [program for program in programs if is_behind and program.stage != "encode"]

    def advance(until: float | None, name: str | None) -> None:
        """Moves on to a time, or until a program is ready."""
        nonlocal now
        while now < (until or 0) or name in left:
            while queue and len(behind & set(left)) < MAX_BACKGROUND_COMPILES:
                one = queue.pop(0)
                left[one.name] = one.compile_s
                behind.add(one.name)
            rate = min(1.0, threads / RECORDED_THREADS / max(1, len(left)))
            nearest = min(left.values(), default=float("inf")) / rate
            span = nearest if until is None else min(nearest, until - now)
            now += span
            for each in list(left):
                left[each] -= span * rate
                if left[each] < 1e-9:
                    del left[each]
                    line.ready[each] = now

    loaded: set[str] = set()
    for program in programs:
        line.needed[program.name] = now
        if program in queue:
            queue.remove(program)
        if program.name not in line.ready:
            left.setdefault(program.name, program.compile_s)
        advance(None, program.name)
        new = {name: size for name, size in program.weights_bytes.items() if name not in loaded}
        loaded |= set(new)
        advance(now + sum(new.values()) / READ_BYTES_S + program.run_s, None)
    line.end = now
    return line


def tables(threads: int) -> str:
    """Markdown: a generation a row, then each program's times."""
    records = {record["model"]: record for record in json.loads(RECORDED.read_text()) if "recipe" not in record}
    overview: list[tuple[str, ...]] = [
        ("model", "total without background compilation", "total with it", "waiting for the decoder, without", "with")
    ]
    details: list[tuple[str, ...]] = [("model", "program", "compile time", "needed at", "ready at", "wait")]
    for model in MODELS:
        programs = programs_of(records[model])
        apart, ahead = (simulate(programs, is_behind=behind, threads=threads) for behind in (False, True))
        decoder = [program.name for program in programs if program.stage == "decode"]
        waits = [sum(map(line.waited, decoder)) for line in (apart, ahead)]
        overview.append((model, *(f"{one:.0f} s" for one in (apart.end, ahead.end, *waits))))
        for program in programs:
            name = program.name
            times = [f"{one:.0f}" for one in (program.compile_s, ahead.needed[name], ahead.ready[name])]
            details.append((model, name, *(f"{one} s" for one in times), f"{ahead.waited(name):.0f} s"))
    return "\n\n".join(map(_markdown, (overview, details)))


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# --- miniatures, measured ---------------------------------------------------------------------------------------------

# A neighbour of the pack, loaded after it: it may compile nothing behind, and steps take longer.
NEIGHBOUR = """
    import importlib, sys, time
    name = next(name for name in sys.modules if name.endswith("tpu_runtime.api"))
    if not {is_behind}:
        sys.modules[name].announce_generations = lambda generations: None
    executables = importlib.import_module(name.replace("api", "programs.executables"))
    run = executables.Executable.__call__

    def run_and_rest(executable, *args):
        result = run(executable, *args)
        if executable.program.name == {step!r}:
            time.sleep({step_s})
        return result

    executables.Executable.__call__ = run_and_rest
    NODE_CLASS_MAPPINGS = {{}}
"""


def first_run_s(server: Server, steps: int, width: int) -> float:
    """Seconds of a prompt that was never encoded, by the server's clock, with nothing compiled or loaded."""
    server.post("/free", {"unload_models": True, "free_memory": True})
    until(lambda: not server.get("/tpu/stats")["resident"])
    for kind in ("xla", "prompts"):
        shutil.rmtree(server.cache / kind, ignore_errors=True)
    workflow = tiny_workflow("first", num_inference_steps=steps, width=width)
    workflow["1"]["inputs"]["prompt"] = f"a cat of {width} pixels"
    entry = server.run(workflow)
    moments = {name: data["timestamp"] for name, data in entry["status"]["messages"] if "timestamp" in data}
    return (moments["execution_success"] - moments["execution_start"]) / 1000


def measure(num_pairs: int, steps: int, step_s: float) -> list[tuple[float, float]]:
    """Pairs of seconds, with compiling behind and without; each pair has a size of its own."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = []
        for is_behind in (True, False):
            base = Path(folder) / str(is_behind)
            base.mkdir()
            neighbour = NEIGHBOUR.format(is_behind=is_behind, step=DENOISE_STEP, step_s=step_s)
            servers.append(prepare(base, packs={"zz-first-run": neighbour}))
            stack.callback(servers[-1].stop)
            servers[-1].start()
            first_run_s(servers[-1], 1, 64)  # imports, and the miniature is made
        for index in range(num_pairs):
            turn = (0, 1) if index % 2 == 0 else (1, 0)
            seconds = {which: first_run_s(servers[which], steps, 80 + 16 * index) for which in turn}
            pairs.append((seconds[0], seconds[1]))
            print(f"pair {index + 1}: {seconds[0]:.1f} s with, {seconds[1]:.1f} s without", flush=True)
    return pairs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "measure"))
    parser.add_argument("--threads", type=int, default=4, help="hyperthreads that compile, of the simulated machine")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.0, help="how long the host rests at each step")
    options = parser.parse_args(arguments)
    if options.what == "simulate":
        sys.stdout.write(tables(options.threads) + "\n")
        return
    pairs = measure(options.pairs, options.steps, options.step_s)
    ahead, apart = (statistics.median(one) for one in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"medians: {ahead:.1f} s with, {apart:.1f} s without; ratio of pairs {ratio:.3f}")


if __name__ == "__main__":
    main()
