"""A network's weights as shapes: format, layout on the mesh, bytes on a chip. Nothing is read here."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...sharding import rules
from ...sharding.mesh import shape_of
from ..precision import Precision
from .modules import Network
from .program import shard_bytes

Weights = dict[str, jax.Array]


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
