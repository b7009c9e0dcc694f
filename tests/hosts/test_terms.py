"""What hosts must have in common is seen wherever it differs; what the leader decides holds and nothing else."""

import os
import shutil
from pathlib import Path

import pytest
from comfyui_tpu.tpu_runtime import versions
from comfyui_tpu.tpu_runtime.hosts import terms

SOURCE = "the pack's source"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small pack in the place of this one."""
    for name in ("attention/a.py", "sharding/b.py", "tpu_runtime/hosts/c.py", "cli/d.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(terms, "_ROOT", tmp_path)
    return tmp_path


def test_the_sources_digest_is_of_names_and_contents(source: Path):
    own = terms.terms()[SOURCE]
    assert own == terms.terms()[SOURCE] and len(own) == 12 and int(own, 16)
    seen = {own}
    (source / "tpu_runtime/hosts/c.py").write_text("changed")
    seen.add(terms.terms()[SOURCE])
    (source / "sharding/new.py").write_text("")
    seen.add(terms.terms()[SOURCE])
    (source / "attention/a.py").rename(source / "attention/renamed.py")
    seen.add(terms.terms()[SOURCE])
    assert len(seen) == 4


def test_the_sources_digest_is_the_same_wherever_the_pack_lies(source: Path, monkeypatch: pytest.MonkeyPatch):
    own = terms.terms()[SOURCE]
    other = source.parent / f"{source.name}-elsewhere"
    shutil.copytree(source, other)
    monkeypatch.setattr(terms, "_ROOT", other)
    assert terms.terms()[SOURCE] == own
    (other / "cli/d.py").write_text("what hosts do not run")
    (other / "sharding/notes.txt").write_text("no code")
    assert terms.terms()[SOURCE] == own


def test_terms_are_the_versions_and_the_source():
    assert terms.terms() == {**versions.of_results(), SOURCE: terms.terms()[SOURCE]}


def test_what_differs_is_named_from_both_sides():
    assert terms.difference({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) is None
    assert terms.difference({"a": "1", "b": "2"}, {"a": "3", "c": "4"}) == (
        "a: 3 there, 1 here; b: none there, 2 here; c: 4 there, none here"
    )


def test_the_leaders_environment_holds_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "mine")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    monkeypatch.setenv("COMFYUI_TPU_HBM_GIB", "8")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    found = terms.environment()
    assert set(found) == set(terms.VARIABLES) and found["XLA_FLAGS"] == "mine" and found["LIBTPU_INIT_ARGS"] is None
    path = os.environ["PATH"]
    terms.take_over({"XLA_FLAGS": "theirs", "LIBTPU_INIT_ARGS": "x", "COMFYUI_TPU_HBM_GIB": None, "PATH": "nowhere"})
    assert os.environ["XLA_FLAGS"] == "theirs" and os.environ["LIBTPU_INIT_ARGS"] == "x"
    assert "COMFYUI_TPU_HBM_GIB" not in os.environ and os.environ["PATH"] == path
    for name in ("LIBTPU_INIT_ARGS", "COMFYUI_TPU_HBM_GIB"):
        os.environ.pop(name, None)
