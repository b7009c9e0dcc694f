"""What a chip's memory numbers mean: whether they follow what is written and freed, and how much can be filled."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ...sharding.mesh import Device
from .. import device_memory
from ..machine.record import MachineRecord
from ..units import GIB, MIB, readable
from .checks import Check, Found, Wrong

FAMILY = "memory"
PIECES = 32  # in which a chip is filled
# Shares that are left free, of which the first that works is taken; what the engine takes by itself is the first.
RESERVES = (0.04, 0.06, 0.08, 0.12, 0.16, 0.25, 0.4)
# What is allocated for one array beside its bytes, at most.
SLACK_SHARE = 0.05


def checks(devices: Sequence[Device]) -> Iterator[Check]:
    for stage, run in (("numbers", _numbers), ("room", _room)):
        yield Check(family=FAMILY, stage=stage, precision="", run=lambda progress, run=run: run(devices[0]))


def _numbers(device: Device) -> Found:
    """`bytes_in_use` before, with an array, after a program with temporaries, and after all is freed."""
    before = device_memory.of(device)
    if before.limit_bytes is None or before.in_use_bytes is None:
        return Found(note=f"a {device.device_kind} does not report its memory")
    size = before.limit_bytes // 8 // MIB * MIB
    array = _filled(device, size)
    held = _used(device) - before.in_use_bytes
    if not size <= held <= size * (1 + SLACK_SHARE) + MIB:
        raise Wrong(f"With {readable(size)} written the chip says that {readable(held)} more are in use.")
    # Sorting needs as much again, for as long as it runs.
    sort = jax.jit(lambda x: jnp.sort(x, axis=0)[:1]).lower(array).compile()
    jax.block_until_ready(sort(array))
    after = device_memory.of(device)
    array.delete()
    left = _used(device) - before.in_use_bytes
    # A runtime may count the code of loaded programs as in use: 8.4 MiB for the sort on v6e.
    if left > MIB + _code_bytes(sort) + _code_bytes(_maker(device, size // 512).lower().compile()):
        raise Wrong(f"With all of {readable(size)} freed the chip says that {readable(left)} of it are in use.")
    values = {f"{name.removesuffix('_bytes')}_gib": round(value / GIB, 4) for name, value in after.known.items()}
    return Found(values=values | {"array_gib": round(size / GIB, 4)})


def _room(device: Device) -> Found:
    """How much of the limit can be filled in pieces, as weights fill it."""
    limit_bytes = device_memory.of(device).limit_bytes
    if limit_bytes is None:
        return Found(note=f"a {device.device_kind} does not report its memory")
    reason = ""
    for share in RESERVES:
        wanted = int(limit_bytes * (1 - share)) - _used(device)
        held: list[jax.Array] = []
        try:
            for _ in range(PIECES):
                held.append(_filled(device, wanted // PIECES))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).partition("\n")[0]
        else:
            learnt = MachineRecord(reserve_share=share)
            if share == RESERVES[0]:
                return Found(values={"reserve_share": share}, learnt=learnt)
            raise Wrong(
                f"Of {readable(limit_bytes)} only {100 * (1 - share):.0f} % can be filled ({reason}): "
                f"{100 * share:.0f} % are left free from now on.",
                learnt,
            )
        finally:
            for array in held:
                array.delete()
    raise Wrong(
        f"Of {readable(limit_bytes)} not even {100 * (1 - RESERVES[-1]):.0f} % can be filled ({reason}).",
        MachineRecord(reserve_share=RESERVES[-1]),
    )


def _code_bytes(program: Any) -> int:
    """Return the bytes of a compiled program's code on the device, 0 where the runtime does not report them."""
    analysis = program.memory_analysis()
    return int(getattr(analysis, "generated_code_size_in_bytes", 0) or 0)


def _used(device: Device) -> int:
    return device_memory.of(device).in_use_bytes or 0


def _filled(device: Device, size: int) -> jax.Array:
    """An array of so many bytes, made on the device."""
    return jax.block_until_ready(_maker(device, size // 512)())


@functools.cache
def _maker(device: Device, rows: int) -> Any:
    return jax.jit(lambda: jnp.ones((rows, 128), jnp.float32), out_shardings=SingleDeviceSharding(device))
