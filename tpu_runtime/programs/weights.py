"""Networks, each built once, and their weights as shapes: format, layout on the mesh, bytes on a chip. Nothing is read
here.

Of weights in int8 what a number is worth stands beside it, by its name and `WORTH`.
"""

import functools
import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...kernels import names
from ...kernels.choice import Rungs
from ...kernels.linear_int8 import TAKES_INT8, Rounded, block_of, rotated_weight, rounded
from ...sharding import rules
from ...sharding.mesh import Device, shape_of
from ..model_spec import Component
from ..precision import Precision
from . import modules
from .modules import Network, Weight
from .program import TRACING, Config, shard_bytes

Weights = dict[str, jax.Array]
# Of weights in int8 the dimensions over which a product sums.
Axes = Mapping[str, tuple[int, ...]]
NONE: Axes = {}
WORTH = "_worth"
FEWEST_LANES = 1024  # of a product's sums and results, from which on int8 saves more than rounding tokens costs


@dataclass(kw_only=True)
class _Built:
    """A network that was built here. Whoever traces it may change its module."""

    network: Network
    is_untouched: bool


_built: OrderedDict[tuple[int, str], _Built] = OrderedDict()
MAX_BUILT = 32


def described(component: Component, config: Config) -> Network:
    """The network, for who asks only for its weights: its module may not be called. Built once for each config."""
    with TRACING:
        return _found(component, config).network


def traceable(component: Component, config: Config) -> Network:
    """The network with a module of the caller's own, which it may change: the one that was built to be `described`, if
    nobody has it.
    """
    with TRACING:
        found = _found(component, config)
        if found.is_untouched:
            found.is_untouched = False
            return found.network
        return modules.build(component, config)


def _found(component: Component, config: Config) -> _Built:
    key = (id(component), json.dumps(config, sort_keys=True, default=str))
    if key not in _built:  # with the component, so that no other gets its id
        _built[key] = _Built(network=modules.build(component, config), is_untouched=True)
        if len(_built) > MAX_BUILT:
            _built.popitem(last=False)
    _built.move_to_end(key)
    return _built[key]


def weight_dtype(network: Network, name: str, precision: Precision) -> jax.numpy.dtype:
    """The format of a weight in use: upstream keeps some modules in float32 whatever the rest is in."""
    float32 = precision == "float32" or network.weights[name].keep_float32
    return jax.numpy.dtype(jax.numpy.float32 if float32 else jax.numpy.bfloat16)


def params(network: Network, precision: Precision) -> dict[str, rules.Param]:
    """Shapes and sizes, for the sharding rules."""
    return {
        name: rules.Param(
            shape=weight.shape, size_bytes=int(np.prod(weight.shape)) * weight_dtype(network, name, precision).itemsize
        )
        for name, weight in network.weights.items()
    }


def layouts(network: Network, mesh: Mesh, precision: Precision, axes: Axes = NONE) -> dict[str, rules.Layout]:
    """Of all weights, and of what numbers of those of `axes` are worth, of which every chip has what it needs."""
    placed = rules.lay_out(params(network, precision), network.component.rules, shape_of(mesh))
    for name, over in axes.items():
        kept = _kept(placed[name].in_use or (None,) * len(network.weights[name].shape), over)
        placed[name + WORTH] = rules.Layout(at_rest=kept, in_use=kept)
    return placed


def abstract(network: Network, mesh: Mesh, precision: Precision, axes: Axes = NONE) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights as shapes with their shardings: what a program is compiled for."""
    placed, found = layouts(network, mesh, precision, axes), {}

    def shaped(name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> None:
        sharding = NamedSharding(mesh, PartitionSpec(*placed[name].at_rest))
        found[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for name, weight in network.weights.items():
        if name not in axes:
            shaped(name, weight.shape, weight_dtype(network, name, precision))
            continue
        shaped(name, weight.shape, jnp.dtype(jnp.int8))
        shaped(name + WORTH, _kept(weight.shape, axes[name]), jnp.dtype(jnp.float32))
    return found


def bytes_per_chip(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of the weights on one chip, at rest."""
    return sum(map(shard_bytes, wanted.values()))


# --- in int8 ----------------------------------------------------------------------------------------------------------


def summed(network: Network) -> dict[str, tuple[int, ...]]:
    """The weights that may be int8, and the dimensions of each over which a product sums."""
    found = {}
    for name, weight in network.weights.items():
        rule = next((rule for rule in network.component.rules if rule.matches(name)), None)
        if rule is None or not rule.over or not weight.stacked or weight.keep_float32:
            continue
        if min(_lanes(weight, rule.over, True), _lanes(weight, rule.over, False)) >= FEWEST_LANES:
            found[name] = rule.over
    return found


def are_all_rounded(network: Network, axes: Axes) -> bool:
    """Whether all weights of products with tokens are those in int8."""
    rules = [rule for rule in network.component.rules if rule.over]
    asked = {name for name in network.weights if any(rule.matches(name) for rule in rules)}
    return bool(axes) and asked == set(axes)


def _lanes(weight: Weight, over: tuple[int, ...], ins: bool) -> int:
    return math.prod(size for dim, size in enumerate(weight.shape) if dim and (dim in over) == ins)


def prepared(network: Network, device: Device, rungs: Rungs) -> Axes:
    """As `summed`, and the network's module made ready to take them; none where the chip would not be faster, or where
    the machine does without the kernel.
    """
    takes = device.platform != "tpu" or device.device_kind in TAKES_INT8
    if not takes or names.LINEAR_INT8 in rungs.off:
        return {}
    found = summed(network)
    for name, over in found.items():
        path, _, own = name.rpartition(".")
        worth = torch.empty(_kept(network.weights[name].shape, over)[1:], device="meta")
        network.module.get_submodule(path).register_parameter(
            own + WORTH, torch.nn.Parameter(worth, requires_grad=False)
        )
    return found


def _kept(entries: tuple[Any, ...], over: tuple[int, ...]) -> tuple[Any, ...]:
    """Those of dimensions that a product leaves."""
    return tuple(entry for dim, entry in enumerate(entries) if dim not in over)


def is_rounded(module: Any, name: str = "weight") -> bool:
    return hasattr(module, name + WORTH)


def rounded_of(module: Any, name: str = "weight") -> Rounded:
    """A weight of a traced module, as its program got it."""
    return Rounded(getattr(module, name), getattr(module, name + WORTH), bias_of(module, name))


def bias_of(module: Any, name: str = "weight") -> Any:
    """That of a linear module; None beside a weight of another name."""
    return getattr(module, "bias", None) if name == "weight" else None


def round_weight(
    weight: jax.Array, over: tuple[int, ...], want: jax.ShapeDtypeStruct, worth: jax.ShapeDtypeStruct
) -> tuple[jax.Array, jax.Array]:
    """A loaded weight `[layers, ...]`, rotated, as numbers and what they are worth, on the chips."""
    found = _program(want.sharding, worth.sharding, over)(weight)
    weight.delete()
    return found


@functools.cache
def _program(sharding: NamedSharding, worth: NamedSharding, over: tuple[int, ...]) -> Any:
    inner, chips = tuple(dim - 1 for dim in over), sharding.mesh.shape["tp"]

    def of_layer(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rounded(rotated_weight(weight, inner[-1], block_of(weight.shape[inner[-1]], chips=chips)), inner)

    def run(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.map(of_layer, weight)  # one at a time, for in float32 all are twice as large

    return jax.jit(run, out_shardings=(sharding, worth))
