"""What a LoRA file changes, from its header: names of tensors, in any trainer's spelling, and their shapes. Values are
read only where several names are the same weight.

A file holds matrices by module: `down` and `up` of a LoRA, the factors of LyCORIS' LoHa and LoKr, or full differences.
What matches nothing in the network is listed, never dropped silently.
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
from ..checkpoints import load
from ..checkpoints.model_ref import HeldTensors
from ..files import TensorFile, parse_json, read_header
from ..formats import quantized
from ..formats.names import SECOND_EXPERT, Names, bare
from ..programs.modules import Cut, Network
from .change import Change, LoraError, short
from .factors import LOHA, LOKRS, LORA, Shape, WrongShape, factors
from .peft_config import PeftConfig, of_component
from .spellings import Spelling, settled

# The two matrices of a LoRA. Of several pairs in one module ComfyUI takes the last but one of this list; the last it
# does not take.
_MATRICES = (
    (".lora_A", ".lora_B"),
    (".lora.down.weight", ".lora.up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_down", ".lora_up"),
)
_DOWNS = tuple(down for down, _ in _MATRICES)
_PEFT_PAIR, _OTHER_PAIR, _NORM = _DOWNS[2], _DOWNS[-1], "norm"
# How names end: what a tensor of that name is, and for matrices of a LoRA which pair. The longest ending counts.
_PARTS = {
    **{down: ("down", down) for down, _ in _MATRICES},
    **{up: ("up", down) for down, up in _MATRICES},
    ".lora_B.bias": ("up_bias", _PEFT_PAIR),
    ".alpha": ("alpha", ""),
    # Of several names for the same, the last counts.
    ".magnitude": ("magnitude", ""),  # ai-toolkit's DoRA: the norm of each row, as PEFT's
    ".lora_magnitude_vector.weight": ("magnitude", ""),
    ".lora_magnitude_vector": ("magnitude", ""),
    ".dora_scale": ("magnitude", ""),
    ".w_norm": ("diff", _NORM),
    ".b_norm": ("diff_b", _NORM),
    ".diff": ("diff", ""),
    ".diff_b": ("diff_b", ""),
    **{f".{name}": (name, "") for kind in (LOHA, *LOKRS) for name in kind},
    # Without these a product is wrong: Tucker's core, and a weight that is enlarged.
    **dict.fromkeys((".lora_mid.weight", ".hada_t1", ".hada_t2", ".lokr_t2", ".reshape_weight"), ("unsupported", "")),
}
_PLACES = {ending: place for place, ending in enumerate(_PARTS)}
# What changes a weight, and what a bias, by the parts that it needs and those that are optional.
_SCALES = ("alpha", "magnitude")
_SHARED = (*_SCALES, "unsupported")
_OF_WEIGHT = (*((kind, _SCALES) for kind in (LORA, LOHA, *LOKRS)), (("diff",), ()))
# Of changes of one weight under one name, those that ComfyUI takes in place of the ones before; matrices come first.
_KINDS = ("hada_w1_a", "lokr_w1", "lokr_w1_a", "diff", "diff_b")
_OF_BIAS = ((("diff_b",), ()), (("up_bias", "down"), ("alpha",)))
# Lightx2v's: the difference of a block's `modulation`, which is a parameter and no module.
_MODULATION = ".diff_m"
_ENDING = re.compile(rf"(.+?)({'|'.join(map(re.escape, sorted(_PARTS, key=len, reverse=True)))})")
# PEFT's own state has the adapter's name in the middle: `lora_A.default.weight`.
_NAMED = re.compile(
    r"(.+\.(?:lora_(?:A|B|magnitude_vector)|hada_w[12]_[ab]|lokr_w[12](?:_[ab])?))\.([^.]+)((?:\.weight|\.bias)?)"
)
# The name that PEFT gives an adapter by itself, and the only one that ComfyUI knows.
_DEFAULT_ADAPTER = "default"
# No published name is nearly as long; matching longer ones would take longer than reading the file.
_LONGEST_NAME = 500
# Numbers that an alpha may be, besides those that a weight is.
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
# Where diffusers keeps PEFT's config in a file; PEFT itself writes a separate one.
_PEFT_METADATA, _PEFT_CONFIG = "lora_adapter_metadata", "adapter_config.json"


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


def read(source: Source, network: Network, check: Callable[[], None] = lambda: None) -> Adapter:
    """What a file changes in a network; raises `LoraError` for one that is damaged or no safetensors file.

    Tensors are read only where several names are the same weight; `check` raises if the user cancelled.
    """
    held = source if isinstance(source, HeldTensors) else None
    path = source if isinstance(source, str) else source.title
    shapes, config = _header(path) if held is None else ({n: tuple(x.shape) for n, x in held.tensors.items()}, {})
    peft = PeftConfig(path, of_component(config, network.component.name))
    spellings, misfit = _spellings(path, network, shapes, peft)
    found = Adapter(path=Path(path), changes={}, unused=(), misfit=misfit, held=held)
    changes: dict[str, tuple[Change, ...]] = {}
    used: set[str] = set()
    sizes = {source: one.tensor_shape for one in network.weights.values() for source in one.sources}
    with contextlib.ExitStack() as stack:
        reader = load.Reader(stack, check)
        for weight, own in spellings.items():
            kept, repeated = own, []
            if len(own) > 1:
                kept, repeated = settled(
                    found.path, weight, sizes[weight], own, functools.partial(found.tensor, reader)
                )
            changes[weight] = tuple(one.change for one in kept)
            used.update(name for one in (*kept, *repeated) for name in one.change.parts.values())
    return replace(found, changes=changes, unused=tuple(sorted(shapes.keys() - used)))


def _spellings(
    path: str, network: Network, shapes: Mapping[str, Shape], peft: PeftConfig
) -> tuple[Mapping[str, list[Spelling]], str]:
    """All that a file's names change, by the weight's name in a checkpoint, and the first that does not fit."""
    component = network.component
    weights: dict[str, Shape] = {}
    cuts: dict[str, list[Cut | None]] = defaultdict(list)
    for one in network.weights.values():
        for source in one.sources:
            weights[source] = one.tensor_shape
            cuts[source].append(one.cut)
    names = Names(weights, component.makers_names)
    peft.check_whole(_whole(names, shapes))
    modules = _modules(_meant_for(component.name, shapes))
    spellings: dict[str, list[Spelling]] = defaultdict(list)
    misfit = ""
    for (module, adapter, pair), own in modules.items():
        # An alpha and a magnitude say nothing of the matrices, and an alpha has no adapter's name.
        others = {**modules.get((module, "", ""), {}), **modules.get((module, adapter, ""), {})}
        parts = {**{part: others[part] for part in _SHARED if part in others}, **own}
        _check_sizes(path, parts, shapes)
        targets, scaling = names.find(module), peft.scaling(module, bare(module))
        for rows in targets:
            for weight, chosen in _changed(rows.name, parts, weights):
                meta = {part: torch.empty(shapes[name], device="meta") for part, name in chosen.items()}
                try:
                    found = factors(meta, rows, weights[weight])
                    for cut in cuts[weight]:
                        found.of(cut)
                except WrongShape as error:
                    size = "x".join(map(str, weights[weight]))
                    misfit = misfit or f"{module} is for {error}, but {weight} is {size}"
                    continue
                if pair == _PEFT_PAIR:
                    peft.check_module(module, "magnitude" in parts)
                spellings[weight].append(
                    Spelling(
                        module=module,
                        adapter=adapter,
                        pair=pair,
                        target=targets,
                        change=Change(parts=chosen, rows=rows, scaling=scaling),
                    )
                )
    for weight, own in spellings.items():
        if len(own) > 1:
            spellings[weight] = [
                replace(one, order=_order(names.comfyui_order(one.module, component.lora_prefixes), one)) for one in own
            ]
    return spellings, misfit


def _modules(names: Iterable[str]) -> dict[tuple[str, str, str], dict[str, str]]:
    """Names of tensors by part: of each module, adapter of PEFT's, and pair of matrices ("" for all else)."""
    found: dict[tuple[str, str, str], dict[str, tuple[int, str]]] = defaultdict(dict)
    for name in names:
        if (split := _split(name)) is None:
            continue
        module, adapter, ending = split
        part, pair = _PARTS[ending]
        one = _PLACES[ending], name
        own = found[module, adapter, pair]
        own[part] = max(own.get(part, one), one)
    return {key: {part: name for part, (_, name) in own.items()} for key, own in found.items()}


