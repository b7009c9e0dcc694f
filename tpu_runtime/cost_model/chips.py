"""The TPUs there are, as data: what a chip can do, and which slices of them libtpu can compile for.

Nothing here needs a TPU. `compile_devices` loads libtpu, the TPU's compiler, on any Linux machine.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.experimental import topologies

from ...sharding.mesh import Device
from ..units import GIB

LIBTPU = "libtpu==0.0.42.1"  # what jax 0.10.2 asks for


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip. A chip is one JAX device, but for TPU7x: two, each with half the peak and bandwidth.

    `hbm_gib` is per device and what libtpu leaves to programs (it names the number when a program asks for too much).
    `link_gb_s` is one direction of one link to a neighbouring chip. `mxu_width`: how deep a contraction must be to fill
    a matrix unit. `cores` are the tensor cores of one device: XLA and kernels with a "parallel" grid use them all.
    """

    generation: str
    device_kind: str
    peak_tflop_s: float  # bfloat16, per chip
    clock_ghz: float
    hbm_gib: float
    hbm_gb_s: float  # per chip
    links: int
    link_gb_s: float
    mxu_width: int
    cores: int = 1
    devices: int = 1

    @property
    def clock_hz(self) -> float:
        return self.clock_ghz * 1e9

    @property
    def hbm_bytes(self) -> int:
        """Per device."""
        return int(self.hbm_gib * GIB)

    @property
    def flop_per_cycle(self) -> float:
        """The bfloat16 peak of one device in one clock cycle."""
        return self.peak_tflop_s * 1e12 / self.devices / self.clock_hz


# Peak, HBM bandwidth: https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. Links: the same pages and
# https://jax-ml.github.io/scaling-book/tpus (one-way bandwidth per link; 7x: the lower of 90 and 100). MXU width and
# cores: jax/_src/pallas/mosaic/tpu_info.py. Usable HBM: the refusals of libtpu 0.0.42.1. Clock: peak / (FLOP of all
# MXUs per cycle), which agrees with the LLO schedules.
CHIPS: tuple[Chip, ...] = (
    Chip(
        generation="v4", device_kind="TPU v4", peak_tflop_s=275, clock_ghz=1.05, hbm_gib=30.75, hbm_gb_s=1228,
        links=6, link_gb_s=45, mxu_width=128, cores=2,
    ),
    Chip(
        generation="v5e", device_kind="TPU v5 lite", peak_tflop_s=197, clock_ghz=1.5, hbm_gib=15.75, hbm_gb_s=819,
        links=4, link_gb_s=45, mxu_width=128,
    ),
    Chip(
        generation="v5p", device_kind="TPU v5", peak_tflop_s=459, clock_ghz=1.75, hbm_gib=95.74, hbm_gb_s=2765,
        links=6, link_gb_s=90, mxu_width=128, cores=2,
    ),
    Chip(
        generation="v6e", device_kind="TPU v6 lite", peak_tflop_s=918, clock_ghz=1.75, hbm_gib=31.25, hbm_gb_s=1638,
        links=4, link_gb_s=90, mxu_width=256,
    ),
    Chip(
        generation="tpu7x", device_kind="TPU7x", peak_tflop_s=2307, clock_ghz=2.2, hbm_gib=94.75, hbm_gb_s=7380,
        links=6, link_gb_s=90, mxu_width=256, devices=2,
    ),
)  # fmt: skip


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
        chips = 1
        for side in self.name.partition(":")[2].split("x"):
            chips *= int(side)
        return chips

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
    """The slice called `name`, or by one of its aliases; raises `ValueError` that lists the names."""
    wanted = re.sub(r"\s", "", name).lower()
    for found in TOPOLOGIES:
        if wanted in (found.name, *found.aliases):
            return found
    known = ", ".join(f"{found.name} ({found.aliases[0]})" for found in TOPOLOGIES)
    raise ValueError(f"there is no topology {name!r}; there are {known}.")


def topology_of(device_kind: str, num_devices: int) -> Topology | None:
    """The slice that devices of this kind and number are; None for one that is not listed, or no TPU."""
    same = (found for found in TOPOLOGIES if found.chip.device_kind == device_kind)
    return next((found for found in same if found.num_devices == num_devices), None)


def larger(small: Topology) -> tuple[Topology, ...]:
    """The slices of the same generation with more chips, smallest first."""
    same = (found for found in TOPOLOGIES if found.chip == small.chip and found.num_chips > small.num_chips)
    return tuple(sorted(same, key=lambda found: found.num_chips))


def compile_devices(target: Topology) -> tuple[Device, ...]:
    """The devices of `target` to compile for; no TPU is needed or touched.

    Raises `RuntimeError` where libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise RuntimeError(
            f"libtpu, the TPU's compiler, is not installed; it exists for Linux: pip install {LIBTPU} (or 'jax[tpu]')."
        )
    for name, value in compiler_environment().items():
        os.environ.setdefault(name, value)
    described = topologies.get_topology_desc(target.name, platform="tpu", **target.options)
    return tuple(described.devices)


def compiler_environment() -> dict[str, str]:
    """What libtpu must find in the environment when it is loaded to compile beside a process that uses a TPU, or
    where there is none: it asks no metadata server, takes no lock and does not complain that it is not on a TPU VM.
    """
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
