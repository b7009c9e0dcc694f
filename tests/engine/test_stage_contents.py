"""Stage files hold what was saved into them, under names that other programs can read."""

import os
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import stage_files, stage_values
from safetensors import safe_open

MODEL = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21")
PICTURE_MODEL = ModelRef(spec_name="wan2.2-i2v-a14b", model_id="tiny/wan22i2v")
CARRIED_STATE = {
    "solver": "0a" * 32, "samples": "0b" * 32, "begin": 1, "step": 2, "state": torch.rand(2, 1, 16, 1, 2, 2),
    "generator": torch.Generator().get_state(), "origin": torch.rand(1, 16, 1, 2, 2),
}  # fmt: skip


def latents() -> dict[str, Any]:
    return {"samples": torch.rand(1, 16, 2, 8, 8)}


def test_save_embeddings_round_trips_embeddings_and_condition(tmp_path: Path):
    """Names and numbers are the file's own, so that other programs read them."""
    folder = tmp_path / "new" / "folder"
    given = [[torch.rand(1, 4, 6), {"tpu_family": "Wan22I2V", "length": 3}]]
    negative = [[torch.rand(1, 4, 6), {"tpu_family": "Wan22I2V", "length": 2}]]
    condition = {
        "tpu_family": "Wan22I2V", "height": 64, "width": 48, "num_frames": 5, "tensors": {"condition": torch.rand(2)},
    }  # fmt: skip
    stage_files.save_embeddings(folder, given, negative, PICTURE_MODEL, condition)
    with safe_open(folder / stage_files.EMBEDDINGS, framework="pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert names == {"prompt_embeds", "negative_prompt_embeds", "condition.condition"}
    assert metadata == {
        "made_by": "comfyui-tpu", "prompt_embeds.length": "3", "negative_prompt_embeds.length": "2",
        "condition.height": "64", "condition.width": "48", "condition.num_frames": "5",
    }  # fmt: skip
    for expected, found in zip((given, negative), stage_files.load_embeddings(folder, PICTURE_MODEL), strict=True):
        assert torch.equal(found[0][0], expected[0][0]) and found[0][1].items() >= expected[0][1].items()
    found = stage_files.load_condition(folder, PICTURE_MODEL)
    assert torch.equal(found.pop("tensors")["condition"], condition.pop("tensors")["condition"])
    assert found == condition
    made_by = {"model_name": PICTURE_MODEL.spec_name, "model_id": PICTURE_MODEL.model_id}
    assert stage_files.read_config(folder) == made_by
    assert sorted(path.name for path in folder.iterdir()) == sorted([stage_files.EMBEDDINGS, stage_files.CONFIG])
    stage_files.save_embeddings(folder, given, None, PICTURE_MODEL)
    assert stage_files.load_condition(folder, PICTURE_MODEL) is None
    assert stage_files.load_embeddings(folder, PICTURE_MODEL)[1] is None


def test_save_latents_round_trips_samples_and_solver_state(tmp_path: Path):
    given = latents()
    stage_files.save_latents(tmp_path, given, MODEL)
    assert stage_files.read_config(tmp_path) == {"model_name": MODEL.spec_name, "model_id": MODEL.model_id}
    found = stage_files.load_latents(tmp_path, MODEL)
    assert set(found) == {"samples"} and torch.equal(found["samples"], given["samples"])
    stage_files.save_latents(tmp_path, {**given, stage_values.SOLVER_KEY: CARRIED_STATE}, MODEL)
    found = stage_files.load_latents(tmp_path, MODEL)
    assert torch.equal(found["samples"], given["samples"]) and set(found) == {"samples", stage_values.SOLVER_KEY}
    for name, value in CARRIED_STATE.items():
        other = found[stage_values.SOLVER_KEY][name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
    with safe_open(tmp_path / stage_files.LATENTS, framework="pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} == {"latents", "solver"}  # noqa: SIM118 - no dict


def test_update_config_merges_settings_as_readable_json(tmp_path: Path):
    stage_files.update_config(tmp_path, {"prompt": "ein Bär", "seed": 1})
    stage_files.update_config(tmp_path, {"seed": 2})
    assert stage_files.read_config(tmp_path) == {"prompt": "ein Bär", "seed": 2}
    assert (tmp_path / stage_files.CONFIG).read_text("utf-8") == '{\n  "prompt": "ein Bär",\n  "seed": 2\n}'


def test_list_stage_files_returns_modification_times(tmp_path: Path):
    assert stage_files.list_stage_files(tmp_path) == {}
    stage_files.save_latents(tmp_path, latents(), MODEL)
    os.utime(tmp_path / stage_files.LATENTS, ns=(5_000_000_007, 5_000_000_007))
    assert stage_files.list_stage_files(tmp_path) == {stage_files.LATENTS: 5_000_000_007}


def test_load_stage_files_of_other_model_raises_stage_file_error(tmp_path: Path):
    stage_files.save_latents(tmp_path, latents(), MODEL)
    for load in (stage_files.load_latents, stage_files.load_embeddings, stage_files.load_condition):
        with raises_message(
            stage_files.StageFileError,
            "stage_file.of_another_model",
            folder=tmp_path,
            writer="wan2.1-t2v-14b",
            spec_name="wan2.2-i2v-a14b",
        ):
            load(tmp_path, PICTURE_MODEL)
    for load in (stage_files.load_embeddings, stage_files.load_condition):
        path = tmp_path / stage_files.EMBEDDINGS
        with raises_message(
            stage_files.StageFileError, "stage_file.missing", path=path, stage="encode", folder=tmp_path
        ):
            load(tmp_path, MODEL)