def _order(place: int | None, one: Spelling) -> tuple[int, int] | None:
    """Where a change stands among those of names that ComfyUI takes, `place` being that of its module's name."""
    parts = one.change.parts
    if place is None or one.adapter not in ("", _DEFAULT_ADAPTER) or one.pair == _OTHER_PAIR or "up_bias" in parts:
        return None
    if "up" in parts:
        return place, -1 if one.adapter else _DOWNS.index(one.pair)
    kind = next(number for number, part in enumerate(_KINDS) if part in parts)
    return place, len(_DOWNS) + 2 * kind - (one.pair == _NORM)


def _whole(names: Names, shapes: Iterable[str]) -> Iterator[str]:
    """The file's names of whole weights and biases of a network, which PEFT saves beside changes."""
    for name in shapes:
        module, _, leaf = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".").rpartition(".")
        if leaf in ("weight", "bias") and len(name) <= _LONGEST_NAME and _split(name) is None and names.find(module):
            yield name


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
    """The module that a tensor is for, the name of PEFT's adapter, if it has one, and which ending of `_PARTS`; None
    for a name with another ending.
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
        split = _split(name)
        taken = quantized.READ | _INTEGERS if split and split[2] == ".alpha" else quantized.READ
        if split is not None and tensor.dtype not in taken:
            raise LoraError(
                f"The LoRA {path}: {name} holds {tensor.dtype}, and changes are floating point numbers. "
                "Choose one that is not quantized."
            )
    try:
        config = parse_json(said or "{}")
    except ValueError as error:
        raise LoraError(f"The LoRA {path}: PEFT's config in it is not JSON ({error}). Choose another.") from None
    if not isinstance(config, dict):
        raise LoraError(
            f"The LoRA {path}: PEFT's config in it is {short(config)}, and no object of options. Save it again with "
            "PEFT, or choose another."
        )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return shapes, config
