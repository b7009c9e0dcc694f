"""The checks of each group. Without a TPU, kernels run in interpret mode."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from ...sharding.mesh import Device
from ...tpu_runtime.models import lookup_spec
from ...tpu_runtime.precision import Precision
from . import chips, compiled, groups, kernels, memory, overlap, probes
from .checks import Check

if TYPE_CHECKING:
    from ...tpu_runtime.engine.engine import Engine


def host_device() -> Device:
    """Return the CPU device of the reference. Raises RuntimeError if JAX_PLATFORMS excludes it."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms:
            raise
        raise RuntimeError(
            f"the reference runs on the host's CPU, which JAX_PLATFORMS={platforms} leaves out. Unset it, or set "
            f"JAX_PLATFORMS={platforms},cpu."
        ) from error


@dataclass(kw_only=True)
class CheckPlace:
    """The devices that checks run on."""

    devices: Sequence[Device]
    folder: Path  # shared by processes: one writes files that another reads

    @functools.cached_property
    def host(self) -> Device:
        return host_device()

    @functools.cached_property
    def engines(self) -> "tuple[Engine, Engine]":
        """Return the engine of the host, and that of the chips."""
        from . import families

        return families.make_engine([self.host]), families.make_engine(self.devices, kernel="pallas")


_CHECKS: dict[str, Callable[[CheckPlace], Iterator[Check]]] = {
    groups.START: lambda place: chips.check_devices(place.devices),
    groups.REOPEN: lambda place: iter(()),  # `first_run` times the processes themselves
    "options": lambda place: overlap.check_options(place.devices),
    "memory": lambda place: memory.checks(place.devices),
    "transfers": lambda place: chips.check_transfers(place.devices),
    "together": lambda place: chips.check_collectives(place.devices),
    "beside": lambda place: overlap.check_overlap(place.devices),
    "kernels": lambda place: kernels.checks(place.devices[0], place.host),
    groups.STORE: lambda place: compiled.check_store(place.devices, place.folder),
    groups.STORED: lambda place: compiled.check_stored(place.devices, place.folder),
    "compiling": lambda place: compiled.check_background_compilation(place.devices),
    "probes": lambda place: probes.checks(place.devices),
    **{
        group.name: lambda place, name=group.name: probes.check_arrays(place.devices, name)
        for group in groups.FIRST
        if group.environment
    },
}


def checks_of_group(name: str, place: CheckPlace) -> Iterator[Check]:
    """Yield the checks of a group; each is to be run before the next is requested.

    On a TPU families run in bfloat16, as they do for users, and in float32 as far as that compiles quickly (see
    `families`).
    name: of the group. place: the devices.
    """
    if not name.startswith(groups.FAMILY):
        yield from _CHECKS[name](place)
        return
    from . import families  # imports PyTorch, which no other group needs

    precisions: tuple[Precision, ...] = ("bfloat16", "float32") if place.devices[0].platform == "tpu" else ("float32",)
    yield from families.checks(lookup_spec(name.removeprefix(groups.FAMILY)), *place.engines, precisions)


def checks(devices: Sequence[Device], models: Sequence[str]) -> Iterator[Check]:
    """Yield the checks of `selftest` without --first-run, for this process."""
    place = CheckPlace(devices=devices, folder=Path())
    for group in groups.all_groups(models):
        if group.is_plain:
            yield from checks_of_group(group.name, place)
