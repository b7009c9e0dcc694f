"""A real generation compares its first step with the form without overlapped transfers; here PJRT's place is taken by a
layer that takes a TPU's options.
"""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.distributed.multihost.coordinator import HostGroup
from comfyui_tpu.tests.machine.fake_pjrt import Fault, Layer
from comfyui_tpu.tests.support.host import Host, Runner
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import engine as engines
from comfyui_tpu.tpu_runtime.engine import overlap_check
from comfyui_tpu.tpu_runtime.engine.stage_functions import PredictionRequest
from comfyui_tpu.tpu_runtime.machine import record
from comfyui_tpu.tpu_runtime.machine.fallbacks import WITHOUT_OVERLAP
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.programs import denoise_step
from comfyui_tpu.tpu_runtime.programs.denoise_step import PREDICT
from comfyui_tpu.tpu_runtime.programs.executables import Executable
from comfyui_tpu.tpu_runtime.programs.program import DENOISE_STEP

pytestmark = pytest.mark.slow

SPEC = spec_for_family("Flux2")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
SETTINGS = Settings(height=64, width=64, num_inference_steps=2, guidance_scale=4.0)
ASYNC, VMEM = "xla_tpu_enable_async_all_to_all", "xla_tpu_scoped_vmem_limit_kib"
# A bit of each number of a step whose transfers overlap.
WRONG = Fault(at="run", option=ASYNC, does="flip")

# The options of each step that ran.
Runs = list[tuple[str, ...]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Runs]:
    """Puts this process on a machine with these faults, which knows a TPU's options."""
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))
    runs: Runs = []

    def put(*faults: Fault) -> Runs:
        Layer(faults=faults).install(monkeypatch.setattr)
        for module in (denoise_step, engines):
            monkeypatch.setattr(module, "step_compiler_options", lambda mesh: {ASYNC: "true", VMEM: "65536"})
        call = Executable.__call__

        def watched(program: Executable, *args: Any) -> Any:
            if program.program.name in (DENOISE_STEP, PREDICT):
                runs.append(tuple(program.program.compiler_options))
            return call(program, *args)

        monkeypatch.setattr(Executable, "__call__", watched)
        return runs

    return put


@functools.cache
def texts() -> tuple[Any, Any]:
    return Runner(jax.devices()[:2]).encode(MODEL, "cat", "", Host())


def generate(runner: Runner) -> torch.Tensor:
    samples = runner.denoise(MODEL, SETTINGS, *texts(), Host())["samples"]
    wait_for_comparison()
    return samples


def wait_for_comparison() -> None:
    until(lambda: all(thread.name != overlap_check.THREAD for thread in threading.enumerate()))


def read_record() -> record.MachineRecord:
    (found,) = record.read_all().values()
    return found


def test_the_first_step_of_a_generation_is_compared_and_no_other(machine: Callable[..., Runs]):
    runs = machine()
    runner = Runner(jax.devices()[:2])
    samples = generate(runner)
    assert runs == [(ASYNC, VMEM), (ASYNC, VMEM), (VMEM,)]
    assert list(read_record().overlap.values()) == [True] and not runner.ladder.fallbacks
    for another in (runner, Runner(jax.devices()[:2])):  # the next process too
        runs.clear()
        assert torch.equal(generate(another), samples)
        assert runs == [(ASYNC, VMEM)] * 2


def test_a_step_whose_bits_depend_on_overlap_ends_overlap_on_this_machine(machine: Callable[..., Runs]):
    runs = machine(WRONG)
    runner = Runner(jax.devices()[:2])
    wrong = generate(runner)
    found = read_record()
    assert list(found.overlap.values()) == [False] and found.fallbacks == WITHOUT_OVERLAP
    assert found.sentences == tuple(runner.ladder.sentences) and len(found.sentences) == 1
    runs.clear()
    again = generate(runner)
    assert runs == [(VMEM,)] * 2 and not torch.equal(again, wrong)


def predict(runner: Runner) -> torch.Tensor:
    """A call of ComfyUI's own sampler."""
    noise = np.random.default_rng(0).standard_normal(SPEC.geometry.latent_shape(SETTINGS), np.float32)
    inputs = {"text": texts()[0][0][0].numpy(), "guidance": np.full(1, 4.0, np.float32)}
    request = PredictionRequest(sample=torch.from_numpy(noise), timestep=500.0, inputs=inputs)
    result = runner.run("predict", MODEL, Host(), prediction=request)
    noise += 1  # samplers go on in the same memory
    wait_for_comparison()
    return result


@pytest.mark.parametrize(("faults", "verdict"), [((), True), ((WRONG,), False)], ids=["right", "wrong"])
def test_the_first_prediction_for_comfyuis_sampler_is_compared(
    machine: Callable[..., Runs], faults: tuple[Fault, ...], verdict: bool
):
    runs = machine(*faults)
    runner = Runner(jax.devices()[:2])
    predict(runner)
    assert runs == [(ASYNC, VMEM), (VMEM,)] and list(read_record().overlap.values()) == [verdict]
    runs.clear()
    predict(runner)
    assert runs == [(ASYNC, VMEM) if verdict else (VMEM,)]


def test_several_hosts_compare_nothing(machine: Callable[..., Runs]):
    """A form without overlap would have to be compiled and run by all of them at once."""

    class Hosts(HostGroup):
        pass

    runs = machine()
    generate(Runner(jax.devices()[:2], hosts=Hosts()))
    assert runs == [(ASYNC, VMEM)] * 2 and not record.read_all()
