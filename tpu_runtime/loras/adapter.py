"""What a LoRA file changes, from its header alone: names of tensors, in any trainer's spelling, and their shapes.

A file holds matrices by module: `down` and `up` of a LoRA, the factors of LyCORIS' LoHa and LoKr, or whole differences.
What fits nothing in the network is listed, never dropped in silence.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cache.store import signature
from ..checkpoints.names import Names
from ..programs.modules import Cut, Network
from ..redact import redact
from ..spec import Rows
from .factors import LOHA, LOKRS, LORA, DoesNotFit, Shape, factors

# How names end, and what a tensor of that name is. The longest ending counts.
_PARTS = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.bias": "up_bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    # As PEFT's own state has them, with the adapter's name.
    ".lora_A.default.weight": "down",
    ".lora_B.default.weight": "up",
    ".lora_B.default.bias": "up_bias",
    ".lora_magnitude_vector.default.weight": "magnitude",
    ".lora_A": "down",
    ".lora_B": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".alpha": "alpha",
    ".dora_scale": "magnitude",
    ".diff": "diff",
    ".diff_b": "diff_b",
    ".w_norm": "diff",
    ".b_norm": "diff_b",
    **{f".{name}": name for kind in (LOHA, *LOKRS) for name in kind},
    # Without these a product is another: Tucker's core, and a weight that is to grow.
    **dict.fromkeys((".lora_mid.weight", ".hada_t1", ".hada_t2", ".lokr_t2", ".reshape_weight"), "unsupported"),
}
# What changes a weight, and what a bias, by the parts it needs and those that it may have.
_SCALES = ("alpha", "magnitude")
_OF_WEIGHT = (*((kind, _SCALES) for kind in (LORA, LOHA, *LOKRS)), (("diff",), ()))
_OF_BIAS = ((("diff_b",), ()), (("up_bias", "down"), ("alpha",)))
# Lightx2v's: the difference of a block's `modulation`, which is a parameter and no module.
_MODULATION = ".diff_m"
_ENDING = re.compile(rf"(.+?)({'|'.join(map(re.escape, sorted(_PARTS, key=len, reverse=True)))})")
# Where diffusers keeps PEFT's config in a file; beside PEFT's own files it is a file.
_PEFT_METADATA, _PEFT_CONFIG = "lora_adapter_metadata", "adapter_config.json"


class LoraError(ValueError):
    """A LoRA that cannot be used, in a sentence for the user."""

    def __init__(self, sentence: str) -> None:
        super().__init__(redact(sentence))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What PEFT's config says of a module, for a file without alphas: `alpha / rank ** power`."""

    alpha: float | None = None
    power: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a file changes in one weight of one layer: its tensors' names by part (see `factors`), and of which rows."""

    parts: Mapping[str, str]
    rows: Rows
    scaling: Scaling


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A file's changes, by the weight's name in a checkpoint, and the names in it that fit nothing.

    `misfit` says what would have to fit, of the first that has a module here but another shape.
    """

    path: Path
    changes: Mapping[str, tuple[Change, ...]]
    unused: tuple[str, ...]
    misfit: str


def identity(path: str) -> str:
    """What changes when the file does; raises `LoraError` where it is missing."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise LoraError(f"The LoRA {path} cannot be read ({error.strerror}). Choose another, or put it back.") from None
    return signature(path, stat.st_size, stat.st_mtime_ns)


def content(path: str) -> str:
    """What two copies of the file have in common, and other files do not: its size and header."""
    shapes, config = _header(path)
    return signature(os.stat(path).st_size, sorted(shapes.items()), sorted(config.items()) if config else None)


def read(path: str, network: Network) -> Adapter:
    """What a file changes in a network; raises `LoraError` for one that is damaged or no safetensors file."""
    shapes, config = _header(path)
    weights: dict[str, Shape] = {}
    cuts: dict[str, list[Cut | None]] = defaultdict(list)
    for one in network.weights.values():
        for source in one.sources:
            weights[source] = one.tensor_shape
            cuts[source].append(one.cut)
    names = Names(weights, network.component.makers_names)
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for name in shapes:
        if (found := _split(name)) is not None:
            modules[found[0]][found[1]] = name
    changes: dict[str, list[Change]] = defaultdict(list)
    misfit = ""
    for module, parts in modules.items():
        scaling = _scaling(config, module)
        for rows in names.find(module):
            for weight, chosen in _changed(rows.name, parts, weights):
                meta = {part: torch.empty(shapes[name], device="meta") for part, name in chosen.items()}
                try:
                    found = factors(meta, rows, weights[weight])
                    for cut in cuts[weight]:
                        found.of(cut)
                except DoesNotFit as error:
                    size = "x".join(map(str, weights[weight]))
                    misfit = misfit or f"{module} is for {error}, but {weight} is {size}"
                else:
                    changes[weight].append(Change(parts=chosen, rows=rows, scaling=scaling))
    used = {name for found in changes.values() for change in found for name in change.parts.values()}
    return Adapter(
        path=Path(path),
        changes={name: tuple(found) for name, found in changes.items()},
        unused=tuple(sorted(shapes.keys() - used)),
        misfit=misfit,
    )


def _split(name: str) -> tuple[str, str] | None:
    """The module that a tensor is for, and which part of a change it is; None for a name with another ending."""
    if name.endswith(_MODULATION):
        return f"{name.removesuffix(_MODULATION)}.modulation", "diff"
    match = _ENDING.fullmatch(name)
    return (match[1], _PARTS[match[2]]) if match else None


def _changed(
    module: str, parts: Mapping[str, str], weights: Mapping[str, Shape]
) -> Iterator[tuple[str, dict[str, str]]]:
    """The weights that parts of a module change, each with its own: of a module or of a parameter called `module`."""
    targets = {module if module in weights else f"{module}.weight": _OF_WEIGHT, f"{module}.bias": _OF_BIAS}
    for target, kinds in targets.items():
        for needed, optional in kinds:
            is_whole = "unsupported" not in parts or optional != _SCALES
            if is_whole and target in weights and all(part in parts for part in needed):
                yield target, {part: parts[part] for part in (*needed, *optional) if part in parts}


def _header(path: str) -> tuple[dict[str, Shape], Mapping[str, Any]]:
    """Shapes by name, and PEFT's config where there is one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
            metadata = file.metadata() or {}
        said = metadata.get(_PEFT_METADATA)
        beside = Path(path).with_name(_PEFT_CONFIG)
        if said is None and beside.is_file() and Path(path).name == "adapter_model.safetensors":
            said = beside.read_text("utf-8")
        config = json.loads(said or "{}")
    except (OSError, SafetensorError, ValueError) as error:
        raise LoraError(
            f"The LoRA {path} is not a whole safetensors file ({error}). Download it again, or choose another."
        ) from None
    return shapes, {key.removeprefix("transformer."): value for key, value in config.items()}


def _scaling(config: Mapping[str, Any], module: str) -> Scaling:
    """As PEFT: a pattern is a regular expression for the end of a module's name."""
    patterns = (config.get("alpha_pattern") or {}).items()
    own = (value for key, value in patterns if re.fullmatch(rf"(.*\.)?({key})", module))
    return Scaling(alpha=next(own, config.get("lora_alpha")), power=0.5 if config.get("use_rslora") else 1.0)
