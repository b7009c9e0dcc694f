"""What a LoRA file changes, from its header alone: names of tensors, in any trainer's spelling, and their shapes.

A file holds matrices by module: `down` and `up` of a LoRA, the factors of LyCORIS' LoHa and LoKr, or full differences.
What matches nothing in the network is listed, never dropped silently.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cache.store import signature
from ..checkpoints import load
from ..checkpoints.model_ref import HeldTensors
from ..files import TensorFile, parse_json, read_header
from ..formats import quantized
from ..formats.names import SECOND_EXPERT, Names
from ..model_spec import Rows
from ..programs.modules import Cut, Network
from ..redact import SafeError
from .factors import LOHA, LOKRS, LORA, Shape, WrongShape, factors

# How names end, and what a tensor of that name is. The longest ending counts.
_PARTS = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.bias": "up_bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_A": "down",
    ".lora_B": "up",
    ".lora_down": "down",
    ".lora_up": "up",
    ".lora_down.weight": "down",
    ".lora_up.weight": "up",
    ".lora.down.weight": "down",
    ".lora.up.weight": "up",
    ".alpha": "alpha",
    ".dora_scale": "magnitude",
    ".magnitude": "magnitude",  # ai-toolkit's DoRA: the norm of each row, as PEFT's
    ".diff": "diff",
    ".diff_b": "diff_b",
    ".w_norm": "diff",
    ".b_norm": "diff_b",
    **{f".{name}": name for kind in (LOHA, *LOKRS) for name in kind},
    # Without these a product is wrong: Tucker's core, and a weight that is enlarged.
    **dict.fromkeys((".lora_mid.weight", ".hada_t1", ".hada_t2", ".lokr_t2", ".reshape_weight"), "unsupported"),
}
# What changes a weight, and what a bias, by the parts that it needs and those that are optional.
_SCALES = ("alpha", "magnitude")
_OF_WEIGHT = (*((kind, _SCALES) for kind in (LORA, LOHA, *LOKRS)), (("diff",), ()))
_OF_BIAS = ((("diff_b",), ()), (("up_bias", "down"), ("alpha",)))
# Lightx2v's: the difference of a block's `modulation`, which is a parameter and no module.
_MODULATION = ".diff_m"
_ENDING = re.compile(rf"(.+?)({'|'.join(map(re.escape, sorted(_PARTS, key=len, reverse=True)))})")
# PEFT's own state has the adapter's name in the middle: `lora_A.default.weight`.
_NAMED = re.compile(r"(.+\.lora_(?:A|B|magnitude_vector))\.([^.]+)((?:\.weight|\.bias)?)")
# No published name is nearly as long; matching longer ones would take longer than reading the file.
_LONGEST_NAME = 500
# Of an alpha or the rank it is divided by; larger ones make infinities of weights.
_LARGEST_ALPHA = 1e6
# Where diffusers keeps PEFT's config in a file; PEFT itself writes a separate one.
_PEFT_METADATA, _PEFT_CONFIG = "lora_adapter_metadata", "adapter_config.json"


class LoraError(SafeError):
    """A LoRA that cannot be used, in a sentence for the user."""


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
    held: HeldTensors | None = None

    def tensor(self, reader: load.Reader, name: str) -> torch.Tensor:
        """In float32, on the host."""
        if self.held is None:
            return reader.slice(TensorFile(path=self.path, name=name, shape=()), ()).float()
        reader.check()
        return self.held.tensors[name].detach().to("cpu", torch.float32)


# What is read: a file's path, or what another program holds of one.
Source = str | HeldTensors


def identity(source: Source) -> str:
    """What changes when the file does; raises `LoraError` where it is missing."""
    if isinstance(source, HeldTensors):
        return source.digest
    try:
        stat = os.stat(source)
    except OSError as error:
        raise LoraError(
            f"The LoRA {source} cannot be read ({error.strerror}). Choose another, or put it back."
        ) from None
    return signature(source, stat.st_size, stat.st_mtime_ns)


def content(source: Source) -> str:
    """What two copies of the file have in common, and other files do not: its size and header."""
    if isinstance(source, HeldTensors):
        return source.digest
    shapes, config = _header(source)
    return signature(os.stat(source).st_size, sorted(shapes.items()), sorted(config.items()) if config else None)


def read(source: Source, network: Network) -> Adapter:
    """What a file changes in a network; raises `LoraError` for one that is damaged or no safetensors file."""
    held = source if isinstance(source, HeldTensors) else None
    path = source if isinstance(source, str) else source.title
    shapes, config = _header(path) if held is None else ({n: tuple(x.shape) for n, x in held.tensors.items()}, {})
    weights: dict[str, Shape] = {}
    cuts: dict[str, list[Cut | None]] = defaultdict(list)
    for one in network.weights.values():
        for source in one.sources:
            weights[source] = one.tensor_shape
            cuts[source].append(one.cut)
    names = Names(weights, network.component.makers_names)
    modules: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in _meant_for(network.component.name, shapes):
        if (found := _split(name)) is not None:
            modules[found[:2]][found[2]] = name
    changes: dict[str, list[Change]] = defaultdict(list)
    scalings = _Scalings(path, config)
    misfit = ""
    for (module, adapter), own in list(modules.items()):
        # An alpha has no adapter's name.
        unnamed = modules.get((module, ""), {}) if adapter else {}
        parts = {**{part: unnamed[part] for part in _SCALES if part in unnamed}, **own}
        _check_sizes(path, parts, shapes)
        scaling = scalings.of(module)
        for rows in names.find(module):
            for weight, chosen in _changed(rows.name, parts, weights):
                meta = {part: torch.empty(shapes[name], device="meta") for part, name in chosen.items()}
                try:
                    found = factors(meta, rows, weights[weight])
                    for cut in cuts[weight]:
                        found.of(cut)
                except WrongShape as error:
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
        held=held,
    )


def _meant_for(component: str, names: Iterable[str]) -> list[str]:
    """The names that are for a denoiser called `component`: all, unless some name the second expert, which has these
    alone.
    """
    names = list(names)
    seconds = [name for name in names if name.startswith(SECOND_EXPERT)]
    if component == SECOND_EXPERT.removesuffix("."):
        return seconds or names
    return [name for name in names if not name.startswith(SECOND_EXPERT)]


def _split(name: str) -> tuple[str, str, str] | None:
    """The module that a tensor is for, the name of PEFT's adapter, if it has one, and which part of a change it is;
    None for a name with another ending.
    """
    if len(name) > _LONGEST_NAME:
        return None
    if name.endswith(_MODULATION):
        return f"{name.removesuffix(_MODULATION)}.modulation", "", "diff"
    adapter = ""
    if _ENDING.fullmatch(name) is None and (named := _NAMED.fullmatch(name)):
        name, adapter = named[1] + named[3], named[2]
    match = _ENDING.fullmatch(name)
    return (match[1], adapter, _PARTS[match[2]]) if match else None


def _check_sizes(path: str, parts: Mapping[str, str], shapes: Mapping[str, Shape]) -> None:
    """Raises `LoraError` for tensors that hold nothing, and for an alpha of more than one number."""
    for part, name in parts.items():
        size = math.prod(shapes[name])
        if size == 0 or (part == "alpha" and size != 1):
            form = "x".join(map(str, shapes[name]))
            expected = "one number" if part == "alpha" else "a rank of 1 or more"
            raise LoraError(f"The LoRA {path}: {name} has the shape {form}, which is not {expected}. Choose another.")


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
    from safetensors import SafetensorError

    try:
        tensors, metadata = read_header(Path(path))
        said = metadata.get(_PEFT_METADATA)
        separate = Path(path).with_name(_PEFT_CONFIG)
        if said is None and separate.is_file() and Path(path).name == "adapter_model.safetensors":
            said = separate.read_text("utf-8")
    except (OSError, SafetensorError, UnicodeDecodeError) as error:
        raise LoraError(
            f"The LoRA {path} is not a whole safetensors file ({error}). Download it again, or choose another."
        ) from None
    for name, tensor in tensors.items():
        if tensor.dtype not in quantized.READ and _split(name) is not None:
            raise LoraError(
                f"The LoRA {path}: {name} holds {tensor.dtype}, and changes are floating point numbers. "
                "Choose one that is not quantized."
            )
    try:
        config = parse_json(said or "{}")
    except ValueError as error:
        raise LoraError(f"The LoRA {path}: PEFT's config in it is not JSON ({error}). Choose another.") from None
    if not isinstance(config, dict):
        raise LoraError(f"The LoRA {path}: PEFT's config in it is {_short(config)}, and no object. Choose another.")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return shapes, {key.removeprefix("transformer."): value for key, value in config.items()}


class _Scalings:
    """What PEFT's config says of each module; raises `LoraError` where that cannot be used.

    `alpha_pattern` names modules, fully or from a dot on, as diffusers and PEFT write it. PEFT takes the names for
    regular expressions; a stranger's are not run here, because one can take forever.
    """

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config
        patterns = config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise LoraError(f"The LoRA {path}: alpha_pattern is {_short(patterns)}, and no object. Choose another.")
        self._own: dict[str, tuple[int, Any]] = {}
        for order, (key, alpha) in enumerate(patterns.items()):
            name = key.removeprefix("^").removesuffix("$").replace("\\.", ".")
            if not re.fullmatch(r"[\w.-]+", name):
                raise LoraError(
                    f"The LoRA {path}: alpha_pattern has {_short(key)}, which is a regular expression; only names of "
                    "modules are taken, whole or from a dot on. Save it with the modules' names, or choose another."
                )
            self._own.setdefault(name, (order, alpha))

    def of(self, module: str) -> Scaling:
        """Of several names that fit, the first counts, as in PEFT."""
        parts = module.split(".")
        fitting = (self._own.get(".".join(parts[start:])) for start in range(len(parts)))
        found = min((one for one in fitting if one is not None), key=lambda one: one[0], default=None)
        alpha = self._config.get("lora_alpha") if found is None else found[1]
        power = 0.5 if self._config.get("use_rslora") else 1.0
        return Scaling(alpha=None if alpha is None else check_alpha(self._path, "lora_alpha", alpha), power=power)


def check_alpha(path: str | Path, name: str, alpha: Any) -> float:
    """An alpha as a number; raises `LoraError` for one that no training has."""
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= _LARGEST_ALPHA:
        raise LoraError(
            f"The LoRA {path}: {name} is {_short(alpha)}; an alpha is a number between 0 and {_LARGEST_ALPHA:g}. "
            "Choose another."
        )
    return float(alpha)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
