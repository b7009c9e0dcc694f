"""What the cache's folders hold: counts, keys, seals, and nothing that was half written."""

import errno
import grp
import os
import pwd
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_tpu.tpu_runtime.cache import store, trust
from comfyui_tpu.tpu_runtime.cache.store import Store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "cache"
    monkeypatch.setenv(store.VARIABLE, str(found))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return found


def test_a_signature_is_short_and_of_every_part():
    assert store.signature("a", 1) == "391d545b6971354e"
    assert len({store.signature(*parts) for parts in [(), ("a",), ("a", 1), ("a1",), (1, "a"), ("a", "1")]}) == 6


def test_xlas_folder_is_jaxs_own_where_it_is_given(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert store.xla_cache_folder() == folder / "xla"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "~/mine")
    assert store.xla_cache_folder() == tmp_path / "mine"


def test_usage_counts_files_and_bytes_of_every_kind(folder: Path, monkeypatch: pytest.MonkeyPatch):
    Store("prompts").put("a", b"12345")
    Store("prompts").put("b", b"1")
    (folder / "prompts" / "below").mkdir()
    (folder / "xla").mkdir()
    (folder / "xla" / "one").write_bytes(b"123")
    store._usage.cache_clear()
    found = {one.pop("name"): one for one in store.usage()}
    entries = 2 * store.DIGEST_SIZE + 6
    assert found == {
        "programs": {"path": str(folder / "programs"), "files": 0, "bytes": 0},
        "prompts": {"path": str(folder / "prompts"), "files": 2, "bytes": entries},
        "plans": {"path": str(folder / "plans"), "files": 0, "bytes": 0},
        "xla": {"path": str(folder / "xla"), "files": 1, "bytes": 3},
    }
    # Counted anew after a while, not at each call.
    moments = iter([100.0, 100.1, 100.0 + 2 * store.SECONDS_BETWEEN_COUNTS])
    monkeypatch.setattr(store.time, "monotonic", lambda: next(moments))
    counted = []
    monkeypatch.setattr(store, "_size", lambda folder: counted.append(folder) or {"files": 0, "bytes": 0})
    for _ in range(3):
        store.usage()
    assert len(counted) == 2 * len(found)


@pytest.mark.parametrize(("number", "is_kept"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)])
def test_a_full_disk_can_still_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_kept: bool):
    def refuse(**_):
        raise OSError(number, "refused")

    monkeypatch.setattr(store.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(trust, "temporary_folder", lambda: tmp_path / "instead")
    wanted = tmp_path / f"cache-{number}"
    assert store._writable(str(wanted)) == (wanted if is_kept else tmp_path / "instead")


def test_what_is_half_written_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def replace(scratch: str, path: Path) -> None:
        seen.extend([Path(scratch), Path(path)])
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(store.os, "replace", replace)
    Store("prompts").put("key", b"payload")
    scratch, path = seen
    assert scratch.parent == path.parent == folder / "prompts" and scratch.name.startswith(".key-")
    assert path.name == "key.bin" and list(path.parent.iterdir()) == []


def test_a_damaged_entry_is_dropped_with_its_reason(folder: Path, caplog: pytest.LogCaptureFixture):
    for one, reason in (
        (Store("prompts"), "it is damaged"),
        (Store("programs", code=True), "it is damaged, or of ano"),
    ):
        one.put("key", b"payload")
        path = one.path("key")
        path.write_bytes(path.read_bytes()[:-1] + b"X")
        assert one.get("key") is None and not path.exists()
        assert f"is dropped: {reason}" in caplog.text
        assert ("or of another cache" in caplog.text) == one.code
        one.discard("key", "again")


def test_a_folder_that_cannot_be_looked_at_holds_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "forbidden")

    monkeypatch.setattr(trust, "check", refuse)
    assert not store.holds_own_code(folder / "programs")
    assert f"{folder / 'programs'} cannot be looked at" in caplog.text


# --- trust ------------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_for_this_user_alone_and_nothing_beside_it(tmp_path: Path):
    path = tmp_path / "programs.key"
    made = trust.key(path)
    assert len(made) == trust.KEY_SIZE and trust.key(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_is_made_beside_its_place_and_never_over_that_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, scratches = tmp_path / "programs.key", []

    def link(scratch: str, place: Path) -> None:
        scratches.append(Path(scratch))
        place.write_bytes(b"k" * trust.KEY_SIZE)
        place.chmod(0o600)
        raise FileExistsError

    monkeypatch.setattr(trust.os, "link", link)
    assert trust.key(path) == b"k" * trust.KEY_SIZE
    (scratch,) = scratches
    assert scratch.parent == tmp_path and scratch.name.startswith(".programs.key-") and not scratch.exists()


def test_where_there_are_no_hard_links_a_key_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(scratch: str, place: Path) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(trust.os, "link", link)
    path = tmp_path / "programs.key"
    assert trust.key(path) == trust.key(path) == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_key_is_said(tmp_path: Path):
    path = tmp_path / "programs.key"
    path.write_bytes(b"short")
    path.chmod(0o600)
    with pytest.raises(trust.Untrusted, match="programs.key is no key"):
        trust._read_key(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(trust.Untrusted, match="link is a link"):
        trust._read_key(tmp_path / "link")


@pytest.mark.parametrize(
    ("number", "name", "members", "is_own"),
    [
        (7, "jo", [], True), (7, "jo", ["jo"], True), (7, "jo", ["jo", "eve"], False), (7, "jo", ["eve"], False),
        (7, "staff", [], False), (8, "jo", [], False), (8, "staff", ["jo"], False),
    ],
)  # fmt: skip
def test_a_group_is_a_users_own_where_nobody_else_is_in_it(monkeypatch, number, name, members, is_own):
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="jo", pw_gid=7))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=members))
    assert trust._is_own_group(number) == is_own


def test_a_group_or_user_without_a_name_is_nobodys_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert trust._is_own_group(os.getgid()) is False


def test_a_seal_is_of_key_name_and_payload():
    """Written down: programs that are sealed today open tomorrow."""
    sealed = trust.seal(b"k" * 32, "name", b"payload")
    assert sealed.hex()[:16] == "cc8eca13eb61e321"
    others = [trust.seal(b"l" * 32, "name", b"payload"), trust.seal(b"k" * 32, "nam", b"epayload")]
    assert len({sealed, *others, trust.seal(b"k" * 32, "name", b"other")}) == 4
