"""Trained miniatures that share parts with another: each is put together whole, from the pack's own files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.progress import Silent
from safetensors.torch import load_file, save_file

MINIATURES = Path(__file__).resolve().parents[3] / "miniatures"
SHARED = sorted(path.parent.name for path in MINIATURES.glob("*/shared.json"))
LIMIT = 16_000_000  # bytes of all


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_part_is_the_other_miniatures(name: str):
    (spec,) = (spec for spec in SPECS if spec.miniature.id == f"tiny/{name}")
    parts = json.loads((MINIATURES / name / "shared.json").read_text())
    found = checkpoint.locate(spec, spec.miniature.id)
    home = found.home(Silent())
    for component in spec.components:
        assert checkpoint.read_headers(found.folder(component.folder, Silent()), component)
    found.configs(Silent())
    assert home == tiny.folder(spec, spec.miniature.id) and not (home / "shared.json").exists()
    for part, of in parts.items():
        for path in (MINIATURES / of).iterdir():
            own, joined = MINIATURES / name / part / path.name, home / part / path.name
            if path.suffix == ".safetensors":
                tensors, wanted = load_file(joined), tiny.tensors_of(path)
                wanted |= tiny.tensors_of(own) if own.is_file() else {}
                assert tensors.keys() == wanted.keys()
                assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
            else:
                assert joined.read_bytes() == (own if own.is_file() else path).read_bytes()


def test_a_file_has_tensors_that_it_names_alone(tmp_path: Path):
    """Zeros, and what is equal to another."""
    path, there = tmp_path / "model.safetensors", torch.ones(2, 3, dtype=torch.bfloat16)
    save_file({"there": there}, path, {tiny.LEFT_OUT: json.dumps({"nothing": [4, 1], "again": "there"})})
    found = tiny.tensors_of(path)
    assert found.keys() == {"there", "nothing", "again"}
    assert torch.equal(found["again"], there) and torch.equal(found["nothing"], torch.zeros(4, 1, dtype=torch.bfloat16))
    save_file(found, path)  # as its own memory each
    assert tiny.tensors_of(path).keys() == found.keys()


def test_no_file_has_large_tensors_of_zeros():
    """What is left out is said once: see `tools/train_miniature.py`."""
    for path in MINIATURES.rglob("*.safetensors"):
        assert not [name for name, x in load_file(path).items() if x.numel() > 10_000 and not x.any()], path


@pytest.mark.parametrize("name", SHARED)
def test_of_a_shared_part_only_what_differs_lies_twice(name: str):
    for part, of in json.loads((MINIATURES / name / "shared.json").read_text()).items():
        for path in (MINIATURES / name / part).glob("*"):
            other = MINIATURES / of / path.name
            if path.suffix == ".safetensors":
                known = tiny.tensors_of(other)
                assert not [key for key, x in load_file(path).items() if key in known and torch.equal(x, known[key])]
            else:
                assert path.read_bytes() != other.read_bytes()


def test_a_part_that_changes_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(MINIATURES / "wan21", tmp_path / "wan21")
    shutil.copytree(MINIATURES / "wan22t2v", tmp_path / "wan22t2v")
    monkeypatch.setattr(tiny, "_TRAINED", tmp_path)
    before = tiny.trained("tiny/wan22t2v")
    assert before is not None and before == tiny.trained("tiny/wan22t2v")
    config = tmp_path / "wan21" / "vae" / "config.json"
    config.write_text(config.read_text() + " ")
    after = tiny.trained("tiny/wan22t2v")
    assert after is not None and after != before
    assert (after / "vae" / "config.json").read_text() == config.read_text()


@pytest.mark.parametrize("model_id", ["tiny/..", "tiny/../miniatures/wan21", "tiny/", "wan21", "tiny/wan21/vae"])
def test_nothing_else_is_taken_for_one(model_id: str):
    assert tiny.trained(model_id) is None


def test_all_together_are_small():
    size = sum(path.stat().st_size for path in MINIATURES.rglob("*") if path.is_file())
    print(f"{size:,} bytes")
    assert size <= LIMIT


def test_none_says_where_it_was_made():
    assert not [path for path in MINIATURES.rglob("*.json") if "_name_or_path" in path.read_text("utf-8")]
