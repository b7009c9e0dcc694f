"""Files as the nodes and the command line take them: alone, joined, in dropdowns, and from ComfyUI's folders."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.cli import main
from comfyui_tpu.cli.common_arguments import workflow_folders
from comfyui_tpu.nodes import lora
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.graph import list_generations
from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
from comfyui_tpu.nodes.headless import model_folders
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.model import LOADER, join_model_id
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.test_single_files import write_all
from comfyui_tpu.tests.support import fake_hub
from comfyui_tpu.tests.support.fake_hub import FakeHub
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import content_hash, file_resolution, tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec, published
from comfyui_tpu.tpu_runtime.progress import SilentProgress

WAN = lookup_spec("wan2.1-t2v-14b")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with fake_hub.serve() as found:
        yield found


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """A ComfyUI whose folders hold a miniature's files, one of them in an extra path."""
    source, home = tiny.ensure_random(WAN), tmp_path / "ComfyUI"
    write, models = single_files.write, home / "models"
    write(models / "diffusion_models" / "wan_t2v_14B.safetensors", source / "transformer", "WanTransformer3DModel")
    write(models / "clip" / "umt5.safetensors", source / "text_encoder", "UMT5EncoderModel")
    write(tmp_path / "disk" / "vaes" / "vae" / "wan_vae.safetensors", source / "vae", "AutoencoderKLWan")
    (home / "extra_model_paths.yaml").write_text("a111:\n  base_path: ../disk/vaes\n  vae: |\n    vae\nempty:\n")
    return home


def workflow(**inputs: str) -> dict:
    return {
        "1": {"class_type": "TPUModelLoader", "inputs": {"family": "Wan21", **inputs}},
        "2": {"class_type": "Wan21TPUSampler", "inputs": {"model": ["1", 0], "height": 64, "width": 64}},
    }


def test_resolve_single_file_finds_other_parts_in_comfyui_folders(comfyui: Path):
    folders = model_folders.find_model_folders(comfyui)
    assert [Path(folder).name for folder in folders] == ["diffusion_models", "clip", "vae"]
    model = choose_model(WAN, "wan_t2v_14B.safetensors", folders=folders)
    found = file_resolution.resolve(model.model_id, [WAN], folders)
    assert {name: held.path.name for name, held in found.parts.items()} == {
        "transformer": "wan_t2v_14B.safetensors", "text_encoder": "umt5.safetensors", "vae": "wan_vae.safetensors",
    }  # fmt: skip
    digests = {content_hash.hash_model(model.model_id, folders, SilentProgress()) for _ in range(2)}
    assert len(digests) == 1


