"""An engine whose machine refuses, halts and computes nonsense: what runs in its place, what is said, what is kept.

The machine is a layer in the place of PJRT that says what libtpu says.
"""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from comfyui_tpu.distributed.multihost.coordinator import HostGroup
from comfyui_tpu.kernels.dispatch import KernelFallbacks
from comfyui_tpu.tests.machine import fake_pjrt
from comfyui_tpu.tests.machine.fake_pjrt import Fault, Layer
from comfyui_tpu.tests.support.closeness import PIPELINE, difference
from comfyui_tpu.tests.support.host import Cancelled, Host, Runner
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import engine as engines
from comfyui_tpu.tpu_runtime.engine import overlap_check
from comfyui_tpu.tpu_runtime.engine.memory_advice import OutOfMemory
from comfyui_tpu.tpu_runtime.machine import record
from comfyui_tpu.tpu_runtime.machine.fallbacks import ChipHalted, Fallbacks, Unsupported
from comfyui_tpu.tpu_runtime.machine.policy import FallbackPolicy
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.monitor import snapshot
from comfyui_tpu.tpu_runtime.programs import denoise_step
from comfyui_tpu.tpu_runtime.programs.finite_check import NotFinite
from comfyui_tpu.tpu_runtime.programs.program import DENOISE_STEP, Program

pytestmark = pytest.mark.slow

SPEC = spec_for_family("Flux2")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
SETTINGS = Settings(height=64, width=96, num_inference_steps=2, guidance_scale=4.0)
OPTIONS = {"xla_tpu_enable_async_all_to_all": "true", "xla_tpu_scoped_vmem_limit_kib": "65536"}

ASYNC, VMEM = OPTIONS
NO_OPTION = "INVALID_ARGUMENT: No such compile option: '{}'"
# As libtpu 0.0.42.1 says it of a kernel's scratch.
NO_VMEM = "RESOURCE_EXHAUSTED: Allocation (size=2) would exceed memory (size=1) :: #a [space=vmem] :: attention.1"
HALT = "INTERNAL: Core halted unexpectedly: TPU program continuator has halted"
HOST = "RESOURCE_EXHAUSTED: ioctl failed: Cannot allocate memory: VFIO_IOMMU_MAP_DMA"
ATTENTION = r'["/]attention(_with_rerun)?/while'  # not the folder

# How far kernels were followed in each denoising step that was compiled, and its options.
Steps = list[tuple[KernelFallbacks, tuple[str, ...]]]
Breaks = Callable[..., Steps]


@pytest.fixture
def breaks(exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Breaks:
    """Puts this process on a machine with these faults."""
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))
    # A comparison in the background would compile one more form at any time.
    monkeypatch.setattr(overlap_check.OverlapChecks, "first_step", lambda *_: None)

    def put(*faults: Fault) -> Steps:
        Layer(faults=faults).install(monkeypatch.setattr)
        for module in (denoise_step, engines):
            monkeypatch.setattr(module, "step_compiler_options", lambda mesh: OPTIONS)
        steps: Steps = []
        compile_ = Program.compile

        def compile(program: Program, lowered: jax.stages.Lowered | None = None) -> Any:
            if program.name == DENOISE_STEP:
                steps.append((program.rungs, tuple(program.compiler_options)))
            return compile_(program, lowered)

        monkeypatch.setattr(Program, "compile", compile)
        return steps

    return put


@functools.cache
def texts() -> tuple[Any, Any]:
    """Of a machine without faults, once: most of these are faults of a denoising step."""
    return Runner(jax.devices()[:2]).encode(MODEL, "cat", "", Host())


def generate(runner: Runner, host: Host) -> torch.Tensor:
    return runner.denoise(MODEL, SETTINGS, *texts(), host)["samples"]


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    """What a machine without faults makes of it."""
    return generate(Runner(jax.devices()[:2]), Host())


