"""Single files in their makers' names give what the folder in diffusers layout gives: tensors, configs, frames."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.single_files import Tensors
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, choose_model, resolve_variant
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS, SPECS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network
from comfyui_tpu.tpu_runtime.progress import SilentProgress

WAN = lookup_spec("wan2.1-t2v-14b")
# A file of two networks is in `tests/models/test_qwen_image_edit.py`.
EACH = [
    spec
    for spec in SPECS
    if len({(part.folder, part.class_name) for part in spec.components}) == len({p.folder for p in spec.components})
]
# What ComfyUI's folders and its repackaged files suggest of a model that tensors do not tell.
HINTS = {"transformer": "{name}", "transformer_2": "{name}_low_noise"}


def file_name(spec: ModelSpec, folder: str) -> str:
    return HINTS.get(folder, folder).format(name=spec.name) + ".safetensors"


def write_all(spec: ModelSpec, home: Path, **options: object) -> list[str]:
    """The paths of a miniature's networks, each in a file of its own."""
    return [
        str(
            single_files.write_folder(home / file_name(spec, folder), tiny.ensure_random(spec), spec, folder, **options)
        )
        for folder in dict.fromkeys(component.folder for component in spec.components)
    ]


def rest(spec: ModelSpec, *files: str) -> str:
    """The model of files, whose tokenizers are those of the miniature."""
    return " + ".join([*files, spec.miniature.random_id])


def own_tensors(spec: ModelSpec, model_id: str, folders: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Every tensor that the model's networks read, by component and name."""
    found, values = checkpoint.locate(spec, model_id, folders), {}
    found.check()
    configs = found.configs(SilentProgress())
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, lambda: None)
        for component in spec.components:
            network = upstream_network.build_network(component, configs[component.name])
            folder = found.fetch_weights(component, SilentProgress())
            files = checkpoint.match_weights(network, checkpoint.read_headers(folder, component), folder)
            for name, weight in network.weights.items():
                for source, file in zip(weight.sources, files[name], strict=True):
                    values[f"{component.name}.{source}"] = reader.slice(file, ())
    return values


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_single_files_of_every_model_match_folder_tensors(spec: ModelSpec, tmp_path: Path):
    files = write_all(spec, tmp_path)
    family = next(one for one in FLAGSHIPS if one.family == spec.family)
    assert resolve_variant(family, rest(spec, *files)).name == spec.name
    ours, theirs = own_tensors(spec, rest(spec, *files)), own_tensors(spec, spec.miniature.random_id)
    # FLUX.2's repackaged Mistral has the layers that are read, and no more.
    assert ours.keys() == theirs.keys()
    assert not [name for name, value in ours.items() if not torch.equal(value, theirs[name])]


@pytest.mark.parametrize("spec", EACH, ids=lambda spec: spec.name)
def test_single_files_configs_match_folder(spec: ModelSpec, tmp_path: Path):
    """Also where the file does not carry one along, but for what tensors do not tell."""
    found = checkpoint.locate(spec, rest(spec, *write_all(spec, tmp_path)))
    folder = checkpoint.locate(spec, spec.miniature.random_id).configs(SilentProgress())
    for name, config in found.configs(SilentProgress()).items():
        component = spec.component(name)
        if component.class_name == "Mistral3ForConditionalGeneration":
            continue  # of fewer layers, see above
        kept = {key: value for key, value in folder[name].items() if not key.startswith("_")}
        assert {key: config.get(key) for key in kept} == kept
    assert dict(found.index(SilentProgress()))["_class_name"] == spec.published.pipeline_classes[0]


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", "net.", "model.model."])
def test_single_file_with_tool_prefix_matches_folder_tensors(prefix: str, tmp_path: Path):
    source = tiny.ensure_random(WAN)
    path = single_files.write(
        tmp_path / "wan.safetensors", source / "transformer", "WanTransformer3DModel", prefix=prefix
    )
    ours, theirs = own_tensors(WAN, rest(WAN, str(path))), own_tensors(WAN, WAN.miniature.random_id)
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_combined_checkpoint_matches_folder_tensors(tmp_path: Path):
    """As ComfyUI's `checkpoints` folder has them."""
    source, tensors, configs = tiny.ensure_random(WAN), {}, {}
    for folder, kind, prefix in (
        ("transformer", "WanTransformer3DModel", "model.diffusion_model."),
        ("text_encoder", "UMT5EncoderModel", "text_encoders.umt5xxl.transformer."),
        ("vae", "AutoencoderKLWan", "vae."),
    ):
        config = json.loads((source / folder / "config.json").read_text())
        configs[folder] = {key: value for key, value in config.items() if not key.startswith("_")}
        own = single_files.makers(kind, config, single_files.load_folder(source / folder))
        tensors |= {prefix + name: value.clone() for name, value in own.items()}
    path = tmp_path / "all_in_one.safetensors"
    single_files.save_file(tensors, path, {"config": json.dumps(configs)})
    ours, theirs = own_tensors(WAN, rest(WAN, str(path))), own_tensors(WAN, WAN.miniature.random_id)
    assert ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def in_format(dtype: torch.dtype) -> object:
    def change(tensors: Tensors) -> Tensors:
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}

    return change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_single_files_unscaled_dtype_is_a_cast(dtype: torch.dtype, tmp_path: Path):
    files = write_all(WAN, tmp_path, change=in_format(dtype))
    ours, theirs = own_tensors(WAN, rest(WAN, *files)), own_tensors(WAN, WAN.miniature.random_id)
    assert all(torch.equal(value.float(), theirs[name].to(dtype).float()) for name, value in ours.items())


