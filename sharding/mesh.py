"""The mesh: every device of all processes, in one order, on the axes `(dp, sp, tp)`.

Devices are ordered by host. The axes that exchange most, `tp` and then `sp`, get neighbouring chips, first those of one
host; `dp` spans hosts. Meshes of different shapes over the same devices keep the same device order, so that an array
sharded over all axes has the same layout on each.
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
    """Return the mesh of `shape` over `devices`. Raises `ValueError` if their number is not that of the shape."""
    if len(devices) != shape.num_devices:
        raise ValueError(f"mesh {shape} needs {shape.num_devices} devices, but there are {len(devices)}.")
    # Devices are numbered row by row over the slice: the first four of a v6e 4x4 belong to two hosts.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(np.asarray(ordered, dtype=object).reshape(shape.dp, shape.sp, shape.tp), AXES)


def mesh_shape(mesh: Mesh) -> MeshShape:
    """Return the shape of `mesh`."""
    return MeshShape(**{axis: mesh.shape[axis] for axis in AXES})
