"""Folders that are made in the cache are whole, or made again by themselves."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.test_media import disk_that_takes
from comfyui_tpu.tpu_runtime.cache import folders, store
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny
from comfyui_tpu.tpu_runtime.files import WriteError
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    folders._verified.clear()
    return tmp_path / "cache"


def make(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "a.bin").write_bytes(b"12345678")
    (folder / "inner" / "b.json").write_text("{}")


def names(folder: Path) -> list[str]:
    """The folders in a folder; their manifests are hidden files."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a file is gone": lambda folder: (folder / "a.bin").unlink(),
    "a folder is gone": lambda folder: ((folder / "inner" / "b.json").unlink(), (folder / "inner").rmdir()),
    "a file is shorter": lambda folder: (folder / "a.bin").write_bytes(b"1"),
    "a file is empty": lambda folder: (folder / "a.bin").write_bytes(b""),
    "a bit is another": lambda folder: (folder / "a.bin").write_bytes(b"12345679"),
    "its manifest is gone": lambda folder: folders.manifest_path(folder).unlink(),
    "its manifest is damaged": lambda folder: folders.manifest_path(folder).write_text('{"a.bin": 1}'),
    "its manifest is no object": lambda folder: folders.manifest_path(folder).write_bytes(b"[[\xff"),
    "a folder lies in the place of a file": lambda folder: ((folder / "a.bin").unlink(), (folder / "a.bin").mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_cached_folder_with_damage_is_recreated(name: str):
    made: list[Path] = []

    def counted(folder: Path) -> None:
        made.append(folder)
        make(folder)

    found = folders.ensure_cached_folder("tiny", "x", counted)
    assert folders.ensure_cached_folder("tiny", "x", counted) == found and len(made) == 1
    DAMAGE[name](found)
    folders._verified.clear()  # another process
    assert folders.ensure_cached_folder("tiny", "x", counted) == found and len(made) == 2
    assert (found / "a.bin").read_bytes() == b"12345678" and (found / "inner" / "b.json").read_text() == "{}"
    assert names(found.parent) == ["x"] and list(found.parent.iterdir()) != [found]


@pytest.mark.parametrize("part", ["model_index.json", "scheduler/scheduler_config.json", "transformer", "tokenizer"])
def test_tiny_model_folder_with_missing_part_is_recreated(part: str):
    spec = spec_for_family("Wan21")
    path = tiny.find_folder(spec, spec.miniature.id) / part
    for one in sorted(path.rglob("*"), reverse=True) if path.is_dir() else [path]:
        one.unlink() if one.is_file() else one.rmdir()
    found = checkpoint.locate(spec, spec.miniature.id)
    assert found.folder("transformer", SilentProgress()).is_dir() and path.exists()
    assert not path.is_dir() or any(path.iterdir())


def test_cached_folder_with_dangling_link_is_recreated():
    def with_link(folder: Path) -> None:
        (folder / "tokenizer").symlink_to(folders.ensure_cached_folder("parts", "tokenizer", make))

    found = folders.ensure_cached_folder("parts", "model", with_link)
    (found / "tokenizer" / "a.bin").unlink()
    assert folders.ensure_cached_folder("parts", "model", with_link) == found
    assert (found / "tokenizer" / "a.bin").read_bytes() == b"12345678"


WRITER = """
import sys, time
from pathlib import Path
from comfyui_tpu.tpu_runtime.cache import folders
def make(folder):
    (folder / "a.bin").write_bytes(b"x")
    print("writes", flush=True)
    time.sleep(60)
folders.ensure_cached_folder("tiny", "x", make)
"""


def test_cached_folder_removes_scratch_of_killed_writer_only(cache_folder: Path):
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, env=dict(os.environ)) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"writes\n"
        (scratch,) = (cache_folder / "tiny").iterdir()
        folders.ensure_cached_folder("tiny", "y", make)
        assert scratch.is_dir(), "another process is writing it"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    folders.ensure_cached_folder("tiny", "z", make)
    assert names(cache_folder / "tiny") == ["y", "z"] and not scratch.exists()


@pytest.mark.parametrize("kind", [OSError, ValueError, KeyboardInterrupt])
def test_cached_folder_with_failed_creation_leaves_nothing(cache_folder: Path, kind: type[BaseException]):
    def broken(folder: Path) -> None:
        make(folder)
        raise kind("broken")

    with pytest.raises(kind, match="broken"):
        folders.ensure_cached_folder("tiny", "x", broken)
    assert list((cache_folder / "tiny").iterdir()) == []


@pytest.mark.parametrize("ahead_s", [0, 10**6])
def test_cached_folders_least_recently_used_are_evicted(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path, ahead_s: int
):
    """A clock that was set back makes none of them young for ever."""
    size = folders.measure_folder(folders.ensure_cached_folder("tiny", "0", make))
    monkeypatch.setitem(folders.MAX_BYTES, "tiny", size * 3)
    for number in range(5):
        moment = time.time() + ahead_s - 10**5 + number
        found = folders.ensure_cached_folder("tiny", str(number), make)
        os.utime(folders.manifest_path(found), (moment, moment))
    assert names(cache_folder / "tiny") == ["2", "3", "4"]


def test_cached_folder_full_disk_error_names_folder_and_variable(cache_folder: Path):
    folder = cache_folder / "tiny"
    folder.mkdir(parents=True)

    def large(scratch: Path) -> None:
        (scratch / "a.bin").write_bytes(bytes(5000))

    parameters = {"folder": folder, "strerror": "File too large", "instead": re.compile(store.VARIABLE)}
    with disk_that_takes(4000), raises_message(WriteError, "file.disk_full", **parameters):
        folders.ensure_cached_folder("tiny", "x", large)
    assert list(folder.iterdir()) == []
    folders.ensure_cached_folder("tiny", "x", large)
