"""`comfyui-tpu doctor --model`: room for the chosen model, and how fast the disk is read."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_tpu.cli.doctor import HostMachine, disk
from comfyui_tpu.cli.doctor import machine as machines
from comfyui_tpu.cli.main import main

GB, GIB = 10**9, 2**30
MODEL = "wan2.1-t2v-14b"


def machine(home: Path, free_gib: float, missing_gib: float, *, model: str = MODEL) -> HostMachine:
    """With one model of 60 GiB, of which so much is missing, on a disk that reads 1.5 GB/s."""
    home.mkdir(exist_ok=True)
    return HostMachine(
        root=home, home=home, environ={}, packages={}, model=model,
        free_bytes=lambda path: int(free_gib * GIB), read_rate=lambda file: 1.5,
        download_bytes=lambda name: (int(missing_gib * GIB), 60 * GIB),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("free_gib", "missing_gib", "said", "is_fault"),
    [
        (100, 60, f"; 60.0 GiB of {MODEL} are not here yet", False),
        (62, 60, f"; 60.0 GiB of {MODEL} are not here yet", False),  # with programs and videos it just fits
        (61, 60, f"{MODEL} of 60.0 GiB, programs and videos need 62.0 GiB", True),
        (30, 20, f"; 20.0 GiB of {MODEL} are not here yet", False),
        (3, 0, "3.0 GiB free in", False),
        (1, 0, "programs and videos need 2.0 GiB", True),
    ],
)
def test_check_free_space_compares_model_size_with_free_disk(
    tmp_path: Path, free_gib: float, missing_gib: float, said: str, is_fault: bool
):
    (finding,) = disk.check_free_space(machine(tmp_path / "home", free_gib, missing_gib))
    assert said in finding.found and finding.is_fault == is_fault
    assert ("not here yet" in finding.found) == bool(missing_gib)


def test_check_free_space_without_network_reports_free_disk(tmp_path: Path):
    def fails(name: str) -> tuple[int, int]:
        raise ValueError("The Hub does not answer.")

    (finding,) = disk.check_free_space(dataclasses.replace(machine(tmp_path / "home", 5, 0), download_bytes=fails))
    assert "5.0 GiB free" in finding.found and "not known: The Hub does not answer." in finding.found
    assert not finding.remedy


def test_check_read_rate_reads_largest_file_and_estimates_model(tmp_path: Path):
    found = machine(tmp_path / "home", 100, 0)
    assert list(disk.check_read_rate(found)) == []
    for name, size in {"small": 1, "large": 300, "larger/than": 200}.items():
        file = found.comfyui / f"models/diffusion_models/{name}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.truncate(file, size * 2**20)
    (finding,) = disk.check_read_rate(found)
    assert finding.found.startswith("1.50 GB/s, read from") and "large.safetensors" in finding.found
    assert finding.found.endswith(f"; {MODEL} takes {60 * GIB / GB / 1.5:.0f} s to read") and not finding.remedy
    (finding,) = disk.check_read_rate(dataclasses.replace(found, model=""))
    assert finding.found.endswith("large.safetensors")


def test_read_rate_divides_bytes_read_by_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    size = 3 * machines.PIECE_BYTES + 5
    file = tmp_path / "weights"
    file.write_bytes(bytes(size))
    clock = iter([10.0, 10.0, 10.0, 10.0, 10.0, 10.5])
    monkeypatch.setattr(machines, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert machines.read_rate(file) == pytest.approx(size / GB / 0.5)


def test_read_rate_stops_at_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "weights"
    file.write_bytes(bytes(2 * machines.PIECE_BYTES))
    clock = iter([10.0, 10.0, 10.0 + machines.READ_S, 14.0])
    monkeypatch.setattr(machines, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(machines, "READERS", 1)
    assert machines.read_rate(file) == pytest.approx(machines.PIECE_BYTES / GB / 4.0)


def test_doctor_unknown_model_error_lists_models(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--model", "nothing"]) == 2
    assert MODEL in capsys.readouterr().err
