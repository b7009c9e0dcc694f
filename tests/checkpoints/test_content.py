"""The mark of a model's files: the same on every machine, another wherever a model was trained further."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import content_hash, tiny
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.progress import SilentProgress

LARGE = content_hash.SAMPLES * content_hash.SAMPLE_BYTES


def mark(folder: Path) -> str:
    return content_hash.hash_model(str(folder), (), SilentProgress())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model/model_index.json", "model/vae/a.safetensors", "model/tokenizer/vocab.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path / "model"


def test_hash_model_folder_depends_on_names_and_contents(folder: Path):
    """Written down, so that jobs are the same on every machine and in the next version."""
    own = mark(folder)
    assert own == "e54f6b0462d1a19a"
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    (folder / "README.md").write_text("no part of the model")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "note.json").write_text("of a download client")
    (folder / "vae" / ".hidden.json").write_text("")
    assert mark(folder) == own
    seen = {own}
    for name in ("a.json", "a.txt", "a.model", "a.jinja", "a.safetensors"):
        (folder / "vae" / name).write_text("new")
        seen.add(mark(folder))
    (folder / "model_index.json").rename(folder / "renamed.json")
    seen.add(mark(folder))
    assert len(seen) == 7


def test_hash_model_finds_folder_by_name_with_surrounding_blanks(folder: Path):
    assert content_hash.hash_model(f" {folder.name} ", (str(folder.parent),), SilentProgress()) == mark(folder)


def test_hash_model_tiny_ids_have_their_own_hashes():
    assert content_hash.hash_model("tiny/random-wan21", (), SilentProgress()) == f"miniature {tiny.VERSION}"
    trained = tiny.find_trained("tiny/wan21")
    assert trained is not None and content_hash.hash_model("tiny/wan21", (), SilentProgress()) == mark(trained)


def test_hash_model_hub_id_is_newest_commit(monkeypatch: pytest.MonkeyPatch):
    progress, asked = SilentProgress(), []

    def snapshot(model_id: str, watching: SilentProgress) -> SimpleNamespace:
        asked.append((model_id, watching))
        return SimpleNamespace(commit="0123abc")

    monkeypatch.setattr(content_hash.hub, "resolve_snapshot", snapshot)
    assert content_hash.hash_model(" owner/name ", (), progress) == "0123abc" and asked == [("owner/name", progress)]


def test_hash_model_invalid_id_raises_checkpoint_error():
    with raises_message(CheckpointError, "checkpoint.model_id_neither_folder_nor_hub_id", model_id="'no model'"):
        content_hash.hash_model("no model", (), SilentProgress())


def file(path: Path, size: int) -> Path:
    path.write_bytes(bytes(size))
    return path


def change(path: Path, place: int) -> None:
    with path.open("r+b") as written:
        written.seek(place)
        written.write(b"x")


@pytest.mark.parametrize("size", [0, 1, LARGE])
def test_hash_file_small_file_depends_on_every_byte(tmp_path: Path, size: int):
    path = file(tmp_path / "a", size)
    marks = {content_hash.hash_file(path), content_hash.hash_file(file(tmp_path / "b", size + 1))}
    assert content_hash.hash_file(file(tmp_path / "c", size)) in marks and all(len(one) == 16 for one in marks)
    for place in {0, size // 2, size - 1} if size else ():
        change(path, place)
        marks.add(content_hash.hash_file(path))
    assert len(marks) == 2 + len({0, size // 2, size - 1} if size else ())


def test_hash_file_large_file_depends_on_size_and_samples(tmp_path: Path):
    size = 2 * LARGE
    path = file(tmp_path / "a", size)
    step = (size - content_hash.SAMPLE_BYTES) / (content_hash.SAMPLES - 1)
    seen = {content_hash.hash_file(path), content_hash.hash_file(file(tmp_path / "b", size + 1))}
    for place in (
        0,
        content_hash.SAMPLE_BYTES - 1,
        int(31 * step) + 5,
        int(32 * step) + 5,
        size - content_hash.SAMPLE_BYTES,
        size - 1,
    ):
        change(path, place)
        seen.add(content_hash.hash_file(path))
    assert len(seen) == 8
    between = content_hash.hash_file(path)
    change(path, content_hash.SAMPLE_BYTES + 5)
    assert content_hash.hash_file(path) == between
