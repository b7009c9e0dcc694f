"""All checks in order: the chips, the kernels, the families. Without a TPU, kernels run in interpret mode."""

import os
from collections.abc import Iterator, Sequence

import jax

from ...sharding.mesh import Device
from ..model_spec import ModelSpec
from ..precision import Precision
from . import chips, families, kernels
from .checks import Check


def host_device() -> Device:
    """The CPU that the reference runs on; raises `RuntimeError` where JAX was told to leave it out."""
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


def checks(devices: Sequence[Device], specs: Sequence[ModelSpec]) -> Iterator[Check]:
    """Every check, each to be performed before the next is asked for. On a TPU families run in bfloat16, as they do for
    users, and in float32 as far as that compiles quickly (see `families`).
    """
    host = host_device()
    engines = families.engine([host]), families.engine(devices, kernel="pallas")
    yield from chips.checks(devices)
    yield from kernels.checks(devices[0], host)
    precisions: tuple[Precision, ...] = ("bfloat16", "float32") if devices[0].platform == "tpu" else ("float32",)
    for spec in specs:
        yield from families.checks(spec, *engines, precisions)
