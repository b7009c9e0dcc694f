"""An engine whose machine refuses, halts and computes nonsense: what runs in its place, what is said, what is kept.

The machine is a layer in the place of XLA's compiler that says what libtpu says.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from comfyui_tpu.kernels import names
from comfyui_tpu.kernels.choice import Rungs
from comfyui_tpu.tests.support.closeness import PIPELINE, difference
from comfyui_tpu.tests.support.host import Host, Runner
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import engine as engines
from comfyui_tpu.tpu_runtime.machine import record
from comfyui_tpu.tpu_runtime.machine.fallbacks import Fallbacks, Halted
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.monitor import snapshot
from comfyui_tpu.tpu_runtime.programs import denoise_step
from comfyui_tpu.tpu_runtime.programs.finite import NotFinite
from comfyui_tpu.tpu_runtime.programs.program import DENOISE_STEP, Program

SPEC = spec_for_family("Flux2")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
SETTINGS = Settings(height=64, width=96, num_inference_steps=2, guidance_scale=4.0)
OPTIONS = {"xla_tpu_enable_async_all_to_all": "true", "xla_tpu_scoped_vmem_limit_kib": "65536"}

Refuses = Callable[[Program, Mapping[str, str]], str | None]


class Machine:
    """Says what `refuses` returns for a program and its options, or what `answers` makes of a result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses: Refuses = lambda program, options: None
        self.answers: Callable[[Program, Any], Any] = lambda program, result: result
        self.compiled: list[tuple[Rungs, tuple[str, ...]]] = []
        compile_ = Program.compile

        def compile(program: Program, lowered: jax.stages.Lowered | None = None) -> Any:
            options = dict(program.compiler_options)
            if program.name == DENOISE_STEP:
                self.compiled.append((program.rungs, tuple(options)))
            if said := self.refuses(program, options):
                raise jax.errors.JaxRuntimeError(said)
            object.__setattr__(program, "compiler_options", {})  # of a TPU's compiler
            return Compiled(self, program, compile_(program, lowered))

        monkeypatch.setattr(Program, "compile", compile)
        for module in (denoise_step, engines):
            monkeypatch.setattr(module, "step_options", lambda mesh: OPTIONS)


