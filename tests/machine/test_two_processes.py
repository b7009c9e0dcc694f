"""Several processes on one cache: what each finds out about a machine is kept, and what it writes stays whole."""

import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_tpu.tpu_runtime.cache import store
from comfyui_tpu.tpu_runtime.machine import record

ADDS = """
import sys
from comfyui_tpu.tpu_runtime.machine import record
number = sys.argv[1]
for turn in range(20):
    record.update_record(f"machine {number} {turn}", record.MachineRecord(sentences=(f"of {number}",)))
    record.update_record("shared", record.MachineRecord(sentences=(f"{number}-{turn % 4}",)))
"""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_machine_records_of_concurrent_processes_are_all_kept(monkeypatch: pytest.MonkeyPatch, cache_folder: Path):
    processes = [subprocess.Popen([sys.executable, "-c", LIMITS + ADDS, str(number)]) for number in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    found = record.read_all()
    assert {f"machine {number} {turn}" for number in range(3) for turn in range(20)} <= set(found)
    assert set(found["shared"].sentences) == {f"{number}-{turn}" for number in range(3) for turn in range(4)}


LIMITS = """
from comfyui_tpu.tpu_runtime.machine import record
record.MAX_MACHINES, record.MAX_SENTENCES = 1000, 100
"""


def test_trim_keeps_locked_scratch_file_after_clock_change(tmp_path: Path):
    """Beside an entry of the future what is being written looks abandoned."""
    import fcntl
    import os
    import time

    folder = tmp_path / "entries"
    folder.mkdir()
    (folder / "future.bin").write_bytes(b"x")
    ahead = time.time() + 10**7
    os.utime(folder / "future.bin", (ahead, ahead))
    written, left = folder / ".written", folder / ".left"
    left.write_bytes(b"x")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.trim(folder, 10**6)
        assert written.is_file() and not left.exists()
    store.trim(folder, 10**6)
    assert [path.name for path in folder.iterdir()] == ["future.bin"]
