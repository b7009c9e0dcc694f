"""Networks, each built once, and their weights as shapes: format, layout on the mesh, bytes on a chip.

Nothing is read here.

The scale of a quantized weight is a weight too, named by the weight's name and `SCALE_SUFFIX`.
"""

import functools
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...kernels.dispatch import KernelFallbacks
from ...kernels.linear_int8 import Int8Weight
from ...kernels.number_formats import BY_DTYPE, EXACT, FORMATS, LINEAR_CHIPS
from ...sharding import rules
from ...sharding.mesh import Device, mesh_shape
from ..model_spec import Component
from ..precision import Precision
from . import upstream_network
from .program import TRACE_LOCK, Config, shard_bytes
from .upstream_network import Network, Weight

Weights = dict[str, jax.Array]
Axes = Mapping[str, tuple[int, ...]]  # names of quantized weights, and the contracting dimensions of each
NO_AXES: Axes = {}
SCALE_SUFFIX = "_worth"  # suffix of the names of scales
# Inputs and outputs of a product from which on a quantized one saves more than quantizing tokens costs.
MIN_QUANTIZED_LANES = 1024


@dataclass(kw_only=True)
class _Built:
    """Cached network."""

    network: Network
    is_untouched: bool  # whether no caller traces it; tracing may change its module


_built: OrderedDict[tuple[int, str], _Built] = OrderedDict()
MAX_BUILT = 32


def shared_network(component: Component, config: Config) -> Network:
    """Return the cached network for reading parameter shapes. Do not call its module."""
    with TRACE_LOCK:
        return _find_or_build(component, config).network


def private_network(component: Component, config: Config) -> Network:
    """Return a network whose module the caller may trace and change: the cached one if it is still untouched."""
    with TRACE_LOCK:
        cached = _find_or_build(component, config)
        if cached.is_untouched:
            cached.is_untouched = False
            return cached.network
        return upstream_network.build_network(component, config)


def _find_or_build(component: Component, config: Config) -> _Built:
    key = (id(component), json.dumps(config, sort_keys=True, default=str))
    if key not in _built:  # the network refers to the component, so that its id stays unique
        _built[key] = _Built(network=upstream_network.build_network(component, config), is_untouched=True)
        if len(_built) > MAX_BUILT:
            _built.popitem(last=False)
    _built.move_to_end(key)
    return _built[key]


def weight_dtype(network: Network, name: str, precision: Precision) -> jax.numpy.dtype:
    """Return the format of the weight `name` of `network` in use: some stay in float32 at every precision."""
    float32 = precision == "float32" or network.weights[name].keep_float32
    return jax.numpy.dtype(jax.numpy.float32 if float32 else jax.numpy.bfloat16)


def param_shapes(network: Network, precision: Precision) -> dict[str, rules.Param]:
    """Return shapes and sizes of the weights, as the sharding rules take them."""
    return {
        name: rules.Param(
            shape=weight.shape, size_bytes=int(np.prod(weight.shape)) * weight_dtype(network, name, precision).itemsize
        )
        for name, weight in network.weights.items()
    }


def layouts(network: Network, mesh: Mesh, precision: Precision, axes: Axes = NO_AXES) -> dict[str, rules.Layout]:
    """Return the layouts of all weights, and of the scales of quantized weights `axes`, which are where they are used.

    network: whose weights. mesh, precision: of the program.
    """
    placed = rules.lay_out(param_shapes(network, precision), network.component.rules, mesh_shape(mesh))
    for name, over in axes.items():
        kept = _drop_contracted(placed[name].in_use or (None,) * len(network.weights[name].shape), over)
        placed[name + SCALE_SUFFIX] = rules.Layout(at_rest=kept, in_use=kept)
    return placed


def abstract_weights(
    network: Network, mesh: Mesh, precision: Precision, axes: Axes = NO_AXES, number_format: str = EXACT
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the weights as shapes with shardings, as a program is compiled for them.

    network: whose weights. mesh, precision: of the program. axes: quantized weights. number_format:
      theirs.
    """
    placed, shapes = layouts(network, mesh, precision, axes), {}

    def add_shape(name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> None:
        sharding = NamedSharding(mesh, PartitionSpec(*placed[name].at_rest))
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for name, weight in network.weights.items():
        if name not in axes:
            add_shape(name, weight.shape, weight_dtype(network, name, precision))
            continue
        add_shape(name, weight.shape, FORMATS[number_format].dtype)
        add_shape(name + SCALE_SUFFIX, _drop_contracted(weight.shape, axes[name]), jnp.dtype(jnp.float32))
    return shapes


def bytes_per_chip(weights: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Return the bytes of the weights on one chip, at rest."""
    return sum(map(shard_bytes, weights.values()))


def place_in_use(mesh: Mesh, layout: rules.Layout, weight: jax.Array) -> jax.Array:
    """Return a traced weight `[...]` as its `layout` has it in use: gathered if it is only split at rest."""
    axes = layout.in_use[-weight.ndim :]  # of the last dimensions, because groups may have been merged
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, PartitionSpec(*axes)))


