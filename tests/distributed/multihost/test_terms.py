"""What hosts must have in common is seen wherever it differs; what the leader decides holds and nothing else."""

import os
import shutil
from pathlib import Path

import pytest
from comfyui_tpu.distributed.multihost import handshake
from comfyui_tpu.tpu_runtime import versions
from comfyui_tpu.tpu_runtime.machine import fallbacks

SOURCE = "the pack's source"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small pack."""
    folder = tmp_path / "pack"
    for name in ("attention/a.py", "kernels/k.py", "sharding/b.py", "distributed/multihost/c.py", "cli/d.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(name)
    return folder


def digest(folder: Path) -> str:
    versions.source_digest.cache_clear()
    return versions.source_digest(folder)


def test_source_digest_changes_with_names_and_contents(source: Path):
    own = digest(source)
    assert own == digest(source) and int(own, 16)
    seen = {own}
    (source / "distributed/multihost/c.py").write_text("changed")
    seen.add(digest(source))
    (source / "sharding/new.py").write_text("")
    seen.add(digest(source))
    (source / "attention/a.py").rename(source / "attention/renamed.py")
    seen.add(digest(source))
    assert len(seen) == 4


def test_source_digest_is_independent_of_location(source: Path):
    own = digest(source)
    other = source.with_name("elsewhere")
    shutil.copytree(source, other)
    assert digest(other) == own
    (other / "cli/d.py").write_text("what hosts do not run")
    (other / "sharding/notes.txt").write_text("no code")
    assert digest(other) == own


def test_host_versions_contain_result_versions_and_source_digest():
    assert handshake.host_versions() == {**versions.list_result_versions(), SOURCE: versions.source_digest()[:12]}


def test_describe_difference_lists_values_of_both_hosts():
    assert handshake.describe_difference({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) is None
    assert handshake.describe_difference({"a": "1", "b": "2"}, {"a": "3", "c": "4"}) == (
        "a: 3 there, 1 here; b: none there, 2 here; c: 4 there, none here"
    )


def test_apply_environment_sets_only_known_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "mine")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    monkeypatch.setenv("COMFYUI_TPU_HBM_GIB", "8")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    found = handshake.collect_environment()
    assert {fallbacks.KERNELS_VARIABLE, fallbacks.OPTIONS_VARIABLE} < set(found) == set(handshake.VARIABLES)
    assert found["XLA_FLAGS"] == "mine" and found["LIBTPU_INIT_ARGS"] is None
    path = os.environ["PATH"]
    handshake.apply_environment(
        {"XLA_FLAGS": "theirs", "LIBTPU_INIT_ARGS": "x", "COMFYUI_TPU_HBM_GIB": None, "PATH": "nowhere"}
    )
    assert os.environ["XLA_FLAGS"] == "theirs" and os.environ["LIBTPU_INIT_ARGS"] == "x"
    assert "COMFYUI_TPU_HBM_GIB" not in os.environ and os.environ["PATH"] == path
    for name in ("LIBTPU_INIT_ARGS", "COMFYUI_TPU_HBM_GIB"):
        os.environ.pop(name, None)
