"""What is told of a run: memory as devices say it, and how fast weights were loaded."""

import gc
import re
from typing import Any

import jax
import numpy as np
import pytest
from comfyui_tpu.tests.support.host import Host, Runner, new_prompt
from comfyui_tpu.tpu_runtime import device_memory, units
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.device_memory import DeviceMemory
from comfyui_tpu.tpu_runtime.engine import telemetry
from comfyui_tpu.tpu_runtime.engine.telemetry import Activity
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.monitor import snapshot
from comfyui_tpu.tpu_runtime.programs.program import shard_bytes
from comfyui_tpu.tpu_runtime.units import GIB

SPEC = spec_for_family("Flux2")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
# What a public dump of a v6e shows in a step.
BUSY = {
    "bytes_limit": int(31.2 * GIB), "bytes_in_use": int(2.6 * GIB), "bytes_reserved": int(27.3 * GIB),
    "peak_bytes_in_use": 3 * GIB, "peak_bytes_reserved": 28 * GIB, "num_allocs": 7,
}  # fmt: skip


class Device:
    """A device that says `stats` of its memory."""

    def __init__(self, stats: Any) -> None:
        self.stats = stats

    def memory_stats(self) -> Any:
        return self.stats


def memory_of(stats: Any) -> DeviceMemory:
    device: Any = Device(stats)
    return device_memory.memory_stats(device)


@pytest.mark.parametrize("missing", [(), *((name,) for name in BUSY), tuple(BUSY)], ids=str)
def test_memory_stats_accepts_missing_numbers(missing: tuple[str, ...]):
    found = memory_of({name: value for name, value in BUSY.items() if name not in missing})
    wanted = {
        "limit_bytes": "bytes_limit", "in_use_bytes": "bytes_in_use", "reserved_bytes": "bytes_reserved",
        "peak_in_use_bytes": "peak_bytes_in_use", "peak_reserved_bytes": "peak_bytes_reserved",
    }  # fmt: skip
    assert found.known == {ours: BUSY[theirs] for ours, theirs in wanted.items() if theirs not in missing}


def test_device_memory_str_describes_peaks():
    assert str(memory_of(BUSY)) == "at most 3.0 GiB in use and 28.0 GiB reserved, of 31.2 GiB"
    assert str(memory_of({"peak_bytes_in_use": GIB})) == "at most 1.0 GiB in use"
    for nothing in (None, {}, {"bytes_limit": GIB}):
        assert str(memory_of(nothing)) == "does not report its memory"


def test_max_memory_stats_takes_maximum_of_each_number():
    devices: list[Any] = [Device(BUSY), Device(None), Device({"bytes_in_use": 5 * GIB, "bytes_reserved": 1})]
    found = device_memory.max_memory_stats(devices)
    assert (found.in_use_bytes, found.reserved_bytes, found.largest_free_bytes) == (5 * GIB, int(27.3 * GIB), None)


def test_bytes_in_use_reports_device_stats_or_live_arrays():
    said: list[Any] = [Device(BUSY), Device({"bytes_in_use": 7})]
    assert telemetry.bytes_in_use(said) == [int(2.6 * GIB), 7]
    last = jax.devices()[-1]  # which few tests use
    gc.collect()
    held = telemetry.bytes_in_use([last])[0]
    array = jax.device_put(np.ones((256, 1024), np.float32), last)
    assert telemetry.bytes_in_use([last]) == [held + shard_bytes(array)]


def test_encode_run_report_has_loaded_bytes_and_device_peaks(monkeypatch: pytest.MonkeyPatch):
    runner = Runner(jax.devices()[:2])
    busy = memory_of(BUSY)
    monkeypatch.setattr(device_memory, "max_memory_stats", lambda devices: busy)
    monkeypatch.setattr(telemetry, "MIN_REPORTED_S", 0)
    runner.encode(MODEL, new_prompt(), "", host := Host())
    run = runner.last_run
    assert run is not None
    arrays = [array for one in runner.device_cache.list() for array in one.weights.values()]
    weights = sum(array.size * array.dtype.itemsize for array in arrays)
    assert run.loaded_bytes == weights > 0 and run.loading_s > 0
    parts = "importing diffusers|compiling|preparing programs|downloading|loading|running|other work on the host"
    assert re.fullmatch(rf"Took \d+\.\d s: (({parts}) \d+\.\d s(, |$)){{7}}", host.said[-1]), host.said[-1]
    whole, *others = map(float, re.findall(r"[\d.]+(?= s)", host.said[-1]))
    assert whole == pytest.approx(sum(others))
    said = run.describe()
    run.loading_s = 0.5  # of a longer one the rate is said
    assert (said["peak_in_use"], said["peak_reserved"]) == (3 * GIB, 28 * GIB)
    assert said["loaded_bytes"] == weights
    assert "the fullest chip reports at most 3.0 GiB in use and 28.0 GiB reserved, of 31.2 GiB" in str(run)
    assert f"{weights / 1e6:.1f} MB loaded" in str(run) and "GB/s" not in str(run)
    assert units.format_load_rate(28.6e9, 33.6) == "28.6 GB loaded at 0.85 GB/s"
    # Again: nothing is loaded.
    runner.encode(MODEL, new_prompt(), "", Host())
    assert runner.last_run is not run and runner.last_run is not None and runner.last_run.loaded_bytes == 0


@pytest.mark.parametrize(
    ("elapsed", "said"),
    [
        (0.48, "Took 0.6 s: compiling 0.2 s, loading 0.2 s, running 0.2 s"),  # rounded, they are more than the whole
        (0.52, "Took 0.6 s: compiling 0.2 s, loading 0.2 s, running 0.2 s"),
        (0.74, "Took 0.7 s: compiling 0.2 s, loading 0.2 s, running 0.2 s, other work on the host 0.1 s"),
    ],
)
@pytest.mark.parametrize("least", [0, telemetry.MIN_REPORTED_S])
def test_activity_summary_parts_are_never_negative(
    monkeypatch: pytest.MonkeyPatch, elapsed: float, said: str, least: float
):
    monkeypatch.setattr(telemetry, "MIN_REPORTED_S", least)
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: 100 + elapsed)
    activity = Activity(stage="denoise", model="a model", started=100)
    activity.compiling_s = activity.loading_s = activity.running_s = 0.16
    text = activity.summary()
    assert "-" not in text and (least == 0 or text == said)
    whole, *parts = map(float, re.findall(r"[\d.]+(?= s)", text))
    assert whole == pytest.approx(sum(parts))


def test_snapshot_chips_show_used_and_reserved_memory(monkeypatch: pytest.MonkeyPatch):
    runner = Runner(jax.devices()[:2])
    monkeypatch.setattr(snapshot, "current_engine", lambda: runner)
    for chip in snapshot.take_snapshot()["chips"]:
        assert chip["hbm_reserved"] is chip["hbm_reserved_peak"] is None
        assert chip["hbm_used"] is not None and chip["hbm_peak"] >= chip["hbm_used"]
    busy, names = memory_of(BUSY), ("hbm_used", "hbm_reserved", "hbm_peak", "hbm_reserved_peak", "hbm_limit")
    monkeypatch.setattr(device_memory, "memory_stats", lambda device: busy)
    for chip in snapshot.take_snapshot()["chips"]:
        assert [round(chip[name] / GIB, 1) for name in names] == [2.6, 27.3, 3.0, 28.0, 31.2]
