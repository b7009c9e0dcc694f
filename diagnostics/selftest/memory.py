"""Checks of a chip's memory statistics: that they follow allocations, and how much memory can be filled."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ...sharding.mesh import Device
from ...tpu_runtime import device_memory
from ...tpu_runtime.machine.record import MachineRecord
from ...tpu_runtime.units import GIB, MIB, format_size
from .checks import Check, CheckFailed, Measurement

FAMILY = "memory"
PIECES = 32  # in which a chip is filled
# Shares to leave free, of which the first that works is used; the first is the engine's default.
RESERVES = (0.04, 0.06, 0.08, 0.12, 0.16, 0.25, 0.4)
# The most that may be allocated for one array in addition to its bytes, relative to these.
SLACK_SHARE = 0.05


def checks(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield the checks of the first chip's memory."""
    for stage, run in (("numbers", _numbers), ("room", _room)):
        yield Check(family=FAMILY, stage=stage, precision="", run=lambda progress, run=run: run(devices[0]))


def _numbers(device: Device) -> Measurement:
    """Check `bytes_in_use` before and with an array, after a program with temporaries, and after all is freed."""
    before = device_memory.memory_stats(device)
    if before.limit_bytes is None or before.in_use_bytes is None:
        return Measurement(note=f"a {device.device_kind} does not report its memory")
    size = before.limit_bytes // 8 // MIB * MIB
    array = _allocate(device, size)
    used_more = _used_bytes(device) - before.in_use_bytes
    if not size <= used_more <= size * (1 + SLACK_SHARE) + MIB:
        raise CheckFailed(f"With {format_size(size)} written, the chip reports {format_size(used_more)} more in use.")
    # Sorting needs the same amount again while it runs.
    sort = jax.jit(lambda x: jnp.sort(x, axis=0)[:1]).lower(array).compile()
    jax.block_until_ready(sort(array))
    after = device_memory.memory_stats(device)
    array.delete()
    left = _used_bytes(device) - before.in_use_bytes
    # A runtime may count the code of loaded programs as in use: 8.4 MiB for the sort on v6e.
    if left > MIB + _code_bytes(sort) + _code_bytes(_maker(device, size // 512).lower().compile()):
        raise CheckFailed(f"With all of {format_size(size)} freed, the chip reports {format_size(left)} of it in use.")
    values = {f"{name.removesuffix('_bytes')}_gib": round(value / GIB, 4) for name, value in after.known.items()}
    return Measurement(values=values | {"array_gib": round(size / GIB, 4)})


def _room(device: Device) -> Measurement:
    """Find out how much of the limit can be filled in pieces, as weights fill it."""
    limit_bytes = device_memory.memory_stats(device).limit_bytes
    if limit_bytes is None:
        return Measurement(note=f"a {device.device_kind} does not report its memory")
    reason = ""
    for share in RESERVES:
        free_bytes = int(limit_bytes * (1 - share)) - _used_bytes(device)
        arrays: list[jax.Array] = []
        try:
            for _ in range(PIECES):
                arrays.append(_allocate(device, free_bytes // PIECES))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).partition("\n")[0]
        else:
            learnt = MachineRecord(reserve_share=share)
            if share == RESERVES[0]:
                return Measurement(values={"reserve_share": share}, learnt=learnt)
            raise CheckFailed(
                f"Of {format_size(limit_bytes)} only {100 * (1 - share):.0f} % can be filled ({reason}): "
                f"{100 * share:.0f} % are left free from now on.",
                learnt,
            )
        finally:
            for array in arrays:
                array.delete()
    raise CheckFailed(
        f"Of {format_size(limit_bytes)} not even {100 * (1 - RESERVES[-1]):.0f} % can be filled ({reason}).",
        MachineRecord(reserve_share=RESERVES[-1]),
    )


def _code_bytes(program: Any) -> int:
    """Return the bytes of a compiled program's code on the device, 0 where the runtime does not report them."""
    analysis = program.memory_analysis()
    return int(getattr(analysis, "generated_code_size_in_bytes", 0) or 0)


def _used_bytes(device: Device) -> int:
    return device_memory.memory_stats(device).in_use_bytes or 0


def _allocate(device: Device, size: int) -> jax.Array:
    """Return an array of `size` bytes, created on the device."""
    return jax.block_until_ready(_maker(device, size // 512)())


@functools.cache
def _maker(device: Device, rows: int) -> Any:
    return jax.jit(lambda: jnp.ones((rows, 128), jnp.float32), out_shardings=SingleDeviceSharding(device))