def is_exact(samples: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within rounding: XLA's cache may hold what a process with other threads compiled."""
    return difference(samples, exact) <= PIPELINE


def read_machine_record() -> record.MachineRecord:
    (found,) = record.read_all().values()
    return found


def test_refused_option_is_left_out_and_reported_once(breaks: Breaks, exact: torch.Tensor):
    steps = breaks(Fault(at="compile", option=ASYNC, says=NO_OPTION.format(ASYNC)))
    host, runner = Host(), Runner(jax.devices()[:2])
    assert is_exact(generate(runner, host), exact)
    (sentence,) = runner.ladder.sentences
    assert host.said.count(sentence) == 1 and sentence in host.said
    assert ASYNC in sentence and "compiled without" in sentence
    assert [options for _, options in steps] == [(ASYNC, VMEM), (VMEM,)]
    assert read_machine_record() == record.MachineRecord(fallbacks=Fallbacks(options=(ASYNC,)), sentences=(sentence,))
    # The next process begins where this one ended.
    host = Host()
    assert is_exact(generate(Runner(jax.devices()[:2]), host), exact)
    assert sentence not in host.said and len(steps) == 3


def test_refused_kernel_uses_small_tiles_then_xla(breaks: Breaks, exact: torch.Tensor):
    steps = breaks(Fault(at="compile", holds=ATTENTION, says=NO_VMEM))
    host, runner = Host(), Runner(jax.devices()[:2], kernel="pallas")
    # In interpret mode; what remains of kernels rounds otherwise than XLA.
    assert difference(generate(runner, host), exact) <= 1e-5
    small, off = KernelFallbacks(small=("attention",)), KernelFallbacks(small=("attention",), off=("attention",))
    assert [rungs for rungs, _ in steps] == [KernelFallbacks(), small, off]
    said = [sentence for sentence in host.said if "attention" in sentence]
    assert said == runner.ladder.sentences and len(said) == 2
    assert "smaller tiles" in said[0] and "uses XLA" in said[1]
    assert read_machine_record().fallbacks.kernels == off


def test_refusal_without_fallback_raises_runtime_error(breaks: Breaks):
    breaks(Fault(at="compile", option=VMEM, says=NO_OPTION.format("xla_tpu_other")))
    with raises_message(
        RuntimeError, "machine.unsupported", reason=re.compile(r"No such compile option: 'xla_tpu_other'$")
    ):
        generate(Runner(jax.devices()[:2]), Host())
    # Once tried without, and no more.
    assert len(read_machine_record().sentences) == 1


def test_halted_program_is_named_and_next_start_disables_kernels(breaks: Breaks, monkeypatch: pytest.MonkeyPatch):
    breaks(Fault(at="run", option=ASYNC, does="halt", says=HALT))
    # As a TPU's program reads. The frames after a restart are compared in a real ComfyUI (tests/comfyui).
    text = "%attention.1 = custom-call(), %residual_norm = custom-call(), %fusion.3 = fusion()"
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda compiled: text)
    ended: list[bool] = []
    runner = Runner(jax.devices()[:2], when_halted=lambda: ended.append(True))
    halted = Expected("machine.program_halted_chips", program="denoise_step")
    replaced = Expected("machine.replaced_from_next_start", names="attention, residual_norm")
    with raises_message(ChipHalted, "machine.restart_process", sentence=[halted, replaced]):
        generate(runner, Host())
    assert ended == [True]
    # This process has lost the chips: nothing is tried on them.
    with raises_message(ChipHalted, "machine.restart_process"):
        runner.encode(MODEL, "another", "", Host())
    assert read_machine_record().fallbacks.kernels == KernelFallbacks(off=("attention", "residual_norm"))
    after = Runner(jax.devices()[:2])
    assert after.ladder.fallbacks.kernels == read_machine_record().fallbacks.kernels
    assert "denoise_step" in after.ladder.sentences[0]


@pytest.mark.parametrize("is_cured", [True, False])
def test_nonfinite_values_are_retried_once_without_overlap(breaks: Breaks, exact: torch.Tensor, is_cured: bool):
    steps = breaks(Fault(at="run", option=ASYNC if is_cured else VMEM, does="nonsense"))
    runner, host = Runner(jax.devices()[:2]), Host()
    if is_cured:
        assert is_exact(generate(runner, host), exact)
        (sentence,) = runner.ladder.sentences
        assert "overlapped transfers" in sentence
        assert set(read_machine_record().fallbacks.left(OPTIONS)) == {VMEM}
    else:
        with raises_message(
            NotFinite, "program.result_not_finite", what=Expected("sampling.latents_from_step", step=1, total=2)
        ):
            generate(runner, host)
        # It was not the overlap's fault: nothing is kept of that.
        assert runner.ladder.sentences == [] and record.read_all() == {} and not runner.ladder.fallbacks
    assert [options for _, options in steps] == [(ASYNC, VMEM), (VMEM,)]
    assert sum("once more" in sentence for sentence in host.said) == 1


