"""An affine map of channels, one of pixels whose rows are fewer, and SiLU in one pass over memory, by a Pallas kernel.

XLA writes both of the second map's arrays out at full size first, in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from . import names
from .chip import Interpret
from .choice import KernelRefusal
from .convolution import COLUMNS, ROWS, chip_reasons

Picture = Float[Array, "1 channels frames height width"]
FewerRows = Float[Array, "1 channels frames rows width"]  # each of which stands for several of a picture's
Vector = Float[Array, " channels"]


def modulated(
    x: Picture, factor: Vector, shift: Vector, scale: FewerRows, offset: FewerRows, *, interpret: Interpret = False
) -> Picture:
    """SiLU of `(x * factor + shift) * scale + offset` on the mesh in context, whose axes split rows and columns."""
    picture = P(None, None, None, ROWS, COLUMNS)
    specs = picture, P(), P(), picture, picture
    local = functools.partial(_modulated, interpret=interpret)
    return jax.shard_map(local, in_specs=specs, out_specs=picture, check_vma=False)(x, factor, shift, scale, offset)


def reference(x: Picture, factor: Vector, shift: Vector, scale: FewerRows, offset: FewerRows) -> Picture:
    """As `modulated`, by XLA."""
    rows = x.reshape(*x.shape[:3], scale.shape[3], -1, x.shape[4]).astype(jnp.float32)
    beyond = (..., None, None, None, None)
    found = rows * factor[beyond] + shift[beyond]
    found = found * scale[:, :, :, :, None] + offset[:, :, :, :, None]
    return jax.nn.silu(found).astype(x.dtype).reshape(x.shape)


def refusal() -> KernelRefusal:
    """Why the kernel does not run on the chips of the mesh in context."""
    return KernelRefusal(kernel=names.MODULATION, reasons=chip_reasons())


def _modulated(x: Array, factor: Array, shift: Array, scale: Array, offset: Array, *, interpret: Interpret) -> Array:
    """A chip's part."""
    x, scale, offset = (jnp.moveaxis(each[0], 0, -1) for each in (x, scale, offset))
    frames, height, width, channels = x.shape
    several = height // scale.shape[1]
    vectors = [each.astype(jnp.float32)[None] for each in (factor, shift)]

    def rows(count: int) -> Any:
        return pl.BlockSpec((None, count, width, channels), lambda frame, at: (frame, at, 0, 0))

    vector = pl.BlockSpec((1, channels), lambda frame, at: (0, 0))
    found = pl.pallas_call(
        _body,
        grid=(frames, height // several),
        in_specs=[rows(several), vector, vector, rows(1), rows(1)],
        out_specs=rows(several),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=8 * x.size, transcendentals=x.size, bytes_accessed=2 * x.nbytes),
        interpret=interpret,
        name=names.MODULATION,
    )(x, *vectors, scale, offset)
    return jnp.moveaxis(found, -1, 0)[None]


def _body(x: Any, factor: Any, shift: Any, scale: Any, offset: Any, out: Any) -> None:
    # One map of each pixel, for all rows of the block.
    scales, offsets = (each[0].astype(jnp.float32) for each in (scale, offset))
    offsets = offsets + shift[...] * scales
    scales = factor[...] * scales

    def row(at: Array, _: None) -> None:
        values = x[at].astype(jnp.float32) * scales + offsets
        out[at] = (values / (1 + jnp.exp(-values))).astype(out.dtype)

    jax.lax.fori_loop(0, x.shape[0], row, None)
