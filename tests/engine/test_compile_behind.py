"""What later stages need is compiled behind the running one: in order, once, and never to the stage's harm."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import pytest
import torch
from comfyui_tpu.tests.support.host import Cancelled, Host, Runner
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime.cache import store, xla_cache
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef, PlannedGeneration
from comfyui_tpu.tpu_runtime.engine import compile_times, program_cache, stage_functions, telemetry
from comfyui_tpu.tpu_runtime.engine.device_cache import DeviceCache
from comfyui_tpu.tpu_runtime.engine.program_cache import ProgramCache, ProgramRequest
from comfyui_tpu.tpu_runtime.memory_errors import CompileOutOfMemory, MemoryRefusal
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import executables
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPEC = spec_for_family("Wan21")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id)
SETTINGS = SPEC.settings(**{**SPEC.miniature.inputs, "num_frames": 5, "num_inference_steps": 2})
GENERATION = PlannedGeneration(model=MODEL, stages=("denoise", "decode"), settings=SETTINGS)
ACTIVITY = telemetry.Activity(stage="denoise", model="m")
TOO_LARGE = CompileOutOfMemory(
    MemoryRefusal(memory="HBM", needed_bytes=1, sentence="the compiler says it is too large")
)


class Compiler:
    """Stands for XLA: each program, known by one word, is ready when the test says so (`allow`), or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.cached: set[str] = set()
        self.fails: dict[str, list[Exception]] = {}
        self._allowed: dict[str, threading.Event] = {}
        self.counts: Counter[str] = Counter()
        self.device_cache = DeviceCache(jax.devices()[0])
        self.cache = ProgramCache(self.device_cache, self.counts)
        self.host = Host()
        monkeypatch.setattr(executables, "compile_or_load", self._obtain)

    def event(self, name: str) -> threading.Event:
        return self._allowed.setdefault(name, threading.Event())

    def allow(self, *names: str) -> None:
        for name in names:
            self.event(name).set()

    def _obtain(self, name: str) -> tuple[Any, bool]:
        self.begun.append(name)
        if name not in self.cached:
            xla_cache._of_thread.missed()  # as JAX's cache does
        assert self.event(name).wait(PATIENCE_S)
        if self.fails.get(name):
            raise self.fails[name].pop()
        return Program(name), name not in self.cached

    def note(self, *names: str) -> None:
        for name in names:
            self.cache.note(self.wanted(name))

    def get(self, name: str) -> Any:
        watched = telemetry.TrackedProgress(host=self.host, activity=telemetry.Activity(stage="denoise", model="m"))
        return self.cache.get(self.wanted(name), watched)

    def wanted(self, name: str) -> ProgramRequest:
        return ProgramRequest(title=f"the {name}", key=(name,), build=lambda: name)  # type: ignore[arg-type, return-value]

    def behind(self) -> list[str]:
        return [str(one["title"]) for one in self.cache.list_background()]


class Program(str):
    """A loaded program that takes no room."""

    code_bytes = 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path))  # where it is not known yet how long anything takes
    one = Compiler(monkeypatch)
    yield one
    one.cache.drop()
    one.allow(*one.begun)


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begins it, and gives what waits for its result."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_S)
        return results[0]

    return result


def test_program_cache_compiles_two_programs_at_a_time_in_order(compiler: Compiler):
    compiler.note("denoiser", "decoder", "rest", "denoiser")
    until(lambda: len(compiler.begun) == 2)
    assert set(compiler.begun) == {"denoiser", "decoder"}
    assert compiler.behind() == ["the denoiser", "the decoder", "the rest"]
    assert [one["elapsed_s"] is None for one in compiler.cache.list_background()] == [False, False, True]
    compiler.allow("denoiser")
    until(lambda: compiler.begun[2:] == ["rest"])
    compiler.allow("decoder", "rest")
    until(lambda: not compiler.behind())
    assert [compiler.get(name) for name in ("denoiser", "decoder", "rest")] == ["denoiser", "decoder", "rest"]
    assert len(compiler.begun) == compiler.counts["compile"] == 3


