"""Upstream torch modules without weights, with their block list scanned.

A module is built on the meta device from its class and config. Its weights are separate, a dict of JAX arrays by
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
from jaxtyping import PyTree

from .. import garbage
from ..files import CheckpointError
from ..messages import compose
from ..model_spec import Component
from . import torch_bridge
from .program import TRACE_LOCK, Config

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

# The name of the one block in a stacked list: `blocks.3.attn.weight` is layer 3 of `blocks.*.attn.weight`.
LAYER = "*"

Index = tuple[slice, ...]
_LAYER_INDEX: ContextVar[jax.Array] = ContextVar("layer_index")


def layer_index() -> jax.Array:
    """Return the index `[]` of the layer being traced, in a scan that passes weights of all layers."""
    return _LAYER_INDEX.get()


class ScannedBlocks(torch.nn.Module):
    """Replacement for a model's list of equal blocks: one block, which `scan_layers` runs with each layer's weights."""

    def __init__(self, blocks: torch.nn.ModuleList, path: str = "") -> None:
        super().__init__()
        self.path, self.num_layers = path, len(blocks)
        self.add_module(LAYER, blocks[0])

    @property
    def block(self) -> torch.nn.Module:
        return self.get_submodule(LAYER)


def scan_layers(
    blocks: ScannedBlocks,
    carry: PyTree,
    body: Callable[[torch.nn.Module, PyTree], PyTree],
    part: range | None = None,
    *,
    stack: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda weights: weights,
    use: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda weights: weights,
    whole: Callable[[str, jax.Array], bool] = lambda name, stack: False,
    collect: bool = False,
) -> tuple[PyTree, PyTree]:
    """Return the last carry of `carry = body(block, carry)` for each layer, traced once, and the collected states.

    blocks: its one block gets a layer's weights as parameters. carry: a tree of torch tensors that keep shape and
      format.
    part: indices of the layers to run; None: all.
    stack: may reshape the weights of all layers. use: places the weights of one layer.
    whole: returns whether `body` gets a weight of all layers, and selects its own by `layer_index`.
    collect: whether to collect the carry's first leaf after each layer, `[layers, ...]`; else None is returned for it.
    """
    block = blocks.block
    stacked = stack(torch_bridge.to_jax({**dict(block.named_parameters()), **_find_saved_buffers(block)}))

    kept = {name: stacked.pop(name) for name in [*stacked] if whole(name, stacked[name])}

    def layer(carry: PyTree, weights: dict[str, jax.Array]) -> tuple[PyTree, jax.Array | None]:
        result = torch_bridge.call_functional(block, use(weights), body, carry)
        result = jax.tree.map(lambda new, old: new.astype(old.dtype), result, carry)
        return result, jax.tree.leaves(result)[0] if collect else None

    def run_indexed(carry: PyTree, index: jax.Array) -> tuple[PyTree, jax.Array | None]:
        weights = {name: jax.lax.dynamic_index_in_dim(x, index, 0, False) for name, x in stacked.items()}
        token = _LAYER_INDEX.set(index)
        try:
            return layer(carry, weights | kept)
        finally:
            _LAYER_INDEX.reset(token)

    start = torch_bridge.to_jax(carry)
    if part is None and not kept:
        return torch_bridge.to_torch(jax.lax.scan(layer, start, stacked))
    # By index, because a slice of the stack would copy the weights.
    result = jax.lax.scan(run_indexed, start, jnp.array(part or range(blocks.num_layers)))
    return torch_bridge.to_torch(result)


def scan_states(blocks: ScannedBlocks, states: torch.Tensor, **same: Any) -> torch.Tensor:
    """Return the states `[...]` after upstream's blocks in turn. same: further arguments of every block."""

    def body(block: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
        result = block(states, **same)
        return result[0] if isinstance(result, tuple) else result  # some blocks return a tuple, in some versions

    return scan_layers(blocks, states, body)[0]


@dataclass(frozen=True, kw_only=True)
class WeightSlice:
    """Slice of a checkpoint's tensor that becomes a parameter."""

    source: str  # name of the tensor in the parameter's module
    shape: tuple[int, ...]  # of the tensor
    dim: int  # dimension that is divided
    groups: int  # equal groups that it is divided into
    taken: int | slice  # the group that is the parameter, or several, as a new dimension before `dim`
    order: tuple[int, ...]  # permutation of the dimensions, applied last

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
        """Return the parameter's values, `[*part_shape]`, from the full tensor `[*shape]`."""
        return self.read((slice(None),) * len(self.order), tensor.__getitem__)

    def read(self, index: Index, read: Callable[[Index], torch.Tensor]) -> torch.Tensor:
        """Return the parameter's values at `index`, `[...]`. read: returns a piece of the full tensor."""
        parts = [index[self.order.index(axis)] for axis in range(len(index))]
        chosen = self._range[parts.pop(self.dim)] if isinstance(self.taken, slice) else self._range
        start, stop, _ = parts[self.dim].indices(self._size)
        places = [slice(group * self._size + start, group * self._size + stop) for group in chosen]
        pieces = [read((*parts[: self.dim], place, *parts[self.dim + 1 :])) for place in places]
        values = torch.stack(pieces, self.dim) if isinstance(self.taken, slice) else pieces[0]
        return values.permute(self.order)


def slice_weight(
    weight: torch.Tensor, source: str, dim: int, groups: int, taken: int | slice, order: Sequence[int] | None = None
) -> torch.nn.Parameter:
    """Return a parameter without values that is a slice of `weight` `[*shape]`: see `WeightSlice`.

    Raises `ValueError` if the dimension is not a multiple of `groups`. source, dim, groups, taken: see `WeightSlice`.
    order: None: unchanged.
    """
    if weight.shape[dim] % groups:
        raise ValueError(compose(
            "program.groups_unequal", source=source, shape=tuple(weight.shape), dim=dim, groups=groups,
        ))  # fmt: skip
    dims = weight.dim() + isinstance(taken, slice)
    weight_slice = WeightSlice(
        source=source, shape=tuple(weight.shape), dim=dim, groups=groups, taken=taken,
        order=tuple(order or range(dims)),
    )  # fmt: skip
    parameter = torch.nn.Parameter(
        torch.empty(weight_slice.part_shape, dtype=weight.dtype, device="meta"), requires_grad=False
    )
    parameter.cut = weight_slice  # type: ignore[attr-defined]
    return parameter


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Parameter of a built module."""

    shape: tuple[int, ...]  # with a leading dimension of layers if `stacked`
    sources: tuple[str, ...]  # names in a checkpoint, one per layer if `stacked`
    stacked: bool  # whether it is scanned
    keep_float32: bool  # whether upstream keeps it in float32
    cut: WeightSlice | None = None  # slice of the checkpoint's tensor; None: all of it

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor, or of each layer's."""
        return self.layer_shape if self.cut is None else self.cut.shape


@dataclass(frozen=True, kw_only=True)
class Network:
    """Built module and its weights."""

    component: Component
    module: torch.nn.Module
    weights: Mapping[str, Weight]  # by parameter name


def build_upstream(component: Component, config: Config) -> torch.nn.Module:
    """Return the unchanged upstream module, with parameters on the meta device and real buffers."""
    import transformers

    with _parameters_on_meta():
        module = construct_upstream(component, config)
    if isinstance(module, transformers.PreTrainedModel):
        # Moving to the meta device unties shared embeddings.
        module.tie_weights()
        _tie(module, component.aliases)
    return module


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device in this thread only, by accelerate; modules of other threads keep theirs."""
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
            owners.clear()  # another patch made meanwhile may still refer to `register_here`


def _tie(module: torch.nn.Module, aliases: Mapping[str, str]) -> None:
    """Share one parameter between names of which a checkpoint holds only one.

    transformers 5.0 unties UMT5's embedding if a config requests it, as all published ones do.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    for alias, name in aliases.items():
        if alias in named and name in named:
            path, _, last = alias.rpartition(".")
            setattr(module.get_submodule(path), last, named[name])


def construct_upstream(component: Component, config: Config) -> "ModelMixin | PreTrainedModel":
    """Return an instance of the upstream class from the contents of `config.json`.

    Raises `CheckpointError` if that fails.
    """
    try:
        return _construct_unchecked(upstream_class(component), component, config)
    except Exception as error:  # upstream may raise anything, because a config may hold anything
        raise CheckpointError(compose(
            "program.config_unusable", folder=component.folder, class_name=component.class_name,
            error_type=type(error).__name__, error=error,
        )) from error  # fmt: skip


def _construct_unchecked(upstream: Any, component: Component, config: Config) -> "ModelMixin | PreTrainedModel":
    if component.library == "transformers":
        # Config classes modify their arguments.
        settings = {
            key: copy.deepcopy(value)
            for key, value in config.items()
            if key not in ("architectures", "model_type", "dtype", "quantization_config")
        }
        module = upstream(upstream.config_class(**settings))
    else:
        module = upstream.from_config({key: value for key, value in config.items() if not key.startswith("_")})
    return module.eval()


def import_libraries() -> None:
    """Import the parts of the upstream libraries that all components use; this takes seconds."""
    import accelerate  # noqa: F401
    from diffusers.models.modeling_utils import ModelMixin  # noqa: F401
    from transformers.modeling_utils import PreTrainedModel  # noqa: F401


def import_upstream(components: Iterable[Component]) -> None:
    """Import the components' classes now: libraries import lazily, and threads may get half-imported modules."""
    with garbage.pause_while_importing():
        import accelerate  # noqa: F401

        for component in components:
            upstream_class(component)


def upstream_class(component: Component) -> Any:
    """Return the class that builds a component."""
    if component.own_class is not None:
        return component.own_class()
    import diffusers
    import transformers

    return getattr({"diffusers": diffusers, "transformers": transformers}[component.library], component.class_name)


def build_network(component: Component, config: Config) -> Network:
    """Build a component's module and list its weights. config: the checkpoint's, or the published one of the spec."""
    with TRACE_LOCK:
        return _build(component, config)


def _build(component: Component, config: Config) -> Network:
    module = build_upstream(component, config)
    if component.layers is not None:
        for path in component.blocks:
            _replace(module, path, module.get_submodule(path)[component.layers])  # type: ignore[index]
    if component.trim:
        component.trim(module)
    keep_float32 = float32_modules(component, module)
    tensors = {**dict(module.named_parameters()), **_find_saved_buffers(module)}
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


def _source(name: str, cut: WeightSlice | None) -> str:
    """Return the checkpoint's name of the tensor that holds a parameter."""
    return name if cut is None else f"{name.rpartition('.')[0]}.{cut.source}"


def float32_modules(component: Component, module: torch.nn.Module) -> frozenset[str]:
    """Return the names in a parameter's path that upstream keeps in float32 when the rest is loaded in bfloat16.

    The libraries use one name differently: diffusers' `_keep_in_fp32_modules` applies to every format, transformers' to
    float16 only, and its `_strict` list to bfloat16 too.
    """
    strict = "_strict" if component.library == "transformers" else ""
    return frozenset(getattr(module, f"_keep_in_fp32_modules{strict}", None) or ())


def _replace(module: torch.nn.Module, path: str, part: torch.nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)


def _find_saved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers that a checkpoint holds with the parameters, such as a batch norm's running statistics."""
    saved = module.state_dict(keep_vars=True)
    return {name: x for name, x in module.named_buffers() if name in saved and x.is_floating_point()}


def _check_equal(names: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` if the parameters `names`, one per layer, have different shapes."""
    different = [name for name in names if shapes.get(name) != shapes[names[0]]]
    if different:
        raise ValueError(compose("program.blocks_differ", different=different[0], names=names[0]))
