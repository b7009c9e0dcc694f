"""Files of networks beside a denoiser that are damaged, of another network, or contradict themselves."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints.controls import ControlFile, check_fits, read_control
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_partial_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs.upstream_network import build_network
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Z_IMAGE, QWEN_IMAGE = lookup_spec("z-image-turbo"), lookup_spec("qwen-image-2512")
WRONG_SHAPE = "checkpoint.shape_contradicts_other_tensors"
SIZES = {
    "z-image-turbo": {
        "dim": 24, "n_heads": 2, "n_kv_heads": 2, "control_in_dim": 33, "control_layers_places": (0, 10, 20),
    },
    "qwen-image-2512": {
        "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4), "num_attention_heads": 2, "joint_attention_dim": 12,
        "num_layers": 2,
    },
}  # fmt: skip


def write(path: Path, model: str, change: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> str:
    component = lookup_spec(model).denoiser.controls[0].component
    network = build_network(component, {**component.config, **SIZES[model]})
    back = {own: theirs for theirs, own in component.aliases.items()}

    def published(name: str) -> str:
        start = max((own for own in back if name.startswith(own)), key=len, default="")
        return back.get(start, "") + name.removeprefix(start)

    tensors = {
        published(source): torch.full(weight.tensor_shape, 0.1)
        for weight in network.weights.values()
        for source in weight.sources
    }
    save_file(change(tensors), path)
    return str(path)


def denoiser(model: str, **changes: object) -> Mapping[str, object]:
    config = {**lookup_spec(model).component("transformer").config, **SIZES[model], **changes}
    return {**config, "n_layers": 30, "n_refiner_layers": 2} if "dim" in config else config


def match(file: ControlFile) -> None:
    file.match_weights(build_network(file.spec.component, file.config))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if name not in key}


def with_tensor(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


@pytest.mark.parametrize("model", SIZES)
def test_control_file_of_known_network_matches_its_denoiser(model: str, tmp_path: Path):
    file = read_control(write(tmp_path / "control.safetensors", model))
    assert {name: file.config[name] for name in SIZES[model] if name != "axes_dims_rope"} == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in SIZES[model].items()
        if name != "axes_dims_rope"
    }
    check_fits(file, lookup_spec(model), denoiser(model))


def test_control_file_with_zero_projection_is_version_2_0(tmp_path: Path):
    """Core tells it by the first refiner's projection, of files with 15 layers only."""
    path = tmp_path / "control.safetensors"

    def extend(tensors: Tensors) -> Tensors:
        longer = {
            name.replace("control_layers.1.", f"control_layers.{layer}."): tensor.clone()
            for name, tensor in tensors.items()
            for layer in range(1, 15)
            if name.startswith("control_layers.1.")
        }
        return {**tensors, **longer, "control_noise_refiner.0.after_proj.weight": torch.zeros(24, 24)}

    assert read_control(write(path, "z-image-turbo", extend)).config["_refined_by_layers"] is True
    assert read_control(write(tmp_path / "lite.safetensors", "z-image-turbo")).config["_refined_by_layers"] is False


@pytest.mark.parametrize(
    ("model", "change", "key"),
    [
        ("z-image-turbo", without("control_layers.2."), "control.layer_count_unsupported"),
        ("z-image-turbo", with_tensor("control_layers.999999.after_proj.weight", 1), "control.layer_count_unsupported"),
        ("z-image-turbo", with_tensor("control_layers.0.attention.norm_q.weight", 0), "file.weight_dimensions_wrong"),
        ("z-image-turbo", with_tensor("control_all_x_embedder.2-1.weight", 24), "file.weight_dimensions_wrong"),
        ("z-image-turbo", without("attention.norm_q"), "file.weight_missing"),
        ("qwen-image-2512", with_tensor("txt_in.weight", 16), "file.weight_dimensions_wrong"),
        ("qwen-image-2512", without("controlnet_x_embedder.weight"), "file.no_known_network"),
    ],
)
def test_control_file_of_wrong_tensors_is_refused_when_read(
    model: str, change: Callable[[Tensors], Tensors], key: str, tmp_path: Path
):
    path = write(tmp_path / "control.safetensors", model, change)
    with pytest.raises(CheckpointError) as raised:
        read_control(path)
    assert raised.value.args[0].key in (key, "file.network_unsupported"), raised.value


@pytest.mark.parametrize(
    ("model", "change", "key"),
    [
        ("z-image-turbo", with_tensor("control_layers.1.after_proj.weight", 24, 12), WRONG_SHAPE),
        ("z-image-turbo", without("control_layers.1.after_proj.weight"), "checkpoint.weight_missing"),
        ("z-image-turbo", with_tensor("control_layers.1.more.weight", 2), "checkpoint.weight_unexpected"),
        ("qwen-image-2512", with_tensor("controlnet_blocks.1.weight", 3, 3), WRONG_SHAPE),
    ],
)  # fmt: skip
def test_control_file_of_wrong_tensors_is_refused_before_loading(
    model: str, change: Callable[[Tensors], Tensors], key: str, tmp_path: Path
):
    file = read_control(write(tmp_path / "control.safetensors", model, change))
    with raises_message(CheckpointError, key):
        match(file)


@pytest.mark.parametrize(
    ("model", "of", "changes", "key"),
    [
        ("z-image-turbo", "qwen-image-2512", {}, "control.of_another_model"),
        ("qwen-image-2512", "z-image-turbo", {}, "control.of_another_model"),
        ("z-image-turbo", "z-image-turbo", {"dim": 48}, "control.does_not_fit"),
        ("qwen-image-2512", "qwen-image-2512", {"joint_attention_dim": 24}, "control.does_not_fit"),
    ],
)
def test_control_file_of_another_denoiser_is_refused(
    model: str, of: str, changes: Mapping[str, object], key: str, tmp_path: Path
):
    file = read_control(write(tmp_path / "control.safetensors", of))
    with raises_message(CheckpointError, key):
        check_fits(file, lookup_spec(model), denoiser(model, **changes))


def test_control_file_with_too_few_layers_of_denoiser_is_refused(tmp_path: Path):
    file = read_control(write(tmp_path / "control.safetensors", "z-image-turbo"))
    with raises_message(CheckpointError, "control.does_not_fit"):
        check_fits(file, Z_IMAGE, {**denoiser("z-image-turbo"), "n_layers": 20})


def test_truncated_or_missing_control_file_is_refused(tmp_path: Path):
    path = Path(write(tmp_path / "control.safetensors", "z-image-turbo"))
    path.write_bytes(path.read_bytes()[:-100])
    with raises_message(CheckpointError, "file.safetensors_cut_off"):
        read_control(str(path))
    for name in ("none.safetensors", "a\0b.safetensors"):
        with raises_message(CheckpointError, "file.unreadable"):
            read_control(str(tmp_path / name))


def test_denoiser_and_control_files_are_refused_in_place_of_each_other(tmp_path: Path):
    path = write(tmp_path / "control.safetensors", "qwen-image-2512")
    with pytest.raises(CheckpointError):
        choose_partial_model([QWEN_IMAGE], path)
    tensors = {"txt_norm.weight": torch.ones(8), "img_in.weight": torch.ones(8, 64)}
    other = tmp_path / "denoiser.safetensors"
    save_file({**tensors, "transformer_blocks.0.img_mod.1.weight": torch.ones(8, 8)}, other)
    with raises_message(CheckpointError, "control.file_of_another_kind"):
        read_control(str(other))
