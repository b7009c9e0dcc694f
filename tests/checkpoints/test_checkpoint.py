"""What a wrong model id or a damaged checkpoint says, word for word, and that nothing was loaded before."""

import json
import re
import shutil
from pathlib import Path

import jax
import pytest
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_names
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import stage_files
from comfyui_tpu.tpu_runtime.engine.prompt_cache import PromptCache
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family
from comfyui_tpu.tpu_runtime.programs import upstream_network
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load_file, save_file

SPEC = spec_for_family("Wan21")


def model(model_id: str | Path, **options) -> ModelRef:
    return ModelRef(spec_name=SPEC.name, model_id=str(model_id), precision="float32", **options)


@pytest.fixture
def checkpoint_copy(tmp_path: Path) -> Path:
    """A checkpoint of our own to damage."""
    return Path(shutil.copytree(tiny.ensure_random(SPEC), tmp_path / "model"))


@pytest.mark.parametrize(
    ("model_id", "key", "parameters"),
    [
        ("  ", "checkpoint.model_id_empty", {"hub_id": "Wan-AI/Wan2.1-T2V-14B-Diffusers", "id": "tiny/wan21"}),
        ("tiny/flux2", "checkpoint.model_id_not_built_in", {"model_id": "tiny/flux2", "id": "tiny/wan21"}),
        (
            "/no/such/folder",
            "checkpoint.model_id_not_found",
            {
                "model_id": "/no/such/folder",
                "searched": ["checkpoint.the_path_itself"],
                "hub_id": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            },
        ),
    ],
)
def test_model_check_unknown_id_raises_value_error(model_id: str, key: str, parameters: dict[str, object]):
    with raises_message(ValueError, key, title="Wan 2.1 T2V 14B", **parameters):
        model(model_id).check()


def test_model_check_folder_without_index_raises_value_error(tmp_path: Path):
    with raises_message(
        ValueError, "checkpoint.no_model_index", title="Wan 2.1 T2V 14B", model_id=tmp_path, index="model_index.json"
    ):
        model(tmp_path).check()


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"'])
def test_model_check_index_not_an_object_raises_value_error(checkpoint_copy: Path, content: str):
    (checkpoint_copy / "model_index.json").write_text(content)
    with raises_message(ValueError, "file.json_not_object", path=re.compile(r"model_index\.json$")):
        model(checkpoint_copy).check()


def test_model_check_other_family_raises_value_error(checkpoint_copy: Path):
    (checkpoint_copy / "model_index.json").write_text(json.dumps({"_class_name": "Flux2Pipeline"}))
    with raises_message(
        ValueError,
        "compatibility.pipeline_of_another_node",
        title="Wan 2.1 T2V 14B",
        model_id=checkpoint_copy,
        class_name="Flux2Pipeline",
        pipeline_classes="WanPipeline or WanDMDPipeline or SkyReelsV2Pipeline",
        hub_id="Wan-AI/Wan2.1-T2V-14B-Diffusers",
    ):
        model(checkpoint_copy).check()


def test_model_check_other_component_class_raises_value_error(checkpoint_copy: Path):
    config = checkpoint_copy / "transformer" / "config.json"
    config.write_text(config.read_text().replace("WanTransformer3DModel", "CogVideoXTransformer3DModel"))
    with raises_message(
        ValueError,
        "compatibility.class_wrong",
        folder="transformer",
        class_name="CogVideoXTransformer3DModel",
        title="Wan 2.1 T2V 14B",
        expected_class=re.compile(r"^Wan"),
    ):
        model(checkpoint_copy).check()


def test_model_check_truncated_file_raises_value_error(checkpoint_copy: Path):
    path = checkpoint_copy / "transformer" / "diffusion_pytorch_model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with raises_message(ValueError, "file.safetensors_cut_off", path=path):
        model(checkpoint_copy).check()


