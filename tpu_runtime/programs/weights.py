"""Networks, each built once, and their weights as shapes: format, layout on the mesh, bytes on a chip. Nothing is read
here.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...sharding import rules
from ...sharding.mesh import shape_of
from ..model_spec import Component
from ..precision import Precision
from . import modules
from .modules import Network
from .program import TRACING, Config, shard_bytes

Weights = dict[str, jax.Array]


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


def layouts(network: Network, mesh: Mesh, precision: Precision) -> dict[str, rules.Layout]:
    return rules.lay_out(params(network, precision), network.component.rules, shape_of(mesh))


def abstract(network: Network, mesh: Mesh, precision: Precision) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights as shapes with their shardings: what a program is compiled for."""
    placed = layouts(network, mesh, precision)
    return {
        name: jax.ShapeDtypeStruct(
            weight.shape,
            weight_dtype(network, name, precision),
            sharding=NamedSharding(mesh, PartitionSpec(*placed[name].at_rest)),
        )
        for name, weight in network.weights.items()
    }


def bytes_per_chip(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of the weights on one chip, at rest."""
    return sum(map(shard_bytes, wanted.values()))