def test_find_lora_searches_comfyui_folders_and_extra_paths(
    comfyui: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Its own one, and those of its extra paths."""
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    extra = "a111:\n  base_path: ../disk\n  loras: |\n    styles\n    more\n"
    (comfyui / "extra_model_paths.yaml").write_text(extra)
    options = argparse.Namespace(input=tmp_path, workflow=tmp_path / "workflow.json")
    folders = workflow_folders(options, tmp_path)
    own, *others = map(Path, folders.loras)
    assert own == comfyui / "models" / "loras" and [path.name for path in others] == ["styles", "more"]
    for folder, name in ((own, "a.safetensors"), (others[1], "b.safetensors")):
        folder.mkdir(parents=True)
        (folder / name).touch()
        assert lora.find_lora(folders, lora_name=name).resolve() == (folder / name).resolve()
    with raises_message(ValueError, "lora.name_not_found", loras=re.compile("loras or .*styles or .*more")):
        lora.find_lora(folders, lora_name="c.safetensors")


def test_join_model_id_adds_chosen_files(comfyui: Path):
    folders = Folders(models=model_folders.find_model_folders(comfyui))
    given = {"model_id": "wan_t2v_14B.safetensors", "vae": "wan_vae.safetensors", "text_encoder": "auto"}
    assert join_model_id(given) == "wan_t2v_14B.safetensors + wan_vae.safetensors"
    (model, _), *_ = list_generations(workflow(**given), folders, HEADLESS_NODES)
    assert (model.spec_name, model.model_id) == (WAN.name, join_model_id(given))
    LOADER.validate_constants(folders, {"family": "Wan21", **given})
    with raises_message(
        CheckpointError, "checkpoint.no_such_file", entry="other.safetensors", hint="checkpoint.did_you_mean"
    ):
        LOADER.validate_constants(folders, {"family": "Wan21", **given, "vae": "other.safetensors"})


def test_loader_workflow_without_file_inputs_uses_defaults():
    old = {"model_id": "tiny/wan21", "family": "Wan21", "precision": "auto"}
    assert LOADER.values(old)["vae"] == "auto"
    LOADER.validate_constants(Folders(), old)
    LOADER.validate_constants(Folders(), {"model_id": "someone/another", "family": "Wan21"})


def test_make_tiny_replaces_files_by_tiny_model():
    found = workflow(model_id="wan2.1_t2v_14B_fp8_scaled.safetensors", vae="wan_2.1_vae.safetensors")
    make_tiny(found)
    assert join_model_id(found["1"]["inputs"]) == "tiny/wan21"


def test_choose_model_missing_part_names_file_to_download(tmp_path: Path):
    transformer = next(path for path in write_all(WAN, tmp_path) if "wan2.1" in Path(path).name)
    repository = "Comfy-Org/Wan_2.1_ComfyUI_repackaged"
    file = Expected("hub.file_of_model", name="umt5_xxl_fp16.safetensors", model_id=repository)
    with raises_message(
        CheckpointError, "checkpoint.component_not_found", what=file, models_folder="text_encoders",
        hub_id=WAN.published.hub_id, separator=" + ",
    ):  # fmt: skip
        choose_model(WAN, transformer)


def test_cli_warmup_accepts_single_files(comfyui: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_PATH", str(comfyui))
    path = tmp_path / "workflow.json"
    nodes = workflow(model_id="tiny/random-wan21")
    path.write_text(json.dumps(nodes))
    arguments = ["warmup", "--model", f"wan_t2v_14B.safetensors + {WAN.miniature.random_id}", "--precision", "float32"]
    sizes = ["--height", "64", "--width", "64", "--num-frames", "1", "--num-inference-steps", "1"]
    assert main.main([*arguments, *sizes]) == 0


def test_cli_download_files_fills_comfyui_folders(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    wanted = published.list_files(WAN.name, "fp8")
    repositories = {file.repository: tmp_path / file.repository for file in wanted}
    for file in wanted:
        path = repositories[file.repository] / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.name.encode() * 1000)
    server.use(monkeypatch, tmp_path / "hf", repositories)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "ComfyUI"))
    assert main.main(["download", WAN.name, "--files", "fp8"]) == 0
    found = {
        path.relative_to(tmp_path / "ComfyUI" / "models") for path in (tmp_path / "ComfyUI").rglob("*.safetensors")
    }
    assert {str(path) for path in found} == {
        "diffusion_models/wan2.1_t2v_14B_fp8_scaled.safetensors",
        "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        "vae/wan_2.1_vae.safetensors",
    }
    said = capsys.readouterr().out
    assert "complete: model_id is wan2.1_t2v_14B_fp8_scaled.safetensors" in said and "to download: " in said
    assert main.main(["download", WAN.name, "--files", "fp4"]) == 2
    assert "known is fp8 or fp16" in capsys.readouterr().err
    # What is there is not asked for again.
    server.asked.clear()
    assert main.main(["download", WAN.name, "--files", "fp8"]) == 0 and not server.weights()


def test_published_file_sets_cover_components_of_their_models():
    for name, formats in published.SETS.items():
        spec = lookup_spec(name)
        for files in formats.values():
            assert sum(file.folder == "diffusion_models" for file in files) == len(spec.denoiser.experts)
            folders = {"text_encoders" if "text" in part.folder else part.folder for part in spec.components}
            kinds = {"transformer": "diffusion_models", "transformer_2": "diffusion_models"}
            kinds |= {"image_encoder": "clip_vision"}
            assert {kinds.get(folder, folder) for folder in folders} == {file.folder for file in files}


@pytest.mark.parametrize("name", published.SETS)
def test_resolve_published_file_set_gives_its_model(name: str, tmp_path: Path):
    """Also where only the names tell it: 480p or 720p, base or distilled, text or picture to video."""
    spec = lookup_spec(name)
    family = [one for one in SPECS if one.family == spec.family]
    written = {
        folder: single_files.write_folder(tmp_path / folder, tiny.ensure_random(spec), spec, folder)
        for folder in dict.fromkeys(part.folder for part in spec.components)
    }
    for kind, files in published.SETS[name].items():
        folders = [part.folder for part in spec.components]
        paths = []
        for file in files:
            own = PARTS.get(file.folder, file.folder)
            folder = next(one for one in dict.fromkeys(folders) if one.startswith(own))
            folders = [one for one in folders if one != folder]
            paths.append(tmp_path / kind / file.folder / file.name)
            paths[-1].parent.mkdir(parents=True, exist_ok=True)
            paths[-1].hardlink_to(written[folder])
        model_id = " + ".join([*map(str, paths), spec.miniature.random_id])
        assert file_resolution.resolve(model_id, family).spec.name == name, kind


# What the folders of a model that ComfyUI's are for begin with.
PARTS = {"diffusion_models": "transformer", "text_encoders": "text_encoder", "clip_vision": "image_encoder"}


def test_readme_file_sizes_match_published_sets():
    for page in ("README.md", "README.zh-CN.md"):
        rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
        for name in published.SETS:
            hub_id = lookup_spec(name).published.hub_id
            # A row names a model in full, or its ending after that of another.
            row = next(row for row in rows if f"`{ending(hub_id)}`" in row or f"{hub_id.rpartition('/')[2]}`" in row)
            missing = [
                size for size in published.describe_sizes(name).split(", ") if size.removesuffix(" GB") not in row
            ]
            assert not missing, (page, name, missing)


def ending(hub_id: str) -> str:
    """What tells a model from its siblings: `-5B-I2V`, `-720p_i2v`."""
    for start in ("zai-org/CogVideoX1.5", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers", "Wan-AI/Wan2.1-I2V-14B"):
        if hub_id.startswith(start):
            return hub_id.removeprefix(start)
    return hub_id.removeprefix("black-forest-labs/FLUX.2-klein")
