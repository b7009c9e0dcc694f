"""What the cache's folders hold: counts, keys, and nothing that was half written."""

import errno
import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_tpu.tpu_runtime.cache import ownership, store
from comfyui_tpu.tpu_runtime.cache.store import Store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "cache"
    monkeypatch.setenv(store.VARIABLE, str(found))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return found


def test_signature_is_short_and_depends_on_every_part():
    assert store.signature("a", 1) == "391d545b6971354e"
    assert len({store.signature(*parts) for parts in [(), ("a",), ("a", 1), ("a1",), (1, "a"), ("a", "1")]}) == 6


def test_xla_cache_folder_follows_jax_variable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert store.xla_cache_folder() == folder / "xla"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "~/mine")
    assert store.xla_cache_folder() == tmp_path / "mine"


def test_measure_usage_counts_files_and_bytes_per_store(folder: Path, monkeypatch: pytest.MonkeyPatch):
    Store("prompts").put("a", b"12345")
    Store("prompts").put("b", b"1")
    (folder / "prompts" / "below").mkdir()
    (folder / "xla").mkdir()
    (folder / "xla" / "one").write_bytes(b"123")
    store._usage.cache_clear()
    found = {one.pop("name"): one for one in store.measure_usage()}
    entries = 2 * store.DIGEST_SIZE + 6
    assert found == {
        "prompts": {"path": str(folder / "prompts"), "files": 2, "bytes": entries},
        "plans": {"path": str(folder / "plans"), "files": 0, "bytes": 0},
        "compile_seconds": {"path": str(folder / "compile_seconds"), "files": 0, "bytes": 0},
        "curves": {"path": str(folder / "curves"), "files": 0, "bytes": 0},
        "xla": {"path": str(folder / "xla"), "files": 1, "bytes": 3},
    }
    # Counted anew after a while, not at each call.
    moments = iter([100.0, 100.1, 100.0 + 2 * store.SECONDS_BETWEEN_COUNTS])
    monkeypatch.setattr(store.time, "monotonic", lambda: next(moments))
    counted = []
    monkeypatch.setattr(store, "_size", lambda folder: counted.append(folder) or {"files": 0, "bytes": 0})
    for _ in range(3):
        store.measure_usage()
    assert len(counted) == 2 * len(found)


def test_measure_usage_follows_current_cache_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store.time, "monotonic", lambda: 100.0)
    for wanted in (folder, folder.parent / "another"):
        monkeypatch.setenv(store.VARIABLE, str(wanted))
        assert {one["path"] for one in store.measure_usage()} == {str(wanted / kind) for kind in store.MAX_BYTES}


@pytest.mark.parametrize(("number", "is_kept"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)])
def test_cache_folder_on_full_disk_is_kept_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_kept: bool
):
    def refuse(**_):
        raise OSError(number, "refused")

    monkeypatch.setattr(store.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(ownership, "temporary_folder", lambda: tmp_path / "instead")
    wanted = tmp_path / f"cache-{number}"
    assert store._writable(str(wanted)) == (wanted if is_kept else tmp_path / "instead")


def test_put_with_failed_replace_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def replace(scratch: str, path: Path) -> None:
        seen.extend([Path(scratch), Path(path)])
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(store.os, "replace", replace)
    Store("prompts").put("key", b"payload")
    scratch, path = seen
    assert scratch.parent == path.parent == folder / "prompts" and scratch.name.startswith(".comfyui-tpu-")
    assert path.name == "key.bin" and list(path.parent.iterdir()) == []


def test_cache_folders_are_private_to_user(tmp_path: Path, folder: Path):
    store.make_private(tmp_path / "a" / "b")
    store.make_private(tmp_path / "a" / "b")
    Store("prompts").put("key", b"payload")
    for made in (tmp_path / "a" / "b", folder, folder / "prompts"):
        assert made.stat().st_mode & 0o777 == 0o700


def write_aged_file(path: Path, moment: float, size: int = 10) -> Path:
    path.write_bytes(bytes(size))
    os.utime(path, (moment, moment))
    return path


def test_trim_removes_scratch_files_one_day_older_than_newest(tmp_path: Path):
    now = 10 * store.ABANDONED_S
    files = [
        write_aged_file(tmp_path / ".abandoned", now - store.ABANDONED_S - 1),
        write_aged_file(tmp_path / ".at-work", now - store.ABANDONED_S),
        write_aged_file(tmp_path / "old.bin", 0), write_aged_file(tmp_path / "newest.bin", now),
    ]  # fmt: skip
    store.trim(tmp_path, 10**6)
    assert [path.name for path in files if not path.exists()] == [".abandoned"]
    (tmp_path / "none").mkdir()
    store.trim(tmp_path / "none", 0)


def test_trim_removes_only_as_much_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = [write_aged_file(tmp_path / f"{number}.bin", number, size=10 + number) for number in range(4)]
    store.trim(tmp_path, 46)  # all of them
    assert all(path.exists() for path in files)
    store.trim(tmp_path, 25)
    assert [path.exists() for path in files] == [False, False, True, True]


def test_trim_ignores_files_removed_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone, kept = write_aged_file(tmp_path / "gone.bin", 0), write_aged_file(tmp_path / "kept.bin", 1)
    listed = [*store._files(tmp_path)]
    gone.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(store, "_files", lambda folder: iter(listed))
        store.trim(tmp_path, 10)
    assert kept.exists()
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([gone, kept]))
    assert [path for path, _ in store._files(tmp_path)] == [kept]


def test_get_damaged_entry_removes_file_and_logs_reason(folder: Path, caplog: pytest.LogCaptureFixture):
    prompts = Store("prompts")
    prompts.put("key", b"payload")
    path = prompts.path("key")
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    assert prompts.get("key") is None and not path.exists()
    assert f"{path} is dropped: it is damaged. It is recreated." in caplog.text
    prompts.discard("key", "again")
    assert "cannot be removed" not in caplog.text  # it is gone already


def test_can_trust_code_of_unreadable_folder_is_false(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "forbidden")

    monkeypatch.setattr(ownership, "check_ownership", refuse)
    assert not store.can_trust_code(folder / "xla")
    assert f"{folder / 'xla'} cannot be looked at" in caplog.text


# --- trust ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name", "members", "is_own"),
    [
        (7, "jo", [], True), (7, "jo", ["jo"], True), (7, "jo", ["jo", "eve"], False), (7, "jo", ["eve"], False),
        (7, "staff", [], False), (8, "jo", [], False), (8, "staff", ["jo"], False),
    ],
)  # fmt: skip
def test_is_own_group_requires_no_other_members(monkeypatch, number, name, members, is_own):
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="jo", pw_gid=7))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert ownership._is_own_group(number) == is_own


def test_is_own_group_without_name_is_false(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert ownership._is_own_group(os.getgid()) is False