def test_program_cache_get_waits_for_background_compile_and_cancels(compiler: Compiler):
    compiler.note("decoder")
    until(lambda: compiler.begun)
    waiting = in_thread(lambda: compiler.get("decoder"))
    said = ["Preparing the program of the decoder", "Compiling the decoder (once for this size)"]
    until(lambda: compiler.host.said == said)
    assert compiler.behind() == []  # the stage's own now
    compiler.host.is_cancelled = True
    assert isinstance(waiting(), Cancelled)
    compiler.host.is_cancelled = False
    compiler.allow("decoder")  # XLA could not be stopped: it is kept
    assert compiler.get("decoder") == "decoder" and compiler.begun == ["decoder"]


def test_program_cache_reports_last_compile_time_of_other_size(compiler: Compiler):
    def wanted(size: str) -> ProgramRequest:
        return ProgramRequest(
            title=f"the denoiser for {size}", key=("denoise", "m", size[:1] == "8"), build=lambda: size
        )  # type: ignore

    class Bar(Host):
        steps: ClassVar[list[tuple[int, int, str]]] = []

        def step(self, done: int, total: int, unit: str, preview: Any = None) -> None:
            self.steps.append((done, total, unit))

    watched = telemetry.TrackedProgress(host=Bar(), activity=ACTIVITY)
    first = in_thread(lambda: compiler.cache.get(wanted("832x480"), watched))
    until(lambda: watched.host.said[1:] == ["Compiling the denoiser for 832x480 (once for this size)"])
    compiler.allow("832x480")
    assert first() == "832x480"
    assert float(compile_times.COMPILE_TIMES.get(wanted("832x480").kind) or "") >= 0  # what it took is kept
    compile_times.COMPILE_TIMES.put(wanted("1280x720").kind, b"90")
    waiting = in_thread(lambda: compiler.cache.get(wanted("1280x720"), watched))
    until(lambda: Bar.steps)
    compiler.allow("1280x720")
    assert waiting() == "1280x720"
    assert watched.host.said[-1] == (
        "Compiling the denoiser for 1280x720 (once for this size, about 90 s, as last time)"
    )
    assert Bar.steps[0] == (0, 90, "second")
    assert ACTIVITY.compiling_s > 0 and ACTIVITY.summary().startswith("Took ")
    # What is in a cache's file may be anything.
    for content in (b"nan", b"-1", b"1e9", b"soon"):
        compile_times.COMPILE_TIMES.put(wanted("1280x720").kind, content)
        assert compile_times.get_last_s(wanted("832x480").kind) == 0


def test_program_cache_cached_program_reports_no_compiling(compiler: Compiler):
    compiler.cached = {"decoder"}
    activity = telemetry.Activity(stage="decode", model="m")
    watched = telemetry.TrackedProgress(host=compiler.host, activity=activity)
    waiting = in_thread(lambda: compiler.cache.get(compiler.wanted("decoder"), watched))
    time.sleep(2 * program_cache.POLL_S)
    assert not activity.compiling
    compiler.allow("decoder")
    assert waiting() == "decoder" and activity.compiling_s == 0 < activity.preparing_s
    assert compiler.host.said == ["Preparing the program of the decoder"]


def test_program_cache_get_skips_queue_of_other_programs(compiler: Compiler):
    compiler.note("one", "two", "three")
    until(lambda: len(compiler.begun) == 2)
    compiler.allow("three")
    assert compiler.get("three") == "three"
    compiler.allow("one", "two")
    until(lambda: not compiler.behind())
    assert sorted(compiler.begun) == ["one", "three", "two"]


def test_program_cache_foreground_compile_can_be_cancelled(compiler: Compiler):
    waiting = in_thread(lambda: compiler.get("denoiser"))
    until(lambda: compiler.begun)
    compiler.host.is_cancelled = True
    assert isinstance(waiting(), Cancelled)