def test_environment_fallbacks_are_not_recorded(breaks: Breaks, exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    """Unset again it is taken again."""
    monkeypatch.setenv("COMFYUI_TPU_KERNELS", "-residual_norm")
    monkeypatch.setenv("COMFYUI_TPU_OPTIONS", "-vmem")
    breaks(Fault(at="compile", option=ASYNC, says=NO_OPTION.format(ASYNC)))
    assert is_exact(generate(Runner(jax.devices()[:2]), Host()), exact)
    assert read_machine_record().fallbacks == Fallbacks(options=(ASYNC,))


def test_cancelled_retry_records_no_fallback(breaks: Breaks, exact: torch.Tensor):
    """The next stage runs as before, and its success is no word on transfers beside computation."""

    class Cancels(Host):
        def text(self, message: str) -> None:
            self.is_cancelled = self.is_cancelled or "once more" in message

    breaks(Fault(at="run", option=ASYNC, does="nonsense"))
    runner = Runner(jax.devices()[:2])
    with pytest.raises(Cancelled):
        runner.denoise(MODEL, SETTINGS, *texts(), Cancels())
    runner.encode(MODEL, "another", "", Host())
    assert record.read_all() == {} and not runner.ladder.fallbacks
    # And a later trial, to its end, does.
    assert is_exact(generate(runner, Host()), exact)
    assert set(read_machine_record().fallbacks.left(OPTIONS)) == {VMEM}


def test_nonfinite_values_without_overlap_options_are_not_retried(breaks: Breaks, monkeypatch: pytest.MonkeyPatch):
    """What is left to leave out, the memory of kernels, has no part in it."""
    monkeypatch.setenv("COMFYUI_TPU_OPTIONS", "-async")
    steps = breaks(Fault(at="run", option=VMEM, does="nonsense"))
    host = Host()
    with raises_message(
        NotFinite, "program.result_not_finite", what=Expected("sampling.latents_from_step", step=1, total=2)
    ):
        generate(Runner(jax.devices()[:2]), host)
    assert [options for _, options in steps] == [(VMEM,)] and not any("once more" in text for text in host.said)


def test_fallbacks_of_two_processes_are_merged_in_record(breaks: Breaks):
    """Each knew the record before the other wrote its own."""
    breaks()
    one, other = FallbackPolicy(jax.devices()[:2]), FallbackPolicy(jax.devices()[:2])
    one.down(Unsupported("option", "the step", (ASYNC,), "unknown"))
    other.down(Unsupported("kernel", "the step", ("attention",), "no room"))
    assert read_machine_record().fallbacks == Fallbacks(options=(ASYNC,), kernels=KernelFallbacks(small=("attention",)))
    assert len(read_machine_record().sentences) == 2


def test_multihost_runner_applies_fallbacks_of_leader(breaks: Breaks, exact: torch.Tensor):
    """Their records may differ, where one host's chips were halted; programs of other kernels wait for ever."""

    class Led(HostGroup):
        def broadcast(self, value: Any) -> Any:
            return {"kernels_off": ["attention"], "options_off": [VMEM]} if isinstance(value, dict) else value

    steps = breaks()
    assert is_exact(generate(Runner(jax.devices()[:2], hosts=Led()), Host()), exact)
    assert steps == [(KernelFallbacks(off=("attention",)), (ASYNC,))] and record.read_all() == {}


WEIGHT = r"float32\["  # what is put while a text encoder is loaded; tokens are whole numbers


@pytest.mark.parametrize("at", ["run", "put"])
def test_host_memory_error_names_ulimit_and_is_not_retried(breaks: Breaks, at: str):
    breaks(Fault(at=at, holds=WEIGHT * (at == "put"), says=HOST))
    host = Host()
    with raises_message(RuntimeError, "memory.host_not_mapped"):
        Runner(jax.devices()[:2]).encode(MODEL, "cat", "", host)
    assert not any("once more" in text for text in host.said), "unloading does not help the host"


def test_out_of_memory_during_weight_transfer_is_retried(breaks: Breaks, exact: torch.Tensor):
    """What was read so far is not left behind: the second attempt begins with all of it."""
    breaks(Fault(at="put", holds=WEIGHT, says=fake_pjrt.NO_ROOM, after=5, times=1))
    host, runner = Host(), Runner(jax.devices()[:2])
    given = runner.encode(MODEL, "cat", "", host)
    assert is_exact(runner.denoise(MODEL, SETTINGS, *given, host)["samples"], exact)
    assert sum(text.endswith(", trying once more") for text in host.said) == 1
    loading = [text for text in host.said if text.startswith("Loading text_encoder")]
    assert len(loading) >= 2 and runner.counts["load"] == len(runner.device_cache.list()) + 1


def test_weight_transfer_without_room_raises_out_of_memory(breaks: Breaks):
    breaks(Fault(at="put", holds=WEIGHT, says=fake_pjrt.NO_ROOM, after=5))
    runner = Runner(jax.devices()[:2])
    with raises_message(
        OutOfMemory, "memory.out_of_memory", stage="encode", num_devices=2, reason=re.compile("no room of that size")
    ):
        runner.encode(MODEL, "cat", "", Host())
    assert runner.device_cache.list() == ()


def test_snapshot_notes_list_disabled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COMFYUI_TPU_KERNELS", "-attention")
    runner = Runner(jax.devices()[:2])
    monkeypatch.setattr(snapshot, "current_engine", lambda: runner)
    assert snapshot.take_snapshot()["notes"] == ["Switched off: attention."]


RESTARTED = """
import fcntl, os, sys
from pathlib import Path
from comfyui_tpu.tpu_runtime.engine import lifecycle
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
lifecycle.restart()
"""


def test_process_restart_keeps_pid_and_lock_and_releases_chips(tmp_path: Path):
    command = [sys.executable, "-c", RESTARTED, str(tmp_path / "file"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    before, after = done.stdout.splitlines()
    assert after == f"{before} True" and done.returncode == 7, done.stderr
