"""Floors and ranges of predictions, against hand arithmetic."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comfyui_tpu.tests.plan.test_scaling import PROGRAM
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.cost_model.flops import Flops
from comfyui_tpu.tpu_runtime.cost_model.step_time import Timing
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS
from comfyui_tpu.tpu_runtime.plan import plan, report

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranges() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("ranges")


# --- floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "kernels", "is_floor"),
    [
        (0.961, 0.98, True),
        (0.95, None, True),
        (0.949, 0.9, False),
        (0.53, 1.0, True),
        (0.87, 0.64, False),
        (None, None, False),
    ],
)
def test_program_prediction_near_peak_is_floor(whole: float | None, kernels: float | None, is_floor: bool):
    program = replace(PROGRAM, ceiling_share=whole, kernels_share=kernels)
    assert program.is_floor == is_floor == program.to_json()["is_floor"]
    assert any(cell.endswith(" floor") for cell in report._row(program)) == is_floor
    notes = plan._floor_notes(whole, kernels)
    assert bool(notes) == is_floor and all("a chip will take longer" in note for note in notes)


def test_kernels_share_is_kernel_flops_over_peak():
    """v5e:2x4: eight chips of 197 TF/s at 1.5 GHz; kernels of 6 s that do 8 x 197e12 x 5.7 FLOPs are at 95 %."""
    target = chips.topology("v5e:2x4")
    timing = Timing(xla=3e9, kernels=9e9)
    found = plan._kernels_share(timing, Flops(kernels=8 * 197e12 * 5.7), target)
    assert found == pytest.approx(0.95)
    assert plan._kernels_share(replace(timing, xla=90e9), Flops(kernels=8 * 197e12 * 5.7), target) is None
    seven = chips.topology("tpu7x:2x2x1")  # two devices a chip
    one_second = Timing(kernels=seven.chip.clock_hz)
    assert plan._kernels_share(one_second, Flops(kernels=4 * 2307e12), seven) == pytest.approx(1.0)


# --- ranges -----------------------------------------------------------------------------------------------------------

STEP = {
    "name": "denoise_step", "runs": 10, "predicted_s": 3.0, "kernel_cycles": 1.8 * 1.75e9, "xla_cycles": 0.66 * 1.75e9,
    "collectives": [{"times": 100, "overlapped": False}, {"times": 500, "overlapped": True}],
}  # fmt: skip
DECODE = STEP | {"name": "vae_decoder.decode_next", "runs": 4, "predicted_s": 0.5, "kernel_cycles": 0, "xla_cycles": 0}
RECORD: dict[str, Any] = {
    "title": "A model", "chips": 8, "chip": {"clock_ghz": 1.75}, "programs": [STEP, {**DECODE, "collectives": []}],
    "settings": {"height": 720, "width": 1280, "num_frames": 81}, "weights_bytes": 10 * 10**9,
}  # fmt: skip


def test_program_range_adds_worst_case_of_each_part(ranges: ModuleType):
    found = ranges.program_range(STEP, 1.75e9)
    # Kernels 1.8 s at 90 % for 97 %, XLA 0.66 s at 66 % for 83 %, 100 transfers with 5 us more.
    assert found.low == 3.0
    assert found.high == pytest.approx(3.0 + 1.8 * (97 / 90 - 1) + 0.17 + 100 * 5e-6)
    assert str(ranges.Range(low=0.0236, high=12.34)) == "0.024 to 12"


def test_a_generation_has_the_host(ranges: ModuleType):
    frames = 81 * 720 * 1280 * 3 * 4
    host = ranges.host_range(RECORD)
    assert host.low == pytest.approx(10 * 0.14e-3 + frames / 4 / 80e9 + 0.47 / 4)
    assert host.high == pytest.approx(10 * 0.36e-3 + frames / 10e9 + 0.47)
    whole = ranges.generation_range(RECORD)
    assert whole.low == pytest.approx(10 * 3.0 + 4 * 0.5 + host.low)
    assert whole.high == pytest.approx(10 * ranges.program_range(STEP, 1.75e9).high + 4 * 0.5 + host.high)


@pytest.mark.parametrize(
    ("gigabytes", "low", "high"),
    [
        (10, 2 + 10 + 3, 2 + 4 + 3 + 20 + 20),  # 5 s of reading are over when the chips are open
        (40, 2 + 20, 2 + 4 + 3 + 20 + 80),  # 20 s of reading, beside which everything else is done
    ],
)
def test_at_best_weights_are_read_beside_everything_else(ranges: ModuleType, gigabytes: int, low: int, high: int):
    parts = {"imports_before": 2.0, "imports_beside": 4.0, "tracing": 3.0}
    start = ranges.start_range(RECORD | {"weights_bytes": gigabytes * 10**9}, parts)
    assert (start.low, start.high) == (low, high)


def test_imports_beside_the_opening_are_not_counted_before_it(ranges: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cold_start = importlib.import_module("cold_start")
    imports = {"interpreter": 0.1, "pack": 0.4, "jax": 0.5, "engine, torch, torchax": 1.5,
               "diffusers, transformers": 2.9, "the model's classes": 1.0}  # fmt: skip
    found = cold_start.summarize(imports, {"encode": 0.2, "image": 0.3, "denoise": 1.0, "decode": 7.0})
    assert found == pytest.approx({"imports_before": 2.0, "imports_beside": 4.4, "tracing": 1.5})


def test_performance_page_contains_range_table_of_flagships(ranges: ModuleType):
    recorded = json.loads((ROOT / "benchmarks" / "predicted.json").read_text())
    records = [record for record in recorded if "recipe" not in record]
    assert [record["model"] for record in records] == [spec.name for spec in FLAGSHIPS]
    assert ranges.table(records) in (ROOT / "docs" / "performance.md").read_text("utf-8")
