"""What a process that is killed while it writes leaves: the next writer in that folder removes it, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.tpu_runtime import files

# Each begins a file in the folder that it is given, says so, and never ends.
WRITERS = {
    "a video": """
import itertools, torch
from fractions import Fraction
from comfyui_tpu.tpu_runtime import media
class Endless:
    shape = (9, 64, 64, 3)
    def __len__(self): return 9
    def __iter__(self):
        for number in itertools.count():
            if number == 60: print("begun", flush=True)
            yield torch.rand(64, 64, 3)
media.check_image = lambda frames: None
media.save_video(folder / "x.mp4", media.Video(frames=Endless(), frame_rate=Fraction(8)))
""",
    "an image": """
from comfyui_tpu.tpu_runtime import media
class Slow:
    def getvalue(self):
        print("begun", flush=True)
        time.sleep(600)
media._write(folder / "x.png", Slow())
""",
    "any file": """
from comfyui_tpu.tpu_runtime import files
def parts():
    yield bytes(100_000)
    print("begun", flush=True)
    time.sleep(600)
with files.open_atomic(folder / "x") as scratch, scratch.open("wb") as file: file.writelines(parts())
""",
}


def start_writer(writer: str, folder: Path) -> subprocess.Popen[bytes]:
    code = f"import sys, time\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\n{WRITERS[writer]}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    return process


@pytest.mark.parametrize("writer", WRITERS)
def test_write_file_removes_scratch_of_killed_writer_only(tmp_path: Path, writer: str):
    process = start_writer(writer, tmp_path)
    try:
        files.write_file(tmp_path / "meanwhile", b"1")
        (scratch,) = tmp_path.glob(".*")
        assert scratch.suffix == {"a video": ".mp4", "an image": ".png", "any file": ""}[writer]
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert scratch.exists()
        files.write_file(tmp_path / "next", b"2")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["meanwhile", "next"]
    finally:
        process.kill()


OURS = f".comfyui-tpu-{files._this_machine()}-"


@pytest.mark.parametrize(
    "name",
    [
        ".01234567-holiday.mp4", ".holiday.mp4", "holiday.mp4", ".comfyui-tpu-notes.txt", f"{OURS}notes.txt",
        f"{OURS}{'0' * 15}.mp4", f"{OURS}{'0' * 17}.mp4", f"{OURS}{'0' * 16}.mp4.txt", f"{OURS}{'g' * 16}.mp4", "%s",
    ],
)  # fmt: skip
def test_write_file_keeps_files_of_other_names(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"mine")
    os.utime(tmp_path / name, (0, 0))
    files.write_file(tmp_path / "next", b"")
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.fixture
def scratch_file(tmp_path: Path) -> Iterator[Path]:
    """The name of a scratch file of this machine whose writer is gone."""
    yield tmp_path / f"{OURS}{'0' * 16}.mp4"


def test_write_file_keeps_folders_links_and_files_of_other_users(
    tmp_path: Path, scratch_file: Path, monkeypatch: pytest.MonkeyPatch
):
    scratch_file.mkdir()
    files.write_file(tmp_path / "next", b"")
    assert scratch_file.is_dir()
    scratch_file.rmdir()
    (tmp_path / "mine").write_bytes(b"mine")
    scratch_file.symlink_to(tmp_path / "mine")
    files.write_file(tmp_path / "next", b"")
    assert scratch_file.is_symlink() and (tmp_path / "mine").read_bytes() == b"mine"
    scratch_file.unlink()
    scratch_file.write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        files.write_file(tmp_path / "next", b"")
        assert scratch_file.exists()
    files.write_file(tmp_path / "next", b"")
    assert not scratch_file.exists()


def test_write_file_keeps_scratch_of_other_machine_for_one_day(
    tmp_path: Path, scratch_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a shared disk its locks may not be seen."""
    scratch_file.write_bytes(b"")
    monkeypatch.setattr(files, "_this_machine", lambda: "f" * 8)
    now = scratch_file.stat().st_mtime
    monkeypatch.setattr(files.time, "time", lambda: now + files.ABANDONED_S - 1)
    files.write_file(tmp_path / "next", b"")
    assert scratch_file.exists()
    monkeypatch.setattr(files.time, "time", lambda: now + files.ABANDONED_S + 1)
    files.write_file(tmp_path / "next", b"")
    assert not scratch_file.exists()


def test_write_file_recreates_scratch_removed_before_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flock, removed = files.fcntl.flock, []

    def taken_first(descriptor: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", taken_first)
    files.write_file(tmp_path / "x.bin", b"whole")
    assert (tmp_path / "x.bin").read_bytes() == b"whole" and not removed[0].exists()


@pytest.mark.parametrize("name", ["x" * 240, "写" * 80, "x." + "y" * 200, ".hidden", "a.b.png", "a.", "x.mp4"])
def test_open_atomic_accepts_any_valid_file_name(tmp_path: Path, name: str):
    """A scratch name that held the file's was longer than the disk takes."""
    with files.open_atomic(tmp_path / name) as scratch:
        scratch.write_bytes(b"1")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_write_file_without_locks_writes_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "fcntl", None)
    files.write_file(tmp_path / "x.bin", b"1", mode=0o600)
    assert (tmp_path / "x.bin").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
