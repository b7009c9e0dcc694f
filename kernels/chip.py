"""What every kernel needs to know of a chip: its registers and its on-chip memory (VMEM)."""

import jax
from jax.experimental.pallas import tpu as pltpu

from ..sharding.chips import CHIPS

# How a kernel runs without a TPU: not at all, in Pallas' interpret mode, or in that which simulates cores and memory.
Interpret = bool | pltpu.InterpretParams

MIB = 2**20
# A register is 8 sublanes of 128 lanes of 32 bits; two rows of bfloat16 share a sublane, or four of int8.
LANES, SUBLANES, PACKED_ROWS, INT8_ROWS = 128, 8, 16, 32
# On-chip memory of one core, by JAX's name of the chip; the compiler keeps some for itself.
VMEM_MIB = {chip.device_kind: chip.vmem_mib for chip in CHIPS}
RESERVED_MIB = 8


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def device_kind() -> str:
    """Of the mesh in context; empty without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else ""


def precision(dtype: jax.numpy.dtype) -> jax.lax.Precision:
    """Of a product in a kernel. Stated for bfloat16 too: a user's default of "highest" does not compile there."""
    return jax.lax.Precision.HIGHEST if dtype == jax.numpy.float32 else jax.lax.Precision.DEFAULT