def test_model_check_missing_shard_raises_value_error(checkpoint_copy: Path):
    (checkpoint_copy / "vae" / "diffusion_pytorch_model-00003-of-00003.safetensors").unlink()
    with raises_message(
        ValueError,
        "checkpoint.weight_files_missing",
        folder=checkpoint_copy / "vae",
        missing_count=1,
        file_count=2,
        missing="diffusion_pytorch_model-00003-of-00003.safetensors",
    ):
        model(checkpoint_copy).check()


def shard_by_use(folder: Path, spec_name: str, component_name: str) -> dict[str, str]:
    """Writes a component's weights again: a file of those that are loaded, one of the others; gives their names."""
    spec = next(spec for spec in SPECS if spec.name == spec_name)
    component = spec.component(component_name)
    found = Path(shutil.copytree(tiny.ensure_random(spec), folder)) / component.folder
    tensors = {name: value for path in found.glob("*.safetensors") for name, value in load_file(path).items()}
    own = {name: weight_names.to_module_name(name, component.aliases) for name in tensors}
    network = upstream_network.build_network(component, component.tiny)
    loaded = {source for weight in network.weights.values() for source in weight.sources}
    parts = {"loaded": {name for name in tensors if own[name] in loaded}}
    parts["other"] = tensors.keys() - parts["loaded"]
    for path in (*found.glob("*.safetensors"), *found.glob("*.index.json")):
        path.unlink()
    files = {part: f"model-{part}.safetensors" for part in parts}
    weight_map = {name: files[part] for part, names in parts.items() for name in names}
    index = f"{weight_names.WEIGHTS[component.library]}.index.json"
    (found / index).write_text(json.dumps({"weight_map": weight_map}))
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, found / files[part])
    return files


@pytest.mark.parametrize(
    ("spec_name", "component_name"),
    [("flux2-dev", "text_encoder"), ("hunyuanvideo1.5-t2v-720p", "text_encoder"), ("wan2.1-t2v-14b", "vae_decoder")],
)
def test_read_headers_without_unused_shard_succeeds(tmp_path: Path, spec_name: str, component_name: str):
    """A quarter of FLUX.2's text encoder: layers after the last state, the vision tower, the head of a chatbot."""
    files = shard_by_use(tmp_path / "model", spec_name, component_name)
    spec = next(spec for spec in SPECS if spec.name == spec_name)
    folder = tmp_path / "model" / spec.component(component_name).folder
    (folder / files["other"]).unlink()
    ModelRef(spec_name=spec_name, model_id=str(tmp_path / "model")).check()
    component = spec.component(component_name)
    network = upstream_network.build_network(component, component.tiny)
    matched = checkpoint.match_weights(network, checkpoint.read_headers(folder, component), folder)
    assert matched.keys() == network.weights.keys()
    (folder / files["loaded"]).unlink()
    with raises_message(ValueError, "checkpoint.no_weights_or_index", present="none"):
        checkpoint.read_headers(folder, component)


def test_match_weights_needs_every_file_of_read_headers():
    """What `only` and `layers` say of names is what a built network has."""
    for spec in SPECS:
        root = tiny.ensure_random(spec)
        for component in spec.components:
            headers = checkpoint.read_headers(root / component.folder, component)
            network = upstream_network.build_network(component, component.tiny)
            matched = checkpoint.match_weights(network, headers, root / component.folder)
            needed = {file.path for files in matched.values() for file in files}
            assert needed == {file.path for file in headers.values()}, f"{spec.name} {component.name}"


def test_model_check_weight_file_outside_folder_raises_value_error(checkpoint_copy: Path):
    index = checkpoint_copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"] = {name: f"../vae/{file}" for name, file in said["weight_map"].items()}
    index.write_text(json.dumps(said))
    with raises_message(ValueError, "checkpoint.index_names_foreign_file", strange=re.compile(r"^'\.\./vae/")):
        model(checkpoint_copy).check()


@pytest.fixture
def runner() -> Runner:
    return Runner(jax.devices()[:3])


def test_encode_missing_weight_raises_value_error(checkpoint_copy: Path, runner: Runner):
    path = checkpoint_copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.block.1.layer.0.SelfAttention.k.weight"]
    save_file(tensors, path)
    with raises_message(
        ValueError,
        "checkpoint.weight_missing",
        folder=checkpoint_copy / "text_encoder",
        missing="encoder.block.1.layer.0.SelfAttention.k.weight",
    ):
        runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())


