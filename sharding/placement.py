"""From the host to the devices.

With several hosts each places what its own devices hold, of values that all have. `jax.device_put` would first compare
the values of all hosts, by a program of its own.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


def put(value: Any, sharding: Sharding) -> jax.Array:
    """A host array laid out by `sharding`; an array of the devices as it is, or laid out again."""
    if isinstance(value, jax.Array) or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_all(values: Any, shardings: Any) -> Any:
    """A pytree of such arrays by a pytree of shardings, in one call: each has its price."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(values, shardings)
    return jax.tree.map(put, values, shardings)
