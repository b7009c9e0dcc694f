"""The one mesh: every device of all processes, in one order, on the axes `(dp, sp, tp)`.

Host after host: what exchanges most, `tp` and then `sp`, has neighbouring chips, those of one host first, and `dp` goes
across. Meshes of different shapes over the same devices keep the same device order: an array sharded over all axes is
laid out alike on each.
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
    # Devices are numbered row by row of the whole slice: of a v6e 4x4, the first four are of two hosts.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(np.asarray(ordered, dtype=object).reshape(shape.dp, shape.sp, shape.tp), AXES)


def shape_of(mesh: Mesh) -> MeshShape:
    return MeshShape(**{axis: mesh.shape[axis] for axis in AXES})
