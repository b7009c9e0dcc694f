"""Checkpoints whose numbers are codes: how they say so, in a component's config or beside its tensors.

Names are those of the writers: compressed-tensors, NVIDIA's modelopt, bitsandbytes, torchao, AutoRound, quanto,
transformers' block-wise fp8, and ComfyUI's scaled fp8.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

# What is read as numbers, in the words of safetensors' headers. fp8 alone is a plain cast; beside a scale it is a code.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
READ = FLOATS | {"F8_E4M3", "F8_E5M2"}
ADVICE = "Such codes are not decoded here. Use a checkpoint whose weights are bfloat16, float16 or float32."

# Which writer leaves which names in a layer, the telling ones first.
_WRITERS = (
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
# What makes numbers of a layer's codes.
_MARKS = ("scale", "absmax", "quant_state", "SCB", "comfy_quant", "qzeros", "_amax")


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

    `dtypes` are safetensors' by name. Codes are of another format than floating point, or fp8, and have beside them,
    in the same layer, what makes numbers of them. Integers without that, such as positions, are left aside.
    """
    suspects = [name for name, dtype in dtypes.items() if dtype not in FLOATS]
    layers = _layers(dtypes) if suspects else {}
    for name in suspects:
        layer, _, own = name.rpartition(".")
        beside = [rest for rest in layers[layer] if rest != own and _is_of(own, rest)]
        if any(mark in rest for mark in _MARKS for rest in beside):
            words = [own, *beside]
            method = next((method for word, method in _WRITERS for each in words if word in each), None)
            return name, method or f"scaled {dtypes[name]}"
    return None


def _layers(names: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """What follows each layer's name in the names of its tensors, to a depth of three as in
    `weight.quant_state.bitsandbytes__nf4`.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(3, len(parts)) + 1):
            layers[".".join(parts[:-depth])].append(".".join(parts[-depth:]))
    return layers


def _is_of(own: str, rest: str) -> bool:
    """Whether `rest` describes the tensor `own` of the same layer, and no part of the layer with codes of its own."""
    return "." not in rest or rest.startswith((f"{own}.", f"{own}_quantizer."))
