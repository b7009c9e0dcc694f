"""The slices of TPU chips that libtpu can compile for, as data.

Nothing here needs a TPU. `compile_devices` loads libtpu, the TPU's compiler, on any Linux machine.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.experimental import topologies

from ...sharding.chips import CHIPS, Chip
from ...sharding.mesh import Device
from ..messages import compose

LIBTPU = "libtpu==0.0.42.1"  # what jax 0.10.2 asks for


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice: `name` as libtpu knows it, `options` for `get_topology_desc`, `aliases` as clouds and users say it.

    None of these slices has wrap-around links: those need sides of 4 in all of 3D, of 16 in 2D, or more.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def chip(self) -> Chip:
        generation = self.name.partition(":")[0]
        return next(chip for chip in CHIPS if chip.generation == generation)

    @property
    def num_chips(self) -> int:
        return math.prod(map(int, self.name.partition(":")[2].split("x")))

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices


def _one_host(*bounds: int) -> dict[str, Any]:
    """All chips on one host, as on the real machine; by default libtpu describes several hosts of four chips."""
    return {"chips_per_host_bounds": [*bounds]}


# By chips: the cloud's names count chips for v5e and v6e, tensor cores for v4, v5p and TPU7x.
TOPOLOGIES: tuple[Topology, ...] = (
    Topology(name="v6e:1x1", options=_one_host(1, 1, 1), aliases=("v6e-1",)),
    Topology(name="v6e:2x2", options=_one_host(2, 2, 1), aliases=("v6e-4",)),
    Topology(name="v6e:2x4", options=_one_host(2, 4, 1), aliases=("v6e-8",)),
    Topology(name="v6e:4x4", aliases=("v6e-16",)),
    Topology(name="v6e:4x8", aliases=("v6e-32",)),
    Topology(name="v6e:8x8", aliases=("v6e-64",)),
    Topology(name="v5e:1x1", options=_one_host(1, 1, 1), aliases=("v5e-1", "v5litepod-1")),
    Topology(name="v5e:2x2", options=_one_host(2, 2, 1), aliases=("v5e-4", "v5litepod-4")),
    Topology(name="v5e:2x4", options=_one_host(2, 4, 1), aliases=("v5e-8", "v5litepod-8")),
    Topology(name="v5p:2x2x1", options=_one_host(2, 2, 1), aliases=("v5p-8",)),
    Topology(name="v5p:2x2x2", aliases=("v5p-16",)),
    Topology(name="v5p:2x2x4", aliases=("v5p-32",)),
    Topology(name="v5p:2x4x4", aliases=("v5p-64",)),
    # Without "megacore" libtpu describes eight single cores.
    Topology(name="v4:2x2x1", options={"chip_config_name": "megacore"} | _one_host(2, 2, 1), aliases=("v4-8",)),
    Topology(name="tpu7x:2x2x1", aliases=("tpu7x-8", "7x-8", "v7x-8")),
)


def topology(name: str) -> Topology:
    """Return the slice with this name or alias. Raises `ValueError` with all names for an unknown one."""
    normalized = re.sub(r"\s", "", name).lower()
    for candidate in TOPOLOGIES:
        if normalized in (candidate.name, *candidate.aliases):
            return candidate
    known = ", ".join(f"{candidate.name} ({candidate.aliases[0]})" for candidate in TOPOLOGIES)
    raise ValueError(compose("plan.no_topology", name=repr(name), known=known))


def find_topology(device_kind: str, num_devices: int) -> Topology | None:
    """Return the slice of `num_devices` devices of this kind; None for an unlisted slice, or no TPU."""
    same = (candidate for candidate in TOPOLOGIES if candidate.chip.device_kind == device_kind)
    return next((candidate for candidate in same if candidate.num_devices == num_devices), None)


def larger(small: Topology) -> tuple[Topology, ...]:
    """Return the slices of the generation of `small` with more chips, smallest first."""
    same = (
        candidate for candidate in TOPOLOGIES if candidate.chip == small.chip and candidate.num_chips > small.num_chips
    )
    return tuple(sorted(same, key=lambda found: found.num_chips))


def compile_devices(target: Topology) -> tuple[Device, ...]:
    """Return the devices of `target` to compile for. It needs no TPU and opens none.

    Raises `RuntimeError` if libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise RuntimeError(compose("plan.libtpu_missing", libtpu=LIBTPU))
    for name, value in compiler_environment().items():
        os.environ.setdefault(name, value)
    described = topologies.get_topology_desc(target.name, platform="tpu", **target.options)
    return tuple(described.devices)


def compiler_environment() -> dict[str, str]:
    """Return the environment for a libtpu that only compiles, without a TPU or next to a process that uses one.

    libtpu then asks no metadata server, takes no lock, and does not report that it runs outside a TPU VM.
    """
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
