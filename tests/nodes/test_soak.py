"""What the soak counts as wrong, in a place where exactly that happens; and a minute of it, when asked for."""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comfyui_tpu.tests.support.citizen import EXAMPLES
from comfyui_tpu.tests.support.comfyui_server import PACK, needs_comfyui

MIB = 2**20
SOAK = PACK / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    found = importlib.util.spec_from_file_location("benchmark_soak", SOAK)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Place:
    """Prompts end at once, each with the digest of its graph, unless something is wrong."""

    def __init__(self, soak: ModuleType) -> None:
        self.soak = soak
        self.prompts = self.measured = 0
        self.lock = threading.Lock()
        self.unloads = (lambda: None,) * 3
        self.device_bytes = self.grows_mib = self.compiles = 0
        self.met: list[tuple[str, bool, bool]] = []
        self.fails = ""
        self.ends: Callable[[dict, int], Any] = lambda graph, number: soak.Ended(digest=str(graph))

    def run(self, client: int, graph: dict) -> Any:
        with self.lock:
            self.prompts += 1
            number = self.prompts
        return self.ends(graph, number)

    def meet(self, client: int, prompt: Any, graph: dict, wanted: str, alone_s: float) -> str:
        self.met.append((prompt.fault, wanted == str(graph), alone_s >= 0))
        return "it went wrong" if prompt.fault == self.fails else ""

    def cancel(self) -> None:
        pass

    def settle(self) -> Any:
        self.measured += 1
        jitter = 3 * (self.measured % 2)
        host_mib = 1000 + self.grows_mib * self.measured + jitter
        return self.soak.Left(on_devices=self.device_bytes, on_host=host_mib * MIB)

    def compilations(self) -> int:
        return self.compiles * self.prompts


@pytest.fixture
def place(soak: ModuleType) -> Place:
    return Place(soak)


def verdict(place: Place, count: int = 40) -> list[int]:
    """Failures, growth, bytes on the devices, recompiles."""
    run = place.soak.Soak(place)
    run.warm()
    run.run(place.soak.plan(count, seed=0))
    return list(run.verdict().values())


def test_soak_without_faults_reports_four_zeros(place: Place):
    assert verdict(place) == [0, 0, 0, 0]
    assert place.prompts == 40 + 2 * len(EXAMPLES) and place.measured == 8


def test_soak_counts_errors_and_different_results_as_failures(place: Place, soak: ModuleType):
    place.ends = lambda graph, number: soak.Ended(error="no luck") if number == 30 else soak.Ended(digest=str(graph))
    assert verdict(place) == [1, 0, 0, 0]
    place.ends = lambda graph, number: soak.Ended(digest=f"{graph} {number}")
    assert verdict(place)[0] >= 40 - soak.SEEDS * len(EXAMPLES)


def test_soak_does_not_count_cancelled_prompt_as_failure(place: Place, soak: ModuleType):
    cancelled = soak.Ended(is_cancelled=True)
    place.ends = lambda graph, number: cancelled if number > 20 else soak.Ended(digest=str(graph))
    assert verdict(place) == [0, 0, 0, 0]


def test_soak_counts_failed_unload_as_failure(place: Place):
    place.unloads = (lambda: 1 / 0,)
    unloads = sum(prompt.unload_at is not None for prompt in place.soak.plan(40, seed=0))
    assert unloads and verdict(place)[0] == unloads


def test_soak_counts_growth_device_bytes_and_recompiles(place: Place):
    place.grows_mib = 20
    failures, grown_mib, left, recompiles = verdict(place)
    assert (failures, left, recompiles) == (0, 0, 0) and 55 <= grown_mib <= 65  # over three rounds of the last four
    place.grows_mib, place.device_bytes, place.compiles = 0, 7, 1
    assert verdict(place) == [0, 0, 7, 40]


def test_soak_plan_is_deterministic_and_alternates_families(soak: ModuleType):
    prompts = soak.plan(300, seed=5)
    assert prompts == soak.plan(300, seed=5) != soak.plan(300, seed=6)
    assert [prompt.family for prompt in prompts[: 2 * len(EXAMPLES)]] == [*EXAMPLES, *EXAMPLES]
    cancels, unloads = (sum(getattr(one, name) is not None for one in prompts) for name in ("cancel_at", "unload_at"))
    assert 40 <= cancels <= 80 and 30 <= unloads <= 60


def test_soak_plan_faults_gives_one_fault_per_ten_prompts(soak: ModuleType):
    prompts = soak.plan_faults(300, seed=5)
    assert prompts == soak.plan_faults(300, seed=5) != soak.plan_faults(300, seed=6)
    assert all(sum(one.fault is not None for one in prompts[start : start + 10]) == 1 for start in range(0, 300, 10))
    assert all(sum(one.fault == kind for one in prompts) == 3 for kind in soak.FAULTS) and len(soak.FAULTS) == 10
    assert not any(one.cancel_at or one.unload_at for one in prompts)


def test_soak_counts_unexpected_fault_outcome_as_failure(place: Place, soak: ModuleType):
    place.fails = "it is cancelled"
    run = soak.Soak(place)
    run.warm_all()
    run.run(soak.plan_faults(100, seed=0))
    assert run.verdict()["failures"] == 1 and "it went wrong" in run.failures[0]
    assert [fault for fault, *_ in place.met] == list(soak.FAULTS) and all(all(rest) for _, *rest in place.met)
    assert len(run.met) == 100


def test_soak_answers_report_late_requests(soak: ModuleType):
    def found(*slow: tuple[float, float]) -> dict[str, Any]:
        numbers = dict.fromkeys(("answers", "failed", "median_ms", "p99_ms", "worst_ms"), 1)
        return {"url": "http://x", "path": "/", **numbers, "slow": list(slow)}

    answers = soak.Answers(mine=[found((5.0, 0.26), (6.0, 0.24))], beside=[found((5.0, 9.0))])
    assert answers.late == [(5.0, 0.26)]
    prompt = soak.Prompt(family="Wan21", seed=0, cancel_at=None, unload_at=None, fault="it is cancelled")
    said = answers.report([(4.0, 5.1, prompt), (7.0, 8.0, prompt)])
    assert "1 over 250 ms" in said and "0.260 s at 00:00:05, during: it is cancelled" in said


@needs_comfyui
@pytest.mark.recorded
def test_soak_on_server_reports_four_zeros(cache: Path):
    """All families, cancels, unloads and two clients, in a server."""
    command = [sys.executable, str(SOAK), "--prompts", "15", "--seed", "1", "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"\n  {done.stdout.strip()}", end="")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    zeros = "0 failures, 0 MiB grown on the host, 0 live device bytes after unloading, 0 recompiles"
    assert "a ComfyUI server, " in done.stdout and zeros in done.stdout
