"""Changes of a LoRA file, from its header: names of tensors in any trainer's form, and their shapes.

Values are read only if several names are the same weight. A file holds matrices by module (`down` and `up` of a LoRA,
the factors of LyCORIS' LoHa and LoKr) or full differences. Names that match nothing in the network are listed.
"""

import contextlib
import functools
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..cache.store import signature
from ..checkpoints import weight_loader
from ..checkpoints.model_ref import InMemoryLora
from ..files import TensorFile, parse_json, read_header
from ..formats import quantization_detect
from ..formats.key_map import SECOND_EXPERT, KeyMap, strip_prefixes
from ..messages import compose
from ..programs.upstream_network import Network, WeightSlice
from .change import LoraError, WeightChange, shorten_value
from .duplicate_names import NamedChange, resolve_spellings
from .factors import LOHA, LOKRS, LORA, Shape, ShapeMismatch, make_factors
from .peft_config import PeftConfig, select_component

# Names of a LoRA's two matrices. ComfyUI does not accept the last pair; of several others in a module the last counts.
_MATRICES = (
    (".lora_A", ".lora_B"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_down", ".lora_up"),
)
_DOWNS = tuple(down for down, _ in _MATRICES)
_PEFT_PAIR, _OTHER_PAIR, _NORM = _DOWNS[2], _DOWNS[-1], "norm"
# Endings of names: the part that the tensor is, and the pair of a LoRA's matrix. The longest ending counts.
_PARTS = {
    **{down: ("down", down) for down, _ in _MATRICES},
    **{up: ("up", down) for down, up in _MATRICES},
    ".lora_B.bias": ("up_bias", _PEFT_PAIR),
    ".alpha": ("alpha", ""),
    # If several names of one part exist, the last counts.
    ".magnitude": ("magnitude", ""),  # ai-toolkit's DoRA: the norm of each row, as PEFT's
    ".lora_magnitude_vector.weight": ("magnitude", ""),
    ".lora_magnitude_vector": ("magnitude", ""),
    ".dora_scale": ("magnitude", ""),
    ".w_norm": ("diff", _NORM),
    ".b_norm": ("diff_b", _NORM),
    ".diff": ("diff", ""),
    ".diff_b": ("diff_b", ""),
    **{f".{name}": (name, "") for kind in (LOHA, *LOKRS) for name in kind},
    # Unsupported, and the product is wrong without them: Tucker's core, and an enlarged weight.
    **dict.fromkeys((".lora_mid.weight", ".hada_t1", ".hada_t2", ".lokr_t2", ".reshape_weight"), ("unsupported", "")),
}
_PLACES = {ending: place for place, ending in enumerate(_PARTS)}
# Parts that change a weight or a bias: required and optional ones.
_SCALES = ("alpha", "magnitude")
_SHARED = (*_SCALES, "unsupported")
_OF_WEIGHT = (*((kind, _SCALES) for kind in (LORA, LOHA, *LOKRS)), (("diff",), ()))
# Precedence of several changes under one name in ComfyUI: matrices first, later entries replace earlier ones.
_KINDS = ("hada_w1_a", "lokr_w1", "lokr_w1_a", "diff", "diff_b")
_OF_BIAS = ((("diff_b",), ()), (("up_bias", "down"), ("alpha",)))
# Lightx2v's difference of a block's `modulation`, which is a parameter, not a module.
_MODULATION = ".diff_m"
_ENDING = re.compile(rf"(.+?)({'|'.join(map(re.escape, sorted(_PARTS, key=len, reverse=True)))})")
# PEFT's own state has the adapter's name in the middle: `lora_A.default.weight`.
_NAMED = re.compile(
    r"(.+\.(?:lora_(?:A|B|magnitude_vector)|hada_w[12]_[ab]|lokr_w[12](?:_[ab])?))\.([^.]+)((?:\.weight|\.bias)?)"
)
# PEFT's default name of an adapter, the only one that ComfyUI supports.
_DEFAULT_ADAPTER = "default"
# Far above published names; matching longer names would take longer than reading the file.
_LONGEST_NAME = 500
# Integer dtypes of an alpha, in addition to the dtypes of weights.
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
# Where diffusers keeps PEFT's config in a file; PEFT itself writes a separate one.
_PEFT_METADATA, _PEFT_CONFIG = "lora_adapter_metadata", "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A file's changes to one network."""

    path: Path  # of the file, or the title
    changes: Mapping[str, tuple[WeightChange, ...]]  # by the weight's name in a checkpoint
    unused: tuple[str, ...]  # names that match nothing
    incompatible: str  # of the first module with another shape: what would have to match; "" if all match
    held: InMemoryLora | None = None  # tensors in memory instead of a file

    def tensor(self, reader: weight_loader.TensorReader, name: str) -> torch.Tensor:
        """Return a tensor of the file in float32 on the host, in the file's shape `[...]`."""
        if self.held is None:
            return reader.slice(TensorFile(path=self.path, name=name, shape=()), ()).float()
        reader.check()
        return self.held.tensors[name].detach().to("cpu", torch.float32)


# A LoRA: the path of a file, or tensors in memory.
Source = str | InMemoryLora


def identify_source(source: Source) -> str:
    """Return a digest that changes when the file does. Raises `LoraError` if the file is missing."""
    if isinstance(source, InMemoryLora):
        return source.digest
    try:
        stat = os.stat(source)
    except OSError as error:
        raise LoraError(compose("lora.unreadable", source=source, strerror=error.strerror)) from None
    return signature(source, stat.st_size, stat.st_mtime_ns)


def hash_content(source: Source) -> str:
    """Return a digest of size and header that is equal for two copies of a file."""
    if isinstance(source, InMemoryLora):
        return source.digest
    shapes, config = _header(source)
    return signature(os.stat(source).st_size, sorted(shapes.items()), sorted(config.items()) if config else None)


def read_adapter(source: Source, network: Network, check: Callable[[], None] = lambda: None) -> Adapter:
    """Return a file's changes to a network. Raises `LoraError` for one that is damaged or unsupported.

    source: the file, or a LoRA in memory.
    check: raises if the user cancelled.
    Tensors are read only if several names are the same weight.
    """
    in_memory = source if isinstance(source, InMemoryLora) else None
    path = source if isinstance(source, str) else source.title
    shapes, config = (
        _header(path) if in_memory is None else ({n: tuple(x.shape) for n, x in in_memory.tensors.items()}, {})
    )
    peft = PeftConfig(path, select_component(config, network.component.name))
    spellings, misfit = _spellings(path, network, shapes, peft)
    adapter = Adapter(path=Path(path), changes={}, unused=(), incompatible=misfit, held=in_memory)
    changes: dict[str, tuple[WeightChange, ...]] = {}
    used: set[str] = set()
    sizes = {source: parameter.tensor_shape for parameter in network.weights.values() for source in parameter.sources}
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, check)
        for weight, named_changes in spellings.items():
            kept, repeated = named_changes, []
            if len(named_changes) > 1:
                kept, repeated = resolve_spellings(
                    adapter.path, weight, sizes[weight], named_changes, functools.partial(adapter.tensor, reader)
                )
            changes[weight] = tuple(spelling.change for spelling in kept)
            used.update(name for spelling in (*kept, *repeated) for name in spelling.change.parts.values())
    return replace(adapter, changes=changes, unused=tuple(sorted(shapes.keys() - used)))


