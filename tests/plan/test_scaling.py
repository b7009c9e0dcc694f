"""The tables of `docs/performance.md` and `docs/scaling.md` that come of predictions."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.cost_model.flops import Flops
from comfyui_tpu.tpu_runtime.cost_model.step_time import Timing
from comfyui_tpu.tpu_runtime.plan.report import Memory, ProgramPlan
from comfyui_tpu.tpu_runtime.units import GIB

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
CAPACITY = ROOT / "docs" / "scaling.md"
PROGRAM = ProgramPlan(
    name="denoise_step", runs=50, mesh="2x4x1", components=("transformer",),
    memory=Memory(arguments=0, weights=0, temporaries=0, output=0, alias=0, peak=4 * GIB),
    fits=True, compile_s=1.0, flops=Flops(), timing=Timing(xla=1.75e9, kernels=3.5e9, waiting=1.75e9),
    predicted_s=4.0, best_s=4.0, rerun_s=4.0, mfu=0.5, ceiling_share=0.7, findings={},
)  # fmt: skip


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of `benchmarks/`, found as where it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module(name)


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benchmark("scaling", monkeypatch)


def entry(scaling: ModuleType, topology: str, **changes: Any) -> Any:
    return scaling.Entry(size=(480, 832), topology=chips.topology(topology), program=replace(PROGRAM, **changes))


def test_scaling_efficiency_is_relative_to_fewest_chips_that_fit(scaling: ModuleType):
    entries = [
        entry(scaling, "v6e:1x1", fits=False, predicted_s=None, timing=None),
        entry(scaling, "v6e:2x2", predicted_s=8.0),
        entry(scaling, "v6e:2x4"),
        entry(scaling, "v6e:4x4", predicted_s=4.0),
        entry(scaling, "v5p:2x2x1", predicted_s=1.0),
    ]
    rows = [scaling.row(each, entries) for each in entries]
    assert [row[4] for row in rows] == ["-", "100 %", "100 %", "50 %", "100 %"]
    assert rows[0][2] == "4.0, does not fit"
    assert rows[2] == ("8 x v6e", "2x4x1", "4.0", "4.00", "100 %", "50 %", "25 %", "25 %", "kernels")


def test_scaling_page_has_row_for_each_slice_and_size(scaling: ModuleType):
    page = PAGE.read_text()
    assert scaling.insert(page, "new") == scaling.insert(scaling.insert(page, "old"), "new")
    for name in scaling.TOPOLOGIES:
        slice_ = chips.topology(name)
        assert page.count(f"| {slice_.num_chips} x {slice_.chip.generation} |") == len(scaling.SIZES)


def test_capacity_rows_follow_from_predicted_records(monkeypatch: pytest.MonkeyPatch):
    capacity = benchmark("capacity", monkeypatch)
    record = {
        "title": "Wan", "topology": "v6e:2x4", "chips": 8, "predicted_total_s": 86.4,
    }  # fmt: skip
    plan = capacity.Plan(record=record, videos=10_001, used=0.5)
    assert plan.row() == ("Wan", "v6e:2x4", "86.4", "500", "0.384", "21", "168")
    rows = {" | ".join(plan.row()) for plan in capacity.plans(1_000_000, 0.8)}
    section = CAPACITY.read_text().partition("## A million videos a day")[2]
    written = [line.strip("| ") for line in section.splitlines() if line.startswith("|")][2:]
    assert len(written) >= 10 and set(written) <= rows
