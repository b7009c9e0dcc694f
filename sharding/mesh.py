"""The one mesh: every device of the process, in one order, on the axes `(dp, sp, tp)`.

Meshes of different shapes over the same devices keep the same device order: an array sharded over all axes is laid out
alike on each.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh

from .shape import AXES, MeshShape

if TYPE_CHECKING:  # to type checkers `jax.Device` is a variable
    from jax._src.lib import Device
else:
    from jax import Device


def make_mesh(devices: Sequence[Device], shape: MeshShape) -> Mesh:
    """The mesh of `shape` over `devices`, which must be exactly as many."""
    if len(devices) != shape.num_devices:
        raise ValueError(f"mesh {shape} needs {shape.num_devices} devices, but there are {len(devices)}.")
    return Mesh(np.asarray(devices, dtype=object).reshape(shape.dp, shape.sp, shape.tp), AXES)


def shape_of(mesh: Mesh) -> MeshShape:
    return MeshShape(**{axis: mesh.shape[axis] for axis in AXES})