def merge_groups(mesh: Mesh, layout: rules.Layout, stack: jax.Array) -> jax.Array:
    """Return a stack `[layers, groups, size, ...]`, whose `size` is on `tp`, as `[layers, rows, ...]`.

    Each chip's pieces of all groups come together: a view, not a copy.
    """
    layers, groups, size, *inner = layout.at_rest or (None,) * stack.ndim

    def merge(stack: jax.Array) -> jax.Array:
        return stack.reshape(len(stack), -1, *stack.shape[3:])

    specs, out_specs = PartitionSpec(layers, groups, size, *inner), PartitionSpec(layers, size, *inner)
    return jax.shard_map(merge, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)(stack)


def is_read_from_stack(layout: rules.Layout, stack: jax.Array) -> bool:
    """Return whether a kernel reads a layer from its stack `[layers, ...]`: quantized and not gathered for use.

    A slice of the stack would be a copy.
    """
    return stack.dtype in BY_DTYPE and layout.at_rest == layout.in_use


# --- quantized --------------------------------------------------------------------------------------------------------


def find_quantizable_weights(network: Network) -> dict[str, tuple[int, ...]]:
    """Return the weights that may be quantized, and the contracting dimensions of each."""
    axes = {}
    for name, weight in network.weights.items():
        rule = next((rule for rule in network.component.rules if rule.matches(name)), None)
        if rule is None or not rule.over or not weight.stacked or weight.keep_float32:
            continue
        if min(_lanes(weight, rule.over, True), _lanes(weight, rule.over, False)) >= MIN_QUANTIZED_LANES:
            axes[name] = rule.over
    return axes


def are_all_quantized(network: Network, axes: Axes) -> bool:
    """Return whether all weights of products with tokens are quantized."""
    rules = [rule for rule in network.component.rules if rule.over]
    asked = {name for name in network.weights if any(rule.matches(name) for rule in rules)}
    return bool(axes) and asked == set(axes)


def _lanes(weight: Weight, over: tuple[int, ...], ins: bool) -> int:
    """Return the size of a product's inputs (`ins`) or outputs, without the dimension of layers."""
    return math.prod(size for dim, size in enumerate(weight.shape) if dim and (dim in over) == ins)


def add_scale_parameters(network: Network, device: Device, rungs: KernelFallbacks, number_format: str) -> Axes:
    """Return the weights that become quantized, and add their scales to the network's module.

    Empty if `number_format` is exact or not faster on `device`, or if its kernel is off in `rungs`.
    """
    if number_format == EXACT or FORMATS[number_format].kernel in rungs.off:
        return NO_AXES
    if device.platform == "tpu" and device.device_kind not in LINEAR_CHIPS[number_format]:
        return NO_AXES
    axes = find_quantizable_weights(network)
    for name, over in axes.items():
        path, _, last = name.rpartition(".")
        scale = torch.empty(_drop_contracted(network.weights[name].shape, over)[1:], device="meta")
        network.module.get_submodule(path).register_parameter(
            last + SCALE_SUFFIX, torch.nn.Parameter(scale, requires_grad=False)
        )
    return axes


def _drop_contracted(entries: tuple[Any, ...], over: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the entries of the dimensions over which a product does not sum."""
    return tuple(entry for dim, entry in enumerate(entries) if dim not in over)


def is_quantized(module: torch.nn.Module, name: str = "weight") -> bool:
    """Return whether a weight of a traced module is quantized."""
    return hasattr(module, name + SCALE_SUFFIX)


def get_quantized_weight(module: torch.nn.Module, name: str = "weight") -> Int8Weight:
    """Return a quantized weight of a traced module, with its scale and bias."""
    return Int8Weight(getattr(module, name), getattr(module, name + SCALE_SUFFIX), get_bias(module, name))


def get_bias(module: torch.nn.Module, name: str = "weight") -> Any:
    """Return the bias of a linear module; None for a weight of another name."""
    return getattr(module, "bias", None) if name == "weight" else None


def quantize_weight(
    weight: jax.Array, over: tuple[int, ...], want: jax.ShapeDtypeStruct, worth: jax.ShapeDtypeStruct
) -> tuple[jax.Array, jax.Array]:
    """Return a loaded weight `[layers, ...]`, quantized on the chips, and its scale. `weight` is deleted.

    over: contracting dimensions. want, worth: shapes and shardings of the results.
    """
    quantized = _program(want.sharding, worth.sharding, over, want.dtype)(weight)
    weight.delete()
    return quantized


@functools.cache
def _program(
    sharding: NamedSharding, worth: NamedSharding, over: tuple[int, ...], dtype: jnp.dtype
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Return the program that quantizes a weight layer by layer."""
    inner, chips = tuple(dim - 1 for dim in over), sharding.mesh.shape["tp"]

    def of_layer(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return BY_DTYPE[dtype].quantize_weight(weight, inner, chips)

    def run(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(of_layer, weight)  # one at a time, because float32 takes twice the memory

    return jax.jit(run, out_shardings=(sharding, worth))
