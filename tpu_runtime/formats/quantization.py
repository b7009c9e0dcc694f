"""Quantised layers of a file and their formats, detected layer by layer because one file mixes formats.

The marks, in order of precedence: `comfy_quant` next to a weight, `_quantization_metadata` in the header,
    `scale_weight` (ComfyUI's first form, Kijai's, musubi-tuner's), a bare `weight_scale` next to fp8 or int8
    (LightX2V), `weight_scale_inv` (transformers), `SCB` and `quant_state` (bitsandbytes). fp8 without a scale is a
    plain cast, also in a file with scaled layers, as in ComfyUI.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files import CheckpointError, TensorFile, TensorView, parse_json
from ..messages import compose
from . import quantization_detect, tokenizer_files
from .decode import GROUP_MXFP8, GROUP_NVFP4, BitsAndBytes4, Mxfp8, Nvfp4, RotatedCodes, ScaledCodes

log = logging.getLogger(__name__)

QUANTIZATION_METADATA = "_quantization_metadata"
FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_FP8_DTYPES = {name: dtype for dtype, name in FP8.items()}
# Names of the supported formats; all others are refused by name.
FORMATS = (*_FP8_DTYPES, "mxfp8", "nvfp4", "int8_tensorwise")
# Names of tensors that belong to a `weight` of the same layer.
_COMPANIONS = (
    *("weight_scale", "weight_scale_2", "scale_weight", "input_scale", "scale_input", "comfy_quant"),
    *("pre_quant_scale", "weight_scale_inv", "SCB", "weight_format"),
)
_MARK_OF_FILE = "scaled_fp8"
_BITS4 = "quant_state.bitsandbytes__"
_BITS4_OWN = "bitsandbytes__"
# Sides of a rotation are powers of 4; no published one is larger.
_LARGEST_ROTATION = 4096
# Sides of tiles that share a scale; 128 in all published files.
_TILES = (16, 32, 64, 128, 256, 512, 1024)
# A block's number in a layer's name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# Limits of the description of one layer (bytes) and of a metadata entry (characters): many times the published ones.
MAX_DESCRIPTION_BYTES, MAX_METADATA_LENGTH = 2**12, 2**20
# The tensors that describe others, with their bytes, by name.
Descriptions = Mapping[str, tuple[TensorFile, bytes]]
# Returns the first tensor of these names in the same layer, or None.
Companion = Callable[..., TensorFile | None]


def decode_tensors(tensors: Mapping[str, TensorFile], metadata: Mapping[str, str]) -> dict[str, TensorFile]:
    """Return the tensors by name, quantised ones as views of their decoded values, without scales and marks.

    metadata: of the header.
    Raises `CheckpointError` for missing or wrong scales, and for unsupported formats.
    """
    described = _descriptions(tensors)
    formats = dict(_read_marks(described, metadata))
    views: dict[str, TensorFile] = {}
    bare: list[TensorFile] = []
    dropped: set[str] = set()
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == _MARK_OF_FILE:
            dropped.add(name)
        if leaf != "weight":
            continue
        decoder = _make_decoder(layer, tensor, tensors, formats, described)
        if decoder is not None:
            views[name] = replace(tensor, shape=_shape(decoder), dtype="F32", made=decoder)
        if decoder is not None or layer in formats:
            dropped.update(companion for leaf in _COMPANIONS if (companion := _join(layer, leaf)) in tensors)
            dropped.update(_bits4(name, tensors))
        elif tensor.dtype in FP8 and len(tensor.shape) > 1:
            bare.append(tensor)
    _warn_bare(bare, views)
    views = {name: views.get(name, tensor) for name, tensor in tensors.items() if name not in dropped}
    _refuse(views)
    return views


def _warn_bare(bare: Sequence[TensorFile], scaled: Iterable[str]) -> None:
    """Log the layers without a scale whose counterpart in another block has one.

    They are a plain cast, as in ComfyUI: right for layers that were left out of the scaling, wrong for a lost scale.
    """
    kinds = {_NUMBER.sub("*", name) for name in scaled}
    layers = [tensor for tensor in bare if _NUMBER.sub("*", tensor.name) in kinds]
    if layers:
        log.warning(
            "%s: %s is fp8 without a scale, and the same layer of other blocks has one (%d layers); they are cast "
            "without a scale, as in ComfyUI. If the result is wrong, download the file again.",
            layers[0].path, layers[0].name, len(layers),
        )  # fmt: skip


def _refuse(tensors: Mapping[str, TensorFile]) -> None:
    """Raise `CheckpointError` with the writer's name if a tensor still holds codes. A tokenizer's bytes are allowed."""
    dtypes = {name: x.dtype for name, x in tensors.items() if name.rpartition(".")[2] not in tokenizer_files.TENSORS}
    if problem := quantization_detect.detect_in_tensors(dtypes):
        name, method = problem
        raise CheckpointError(compose(
            "file.weights_quantized", path=tensors[name].path, method=method, name=name,
            dtype=tensors[name].dtype, advice=quantization_detect.ADVICE,
        ))  # fmt: skip


def _join(layer: str, own: str) -> str:
    return f"{layer}.{own}" if layer else own


def _shape(made: TensorView) -> tuple[int, ...]:
    if isinstance(made, BitsAndBytes4 | Nvfp4):
        return made.shape
    assert isinstance(made, ScaledCodes | Mxfp8 | RotatedCodes)
    return (made.codes if isinstance(made, RotatedCodes) else made).weight.shape


def _descriptions(tensors: Mapping[str, TensorFile]) -> Descriptions:
    """Return the tensors that describe others, with their bytes, by name. Each file is opened once.

    Raises `CheckpointError` for one of another dtype, or one that is too long.
    """
    from safetensors import safe_open

    descriptions: dict[str, tuple[TensorFile, bytes]] = {}
    by_file: dict[Path, list[TensorFile]] = {}
    for name, tensor in tensors.items():
        leaf = name.rpartition(".")[2]
        if leaf != "comfy_quant" and not leaf.startswith(_BITS4_OWN):
            continue
        if tensor.dtype != "U8" or math.prod(tensor.shape) > MAX_DESCRIPTION_BYTES:
            raise CheckpointError(compose(
                "file.format_description_wrong", path=tensor.path, name=tensor.name, dtype=tensor.dtype,
                shape=tensor.shape, max_description_bytes=MAX_DESCRIPTION_BYTES,
            ))  # fmt: skip
        by_file.setdefault(tensor.path, []).append(tensor)
    for path, described in by_file.items():
        with safe_open(str(path), framework="np") as file:
            descriptions |= {tensor.name: (tensor, file.get_tensor(tensor.name).tobytes()) for tensor in described}
    return descriptions


def _read_marks(described: Descriptions, metadata: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield layers whose format the file states, with the statement.

    Those of the header come first; others replace them.
    """
    if QUANTIZATION_METADATA in metadata:
        header = _json(
            check_metadata_length(metadata[QUANTIZATION_METADATA], QUANTIZATION_METADATA),
            f"the metadata {QUANTIZATION_METADATA}",
        )
        layers = header.get("layers")
        if not isinstance(layers, dict) or not all(isinstance(entry, dict) for entry in layers.values()):
            raise CheckpointError(compose("file.metadata_without_layers", quantization_metadata=QUANTIZATION_METADATA))
        yield from layers.items()
    for name, (tensor, content) in described.items():
        if name.rpartition(".")[2] == "comfy_quant":
            yield name.rpartition(".")[0], _json(content, f"{tensor.path}: {name}")