def test_encode_nan_weight_raises_value_error(checkpoint_copy: Path, runner: Runner):
    path = checkpoint_copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"][0, 0] = float("nan")
    save_file(tensors, path)
    with raises_message(
        ValueError, "checkpoint.weight_not_finite", path=path, name="encoder.block.1.layer.1.DenseReluDense.wo.weight"
    ):
        runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())
    assert runner.device_cache.list() == ()


def test_model_ref_finds_folder_by_name(checkpoint_copy: Path):
    ref = model("model", folders=("/nowhere", str(checkpoint_copy.parent)))
    ref.check()
    assert ref.locate().root == checkpoint_copy


def test_encode_embedding_under_alternative_name_is_unchanged(checkpoint_copy: Path, runner: Runner):
    path = checkpoint_copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    assert "shared.weight" in tensors
    expected = runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())[0][0][0]
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    save_file(tensors, path)
    runner.free()
    runner.prompt_cache = PromptCache()
    assert (runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())[0][0][0] == expected).all()


@pytest.mark.parametrize("shard", ["80KB", "1GB"], ids=["shards", "one file"])
@pytest.mark.parametrize("variants", [["fp16"], ["bf16", "fp16"], ["fp16", None]], ids=str)
def test_read_headers_prefers_default_weights_over_variants(variants: list[str | None], shard: str, tmp_path: Path):
    """The usual files count where they are there too."""
    import diffusers
    import transformers

    source = tiny.ensure_random(SPEC)
    for kind, name in ((diffusers.AutoencoderKLWan, "vae"), (transformers.UMT5EncoderModel, "text_encoder")):
        network = kind.from_pretrained(source / name)
        component = next(part for part in SPEC.components if part.folder == name)
        for variant in variants:
            network.save_pretrained(tmp_path / name, variant=variant, max_shard_size=shard)
        used = checkpoint.read_headers(tmp_path / name, component)
        shapes = {own: tuple(tensor.shape) for own, tensor in network.named_parameters()}
        # Shards without a tensor that is loaded are left out.
        assert used.keys() <= shapes.keys() | {"encoder.embed_tokens.weight"}
        assert all(file.shape == shapes.get(own, file.shape) for own, file in used.items())
        files = {file.path.name for file in used.values()}
        chosen = None if None in variants else min(map(str, variants))
        assert {next((v for v in ("bf16", "fp16") if f".{v}" in file), None) for file in files} == {chosen}
        assert (len(files) > 1) == (shard == "80KB")


def test_encode_cancelled_while_loading_frees_device_cache(checkpoint_copy: Path, runner: Runner):
    class Cancelled(Exception):
        pass

    class CancelWhileLoading(SilentProgress):
        def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
            if unit == "MiB":
                raise Cancelled

    with pytest.raises(Cancelled):
        runner.encode(model(checkpoint_copy), "cat", "", CancelWhileLoading())
    assert runner.device_cache.list() == ()
    assert runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())


def test_load_latents_of_other_model_raises_value_error(tmp_path: Path):
    (tmp_path / stage_files.CONFIG).write_text(json.dumps({"model_name": "cogvideox1.5-5b"}))
    with raises_message(
        ValueError, "stage_file.of_another_model", folder=tmp_path, writer="cogvideox1.5-5b", spec_name="wan2.1-t2v-14b"
    ):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))


def test_load_latents_missing_or_damaged_file_raises_value_error(tmp_path: Path):
    with raises_message(
        ValueError, "stage_file.missing", path=re.compile(r"stage2_latents\.safetensors$"), stage="denoise"
    ):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
    (tmp_path / stage_files.LATENTS).write_bytes(b"damaged")
    with raises_message(
        ValueError,
        "stage_file.damaged",
        path=re.compile(r"stage2_latents\.safetensors$"),
        again="delete it and run `comfyui-tpu denoise` again",
    ):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
