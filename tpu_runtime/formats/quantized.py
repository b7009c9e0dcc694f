"""Checkpoints whose numbers are codes: how they say so, in a component's config or next to its tensors.

Names are those of the writers: compressed-tensors, NVIDIA's modelopt, bitsandbytes, torchao, AutoRound, quanto,
transformers' block-wise fp8, and ComfyUI's scaled fp8.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# What is read as numbers, in the words of safetensors' headers. fp8 alone is a plain cast; with a scale it is a code.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
READ = FLOATS | {"F8_E4M3", "F8_E5M2"}
ADVICE = "Such codes are not decoded here. Use a checkpoint whose weights are bfloat16, float16 or float32."
# What a config may say, where the files' own marks tell how each layer is to be decoded (see `formats.codes`).
DECODED = ("bitsandbytes", "fp8")

# Which writer leaves which names in a layer, the telling ones first.
_WRITERS = (
    ("wscales", "SVDQuant (Nunchaku)"),
    ("wtscale", "SVDQuant (Nunchaku)"),
    ("smooth_factor", "SVDQuant (Nunchaku)"),
    ("absmax", "bitsandbytes"),
    ("quant_state", "bitsandbytes"),
    ("SCB", "bitsandbytes"),
    ("weight_packed", "compressed-tensors"),
    ("weight_global_scale", "compressed-tensors"),
    ("_quantizer", "modelopt"),
    ("qzeros", "GPTQ, AWQ or AutoRound"),
    ("qweight", "GPTQ, AWQ or AutoRound"),
    ("qdata", "torchao"),
    ("_data", "quanto"),
    ("comfy_quant", "ComfyUI's formats"),
    ("scale_weight", "ComfyUI's scaled fp8"),
    ("weight_scale_inv", "transformers' block-wise fp8"),
)
# What decodes a layer's codes.
_MARKS = re.compile("scale|absmax|quant_state|SCB|comfy_quant|qzeros|_amax")


def method_of_config(config: Mapping[str, Any]) -> str | None:
    """How a component's `config.json` says that it is quantized; None where it does not.

    `compression_config` is what compressed-tensors wrote before; a model of several parts may say it of one.
    """
    for key in ("quantization_config", "compression_config"):
        if found := config.get(key):
            kinds = (found.get(name) for name in ("quant_method", "quant_algo", "quant_type", "format"))
            named = (
                next((kind for kind in kinds if isinstance(kind, str)), None) if isinstance(found, Mapping) else None
            )
            return named or "a method that its config does not name"
    parts = (part for name, part in config.items() if name.endswith("_config") and isinstance(part, Mapping))
    return next((method for part in parts if (method := method_of_config(part))), None)


def method_of_tensors(dtypes: Mapping[str, str]) -> tuple[str, str] | None:
    """The first tensor that holds codes, and the method that wrote it; None where all hold numbers.

    `dtypes` are safetensors' by name. Codes are of another format than floating point, or fp8, and the same layer has
    what decodes them. Integers without that, such as positions, are ignored.
    """
    suspects = [name for name, dtype in dtypes.items() if dtype not in FLOATS]
    marks, described = _marks(dtypes) if suspects else (Counter(), set())
    for name in suspects:
        layer, _, own = name.rpartition(".")
        if name in described or marks[layer] > bool(_MARKS.search(own)):
            others = [rest for rest in _rests(dtypes, layer) if rest != own and _is_of(own, rest)]
            method = next((method for word, method in _WRITERS for each in (own, *others) if word in each), None)
            return name, method or f"scaled {dtypes[name]}"
    return None


def _marks(names: Iterable[str]) -> tuple[Counter[str], set[str]]:
    """How many tensors of each layer decode codes, and the tensors that have such for themselves, to the depth of
     `weight.quant_state.bitsandbytes__nf4`.

    A stranger's file may have as many tensors in one layer as it likes, so no pair of them is looked at.
    """
    counts: Counter[str] = Counter()
    described: set[str] = set()
    for name in filter(_MARKS.search, names):
        layer, _, own = name.rpartition(".")
        counts[layer] += bool(_MARKS.search(own))
        described.update(*map(_described, (layer, layer.rpartition(".")[0])))
    return counts, described


def _rests(names: Iterable[str], layer: str) -> list[str]:
    """What follows a layer's name in the names of its tensors."""
    prefix = f"{layer}." if layer else ""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _described(part: str) -> tuple[str, str]:
    """The tensors of a layer that the tensors of its part of that name may describe."""
    return part, part.removesuffix("_quantizer")


def _is_of(own: str, rest: str) -> bool:
    """Whether `rest` describes the tensor `own` of the same layer, and no part of the layer with codes of its own."""
    return "." not in rest or own in _described(rest.partition(".")[0])
