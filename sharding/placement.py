"""Transfer from the host to the devices.

With several hosts, each host places the shards of its own devices; all hosts have the values. `jax.device_put` would
first compare the values of all hosts, by a program of its own.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree


def put(value: Any, sharding: Sharding) -> jax.Array:
    """Return `value` on the devices of `sharding`: a host array placed, a device array as it is or resharded."""
    if isinstance(value, jax.Array) or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_all(values: PyTree, shardings: PyTree) -> PyTree:
    """Return a pytree of arrays placed by a pytree of shardings, in one call, because every call has a fixed cost."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(values, shardings)
    return jax.tree.map(put, values, shardings)