def _spellings(
    path: str, network: Network, shapes: Mapping[str, Shape], peft: PeftConfig
) -> tuple[Mapping[str, list[NamedChange]], str]:
    """Return all changes by the weight's name in a checkpoint, and the first mismatch of shapes as text, or ""."""
    component = network.component
    weights: dict[str, Shape] = {}
    cuts: dict[str, list[WeightSlice | None]] = defaultdict(list)
    for parameter in network.weights.values():
        for source in parameter.sources:
            weights[source] = parameter.tensor_shape
            cuts[source].append(parameter.cut)
    names = KeyMap(weights, component.original_keys)
    peft.check_whole(_whole(names, shapes))
    modules = _modules(_names_for_component(component.name, shapes))
    spellings: dict[str, list[NamedChange]] = defaultdict(list)
    misfit = ""
    for (module, adapter, pair), parts_by_kind in modules.items():
        # An alpha and a magnitude say nothing of the matrices, and an alpha has no adapter's name.
        others = {**modules.get((module, "", ""), {}), **modules.get((module, adapter, ""), {})}
        parts = {**{part: others[part] for part in _SHARED if part in others}, **parts_by_kind}
        _check_sizes(path, parts, shapes)
        targets, scaling = names.find(module), peft.scaling(module, strip_prefixes(module))
        for rows in targets:
            for weight, chosen in _find_changed_weights(rows.name, parts, weights):
                meta = {part: torch.empty(shapes[name], device="meta") for part, name in chosen.items()}
                try:
                    delta = make_factors(meta, rows, weights[weight])
                    for cut in cuts[weight]:
                        delta.take_slice(cut)
                except ShapeMismatch as error:
                    size = "x".join(map(str, weights[weight]))
                    misfit = misfit or f"{module} is for {error}, but {weight} is {size}"
                    continue
                if pair == _PEFT_PAIR:
                    peft.check_module(module, "magnitude" in parts)
                spellings[weight].append(
                    NamedChange(
                        module=module,
                        adapter=adapter,
                        pair=pair,
                        target=targets,
                        change=WeightChange(parts=chosen, rows=rows, scaling=scaling),
                    )
                )
    for weight, parts_by_kind in spellings.items():
        if len(parts_by_kind) > 1:
            spellings[weight] = [
                replace(
                    parameter, order=_order(names.comfyui_order(parameter.module, component.lora_prefixes), parameter)
                )
                for parameter in parts_by_kind
            ]
    return spellings, misfit


