"""Affine map of channels, a second one of pixels with fewer rows, and SiLU in one pass over memory, by a Pallas kernel.

XLA would first write both arrays of the second map at full size, in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from . import registry
from .convolution import COLUMNS, ROWS, check_chip_support
from .dispatch import KernelUnsupported
from .hardware import Interpret, Ref

Image = Float[Array, "1 channels frames height width"]
CoarseRows = Float[Array, "1 channels frames rows width"]  # each row applies to several rows of the image
Vector = Float[Array, " channels"]


def modulate(
    x: Image, factor: Vector, shift: Vector, scale: CoarseRows, offset: CoarseRows, *, interpret: Interpret = False
) -> Image:
    """Return SiLU of `(x * factor + shift) * scale + offset` on the mesh in context, which splits rows and columns.

    x: `[1, channels, frames, height, width]`. factor, shift: `[channels]`.
    scale, offset: `[1, channels, frames, rows, width]`; `rows` divides the height.
    interpret: how to run without a TPU, see `hardware.Interpret`.
    """
    image = P(None, None, None, ROWS, COLUMNS)
    specs = image, P(), P(), image, image
    local = functools.partial(_modulate, interpret=interpret)
    return jax.shard_map(local, in_specs=specs, out_specs=image, check_vma=False)(x, factor, shift, scale, offset)


def reference(x: Image, factor: Vector, shift: Vector, scale: CoarseRows, offset: CoarseRows) -> Image:
    """Return the same as `modulate`, computed by XLA: x, factor, shift, scale and offset are those of `modulate`."""
    rows = x.reshape(*x.shape[:3], scale.shape[3], -1, x.shape[4]).astype(jnp.float32)
    by_channel = (..., None, None, None, None)
    result = rows * factor[by_channel] + shift[by_channel]
    result = result * scale[:, :, :, :, None] + offset[:, :, :, :, None]
    return jax.nn.silu(result).astype(x.dtype).reshape(x.shape)


def check_support() -> KernelUnsupported:
    """Return the reasons why the kernel cannot run on the chips of the mesh in context."""
    return KernelUnsupported(kernel=registry.MODULATION, reasons=check_chip_support())


def _modulate(x: Array, factor: Array, shift: Array, scale: Array, offset: Array, *, interpret: Interpret) -> Array:
    """Return one chip's part."""
    x, scale, offset = (jnp.moveaxis(array[0], 0, -1) for array in (x, scale, offset))
    frames, height, width, channels = x.shape
    rows_per_step = height // scale.shape[1]
    vectors = [vector.astype(jnp.float32)[None] for vector in (factor, shift)]

    def rows(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, count, width, channels), lambda frame, at: (frame, at, 0, 0))

    vector = pl.BlockSpec((1, channels), lambda frame, at: (0, 0))
    result = pl.pallas_call(
        _body,
        grid=(frames, height // rows_per_step),
        in_specs=[rows(rows_per_step), vector, vector, rows(1), rows(1)],
        out_specs=rows(rows_per_step),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=8 * x.size, transcendentals=x.size, bytes_accessed=2 * x.nbytes),
        interpret=interpret,
        name=registry.MODULATION,
    )(x, *vectors, scale, offset)
    return jnp.moveaxis(result, -1, 0)[None]


def _body(x: Ref, factor: Ref, shift: Ref, scale: Ref, offset: Ref, out: Ref) -> None:
    # One map per pixel, which applies to all rows of the block.
    scales, offsets = (ref[0].astype(jnp.float32) for ref in (scale, offset))
    offsets = offsets + shift[...] * scales
    scales = factor[...] * scales

    def row(at: Array, _: None) -> None:
        values = x[at].astype(jnp.float32) * scales + offsets
        out[at] = (values / (1 + jnp.exp(-values))).astype(out.dtype)

    jax.lax.fori_loop(0, x.shape[0], row, None)