def test_single_file_missing_parts_use_most_exact_file_found(tmp_path: Path):
    source = tiny.ensure_random(WAN)
    models = {name: tmp_path / name for name in ("diffusion_models", "text_encoders", "vae", "clip_vision")}
    write = single_files.write
    write(models["diffusion_models"] / "wan.safetensors", source / "transformer", "WanTransformer3DModel")
    write(models["vae"] / "sub" / "wan_vae.safetensors", source / "vae", "AutoencoderKLWan")
    encoder, kind = source / "text_encoder", "UMT5EncoderModel"
    write(models["text_encoders"] / "a_fp16.safetensors", encoder, kind, change=in_format(torch.float16))
    write(models["text_encoders"] / "b.safetensors", encoder, kind)
    write(models["text_encoders"] / "c_fp16.safetensors", encoder, kind, change=in_format(torch.float16))
    (models["text_encoders"] / "broken.safetensors").write_bytes(b"x" * 1000)
    folders = tuple(str(folder) for folder in models.values())
    ours, theirs = own_tensors(WAN, "wan.safetensors", folders), own_tensors(WAN, WAN.miniature.random_id)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(
    "spec", slower(FLAGSHIPS, *(spec for spec in FLAGSHIPS if spec is not WAN)), ids=lambda spec: spec.name
)
def test_single_files_frames_match_folder(spec: ModelSpec, tmp_path: Path, compare: Callable):
    """Not to the bit, as the tensors are: a Mistral of fewer layers is another program, which may round elsewhere."""
    files = write_all(spec, tmp_path)
    theirs, ours = (generate(spec, model_id) for model_id in (spec.miniature.random_id, rest(spec, *files)))
    compare(f"{spec.name} of files", ours, theirs)
    assert theirs.std() > 0


def generate(spec: ModelSpec, model_id: str) -> np.ndarray:
    runner = engine(1)
    model = ModelRef(spec_name=spec.name, model_id=model_id, precision="float32")
    frames = 5 if spec.is_image or spec.inputs["num_frames"].problem(5) is None else 9
    sizes = {**spec.miniature.inputs, **({} if spec.is_image else {"num_frames": frames}), "num_inference_steps": 2}
    settings = spec.settings(**{name: value for name, value in sizes.items() if name in spec.inputs})
    embeds = runner.encode(model, "cat", "dog", SilentProgress())
    condition = None
    if spec.needs_condition:
        generator = torch.Generator().manual_seed(3)
        picture = torch.rand(1, settings.height, settings.width, 3, generator=generator)
        condition = runner.encode_image(model, picture, settings, SilentProgress())
    latents = runner.denoise(model, settings, *embeds, SilentProgress(), condition)
    return np.asarray(runner.decode(model, latents, SilentProgress()))


def test_single_files_two_experts_require_high_noise_first(tmp_path: Path):
    spec = lookup_spec("wan2.2-i2v-a14b")
    source = tiny.ensure_random(spec)
    write = single_files.write
    high, low = (
        str(write(tmp_path / f"wan2.2_i2v_{name}_noise_14B.safetensors", source / folder, "WanTransformer3DModel"))
        for name, folder in (("high", "transformer"), ("low", "transformer_2"))
    )
    ours, theirs = own_tensors(spec, rest(spec, high, low)), own_tensors(spec, spec.miniature.random_id)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    with raises_message(CheckpointError, "checkpoint.low_noise_first"):
        choose_model(spec, rest(spec, low, high))
    with raises_message(CheckpointError, "checkpoint.second_expert_missing"):
        choose_model(spec, high)
