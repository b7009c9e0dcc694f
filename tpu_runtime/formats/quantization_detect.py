"""Detection of quantised checkpoints, from a component's config or its tensors.

Names are those of the writers: compressed-tensors, NVIDIA's modelopt, bitsandbytes, torchao, AutoRound, quanto,
    transformers' block-wise fp8, and ComfyUI's scaled fp8.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..messages import compose

# Dtypes read as numbers, as named in safetensors' headers. fp8 alone is a plain cast; with a scale it is a code.
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
READABLE_DTYPES = FLOAT_DTYPES | {"F8_E4M3", "F8_E5M2"}
ADVICE = compose("file.codes_unsupported")
# Methods in a config that are supported, because marks in the files state each layer's format (see `formats.codes`).
DECODED_METHODS = ("bitsandbytes", "fp8")

# Names in a layer and the tool that writes them, the most specific ones first.
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
# Names of tensors that decode a layer's codes.
_MARKS = re.compile("scale|absmax|quant_state|SCB|comfy_quant|qzeros|_amax")


def detect_in_config(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation method in a component's `config.json`, or None.

    `compression_config` is an older key of compressed-tensors. A model of several networks may have the entry in one
    part.
    """
    for key in ("quantization_config", "compression_config"):
        if entry := config.get(key):
            kinds = (entry.get(name) for name in ("quant_method", "quant_algo", "quant_type", "format"))
            method_name = (
                next((kind for kind in kinds if isinstance(kind, str)), None) if isinstance(entry, Mapping) else None
            )
            return method_name or "a method that its config does not name"
    parts = (part for name, part in config.items() if name.endswith("_config") and isinstance(part, Mapping))
    return next((method for part in parts if (method := detect_in_config(part))), None)


def detect_in_tensors(dtypes: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first tensor that holds codes, and the method that wrote it; None if all hold numbers.

    dtypes: of the tensors by name, as safetensors names them.
    Codes have a dtype other than floating point, or fp8, and the same layer has tensors that decode them. Integers
    without such, as positions, are ignored.
    """
    suspects = [name for name, dtype in dtypes.items() if dtype not in FLOAT_DTYPES]
    marks, described = _marks(dtypes) if suspects else (Counter(), set())
    for name in suspects:
        layer, _, leaf = name.rpartition(".")
        if name in described or marks[layer] > bool(_MARKS.search(leaf)):
            others = [rest for rest in _suffixes(dtypes, layer) if rest != leaf and _describes(leaf, rest)]
            method = next((method for word, method in _WRITERS for name_ in (leaf, *others) if word in name_), None)
            return name, method or f"scaled {dtypes[name]}"
    return None


def _marks(names: Iterable[str]) -> tuple[Counter[str], set[str]]:
    """Count the tensors of each layer that decode codes.

    Also returns the tensors that have decoding tensors of their own, to the depth of
    `weight.quant_state.bitsandbytes__nf4`.

    An untrusted file may have many tensors in one layer, so pairs of them are not compared.
    """
    counts: Counter[str] = Counter()
    described: set[str] = set()
    for name in filter(_MARKS.search, names):
        layer, _, leaf = name.rpartition(".")
        counts[layer] += bool(_MARKS.search(leaf))
        described.update(*map(_list_described_names, (layer, layer.rpartition(".")[0])))
    return counts, described


def _suffixes(names: Iterable[str], layer: str) -> list[str]:
    """Return the rest of the names of a layer's tensors, after the layer's name."""
    prefix = f"{layer}." if layer else ""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _list_described_names(part: str) -> tuple[str, str]:
    """Return the names of the tensors in a layer that tensors below the name `part` may describe."""
    return part, part.removesuffix("_quantizer")


def _describes(own: str, rest: str) -> bool:
    """Return whether `rest` describes the tensor `own` of the same layer, and not a submodule with codes of its own."""
    return "." not in rest or own in _list_described_names(rest.partition(".")[0])
