"""Quantised layers, as their writers lay them out, are the numbers that the writers' own code makes of them.

The oracles are `comfy-kitchen`'s CPU backend (ComfyUI's formats) and `gguf`'s own arithmetic.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
from comfyui_tpu.tpu_runtime.files import CheckpointError, TensorFile
from comfyui_tpu.tpu_runtime.formats import decode, gguf_file, quantization, single_file
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
FP8, FP8_WIDE = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 96, 256


def weight(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def mark(**said: object) -> torch.Tensor:
    """ComfyUI's description of a layer."""
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def read(tmp_path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> dict[str, TensorFile]:
    save_file(tensors, tmp_path / "file.safetensors", metadata)
    return quantization.decode_tensors(*single_file.read_safetensors_header(tmp_path / "file.safetensors"))


def is_close(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    """Whether two pieces, which may be empty, differ by at most `bound` of the other's largest value."""
    return one.shape == other.shape and (not one.numel() or difference(one, other) <= bound)


def value(file: TensorFile, *index: slice) -> torch.Tensor:
    import contextlib

    with contextlib.ExitStack() as stack:
        return weight_loader.TensorReader(stack, lambda: None).slice(file, index)


PIECES = [
    (slice(None), slice(None)),
    (slice(0, 24), slice(None)),
    (slice(72, 96), slice(64, 192)),
    (slice(5, 6), slice(17, 50)),
    (slice(10, 10), slice(None)),
]


def holds_in_pieces(file: TensorFile, whole: torch.Tensor) -> None:
    """Any part is that part of all of it."""
    assert torch.equal(value(file), whole)
    for piece in PIECES:
        assert torch.equal(value(file, *piece), whole[piece]), piece


def make_scaled_fp8(scale: torch.Tensor, dtype: torch.dtype = FP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and what they stand for: w.float() * scale."""
    stored = (weight() / 0.05).to(dtype)
    return stored, stored.float() * scale


SCALES = {
    "of all": torch.tensor(0.013),
    "of all, in a list": torch.tensor([0.013]),
    "of rows": torch.rand(ROWS, 1) + 0.1,
    "of blocks": torch.rand(ROWS, 4, 1) + 0.1,
}


@pytest.mark.parametrize("dtype", [FP8, FP8_WIDE], ids=str)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("form", ["ComfyUI's first", "a mark", "metadata", "bare"])
def test_scaled_fp8_is_codes_times_scale(form: str, kind: str, dtype: torch.dtype, tmp_path: Path):
    scale = SCALES[kind]
    spread = scale.flatten(1).repeat_interleave(COLUMNS // 4, 1) if scale.ndim == 3 else scale
    stored, wanted = make_scaled_fp8(spread, dtype)
    name = "scale_weight" if form == "ComfyUI's first" else "weight_scale"
    tensors = {"a.weight": stored, f"a.{name}": scale, "a.bias": torch.ones(ROWS), "a.input_scale": torch.ones(())}
    said = {"format": "float8_e4m3fn" if dtype == FP8 else "float8_e5m2"}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": said}})} if form == "metadata" else None
    tensors |= {"a.comfy_quant": mark(**said)} if form == "a mark" else {}
    tensors |= {"scaled_fp8": torch.zeros(2, dtype=dtype)} if form == "ComfyUI's first" else {}
    found = read(tmp_path, tensors, metadata)
    assert found.keys() == {"a.weight", "a.bias"}
    holds_in_pieces(found["a.weight"], wanted)


def test_fp8_stored_as_bytes_uses_described_format(tmp_path: Path):
    stored, wanted = make_scaled_fp8(torch.tensor(0.5), FP8_WIDE)
    tensors = {"a.weight": stored.view(torch.uint8), "a.weight_scale": torch.tensor(0.5)}
    found = read(tmp_path, {**tensors, "a.comfy_quant": mark(format="float8_e5m2")})
    holds_in_pieces(found["a.weight"], wanted)


def test_fp8_with_128_blocks_matches_transformers_layout(tmp_path: Path):
    stored = (weight(200, 300) / 0.05).to(FP8)
    scale = torch.rand(2, 3) + 0.1
    wanted = stored.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    found = read(tmp_path, {"a.weight": stored, "a.weight_scale_inv": scale})
    assert torch.equal(value(found["a.weight"]), wanted)
    assert torch.equal(value(found["a.weight"], slice(100, 150), slice(120, 260)), wanted[100:150, 120:260])


# Shapes of weights, of their scales, and of the tiles that transformers' own code makes of the two.
GRIDS = {
    "of all": ((96, 256), (), (96, 256)),
    "of all, in a list": ((96, 256), (1,), (96, 256)),
    "of all, in two dimensions": ((96, 256), (1, 1), (96, 256)),
    "of rows": ((96, 256), (96, 1), (1, 256)),
    "of rows and blocks of columns": ((96, 256), (96, 2), (1, 128)),
    "of tiles of 64": ((192, 256), (3, 4), (64, 64)),
    "of tiles of 32": ((96, 256), (3, 8), (32, 32)),
    "of tiles of two sides": ((96, 256), (6, 2), (16, 128)),
    "of tiles of 64, the last cut off": ((151, 256), (3, 4), (64, 64)),
    "of tiles of 128, the last cut off": ((200, 300), (2, 3), (128, 128)),
}


@pytest.mark.parametrize("case", GRIDS)
def test_fp8_with_transformers_scales_matches_transformers(case: str, tmp_path: Path):
    from transformers.integrations import finegrained_fp8

    shape, grid, tile = GRIDS[case]
    stored = (weight(*shape) / 0.05).to(FP8)
    scale = torch.rand(grid, generator=torch.Generator().manual_seed(1)) + 0.1
    wanted = finegrained_fp8._dequantize_fp8_weight(
        stored.clone(), scale, list(tile) if scale.numel() > 1 else None, torch.float32
    )
    found = read(tmp_path, {"a.weight": stored, "a.weight_scale_inv": scale})
    assert found.keys() == {"a.weight"}
    assert torch.equal(value(found["a.weight"]), wanted)
    assert torch.equal(value(found["a.weight"], slice(30, 77), slice(40, 201)), wanted[30:77, 40:201])


def test_fp8_layers_without_scale_are_cast_in_mixed_file(tmp_path: Path):
    """As ComfyUI takes them: of another network of the file, and of another layer of the same."""
    stored, wanted = make_scaled_fp8(torch.tensor(0.013))
    tensors = {
        "net.blocks.0.q.weight": stored, "net.blocks.0.k.weight": stored,
        "net.blocks.0.k.scale_weight": torch.tensor(0.013),
        "text_encoders.t5.blocks.0.q.weight": stored, "text_encoders.t5.blocks.0.q.scale_weight": torch.tensor(0.013),
        "text_encoders.t5.scaled_fp8": torch.zeros(2, dtype=FP8), "vae.conv.weight": stored,
    }  # fmt: skip
    found = read(tmp_path, {name: tensor.clone() for name, tensor in tensors.items()})
    plain = {"net.blocks.0.q.weight", "vae.conv.weight"}
    assert found.keys() == {*plain, "net.blocks.0.k.weight", "text_encoders.t5.blocks.0.q.weight"}
    for name, tensor in found.items():
        assert torch.equal(value(tensor).float(), stored.float() if name in plain else wanted), name


# Layers of a file, and which of them have a scale; ComfyUI casts the rest.
SOME_SCALED = {
    "the first block alone": (["blocks.0.q", "blocks.1.q", "blocks.2.q"], ["blocks.0.q"]),
    "all blocks but the last": (["blocks.0.q", "blocks.1.q", "blocks.2.q"], ["blocks.0.q", "blocks.1.q"]),
    "other layers of each block": (["a.0.q", "a.0.k", "a.1.q", "a.1.k"], ["a.0.q", "a.1.k"]),
}


@pytest.mark.parametrize("form", ["scale_weight", "comfy_quant", "metadata"])
@pytest.mark.parametrize("case", SOME_SCALED)
def test_fp8_layer_without_scale_matches_comfyui_cast(
    case: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """By core's `convert_old_quants` and its class of layers: one without a description is a cast."""
    layers, with_scale = SOME_SCALED[case]
    stored, wanted = make_scaled_fp8(torch.tensor(0.013))
    tensors = {f"{layer}.weight": stored.clone() for layer in layers}
    name = "scale_weight" if form == "scale_weight" else "weight_scale"
    tensors |= {f"{layer}.{name}": torch.tensor(0.013) for layer in with_scale}
    said, metadata = {"format": "float8_e4m3fn"}, None
    if form == "scale_weight":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=FP8)
    elif form == "comfy_quant":
        tensors |= {f"{layer}.comfy_quant": mark(**said) for layer in with_scale}
    else:
        metadata = {"_quantization_metadata": json.dumps({"layers": dict.fromkeys(with_scale, said)})}
    found = read(tmp_path, tensors, metadata)
    assert found.keys() == {f"{layer}.weight" for layer in layers}
    for layer in layers:
        expected = wanted if layer in with_scale else stored.float()
        assert torch.equal(value(found[f"{layer}.weight"]).float(), expected), layer
    assert "is fp8 without a scale, and the same layer of other blocks has one" in caplog.text


def kitchen(layout: str, tensor: torch.Tensor, **options: object) -> tuple[torch.Tensor, object, torch.Tensor]:
    """Codes, their parameters, and what `comfy-kitchen` makes of them."""
    import comfy_kitchen.tensor as kitchen_tensor

    kind = getattr(kitchen_tensor, layout)
    stored, parameters = kind.quantize(tensor, **options)
    return stored, parameters, kind.dequantize(stored, parameters)


@pytest.mark.parametrize("shape", [(96, 256), (256, 128), (40, 96)], ids=str)
def test_mxfp8_matches_comfy_kitchen(shape: tuple[int, int], tmp_path: Path):
    stored, parameters, wanted = kitchen("TensorCoreMXFP8Layout", weight(*shape))
    tensors = {"a.weight": stored, "a.weight_scale": parameters.scale.view(torch.uint8)}
    found = read(tmp_path, {**tensors, "a.comfy_quant": mark(format="mxfp8")})["a.weight"]
    rows, columns = shape
    wanted = wanted[:rows, :columns]  # they leave in what fills up the last blocks
    assert torch.equal(value(found, slice(0, rows), slice(0, columns)), wanted.float())
    assert torch.equal(value(found, slice(7, 33), slice(40, 90)), wanted[7:33, 40:90].float())


@pytest.mark.parametrize("shape", [(96, 256), (256, 128), (40, 90)], ids=str)
def test_nvfp4_matches_comfy_kitchen(shape: tuple[int, int], tmp_path: Path):
    stored, parameters, wanted = kitchen("TensorCoreNVFP4Layout", weight(*shape), scale="recalculate")
    tensors = {
        "a.weight": stored, "a.weight_scale": parameters.block_scale.view(torch.uint8),
        "a.weight_scale_2": parameters.scale.float(), "a.comfy_quant": mark(format="nvfp4"),
    }  # fmt: skip
    found = read(tmp_path, tensors)["a.weight"]
    rows, columns = shape
    ours = value(found, slice(0, rows), slice(0, columns))
    wanted = wanted[:rows, :columns]
    # Theirs is rounded where ours is not.
    assert ((ours - wanted.float()).abs() <= 2**-8 * wanted.float().abs()).all()
    assert torch.equal(value(found, slice(7, 33), slice(41, 80)), ours[7:33, 41:80])
    before = torch.rand(columns) + 0.5
    found = read(tmp_path, {**tensors, "a.pre_quant_scale": before})["a.weight"]
    assert is_close(value(found, slice(0, rows), slice(0, columns)), ours * before, 1e-5)


@pytest.mark.parametrize("size", [0, 16, 64, 256])
def test_int8_with_and_without_rotation_matches_comfy_kitchen(size: int, tmp_path: Path):
    tensor = weight()
    options = {"convrot": True, "convrot_groupsize": size} if size else {}
    stored, parameters, wanted = kitchen(
        "TensorWiseINT8Layout", tensor, is_weight=True, per_channel=True, **options
    )  # fmt: skip
    said = {"format": "int8_tensorwise", **({"params": options} if size == 64 else options)}
    tensors = {"a.weight": stored, "a.weight_scale": parameters.scale.float()}
    found = read(tmp_path, {**tensors, "a.comfy_quant": mark(**said)})["a.weight"]
    ours = value(found)
    assert difference(ours, wanted.float()) <= 1e-5
    assert difference(ours, tensor) < 0.02
    for piece in PIECES:
        assert is_close(value(found, *piece), ours[piece], 1e-6)


def test_int8_without_description_is_codes_times_scale(tmp_path: Path):
    stored = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
    scale = torch.rand(ROWS, 1)
    holds_in_pieces(read(tmp_path, {"a.weight": stored, "a.weight_scale": scale})["a.weight"], stored.float() * scale)


@pytest.mark.parametrize("nested", [False, True], ids=["scales", "scales that are codes"])
def test_bitsandbytes_4bit_matches_documented_layout(nested: bool, tmp_path: Path):
    """By its documented layout: two codes a byte, the first in the high half, and scales of blocks."""
    random = torch.Generator().manual_seed(1)
    picked = torch.randint(0, 16, (ROWS * COLUMNS,), generator=random, dtype=torch.uint8)
    table = torch.linspace(-1, 1, 16)
    scales = torch.rand(ROWS * COLUMNS // 64, generator=random)
    state = {"blocksize": 64, "shape": [ROWS, COLUMNS], "quant_type": "nf4", "dtype": "bfloat16"}
    tensors = {
        "a.weight": (picked[::2] << 4 | picked[1::2])[:, None], "a.weight.quant_map": table, "a.weight.absmax": scales,
    }  # fmt: skip
    if nested:
        codes_of_scales = torch.randint(0, 256, scales.shape, generator=random, dtype=torch.uint8)
        values, factors = torch.linspace(-1, 1, 256), torch.rand(math.ceil(len(scales) / 256), generator=random)
        scales = values[codes_of_scales.int()] * factors.repeat_interleave(256)[: len(scales)] + 0.25
        tensors |= {"a.weight.absmax": codes_of_scales, "a.weight.nested_absmax": factors}
        tensors |= {"a.weight.nested_quant_map": values}
        state |= {"nested_blocksize": 256, "nested_offset": 0.25}
    wanted = (table[picked.int()] * scales.repeat_interleave(64)).reshape(ROWS, COLUMNS)
    found = read(tmp_path, {**tensors, "a.weight.quant_state.bitsandbytes__nf4": mark(**state)})
    assert found.keys() == {"a.weight"}
    holds_in_pieces(found["a.weight"], wanted)


def test_bitsandbytes_8bit_is_codes_times_row_scale(tmp_path: Path):
    stored = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
    scale = torch.rand(ROWS)
    tensors = {"a.weight": stored, "a.SCB": scale, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = read(tmp_path, tensors)
    assert found.keys() == {"a.weight"}
    assert difference(value(found["a.weight"]), stored.float() * scale[:, None] / 127) <= 1e-6


def write_gguf(path: Path, arrays: dict[str, tuple[np.ndarray, str]], architecture: str = "wan") -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, (array, kind) in arrays.items():
        dtype = gguf.GGMLQuantizationType[kind]
        data = array if kind in ("F32", "F16") else gguf.quants.quantize(array, dtype)
        writer.add_tensor(name, data.astype(np.float16) if kind == "F16" else data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


QUANTIZED = ("BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")


@pytest.mark.parametrize("kind", ["F32", "F16", *QUANTIZED])
def test_gguf_format_matches_gguf_package(kind: str, tmp_path: Path):
    array = weight().numpy()
    write_gguf(tmp_path / "file.gguf", {"a.weight": (array, kind)})
    tensors, fields = gguf_file.read_gguf(tmp_path / "file.gguf")
    stored = gguf.GGUFReader(tmp_path / "file.gguf").tensors[0]
    wanted = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32))
    assert gguf_file.get_text(fields, "general.architecture") == "wan"
    holds_in_pieces(tensors["a.weight"], wanted.reshape(ROWS, COLUMNS))


@pytest.mark.parametrize("kind", ["Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "IQ4_NL"])
def test_gguf_k_quant_format_matches_gguf_package(kind: str, tmp_path: Path):
    """The package decodes them and does not encode: any bytes are a tensor, but for scales that are no numbers."""
    dtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (ROWS * COLUMNS // block, size), dtype=np.uint8)
    half = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    data[:, :4], data[:, -2:] = half, half[:2]  # where each of them has its scales of 16 bits
    writer = gguf.GGUFWriter(str(tmp_path / "file.gguf"), "wan")
    writer.add_tensor("a.weight", data.reshape(ROWS, -1), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wanted = torch.from_numpy(gguf.quants.dequantize(data.reshape(ROWS, -1), dtype).astype(np.float32))
    tensors, _ = gguf_file.read_gguf(tmp_path / "file.gguf")
    holds_in_pieces(tensors["a.weight"], wanted)


def test_gguf_original_shape_field_restores_dimensions(tmp_path: Path):
    array = np.random.default_rng(0).normal(size=(8, 4, 1, 2, 2)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "file.gguf"), "wan")
    writer.add_array("comfy.gguf.orig_shape.a.weight", list(array.shape))
    writer.add_tensor("a.weight", array.reshape(8, -1), raw_dtype=gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf_file.read_gguf(tmp_path / "file.gguf")[0]["a.weight"]
    assert torch.equal(value(tensor), torch.from_numpy(array))
    assert torch.equal(value(tensor, slice(2, 5), *[slice(None)] * 4), torch.from_numpy(array[2:5]))


@pytest.mark.parametrize("kind", ["Q2_K", "TQ1_0"])
def test_gguf_unsupported_format_raises_checkpoint_error(kind: str, tmp_path: Path):
    dtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    writer = gguf.GGUFWriter(str(tmp_path / "file.gguf"), "wan")
    writer.add_tensor("a.weight", np.zeros((4, size), np.uint8), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with raises_message(CheckpointError, "file.format_unsupported", tensor_name="a.weight", format=kind):
        gguf_file.read_gguf(tmp_path / "file.gguf")


def damaged(problem: str) -> Expected:
    return Expected("file.quantization_damaged", name="a.weight", problem=re.compile(problem))


BAD: dict[str, tuple[Callable[[], Tensors], Expected]] = {
    "a format by another name": (
        lambda: {"a.weight": weight().to(FP8), "a.comfy_quant": mark(format="convrot_w4a4")},
        Expected("file.quantization_unsupported", name="a.weight", kind="convrot_w4a4"),
    ),
    "no scale": (
        lambda: {"a.weight": weight().to(FP8), "a.comfy_quant": mark(format="float8_e4m3fn")},
        Expected("file.weight_scale_missing", name="a.weight"),
    ),
    "scales of another number": (
        lambda: {"a.weight": weight().to(FP8), "a.weight_scale": torch.ones(7)},
        damaged(r"scales of F32 and \(7,\)"),
    ),
    "scales of the columns of a square": (
        lambda: {"a.weight": weight(ROWS, ROWS).to(FP8), "a.weight_scale": torch.ones(1, ROWS)},
        damaged(r"scales of F32 and \(1, 96\), and they are one number, one a row"),
    ),
    "a grid of no tiles": (
        lambda: {"a.weight": weight(96, 256).to(FP8), "a.weight_scale_inv": torch.ones(7, 2)},
        damaged(r"a weight_scale_inv of F32 and \(7, 2\), and it is a number, one a row, or a grid"),
    ),
    "a grid of tiles that could be of several sizes": (
        lambda: {"a.weight": weight(150, 256).to(FP8), "a.weight_scale_inv": torch.ones(3, 2)},
        damaged(r"a weight_scale_inv of F32 and \(3, 2\)"),
    ),
    "exponents in place of scales": (
        lambda: {"a.weight": weight(200, 300).to(FP8), "a.weight_scale_inv": torch.ones(2, 3, dtype=torch.uint8)},
        damaged(r"a weight_scale_inv of U8 and \(2, 3\)"),
    ),
    "scales of mxfp8 of another number": (
        lambda: {
            "a.weight": weight().to(FP8), "a.weight_scale": torch.ones(7, dtype=torch.uint8),
            "a.comfy_quant": mark(format="mxfp8"),
        },
        damaged(r"a weight_scale of \(7,\)"),
    ),
    "a rotation of another size": (
        lambda: {
            "a.weight": torch.zeros(ROWS, COLUMNS, dtype=torch.int8), "a.weight_scale": torch.ones(()),
            "a.comfy_quant": mark(format="int8_tensorwise", convrot=True, convrot_groupsize=10**9),
        },
        damaged("convrot_groupsize 1000000000"),
    ),
    "a mark that is not JSON": (
        lambda: {"a.weight": weight().to(FP8), "a.comfy_quant": torch.zeros(3, dtype=torch.uint8)},
        Expected("file.quantization_not_json", what=re.compile("a.comfy_quant$")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_inconsistent_quantization_raises_checkpoint_error(case: str, tmp_path: Path):
    make, expected = BAD[case]
    with raises_message(CheckpointError, expected):
        read(tmp_path, make())


def test_hadamard_matrix_is_its_own_inverse():
    for size in (4, 16, 256):
        matrix = decode.hadamard_matrix(size)
        assert difference(matrix @ matrix.T, torch.eye(size)) <= 4e-6