class Compiled:
    """A compiled program of that machine."""

    def __init__(self, machine: Machine, program: Program, compiled: jax.stages.Compiled) -> None:
        self._machine, self._program, self._compiled = machine, program, compiled

    def __call__(self, *args: Any) -> Any:
        return self._machine.answers(self._program, self._compiled(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def as_text(self) -> str:
        return "%attention.1 = custom-call(), %residual_norm = custom-call(), %fusion.3 = fusion()"


@pytest.fixture
def machine(exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))
    return Machine(monkeypatch)


def generate(runner: Runner, host: Host) -> torch.Tensor:
    texts = runner.encode(MODEL, "cat", "", host)
    return runner.denoise(MODEL, SETTINGS, *texts, host)["samples"]


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """What a machine without faults makes of it."""
    return generate(Runner(jax.devices()[:2]), Host())


def is_exact(samples: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within rounding: XLA's cache may hold what a process with other threads compiled."""
    return difference(samples, exact) <= PIPELINE


def recorded() -> record.MachineRecord:
    (found,) = record.everything().values()
    return found


def test_an_option_that_is_refused_is_left_out_and_said_once(machine: Machine, exact: torch.Tensor):
    option = "xla_tpu_enable_async_all_to_all"
    machine.refuses = lambda program, options: (
        f"INVALID_ARGUMENT: No such compile option: '{option}'" * (option in options)
    )
    host, runner = Host(), Runner(jax.devices()[:2])
    assert is_exact(generate(runner, host), exact)
    (sentence,) = runner.ladder.sentences
    assert host.said.count(sentence) == 1 and sentence in host.said
    assert option in sentence and "compiled without" in sentence
    assert [options for _, options in machine.compiled] == [tuple(OPTIONS), ("xla_tpu_scoped_vmem_limit_kib",)]
    assert recorded() == record.MachineRecord(fallbacks=Fallbacks(options=(option,)), sentences=(sentence,))
    # The next process begins where this one ended.
    host = Host()
    assert is_exact(generate(Runner(jax.devices()[:2]), host), exact)
    assert sentence not in host.said and len(machine.compiled) == 3


def test_a_kernel_that_is_refused_takes_smaller_tiles_then_xla_its_place(machine: Machine, exact: torch.Tensor):
    def refuses(program: Program, options: Mapping[str, str]) -> str | None:
        if program.name != DENOISE_STEP or names.ATTENTION in program.rungs.off:
            return None
        return "RESOURCE_EXHAUSTED: Allocation (size=2) would exceed memory (size=1) :: #a [space=vmem] :: attention.1"

    machine.refuses = refuses
    host, runner = Host(), Runner(jax.devices()[:2], kernel="pallas")
    # In interpret mode; what remains of kernels rounds otherwise than XLA.
    assert difference(generate(runner, host), exact) <= 1e-5
    small, off = Rungs(small=("attention",)), Rungs(small=("attention",), off=("attention",))
    assert [rungs for rungs, _ in machine.compiled] == [Rungs(), small, off]
    said = [sentence for sentence in host.said if "attention" in sentence]
    assert said == runner.ladder.sentences and len(said) == 2
    assert "smaller tiles" in said[0] and "by XLA" in said[1]
    assert recorded().fallbacks.kernels == off


def test_a_refusal_without_a_rung_below_is_the_users(machine: Machine):
    machine.refuses = lambda program, options: "INVALID_ARGUMENT: No such compile option: 'xla_tpu_other'"
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_tpu_other'"):
        generate(Runner(jax.devices()[:2]), Host())
    # Once tried without, and no more.
    assert len(recorded().sentences) == 1


def test_a_halt_names_its_program_and_the_next_start_is_without_its_kernels(machine: Machine, exact: torch.Tensor):
    def answers(program: Program, result: Any) -> Any:
        if program.name == DENOISE_STEP and not program.rungs.off:
            raise jax.errors.JaxRuntimeError("INTERNAL: Core halted unexpectedly: TPU program continuator has halted")
        return result

    machine.answers, ended = answers, []
    runner = Runner(jax.devices()[:2], when_halted=lambda: ended.append(True))
    with pytest.raises(Halted, match="denoise_step halted the chips.*attention, residual_norm.*restart"):
        generate(runner, Host())
    assert ended == [True]
    # This process has lost the chips: nothing is tried on them.
    with pytest.raises(Halted, match="restart"):
        runner.encode(MODEL, "another", "", Host())
    assert recorded().fallbacks.kernels == Rungs(off=("attention", "residual_norm"))
    after = Runner(jax.devices()[:2])
    assert is_exact(generate(after, Host()), exact)
    assert "denoise_step" in after.ladder.sentences[0]


@pytest.mark.parametrize("is_cured", [True, False])
def test_nonsense_is_tried_once_more_without_overlap(machine: Machine, exact: torch.Tensor, is_cured: bool):
    def answers(program: Program, result: Any) -> Any:
        if program.name != DENOISE_STEP or (is_cured and len(machine.compiled) == 2):
            return result
        return (*result[:-1], False)

    machine.answers = answers
    runner, host = Runner(jax.devices()[:2]), Host()
    if is_cured:
        assert is_exact(generate(runner, host), exact)
        (sentence,) = runner.ladder.sentences
        assert "beside computation" in sentence
        assert set(recorded().fallbacks.left(OPTIONS)) == {"xla_tpu_scoped_vmem_limit_kib"}
    else:
        with pytest.raises(NotFinite, match="step 1 of 2"):
            generate(runner, host)
        # It was not the overlap's fault: nothing is kept of that.
        assert runner.ladder.sentences == [] and record.everything() == {} and not runner.ladder.fallbacks
    assert [len(options) for _, options in machine.compiled] == [2, 1]
    assert sum("once more" in sentence for sentence in host.said) == 1


def test_memory_of_the_host_has_its_own_sentence(machine: Machine):
    said = "RESOURCE_EXHAUSTED: ioctl failed: Cannot allocate memory: VFIO_IOMMU_MAP_DMA"

    def answers(program: Program, result: Any) -> Any:
        raise jax.errors.JaxRuntimeError(said)

    machine.answers = answers
    runner = Runner(jax.devices()[:2])
    with pytest.raises(RuntimeError, match="The host could not map memory.*ulimit -l unlimited"):
        runner.encode(MODEL, "cat", "", Host())


def test_the_monitor_says_what_the_machine_does_without(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_TPU_KERNELS", "-attention")
    runner = Runner(jax.devices()[:2])
    monkeypatch.setattr(snapshot, "current", lambda: runner)
    assert snapshot.stats()["notes"] == ["Switched off: attention."]


RESTARTED = """
import fcntl, os, sys
from pathlib import Path
from comfyui_tpu.tpu_runtime.engine import current
file, folder = map(Path, sys.argv[1:])
if file.exists():
    chips, lock = map(int, file.read_text().split())
    is_open = [number for number in (chips, lock) if os.path.exists(f"/proc/self/fd/{number}")]
    print(os.getpid(), is_open == [lock], flush=True)
    sys.exit(7)
chips, lock = os.open("/dev/null", os.O_RDONLY), os.open(folder, os.O_RDONLY)
for number in (chips, lock):
    os.set_inheritable(number, True)
file.write_text(f"{chips} {lock}")
print(os.getpid(), flush=True)
current.restart()
"""


def test_a_process_that_starts_again_is_the_same_with_its_lock_and_without_the_chips(tmp_path: Path):
    command = [sys.executable, "-c", RESTARTED, str(tmp_path / "file"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    before, after = done.stdout.splitlines()
    assert after == f"{before} True" and done.returncode == 7, done.stderr
