"""Quantized checkpoints in diffusers layout whose codes are not decoded are refused by the method's name."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.formats import quantization_detect
from comfyui_tpu.tpu_runtime.models import SPECS, spec_for_family
from comfyui_tpu.tpu_runtime.programs import upstream_network
from safetensors.torch import load_file, save_file

SPEC = spec_for_family("Wan21")
LAYER = "blocks.0.attn1.to_q"
FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


def as_torchao(weight: torch.Tensor) -> Tensors:
    return {"_weight_qdata": torch.zeros(weight.shape, dtype=torch.int8), "_weight_scale": torch.ones(len(weight))}


def as_packed_compressed_tensors(weight: torch.Tensor) -> Tensors:
    return {
        "weight_packed": torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32),
        "weight_scale": torch.ones(len(weight), 1, dtype=torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }


def as_modelopt(weight: torch.Tensor) -> Tensors:
    return {
        "weight": weight.to(FP8),
        "weight_quantizer._scale": torch.ones(()),
        "input_quantizer._amax": torch.ones(()),
    }


def as_auto_round_mxfp8(weight: torch.Tensor) -> Tensors:
    return {"weight": weight.to(FP8), "weight_scale": torch.full((len(weight), 1), 127, dtype=torch.uint8)}


def as_gptq(weight: torch.Tensor) -> Tensors:
    return {
        "qweight": torch.zeros(weight.shape[1] // 8, len(weight), dtype=torch.int32),
        "qzeros": torch.zeros(1, len(weight) // 8, dtype=torch.int32),
        "scales": torch.ones(1, len(weight), dtype=torch.float16),
    }


def as_quanto(weight: torch.Tensor) -> Tensors:
    return {"weight._data": torch.zeros(weight.shape, dtype=torch.int8), "weight._scale": torch.ones(len(weight), 1)}


# By writer: what it puts into config.json, if anything, what it makes of a weight, and what names it in the tensors.
WRITERS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors], str]] = {
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {}}}, as_torchao, "torchao"),
    "compressed-tensors, packed": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        as_packed_compressed_tensors,
        "compressed-tensors",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, as_modelopt, "modelopt"),
    "auto-round": ({"quant_method": "auto-round", "data_type": "mx_fp"}, as_auto_round_mxfp8, "scaled F8_E4M3"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, as_gptq, "GPTQ, AWQ or AutoRound"),
    "quanto": ({"quant_method": "quanto", "weights": "int8"}, as_quanto, "quanto"),
}  # fmt: skip


def quantize(folder: Path, make: Callable[[torch.Tensor], Tensors] | None, config: dict[str, Any] | None) -> Path:
    """A copy of the tiny checkpoint whose transformer has one layer as `make` writes it, and `config` beside it."""
    shutil.copytree(tiny.ensure_random(SPEC), folder, copy_function=os.link)
    part = folder / "transformer"
    tensors: Tensors = {}
    for path in part.glob("*.safetensors*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    if make is not None:
        tensors |= {f"{LAYER}.{name}": x for name, x in make(tensors.pop(f"{LAYER}.weight")).items()}
    save_file(tensors, part / "diffusion_pytorch_model.safetensors")
    written = json.loads((part / "config.json").read_text())
    (part / "config.json").unlink()  # a link to the original
    (part / "config.json").write_text(json.dumps(written | ({"quantization_config": config} if config else {})))
    return folder


@pytest.mark.parametrize("writer", WRITERS)
def test_choose_model_quantization_config_raises_checkpoint_error(writer: str, tmp_path: Path):
    config, make, _ = WRITERS[writer]
    folder = quantize(tmp_path / "model", make, config)
    with raises_message(
        CheckpointError,
        "compatibility.quantized",
        title=SPEC.title,
        folder="transformer",
        model_id=folder,
        method=config["quant_method"],
        hub_id=SPEC.published.hub_id,
    ):
        choose_model(SPEC, str(folder))


@pytest.mark.parametrize("writer", WRITERS)
def test_choose_model_quantized_tensors_raise_checkpoint_error(writer: str, tmp_path: Path):
    """Repackaged files often come with the config of the original."""
    _, make, method = WRITERS[writer]
    folder = quantize(tmp_path / "model", make, None)
    with raises_message(
        CheckpointError,
        "file.weights_quantized",
        method=method,
        name=re.compile(f"^{re.escape(LAYER)}[.]"),
        advice="file.codes_unsupported",
    ) as error:
        choose_model(SPEC, str(folder))
    assert "download" not in str(error.value).lower()


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_choose_model_pickled_quantized_weights_name_the_method(part: str, tmp_path: Path):
    """As torchao's were, before it wrote safetensors."""
    folder = quantize(tmp_path / "model", None, None)
    for path in (folder / part).glob("*.safetensors*"):
        path.rename(path.with_suffix(".bin"))
    path = folder / part / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "torchao"}}
    path.unlink()  # a link to the original
    path.write_text(json.dumps(config))
    with raises_message(CheckpointError, "compatibility.quantized", folder=part, method="torchao") as error:
        choose_model(SPEC, str(folder))
    assert "incomplete" not in str(error.value) and "ownload" not in str(error.value)