def _modules(names: Iterable[str]) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return names of tensors by part. Keys are module, PEFT adapter, and pair of matrices ("" for other parts)."""
    by_module: dict[tuple[str, str, str], dict[str, tuple[int, str]]] = defaultdict(dict)
    for name in names:
        if (split := _split(name)) is None:
            continue
        module, adapter, ending = split
        part, pair = _PARTS[ending]
        rank = _PLACES[ending], name
        parts = by_module[module, adapter, pair]
        parts[part] = max(parts.get(part, rank), rank)
    return {key: {part: name for part, (_, name) in parts.items()} for key, parts in by_module.items()}


def _order(place: int | None, one: NamedChange) -> tuple[int, int] | None:
    """Return the rank of a change among the names that ComfyUI accepts; `place` is the rank of its module's name."""
    parts = one.change.parts
    if place is None or one.adapter not in ("", _DEFAULT_ADAPTER) or one.pair == _OTHER_PAIR or "up_bias" in parts:
        return None
    if "up" in parts:
        return place, -1 if one.adapter else _DOWNS.index(one.pair)
    kind = next(number for number, part in enumerate(_KINDS) if part in parts)
    return place, len(_DOWNS) + 2 * kind - (one.pair == _NORM)


def _whole(names: KeyMap, shapes: Iterable[str]) -> Iterator[str]:
    """Yield the file's names of full weights and biases of a network, which PEFT saves next to changes."""
    for name in shapes:
        module, _, leaf = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".").rpartition(".")
        if leaf in ("weight", "bias") and len(name) <= _LONGEST_NAME and _split(name) is None and names.find(module):
            yield name


def _names_for_component(component: str, names: Iterable[str]) -> list[str]:
    """Return the names for the denoiser `component`.

    These are all names, unless some name the second expert, which gets those alone.
    """
    names = list(names)
    seconds = [name for name in names if name.startswith(SECOND_EXPERT)]
    if component == SECOND_EXPERT.removesuffix("."):
        return seconds or names
    return [name for name in names if not name.startswith(SECOND_EXPERT)]


def _split(name: str) -> tuple[str, str, str] | None:
    """Return the module of a tensor, the name of PEFT's adapter or "", and the ending in `_PARTS`.

    None for other endings.
    """
    if len(name) > _LONGEST_NAME:
        return None
    if name.endswith(_MODULATION):
        return f"{name.removesuffix(_MODULATION)}.modulation", "", ".diff"
    adapter = ""
    if _ENDING.fullmatch(name) is None and (named := _NAMED.fullmatch(name)):
        name, adapter = named[1] + named[3], named[2]
    match = _ENDING.fullmatch(name)
    return (match[1], adapter, match[2]) if match else None


def _check_sizes(path: str, parts: Mapping[str, str], shapes: Mapping[str, Shape]) -> None:
    """Raise `LoraError` for empty tensors, and for an alpha of more than one number."""
    for part, name in parts.items():
        size = math.prod(shapes[name])
        if size == 0 or (part == "alpha" and size != 1):
            form = "x".join(map(str, shapes[name]))
            expected = "one number" if part == "alpha" else "a rank of 1 or more"
            raise LoraError(compose("lora.shape_wrong", path=path, name=name, form=form, expected=expected))


def _find_changed_weights(
    module: str, parts: Mapping[str, str], weights: Mapping[str, Shape]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the weights that parts of a module change, each with its parts.

    Parts belong to the module, or to a parameter of that name.
    """
    targets = {module if module in weights else f"{module}.weight": _OF_WEIGHT, f"{module}.bias": _OF_BIAS}
    for target, kinds in targets.items():
        for needed, optional in kinds:
            is_whole = "unsupported" not in parts or optional != _SCALES
            if is_whole and target in weights and all(part in parts for part in needed):
                yield target, {part: parts[part] for part in (*needed, *optional) if part in parts}


def _header(path: str) -> tuple[dict[str, Shape], Mapping[str, Any]]:
    """Return shapes by name, and PEFT's config or {}."""
    from safetensors import SafetensorError

    try:
        tensors, metadata = read_header(Path(path))
        config_text = metadata.get(_PEFT_METADATA)
        separate = Path(path).with_name(_PEFT_CONFIG)
        if config_text is None and separate.is_file() and Path(path).name == "adapter_model.safetensors":
            config_text = separate.read_text("utf-8")
    except (OSError, SafetensorError, UnicodeDecodeError) as error:
        raise LoraError(compose("lora.cut_off", path=path, error=error)) from None
    for name, tensor in tensors.items():
        split = _split(name)
        taken = (
            quantization_detect.READABLE_DTYPES | _INTEGERS
            if split and split[2] == ".alpha"
            else quantization_detect.READABLE_DTYPES
        )
        if split is not None and tensor.dtype not in taken:
            raise LoraError(compose("lora.not_floating_point", path=path, name=name, dtype=tensor.dtype))
    try:
        config = parse_json(config_text or "{}")
    except ValueError as error:
        raise LoraError(compose("lora.peft_config_not_json", path=path, error=error)) from None
    if not isinstance(config, dict):
        raise LoraError(compose("lora.peft_config_not_object", path=path, config=shorten_value(config)))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return shapes, config