def test_program_cache_drop_prevents_queued_compiles(compiler: Compiler):
    compiler.note("one", "two", "three")
    until(lambda: len(compiler.begun) == 2)
    compiler.cache.drop()
    compiler.allow("one", "two", "three")
    until(lambda: not compiler.behind())
    assert compiler.get("three") == "three" and sorted(compiler.begun) == ["one", "three", "two"]


@pytest.mark.parametrize("is_waiting", [False, True], ids=["before it is needed", "while a stage waits"])
def test_program_cache_background_failure_is_logged_and_retried(
    is_waiting: bool, compiler: Compiler, caplog: pytest.LogCaptureFixture
):
    compiler.fails["decoder"] = [RuntimeError("no luck")]
    compiler.note("decoder")
    until(lambda: compiler.begun)
    waiting = in_thread(lambda: compiler.get("decoder")) if is_waiting else None
    until(lambda: bool(compiler.host.said) == is_waiting)
    compiler.allow("decoder")
    until(lambda: "no luck" in caplog.text)
    assert (waiting() if waiting else compiler.get("decoder")) == "decoder"
    assert compiler.begun == ["decoder"] * 2 and caplog.text.count("no luck") == 1


def test_program_cache_foreground_failure_is_raised(compiler: Compiler):
    compiler.fails["decoder"] = [RuntimeError("no luck")] * 2
    compiler.allow("decoder")
    with pytest.raises(RuntimeError, match="no luck"):
        compiler.get("decoder")
    assert compiler.begun == ["decoder"]


def test_program_cache_background_refusal_is_raised_by_get(compiler: Compiler, caplog: pytest.LogCaptureFixture):
    compiler.fails["decoder"] = [TOO_LARGE]
    compiler.note("decoder")
    compiler.allow("decoder")
    until(lambda: compiler.begun and not compiler.behind())
    with pytest.raises(CompileOutOfMemory, match="too large"):
        compiler.get("decoder")
    assert compiler.begun == ["decoder"] and not caplog.records
    assert compiler.get("decoder") == "decoder"  # with other sizes loaded, say: it may be asked again


def test_program_cache_without_room_leaves_program_on_disk(compiler: Compiler, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DeviceCache, "has_room", lambda *_: False)
    compiler.allow("decoder")
    compiler.note("decoder")
    until(lambda: compiler.counts["compile"] and not compiler.behind())
    compiler.get("decoder")
    assert compiler.begun == ["decoder"] * 2  # the second finds it there


def test_program_cache_clear_keeps_background_compile(compiler: Compiler):
    compiler.note("decoder")
    until(lambda: compiler.begun)
    compiler.device_cache.clear()
    compiler.allow("decoder")
    assert compiler.get("decoder") == "decoder" and compiler.begun == ["decoder"]


# --- a whole engine ---------------------------------------------------------------------------------------------------


def generate(engine: Runner) -> list[torch.Tensor]:
    embeds = engine.encode(MODEL, "a cat", "", SilentProgress())
    latents = engine.denoise(MODEL, SETTINGS, *embeds, SilentProgress())
    return [embeds[0][0][0], latents["samples"], engine.decode(MODEL, latents, SilentProgress())]


