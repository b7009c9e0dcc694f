"""Probes on simulated chips: they run small, and their numbers have the names that the documentation lists."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest
from comfyui_tpu.diagnostics.selftest import checks, first_run, groups, probes
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.machine.record import MachineRecord
from comfyui_tpu.tpu_runtime.progress import SilentProgress

PAGE = Path(__file__).parents[3] / "docs" / "first_tpu_run.md"


@pytest.mark.parametrize("count", [1, 3, 8])
def test_probe_values_are_documented(count: int):
    page = PAGE.read_text("utf-8")
    for check in probes.checks(jax.devices()[:count]):
        row = checks.run_check(check, SilentProgress())
        assert row.is_good, (row.title, row.problem)
        assert row.learnt == MachineRecord(), "simulated chips teach nothing"
        assert row.values or row.note == "one chip has no links"
        for name, value in row.values.items():
            assert f"`{name}`" in page and value >= 0, name


def test_measure_starts_records_longer_of_both_starts(monkeypatch: pytest.MonkeyPatch):
    """Of described chips: a plan on this machine takes the longer of the two starts."""
    seconds = iter([16e-6, 4.5e-6, 13e-6, 3e-6])
    sizes = list[int]()

    def time_exchange(mesh: object, exchange: object, times: int, size_bytes: int) -> float:
        assert times == 1000
        sizes.append(size_bytes)
        return next(seconds)

    monkeypatch.setattr(probes, "_time_exchange", time_exchange)
    found = probes._measure_starts(chips.compile_devices(chips.topology("v6e:2x4")))
    assert found.values == {
        "all_to_all_us": 16.0, "all_to_all_start_us": 4.5, "permute_us": 13.0, "permute_start_us": 3.0,
    }  # fmt: skip
    assert sizes == [10**6, 4096] * 2 and found.learnt == MachineRecord(transfer_start_s=4.5e-6)


def test_premapped_buffer_size_is_set_in_two_groups_only():
    sizes = {group.name: dict(group.environment)[groups.PREMAPPED] for group in groups.FIRST if group.environment}
    assert sizes == {"TPU_PREMAPPED_BUFFER_SIZE 4 GiB": "4294967296", "TPU_PREMAPPED_BUFFER_SIZE 16 GiB": "17179869184"}
    assert not set(sizes) & {group.name for group in groups.quick_groups(groups.QUICK_MODELS)}


def test_first_run_sets_premapped_buffer_size_per_group(monkeypatch: pytest.MonkeyPatch):
    given = dict[str, str | None]()

    def run_module_child(module: str, job: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
        given[job["groups"][0]] = environment.get(groups.PREMAPPED)
        assert environment["PATH"] == os.environ["PATH"]
        raise InterruptedError

    monkeypatch.delenv(groups.PREMAPPED, raising=False)
    monkeypatch.setattr(first_run.children, "run_module_child", run_module_child)
    for group in groups.FIRST[-3:]:
        with pytest.raises(InterruptedError):
            first_run.FirstRun([]).run([group])
    assert list(given.values()) == [None, "4294967296", "17179869184"]
