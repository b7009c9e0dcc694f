"""A trace of each stage where the variable names a folder, and no harm where it cannot be written."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from comfyui_tpu.tpu_runtime.engine import profiling


@pytest.fixture(autouse=True)
def first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_numbers", iter(range(1, 100)))


def run(stage: str) -> None:
    with profiling.trace_stage(stage):
        jax.block_until_ready(jnp.ones(8) + 1)


def test_trace_stage_unset_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(profiling.VARIABLE, raising=False)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_: pytest.fail("a trace was started"))
    run("denoise")


def test_trace_stage_writes_one_folder_per_stage_up_to_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(profiling.VARIABLE, str(tmp_path))
    monkeypatch.setattr(profiling, "MAX_STAGES", 2)
    for stage in ("encode", "denoise", "decode"):
        run(stage)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-encode", "2-denoise"]
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_trace_stage_with_unusable_folder_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(profiling.VARIABLE, str(tmp_path / "file"))
    run("encode")
    run("decode")


def test_trace_stage_propagates_stage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(profiling.VARIABLE, str(tmp_path))
    with pytest.raises(KeyError), profiling.trace_stage("encode"):
        raise KeyError
    run("decode")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-encode", "2-decode"]
