"""Trained miniatures: each is put together whole, from the pack's own files and those of parts that it shares."""

import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load, load_file

MINIATURES = Path(__file__).resolve().parents[3] / "miniatures"
ALL = sorted(path.parent.name for path in MINIATURES.glob("*/model_index.json"))
SHARED = sorted(path.parent.name for path in MINIATURES.glob("*/shared.json"))
LIMIT = 16_000_000  # bytes of all


def tensors_of(folder: Path, weights: Path) -> dict[str, torch.Tensor]:
    """What `folder` has of the tensors that a whole miniature's `weights` have; nothing where it has no such file."""
    path = folder / f"{weights.name}.xz"
    if not path.is_file():
        return {}
    with lzma.open(path) as file:
        return load(file.read())


@pytest.mark.parametrize("name", ALL)
def test_miniature_folder_is_complete_with_shared_parts(name: str):
    (spec,) = (spec for spec in SPECS if spec.miniature.id == f"tiny/{name}")
    shared = MINIATURES / name / "shared.json"
    parts = json.loads(shared.read_text()) if shared.is_file() else {}
    found = checkpoint.locate(spec, spec.miniature.id)
    home = found.home(SilentProgress())
    for component in spec.components:
        assert checkpoint.read_headers(found.folder(component.folder, SilentProgress()), component)
    found.configs(SilentProgress())
    assert home == tiny.find_folder(spec, spec.miniature.id) and not (home / "shared.json").exists()
    assert not list(home.rglob("*.xz"))
    for folder in {path.parent for path in home.rglob("*") if path.is_file()}:
        own = MINIATURES / name / folder.relative_to(home)
        sources = [own] + [MINIATURES / of for part, of in parts.items() if home / part == folder]
        for path in folder.iterdir():
            if path.suffix == ".safetensors":
                tensors, wanted = load_file(path), {}
                for source in reversed(sources):
                    wanted |= tensors_of(source, path)
                wanted = {key: tensor for key, tensor in wanted.items() if tensor.numel()}  # others are done without
                assert tensors.keys() == wanted.keys()
                assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)
            elif path.is_file():
                there = next(source / path.name for source in sources if (source / path.name).is_file())
                assert path.read_bytes() == there.read_bytes()


def test_packed_miniature_weights_are_bfloat16():
    """In bfloat16, which is what they are packed for: see `tools/train_miniature.py`."""
    assert not list(MINIATURES.rglob("*.safetensors"))
    for path in MINIATURES.rglob(f"*{tiny.PACKED}"):
        assert {x.dtype for x in tiny.unpack_weights(path).values()} <= {torch.bfloat16, torch.int64}, path


@pytest.mark.parametrize("name", SHARED)
def test_shared_miniature_parts_store_only_differences(name: str):
    for part, of in json.loads((MINIATURES / name / "shared.json").read_text()).items():
        for path in (MINIATURES / name / part).glob("*"):
            other = MINIATURES / of / path.name
            if path.suffix == ".xz":
                known, found = tiny.unpack_weights(other), tiny.unpack_weights(path)
                assert not [key for key in known.keys() & found.keys() if torch.equal(found[key], known[key])]
            else:
                assert path.read_bytes() != other.read_bytes()


def test_find_trained_changed_shared_part_gives_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(MINIATURES / "wan21", tmp_path / "wan21")
    shutil.copytree(MINIATURES / "wan22t2v", tmp_path / "wan22t2v")
    monkeypatch.setattr(tiny, "_TRAINED", tmp_path)
    before = tiny.find_trained("tiny/wan22t2v")
    assert before is not None and before == tiny.find_trained("tiny/wan22t2v")
    config = tmp_path / "wan21" / "vae" / "config.json"
    config.write_text(config.read_text() + " ")
    after = tiny.find_trained("tiny/wan22t2v")
    assert after is not None and after != before
    assert (after / "vae" / "config.json").read_text() == config.read_text()


@pytest.mark.parametrize("model_id", ["tiny/..", "tiny/../miniatures/wan21", "tiny/", "wan21", "tiny/wan21/vae"])
def test_find_trained_invalid_model_id_is_none(model_id: str):
    assert tiny.find_trained(model_id) is None


def test_miniatures_total_size_is_below_limit():
    size = sum(path.stat().st_size for path in MINIATURES.rglob("*") if path.is_file())
    print(f"{size:,} bytes")
    assert size <= LIMIT


def test_miniature_configs_have_no_local_paths():
    assert not [path for path in MINIATURES.rglob("*.json") if "_name_or_path" in path.read_text("utf-8")]