def test_engine_expect_gives_equal_results_without_recompiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The very same programs: XLA finds those of the first run in its own cache."""
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path))
    plain, ahead = Runner(jax.devices()[:2]), Runner(jax.devices()[:2])
    expected = generate(plain)
    for path in (tmp_path / "prompts").iterdir():
        path.unlink()
    noted, note, compiled = [], ProgramCache.note, ahead.compilations.compiled
    monkeypatch.setattr(ProgramCache, "note", lambda *given: (noted.append(given[1]), note(*given))[1])
    ahead.expect([GENERATION])
    found = generate(ahead)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert plain.counts["compile"] == len(ahead.device_cache.programs()) == 4
    assert ahead.counts == plain.counts - Counter(compile=4)
    assert ahead.compilations.compiled == compiled
    titles = dict.fromkeys(wanted.title.partition(" for")[0] for wanted in noted)
    assert list(titles) == ["the denoiser", "the vae decoder"] and ahead.program_cache.list_background() == []


def test_engine_without_expectation_precompiles_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage_functions, "precompile_stages", lambda *_: pytest.fail("nobody said that this would run"))
    engine = Runner(jax.devices()[:2])
    embeds = engine.encode(MODEL, "a cat", "", SilentProgress())
    engine.expect([PlannedGeneration(model=MODEL, stages=("denoise",))])
    engine.denoise(MODEL, SETTINGS, *embeds, SilentProgress())


def test_engine_expect_matches_model_with_lora(monkeypatch: pytest.MonkeyPatch):
    """A workflow's expectations know no LoRAs, another machine's stages bring them: neither begins again for them."""
    noted: list[tuple[ModelRef, list[str]]] = []
    done = threading.Semaphore(0)

    def note(stage: Any, settings: Any, stages: list[str]) -> None:
        noted.append((stage.model, stages))
        done.release()

    monkeypatch.setattr(stage_functions, "precompile_stages", note)
    engine = Runner(jax.devices()[:2])
    changed = replace(MODEL, loras=(Lora(path="style.safetensors", strength=0.8),))
    for model in (MODEL, changed):
        engine.expect([replace(GENERATION, model=model)])
        engine.encode(changed, "a cat", "", SilentProgress())
    assert done.acquire(timeout=PATIENCE_S)
    engine.expect([replace(GENERATION, stages=("decode",))])
    engine.encode(changed, "a cat", "", SilentProgress())
    assert done.acquire(timeout=PATIENCE_S)
    assert noted == [(changed, ["denoise", "decode"]), (changed, ["decode"])]


def test_engine_cancelled_stage_drops_precompilation(monkeypatch: pytest.MonkeyPatch):
    noting, dropped = threading.Event(), threading.Event()

    def note(stage: Any, *_: Any) -> None:
        noting.set()
        until(lambda: stage.progress.host.is_cancelled)
        dropped.set()
        stage.progress.check_cancelled()

    class Stops(SilentProgress):
        def text(self, message: str) -> None:
            until(noting.is_set)
            raise Cancelled

    monkeypatch.setattr(stage_functions, "precompile_stages", note)
    engine = Runner(jax.devices()[:2])
    engine.expect([GENERATION])
    with pytest.raises(Cancelled):
        engine.encode(MODEL, "another cat", "", Stops())
    assert dropped.wait(PATIENCE_S)


ENDING = """
import sys, threading
import jax, jax.numpy as jnp
from comfyui_tpu.tpu_runtime.engine import lifecycle, program_cache
from comfyui_tpu.tpu_runtime.progress import run_in_daemon_thread

def slow(x):
    for index in range(400):
        x = jnp.sin(x @ x) + jnp.cumsum(x, axis=index % 2)
    return x

lowered, begun = jax.jit(slow).lower(jnp.ones((8, 8))), threading.Event()
def compile():
    begun.set()
    lowered.compile()
    print("compiled")
run_in_daemon_thread(compile, program_cache.COMPILE_THREAD)
begun.wait()
print("ends")
if "leave" in sys.argv:
    lifecycle.exit_process(3)
sys.exit(3)
"""


@pytest.mark.parametrize(("how", "printed"), [("leave", "ends\n"), ("in order", "ends\ncompiled\n")])
def test_exit_process_during_compile_keeps_exit_code(how: str, printed: str):
    """Left by its host, at once; otherwise after XLA is done, where a signal would kill it (see `current`)."""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": ""}
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, how], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stdout) == (3, printed), ended.stderr