def check_metadata_length(text: str, name: str) -> str:
    """Return an entry of a file's metadata. Raises `CheckpointError` if it is longer than any published one."""
    if len(text) > MAX_METADATA_LENGTH:
        raise CheckpointError(compose(
            "file.metadata_too_long", name=name, count=len(text), max_metadata_length=MAX_METADATA_LENGTH,
        ))  # fmt: skip
    return text


def _json(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise CheckpointError(compose("file.quantization_not_json", what=what, error=error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(compose("file.quantization_not_object", what=what))
    return value


def _make_decoder(
    layer: str,
    weight: TensorFile,
    tensors: Mapping[str, TensorFile],
    formats: Mapping[str, Mapping[str, Any]],
    described: Descriptions,
) -> TensorView | None:
    """Return the view that decodes a layer's weight; None if it holds numbers."""

    def companion(*names: str) -> TensorFile | None:
        return next((tensor for name in names if (tensor := tensors.get(_join(layer, name)))), None)

    if layer in formats:
        return _make_marked_codes(weight, formats[layer], companion)
    if (scale := companion("scale_weight")) is not None:
        return _make_scaled_codes(weight, scale)
    scale = companion("weight_scale")
    if (
        scale is not None
        and scale.dtype in quantization_detect.FLOAT_DTYPES
        and weight.dtype in (*FP8, "I8")
        and companion("weight_packed") is None
    ):
        return _make_scaled_codes(weight, scale)
    if (scale := companion("weight_scale_inv")) is not None:
        return _make_tiled_codes(weight, scale)
    if (scale := companion("SCB")) is not None and weight.dtype == "I8":
        return replace(_make_scaled_codes(weight, scale), times=1 / 127)
    return _bitsandbytes(weight, tensors, described)


def _make_tiled_codes(weight: TensorFile, scale: TensorFile) -> ScaledCodes:
    """Return codes with the scales of transformers.

    There is one scale, one per row, or a grid of tiles whose size follows from its shape.
    """
    if len(scale.shape) < 2 or math.prod(scale.shape) == 1:
        return _make_scaled_codes(weight, scale)
    is_grid = len(weight.shape) == len(scale.shape) == 2
    rows, columns = map(_tile, weight.shape, scale.shape) if is_grid else (0, 0)
    sizes = ", ".join(map(str, _TILES))
    _check(
        weight,
        rows > 0 and columns > 0 and scale.dtype in quantization_detect.FLOAT_DTYPES,
        f"of shape {weight.shape} has a weight_scale_inv of {scale.dtype} and {scale.shape}, and it is a number, one a "
        f"row, or a grid of tiles whose sides are {sizes} or divide the weight's",
    )
    return ScaledCodes(weight=weight, scale=scale, dtype=weight.dtype, tile=(rows, columns))


def _tile(size: int, count: int) -> int:
    """Return the side of tiles of which `count` cover `size`; 0 if no side does, or several."""
    if count == 1:
        return size
    fitting = {side for side in _TILES if count and math.ceil(size / side) == count}
    # The last tile of the published size may end beyond the weight; one of another size is then open.
    if 128 in fitting:
        return 128
    if count and size % count == 0:
        fitting.add(size // count)
    return fitting.pop() if len(fitting) == 1 else 0


def _make_marked_codes(weight: TensorFile, statement: Mapping[str, Any], companion: Companion) -> TensorView | None:
    """Return the view that decodes a weight in the format that its layer states; None if it holds numbers."""
    kind = statement.get("format")
    params = statement.get("params")
    statement = {**params, **statement} if isinstance(params, dict) else statement
    if kind not in FORMATS:
        raise CheckpointError(compose(
            "file.quantization_unsupported", path=weight.path, name=weight.name, kind=str(kind)[:60],
            formats=", ".join(FORMATS),
        ))  # fmt: skip
    if weight.dtype in quantization_detect.FLOAT_DTYPES:
        return None  # marked, but not quantized
    scale = companion("weight_scale", "scale_weight")
    if scale is None:
        raise CheckpointError(compose("file.weight_scale_missing", path=weight.path, name=weight.name, kind=kind))
    if kind in _FP8_DTYPES:
        return replace(
            _make_scaled_codes(weight, scale), dtype=weight.dtype if weight.dtype in FP8 else _FP8_DTYPES[kind]
        )
    if kind == "int8_tensorwise":
        codes = _make_scaled_codes(weight, scale)
        return RotatedCodes(codes=codes, size=_rotation(weight, statement)) if statement.get("convrot") else codes
    return _make_block_codes(kind, weight, scale, companion)


def _make_block_codes(kind: str, weight: TensorFile, scale: TensorFile, companion: Companion) -> TensorView:
    """Return codes in groups of columns that share a scale; the scales are stored in tiles."""
    _check(weight, len(weight.shape) == 2, f"is {kind} of {len(weight.shape)} dimensions")
    rows, columns = weight.shape
    group = GROUP_MXFP8 if kind == "mxfp8" else GROUP_NVFP4
    columns *= 1 if kind == "mxfp8" else 2
    tiles = math.ceil(rows / 128) * 128 * math.ceil(columns / group / 4) * 4
    _check(weight, columns % group == 0, f"has {columns} columns, no multiple of {group}")
    _check(weight, math.prod(scale.shape) == tiles, f"has a weight_scale of {scale.shape}, and not {tiles} of them")
    if kind == "mxfp8":
        return Mxfp8(weight=weight, scale=scale)
    scale_2, before = companion("weight_scale_2"), companion("pre_quant_scale")
    _check(weight, scale_2 is not None and math.prod(scale_2.shape) == 1, "is nvfp4 without a weight_scale_2")
    assert scale_2 is not None
    _check(
        weight, before is None or math.prod(before.shape) >= columns - group, "has a pre_quant_scale of another size"
    )
    return Nvfp4(weight=weight, scale=scale, scale_2=scale_2, input_scale=before)


def _check(weight: TensorFile, fits: bool, problem: str) -> None:
    if not fits:
        raise CheckpointError(compose("file.quantization_damaged", path=weight.path, name=weight.name, problem=problem))


def _rotation(weight: TensorFile, said: Mapping[str, Any]) -> int:
    size = said.get("convrot_groupsize", 256)
    is_power = isinstance(size, int) and 4 <= size <= _LARGEST_ROTATION and math.log(size, 4).is_integer()
    _check(weight, is_power, f"has convrot_groupsize {str(size)[:40]}, which is not a power of 4")
    _check(weight, len(weight.shape) == 2 and weight.shape[1] % size == 0, f"is not rotated in groups of {size}")
    return size


def _make_scaled_codes(weight: TensorFile, scale: TensorFile) -> ScaledCodes:
    """Return codes with one scale, one scale a row, or scales of blocks of columns.

    Raises `CheckpointError` for other shapes.
    """
    size, shape = math.prod(scale.shape), scale.shape
    rows, columns = weight.shape[0] if weight.shape else 0, weight.shape[1] if len(weight.shape) > 1 else 1
    of_rows = shape[:1] == (rows,) and size == rows
    of_blocks = len(shape) == 3 and len(weight.shape) == 2 and shape[0] == rows and shape[2] == 1
    fits = size == 1 or of_rows or (of_blocks and shape[1] and columns % shape[1] == 0)
    _check(
        weight,
        bool(fits) and scale.dtype in quantization_detect.FLOAT_DTYPES,
        f"of shape {weight.shape} has scales of {scale.dtype} and {shape}, and they are one number, one a row, or "
        "[rows, blocks of columns, 1]",
    )
    return ScaledCodes(weight=weight, scale=scale, dtype=weight.dtype)


def _bits4(name: str, tensors: Mapping[str, TensorFile]) -> Iterator[str]:
    """Yield the names of the tensors of bitsandbytes below a weight's own name."""
    names = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", f"{_BITS4}nf4", f"{_BITS4}fp4")
    yield from (below for leaf in names if (below := f"{name}.{leaf}") in tensors)


def _bitsandbytes(weight: TensorFile, tensors: Mapping[str, TensorFile], described: Descriptions) -> TensorView | None:
    below = {name.removeprefix(f"{weight.name}."): tensors[name] for name in _bits4(weight.name, tensors)}
    state = next((leaf for leaf in below if leaf.startswith(_BITS4)), None)
    if state is None or not {"absmax", "quant_map"} <= below.keys():
        return None
    state_json = _json(described[below[state].name][1], f"{weight.path}: {below[state].name}")
    shape, block = state_json.get("shape"), state_json.get("blocksize")
    is_shape = isinstance(shape, list) and all(isinstance(size, int) and size > 0 for size in shape)
    _check(weight, is_shape and isinstance(block, int) and block > 0, "has a quant_state without a shape")
    assert isinstance(shape, list) and isinstance(block, int)
    size, nested = math.prod(shape), {}
    _check(weight, math.prod(weight.shape) == math.ceil(size / 2) and len(weight.shape) == 2, f"is not of {shape}")
    _check(weight, math.prod(below["absmax"].shape) == math.ceil(size / block), "has another number of scales")
    _check(weight, math.prod(below["quant_map"].shape) == 16, "has a quant_map of another size than 16")
    if "nested_absmax" in below:
        inner, offset = state_json.get("nested_blocksize"), state_json.get("nested_offset")
        is_number = isinstance(inner, int) and inner > 0 and isinstance(offset, int | float)
        _check(weight, is_number and "nested_quant_map" in below, "has a quant_state without nested_blocksize")
        nested = {
            "scale_values": below["nested_quant_map"], "scale_scale": below["nested_absmax"],
            "scale_block": inner, "offset": offset,
        }  # fmt: skip
    return BitsAndBytes4(
        weight=weight, shape=tuple(shape), block=block, values=below["quant_map"], scale=below["absmax"], **nested
    )
