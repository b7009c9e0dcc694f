"""What a wrong model id or a damaged checkpoint says, word for word, and that nothing was loaded before."""

import json
import shutil
from pathlib import Path

import jax
import pytest
from comfyui_tpu.tests.support.host import Runner
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
    ("model_id", "sentence"),
    [
        (
            "  ",
            "Wan 2.1 T2V 14B: model_id is empty. Enter a Hugging Face id such as Wan-AI/Wan2.1-T2V-14B-Diffusers, a "
            "folder in diffusers layout, or tiny/wan21.",
        ),
        ("tiny/flux2", "Wan 2.1 T2V 14B: model_id is tiny/flux2; its built-in checkpoint is tiny/wan21."),
        (
            "/no/such/folder",
            "Wan 2.1 T2V 14B: model_id is /no/such/folder; there is no such folder (looked at the path itself) and it "
            "is not a Hugging Face id (owner/name) such as Wan-AI/Wan2.1-T2V-14B-Diffusers.",
        ),
    ],
)
def test_model_check_unknown_id_raises_value_error(model_id: str, sentence: str):
    with pytest.raises(ValueError) as error:
        model(model_id).check()
    assert str(error.value) == sentence


def test_model_check_folder_without_index_raises_value_error(tmp_path: Path):
    with pytest.raises(ValueError) as error:
        model(tmp_path).check()
    assert str(error.value) == (
        f"Wan 2.1 T2V 14B: the folder {tmp_path} has no model_index.json; it is not a model in diffusers layout. "
        "Choose the folder that holds model_index.json, transformer/, vae/."
    )


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"'])
def test_model_check_index_not_an_object_raises_value_error(checkpoint_copy: Path, content: str):
    (checkpoint_copy / "model_index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model_index\.json holds a JSON \w+; it must be an object"):
        model(checkpoint_copy).check()


def test_model_check_other_family_raises_value_error(checkpoint_copy: Path):
    (checkpoint_copy / "model_index.json").write_text(json.dumps({"_class_name": "Flux2Pipeline"}))
    with pytest.raises(ValueError) as error:
        model(checkpoint_copy).check()
    assert str(error.value) == (
        f"Wan 2.1 T2V 14B: the checkpoint {checkpoint_copy} is a Flux2Pipeline; this node needs a WanPipeline or "
        "WanDMDPipeline or SkyReelsV2Pipeline, such as Wan-AI/Wan2.1-T2V-14B-Diffusers."
    )


def test_model_check_other_component_class_raises_value_error(checkpoint_copy: Path):
    config = checkpoint_copy / "transformer" / "config.json"
    config.write_text(config.read_text().replace("WanTransformer3DModel", "CogVideoXTransformer3DModel"))
    with pytest.raises(ValueError, match="transformer is a CogVideoXTransformer3DModel; Wan 2.1 T2V 14B needs a Wan"):
        model(checkpoint_copy).check()


def test_model_check_truncated_file_raises_value_error(checkpoint_copy: Path):
    path = checkpoint_copy / "transformer" / "diffusion_pytorch_model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError) as error:
        model(checkpoint_copy).check()
    assert str(error.value).startswith(f"{path} is not a complete safetensors file (")
    assert str(error.value).endswith("it was probably cut off while downloading. Delete it and download it again.")


def test_model_check_missing_shard_raises_value_error(checkpoint_copy: Path):
    (checkpoint_copy / "vae" / "diffusion_pytorch_model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        model(checkpoint_copy).check()
    assert str(error.value) == (
        f"{checkpoint_copy / 'vae'}: 1 of 2 weight files are missing: "
        f"diffusion_pytorch_model-00003-of-00003.safetensors. "
        "Download the checkpoint again."
    )


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
    with pytest.raises(ValueError, match="expected one .safetensors file or an index, found none"):
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
    with pytest.raises(
        ValueError, match=r"names a weight file '\.\./vae/.*'; only \.safetensors files in the same folder are read"
    ):
        model(checkpoint_copy).check()


@pytest.fixture
def runner() -> Runner:
    return Runner(jax.devices()[:3])


def test_encode_missing_weight_raises_value_error(checkpoint_copy: Path, runner: Runner):
    path = checkpoint_copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["encoder.block.1.layer.0.SelfAttention.k.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError) as error:
        runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())
    assert str(error.value) == (
        f"{checkpoint_copy / 'text_encoder'}: the weight "
        f"encoder.block.1.layer.0.SelfAttention.k.weight is missing; the "
        "checkpoint is incomplete. Download it again, or choose another."
    )


def test_encode_nan_weight_raises_value_error(checkpoint_copy: Path, runner: Runner):
    path = checkpoint_copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.block.1.layer.1.DenseReluDense.wo.weight"][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ValueError) as error:
        runner.encode(model(checkpoint_copy), "cat", "", SilentProgress())
    assert str(error.value) == (
        f"{path}: the weight encoder.block.1.layer.1.DenseReluDense.wo.weight holds NaN or infinity; the file is "
        "damaged. Download it again."
    )
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
    with pytest.raises(ValueError) as error:
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
    assert str(error.value) == f"{tmp_path} was made by cogvideox1.5-5b; it cannot be continued with wan2.1-t2v-14b."


def test_load_latents_missing_or_damaged_file_raises_value_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"stage2_latents.safetensors is missing; run `comfyui-tpu denoise --folder"):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
    (tmp_path / stage_files.LATENTS).write_bytes(b"damaged")
    with pytest.raises(
        ValueError, match=r"stage2_latents.safetensors is damaged \(.*\); delete it and run `comfyui-tpu denoise` again"
    ):
        stage_files.load_latents(tmp_path, model("tiny/wan21"))
