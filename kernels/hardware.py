"""Hardware constants for kernels: register shape, on-chip memory (VMEM), and the types of kernel arguments."""

from typing import Protocol, runtime_checkable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..sharding.chips import CHIPS

# How a kernel runs without a TPU: False, not at all; True, in Pallas' interpret mode; with parameters, in the interpret
# mode that simulates cores and memory.
Interpret = bool | pltpu.InterpretParams
Scalar = int | jax.Array  # known before the trace, or computed in the program


@runtime_checkable
class ArrayRef(Protocol):
    """A block of an array in VMEM or SMEM, as Pallas passes it to a kernel's body."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> jax.numpy.dtype: ...

    @property
    def ndim(self) -> int: ...

    @property
    def size(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: object, /) -> jax.Array: ...

    def __setitem__(self, index: object, value: object, /) -> None: ...


Ref = ArrayRef
Slice = pl.Slice | slice  # a range of rows or lanes; a plain slice if its start is known before the trace

MIB = 2**20
# A register is 8 sublanes of 128 lanes of 32 bits; two rows of bfloat16 share a sublane, or four of int8.
LANES, SUBLANES, PACKED_ROWS, INT8_ROWS = 128, 8, 16, 32
# On-chip memory of one core, by JAX's name of the chip. The compiler reserves `RESERVED_MIB` of it.
VMEM_MIB = {chip.device_kind: chip.vmem_mib for chip in CHIPS}
RESERVED_MIB = 8


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def device_kind() -> str:
    """Return JAX's name of the chips of the mesh in context; "" without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else ""


def matmul_precision(dtype: jax.numpy.dtype) -> jax.lax.Precision:
    """Return the precision of a kernel's matrix product with inputs of `dtype`.

    It is stated for bfloat16 too: a user's default of "highest" does not compile there.
    """
    return jax.lax.Precision.HIGHEST if dtype == jax.numpy.float32 else jax.lax.Precision.DEFAULT
