"""Upstream torch modules without weights, with their block list scanned.

A module is built on the meta device from its class and config; its weights live outside, as a dict of JAX arrays by
parameter name. The list of equal blocks becomes one block whose parameters are stacked over layers and which runs under
`jax.lax.scan`, so that tracing and compiling do not grow with depth.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch

from ..files import CheckpointError
from ..model_spec import Component
from . import torch_bridge
from .program import TRACING

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

# The name of the one block in a stacked list: `blocks.3.attn.weight` is layer 3 of `blocks.*.attn.weight`.
LAYER = "*"

Index = tuple[slice, ...]
_LAYER_INDEX: ContextVar[jax.Array] = ContextVar("layer_index")


def layer_index() -> jax.Array:
    """Within a layer of a scan that keeps weights whole: its number."""
    return _LAYER_INDEX.get()


class ScannedBlocks(torch.nn.Module):
    """Stands in a model where its list of equal blocks was: one block, which `scan_layers` runs with each layer's
    weights.
    """

    def __init__(self, blocks: torch.nn.ModuleList, path: str = "") -> None:
        super().__init__()
        self.path, self.num_layers = path, len(blocks)
        self.add_module(LAYER, blocks[0])

    @property
    def block(self) -> torch.nn.Module:
        return self.get_submodule(LAYER)


def scan_layers(
    blocks: ScannedBlocks,
    carry: Any,
    body: Callable[[torch.nn.Module, Any], Any],
    part: range | None = None,
    *,
    stack: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda weights: weights,
    use: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda weights: weights,
    whole: Callable[[str, jax.Array], bool] = lambda name, stack: False,
    collect: bool = False,
) -> tuple[Any, Any]:
    """`carry = body(block, carry)` for each layer in turn (or those in `part`), traced once: the last carry.

    `block` is the one block with a layer's weights for parameters. `carry` is a tree of torch tensors; each keeps its
    shape and its format. `stack` may reshape all layers' weights, `use` places one layer's. Those that are
    `whole` the body gets of all layers, and takes its own by `layer_index`. With `collect` also what
    each layer leaves in the carry's first leaf, `[layers, ...]`.
    """
    block = blocks.block
    stacked = stack(torch_bridge.to_jax({**dict(block.named_parameters()), **_saved_buffers(block)}))

    kept = {name: stacked.pop(name) for name in [*stacked] if whole(name, stacked[name])}

    def layer(carry: Any, weights: dict[str, jax.Array]) -> tuple[Any, jax.Array | None]:
        found = torch_bridge.functional(block, use(weights), body, carry)
        found = jax.tree.map(lambda new, old: new.astype(old.dtype), found, carry)
        return found, jax.tree.leaves(found)[0] if collect else None

    def indexed(carry: Any, index: jax.Array) -> tuple[Any, jax.Array | None]:
        weights = {name: jax.lax.dynamic_index_in_dim(x, index, 0, False) for name, x in stacked.items()}
        token = _LAYER_INDEX.set(index)
        try:
            return layer(carry, weights | kept)
        finally:
            _LAYER_INDEX.reset(token)

    start = torch_bridge.to_jax(carry)
    # By index: a slice of the stack would be a copy of those weights.
    if part is None and not kept:
        return torch_bridge.to_torch(jax.lax.scan(layer, start, stacked))
    found = jax.lax.scan(indexed, start, jnp.array(part or range(blocks.num_layers)))
    return torch_bridge.to_torch(found)


def scan_states(blocks: ScannedBlocks, states: torch.Tensor, **same: Any) -> torch.Tensor:
    """What upstream's blocks in turn make of `states`; their other arguments are the `same` for every layer."""

    def body(block: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
        found = block(states, **same)
        return found[0] if isinstance(found, tuple) else found  # as some do, in some versions

    return scan_layers(blocks, states, body)[0]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Part of a checkpoint's tensor of `shape`, called `source` beside the parameter's module.

    Its dimension `dim` is cut into `groups` of equal size. Of these the parameter is one, or has several (`taken`, a
    slice) as a dimension of their own in front of it. Then dimensions follow each other in `order`.
    """

    source: str
    shape: tuple[int, ...]
    dim: int
    groups: int
    taken: int | slice
    order: tuple[int, ...]

    @property
    def _range(self) -> range:
        return range(self.groups)[self.taken if isinstance(self.taken, slice) else slice(self.taken, self.taken + 1)]

    @property
    def _size(self) -> int:
        return self.shape[self.dim] // self.groups

    @property
    def part_shape(self) -> tuple[int, ...]:
        several = (len(self._range),) if isinstance(self.taken, slice) else ()
        shape = (*self.shape[: self.dim], *several, self._size, *self.shape[self.dim + 1 :])
        return tuple(shape[axis] for axis in self.order)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter's values, of the full tensor's."""
        return self.read((slice(None),) * len(self.order), tensor.__getitem__)

    def read(self, index: Index, read: Callable[[Index], torch.Tensor]) -> torch.Tensor:
        """The parameter's values at `index`, from a tensor that `read` reads a piece of."""
        parts = [index[self.order.index(axis)] for axis in range(len(index))]
        chosen = self._range[parts.pop(self.dim)] if isinstance(self.taken, slice) else self._range
        start, stop, _ = parts[self.dim].indices(self._size)
        places = [slice(group * self._size + start, group * self._size + stop) for group in chosen]
        pieces = [read((*parts[: self.dim], place, *parts[self.dim + 1 :])) for place in places]
        found = torch.stack(pieces, self.dim) if isinstance(self.taken, slice) else pieces[0]
        return found.permute(self.order)


def cut(
    weight: torch.Tensor, source: str, dim: int, groups: int, taken: int | slice, order: Sequence[int] | None = None
) -> torch.nn.Parameter:
    """A parameter in place of `weight`, or beside others: see `Cut`. Without values."""
    if weight.shape[dim] % groups:
        raise ValueError(f"{source} of shape {tuple(weight.shape)}: dimension {dim} is not {groups} equal groups.")
    dims = weight.dim() + isinstance(taken, slice)
    how = Cut(
        source=source, shape=tuple(weight.shape), dim=dim, groups=groups, taken=taken,
        order=tuple(order or range(dims)),
    )  # fmt: skip
    parameter = torch.nn.Parameter(torch.empty(how.part_shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    parameter.cut = how  # type: ignore[attr-defined]
    return parameter


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of a built module: its shape (stacked where scanned) and the names it has in a checkpoint; of what is
    there it may be a `cut`.
    """

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    stacked: bool
    keep_float32: bool
    cut: Cut | None = None

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor, or of each of its layers'."""
        return self.layer_shape if self.cut is None else self.cut.shape


@dataclass(frozen=True, kw_only=True)
class Network:
    """A built module and the weights it needs, by parameter name."""

    component: Component
    module: torch.nn.Module
    weights: Mapping[str, Weight]


def build_full(component: Component, config: Mapping[str, Any]) -> torch.nn.Module:
    """The upstream module as it is, parameters on the meta device, buffers real."""
    import transformers

    with _parameters_on_meta():
        module = construct(component, config)
    if isinstance(module, transformers.PreTrainedModel):
        # Moving to the meta device unties shared embeddings.
        module.tie_weights()
        _tie(module, component.aliases)
    return module


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """accelerate's empty weights, for this thread alone: others may construct modules meanwhile, which keep theirs."""
    import accelerate

    owners = {threading.get_ident()}
    register = torch.nn.Module.register_parameter
    with accelerate.init_empty_weights(include_buffers=False):
        register_empty = torch.nn.Module.register_parameter

        def register_here(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
            (register_empty if threading.get_ident() in owners else register)(self, name, param)

        torch.nn.Module.register_parameter = register_here
        try:
            yield
        finally:
            owners.clear()  # whoever patched it meanwhile may have kept ours


def _tie(module: torch.nn.Module, aliases: Mapping[str, str]) -> None:
    """Makes one parameter of those that checkpoints hold once, under either name.

    transformers 5.0 unties UMT5's embedding where a config says so, as all published ones do.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    for other, own in aliases.items():
        if other in named and own in named:
            path, _, last = other.rpartition(".")
            setattr(module.get_submodule(path), last, named[own])


def construct(component: Component, config: Mapping[str, Any]) -> "ModelMixin | PreTrainedModel":
    """Calls the upstream class with a config as its `config.json` holds it; `CheckpointError` where that fails."""
    try:
        return _constructed(upstream_class(component), component, config)
    except Exception as error:  # whatever upstream's code makes of a config that may hold anything
        raise CheckpointError(
            f"{component.folder}/config.json: no {component.class_name} can be made of it ({type(error).__name__}: "
            f"{error}). The checkpoint is damaged, or made for another version; download it again."
        ) from error


def _constructed(upstream: Any, component: Component, config: Mapping[str, Any]) -> "ModelMixin | PreTrainedModel":
    if component.library == "transformers":
        # Config classes write into what they are given.
        settings = {
            key: copy.deepcopy(value)
            for key, value in config.items()
            if key not in ("architectures", "model_type", "dtype", "quantization_config")
        }
        module = upstream(upstream.config_class(**settings))
    else:
        module = upstream.from_config({key: value for key, value in config.items() if not key.startswith("_")})
    return module.eval()


def import_upstream(components: Iterable[Component]) -> None:
    """Imports what these are built with: the libraries do so lazily, and two threads may meet half-made modules."""
    import accelerate  # noqa: F401

    for component in components:
        upstream_class(component)


def upstream_class(component: Component) -> Any:
    if component.own_class is not None:
        return component.own_class()
    import diffusers
    import transformers

    return getattr({"diffusers": diffusers, "transformers": transformers}[component.library], component.class_name)


def build(component: Component, config: Mapping[str, Any]) -> Network:
    """Builds a component's module and lists its weights. `config` is the checkpoint's own, or the spec's real one."""
    with TRACING:
        return _build(component, config)


def _build(component: Component, config: Mapping[str, Any]) -> Network:
    module = build_full(component, config)
    if component.layers is not None:
        for path in component.blocks:
            _replace(module, path, module.get_submodule(path)[component.layers])  # type: ignore[index]
    if component.trim:
        component.trim(module)
    keep_float32 = float32_modules(component, module)
    tensors = {**dict(module.named_parameters()), **_saved_buffers(module)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weights: dict[str, Weight] = {}
    for name, shape in shapes.items():
        if component.only and not name.startswith(component.only):
            continue
        float32 = not keep_float32.isdisjoint(name.split("."))
        prefix = next((f"{path}." for path in component.blocks if name.startswith(f"{path}.")), None)
        cut = getattr(tensors[name], "cut", None)
        if prefix is None:
            weights[name] = Weight(
                shape=shape, sources=(_source(name, cut),), stacked=False, keep_float32=float32, cut=cut
            )
            continue
        layer, rest = name.removeprefix(prefix).split(".", 1)
        if layer == "0":
            count = len(module.get_submodule(prefix[:-1]))  # type: ignore[arg-type]
            names = tuple(f"{prefix}{index}.{rest}" for index in range(count))
            _check_equal(names, shapes)
            weights[f"{prefix}{LAYER}.{rest}"] = Weight(
                shape=(count, *shape), sources=tuple(_source(name, cut) for name in names), stacked=True,
                keep_float32=float32, cut=cut,
            )  # fmt: skip
    for path in component.blocks:
        blocks = module.get_submodule(path)
        assert isinstance(blocks, torch.nn.ModuleList)
        _replace(module, path, ScannedBlocks(blocks, path))
    return Network(component=component, module=module, weights=weights)


def _source(name: str, cut: Cut | None) -> str:
    """What a checkpoint calls the tensor that holds a parameter."""
    return name if cut is None else f"{name.rpartition('.')[0]}.{cut.source}"


def float32_modules(component: Component, module: torch.nn.Module) -> frozenset[str]:
    """Names within a parameter's path that upstream keeps in float32 when the rest is loaded in bfloat16.

    The libraries mean different things by one name: diffusers' `_keep_in_fp32_modules` holds for every format,
    transformers' for float16 alone, and its `_strict` list for bfloat16 too.
    """
    strict = "_strict" if component.library == "transformers" else ""
    return frozenset(getattr(module, f"_keep_in_fp32_modules{strict}", None) or ())


def _replace(module: torch.nn.Module, path: str, part: torch.nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)


def _saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint holds beside the parameters, such as a batch norm's running statistics."""
    saved = module.state_dict(keep_vars=True)
    return {name: x for name, x in module.named_buffers() if name in saved and x.is_floating_point()}


def _check_equal(names: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    different = [name for name in names if shapes.get(name) != shapes[names[0]]]
    if different:
        raise ValueError(f"{different[0]} differs in shape from {names[0]}; such blocks cannot be scanned.")