def test_detect_in_config_finds_nested_quantization():
    assert (
        quantization_detect.detect_in_config({"text_config": {"quantization_config": {"quant_method": "fp8"}}}) == "fp8"
    )
    assert (
        quantization_detect.detect_in_config({"compression_config": {"format": "pack-quantized"}}) == "pack-quantized"
    )
    for nameless in (["what"], {"bits": 4}, {"quant_method": 4}):
        found = quantization_detect.detect_in_config({"quantization_config": nameless})
        assert found == "a method that its config does not name"
    for key in ("quant_method", "quant_algo", "quant_type", "format"):
        assert quantization_detect.detect_in_config({"quantization_config": {key: "x", "bits": 4}}) == "x"
    of_a_part = {"quantization_config": {"quant_method": "fp8"}}
    assert quantization_detect.detect_in_config({"text_config": 3, "task": of_a_part}) is None


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_detect_in_config_of_published_configs_is_none(spec):
    assert not any(quantization_detect.detect_in_config(component.config) for component in spec.components)


def test_choose_model_plain_fp8_cast_is_accepted(tmp_path: Path):
    """`scale_shift_table` is a weight of Wan's blocks, and no scale of its neighbours."""
    folder = quantize(tmp_path / "model", None, None)
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: x.to(FP8) for name, x in load_file(path).items()}
    assert any("scale_shift_table" in name for name in tensors)
    save_file(tensors, path)
    choose_model(SPEC, str(folder))
    headers = checkpoint.read_headers(folder / "transformer", SPEC.component("transformer"))
    assert {tensor.dtype for tensor in headers.values()} == {"F8_E4M3"}


@pytest.mark.parametrize("kind", [FP8, torch.float8_e5m2], ids=str)
def test_read_layer_plain_fp8_matches_cast_values(kind: torch.dtype, tmp_path: Path):
    """As where a LoRA changes it; torch cannot tell whether fp8 is finite."""
    folder = quantize(tmp_path / "model", None, None) / "transformer"
    path = folder / "diffusion_pytorch_model.safetensors"
    cast = {name: x.to(kind) for name, x in load_file(path).items()}
    save_file(cast, path)
    component = SPEC.component("transformer")
    network = upstream_network.build_network(component, component.tiny)
    files = checkpoint.match_weights(network, checkpoint.read_headers(folder, component), folder)
    name = next(name for name, weight in network.weights.items() if f"{LAYER}.weight" in weight.sources)
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, lambda: None)
        alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        layer = weight_loader.read_layer(reader, files[name][0], network.weights[name], alone)
    assert np.array_equal(np.asarray(layer, np.float32), cast[f"{LAYER}.weight"].float().numpy())


def test_match_weights_integer_weight_raises_checkpoint_error(tmp_path: Path):
    folder = quantize(tmp_path / "model", lambda weight: {"weight": torch.zeros(weight.shape, dtype=torch.int8)}, None)
    component = SPEC.component("transformer")
    headers = checkpoint.read_headers(folder / "transformer", component)
    with raises_message(CheckpointError, "checkpoint.weight_not_floating_point", source=f"{LAYER}.weight", dtype="I8"):
        checkpoint.match_weights(upstream_network.build_network(component, component.tiny), headers, folder)


def test_detect_in_tensors_ignores_position_ids():
    """CLIP's published files have them."""
    names = {"embeddings.position_ids": "I64", "embeddings.position_embedding.weight": "F16", "logit_scale": "F32"}
    assert quantization_detect.detect_in_tensors(names) is None


@pytest.mark.parametrize(
    ("names", "found"),
    [
        # bitsandbytes' description of the whole quantization, two names below the weight.
        ({"a.b.weight": "U8", "a.b.weight.quant_state.bitsandbytes__nf4": "U8"}, ("a.b.weight", "bitsandbytes")),
        ({"weight": "I8", "SCB": "F32"}, ("weight", "bitsandbytes")),
        # Two scales, of which one is made of codes too.
        ({"a.weight_scale": "U8", "a.input_scale": "F32"}, ("a.weight_scale", "scaled U8")),
        ({"a.weight_scale": "U8"}, None),
        ({"a.weight_scale": "F32", "a.weight": "I8", "a.b.weight.absmax": "F32"}, ("a.weight", "scaled I8")),
        ({"a.position": "I64", "a.position.table": "F32", "b.scale": "F32"}, None),
        ({"a.weight": "F8_E4M3", "a.bias": "F16"}, None),
    ],
)
def test_detect_in_tensors_finds_codes_by_neighbouring_names(names: dict[str, str], found: tuple[str, str] | None):
    assert quantization_detect.detect_in_tensors(names) == found
    turned = dict(reversed(names.items()))
    assert quantization_detect.detect_in_tensors(turned) == found
