"""Convolution of a video or image, whose rows and columns are split over the chips of a TPU, by a Pallas kernel.

Channels are a register's lanes and columns its sublanes. For some rows of a frame at once, the pixels under the
window's frames and rows are side by side as lanes, without being moved. One product computes the addend of each of the
window's columns, in separate lanes; their sum, each shifted by a column, is the result. The norm and activation before
an autoencoder's convolution, and the residual sum after it, are applied to the same rows, in one pass over memory.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from . import hardware, registry
from .dispatch import NO_TPU, KernelUnsupported, uses_small_tiles
from .hardware import LANES, MIB, PACKED_ROWS, RESERVED_MIB, Interpret, Ref, round_up

MIN_VMEM_MIB = 64  # VMEM that the kernel needs; chips with less use XLA's convolutions
# Unrolled products of 8 pixels by 256 x 256 weights: twice as many instructions, 2 to 3 s to compile.
MAX_PRODUCTS = 1300
# Up to this many output channels are sublanes: as 3 of 128 lanes, an image's would make the array 40 times as large.
MAX_SUBLANE_CHANNELS = 4
NORM_MIB = 3  # float32 rows that are normalized at once
NORM_EPS = 1e-12  # epsilon of a pixel's norm, as in `torch.nn.functional.normalize`
ROWS, COLUMNS = "dp", "sp"  # mesh axes that split an image's rows and columns

Frames = Float[Array, "1 channels frames height width"]
Past = Float[Array, "1 channels _ height width"]
KernelWeight = Float[Array, "out channels time rows columns"]
Bias = Float[Array, " out"]
Gain = Float[Array, " channels"]
Result = Float[Array, "1 out _ _ _"]
Shaped = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig:
    """Static configuration of a convolution; see `convolution`."""

    window: tuple[int, ...]  # frames, rows and columns of the weights
    repeats: bool  # whether edges are repeated beyond the frame, instead of zeros
    factor: int  # rows and columns that a pixel is repeated to
    halved: bool  # whether every second row and column of the result is returned
    past_at: int  # frame before which the past frames are inserted
    columns_each: int  # columns that a pixel is repeated to in the kernel; the rest of `factor` is repeated before
    limit_mib: int  # VMEM that the kernel may use


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class FusedOps:
    """Operations fused with a convolution, each None if absent: arrays, or their specs in a tree of equal structure."""

    gain: Any = None  # factor of the norm before it, `[channels]`
    shift: Any = None  # addend of the norm before it, `[channels]`
    # With a `shift`, which makes zeros nonzero: masks, 0 outside the image, of the rows above and below, `[2, 1]`, and
    # of the columns after a row's full registers, `[columns, 1]`.
    inside: Any = None
    onto: Any = None  # residual that is added to the result, of its shape


def check_support(weight: Shaped) -> KernelUnsupported:
    """Return the reasons why the kernel cannot use `weight` on the chips of the mesh in context."""
    return KernelUnsupported(kernel=registry.CONVOLUTION, reasons=(*check_chip_support(), *_weight_reasons(weight)))


def check_chip_support() -> tuple[str, ...]:
    """Return the reasons why a chip of the mesh in context cannot run kernels that hold rows of an image."""
    kind, mib = hardware.device_kind(), vmem_mib()
    if not kind.startswith("TPU"):
        return (NO_TPU,)
    return () if mib >= MIN_VMEM_MIB else (f"{kind} has {mib} MiB of on-chip memory (VMEM), less than {MIN_VMEM_MIB}",)


def _weight_reasons(weight: Shaped) -> tuple[str, ...]:
    reasons, shape = [], " x ".join(map(str, weight.shape))
    if max(weight.shape[3:]) > 3:
        reasons.append(f"a kernel of {weight.shape[3]} rows and {weight.shape[4]} columns has more than 3")
    if _apart(weight, limit_mib := _limit_mib()) is None:
        reasons.append(f"weights of {shape} leave no space for rows in {limit_mib} MiB of on-chip memory (VMEM)")
    return tuple(reasons)


def vmem_mib() -> int:
    """Return the MiB of VMEM of a chip of the mesh in context; 0 if it is not a TPU."""
    return hardware.VMEM_MIB.get(hardware.device_kind(), 0)


def norm_silu(
    x: Float[Array, "1 channels _ height width"], gain: Gain, shift: Gain | None = None
) -> Float[Array, "1 channels _ height width"]:
    """Return SiLU of each pixel's RMS norm, `x / |x| * gain`, or of `x * gain + shift`; both are `[channels]`.

    The shift is for norms whose sums are computed elsewhere. It is computed in float32 and rounded once.
    """
    around = jax.tree.map(lambda v: v[:, None, None, None], FusedOps(gain=gain, shift=shift))
    return _activate(x.astype(jnp.float32), around, 1).astype(x.dtype)


def _activate(x: Array, around: FusedOps, axis: int) -> Array:
    """Return the norm and SiLU of float32 `x`, whose channels are along `axis`."""
    if around.shift is not None:
        return jax.nn.silu(x * around.gain + around.shift)
    square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    return jax.nn.silu(x * jax.lax.rsqrt(jnp.maximum(square, NORM_EPS**2)) * around.gain)


def join_past(x: Frames, past: tuple[Past, ...], past_at: int) -> Float[Array, "1 channels _ height width"]:
    """Return all frames in order: those of the `past` come before frame `past_at` of `x`."""
    return jnp.concatenate([x[:, :, :past_at], *past, x[:, :, past_at:]], axis=2) if past else x


def reference(
    x: Frames,
    weight: KernelWeight,
    bias: Bias | None,
    *,
    repeats: bool,
    gain: Gain | None = None,
    shift: Gain | None = None,
    onto: Result | None = None,
    doubled: bool = False,
    halved: bool = False,
    past: tuple[Past, ...] = (),
    past_at: int = 0,
) -> Result:
    """Return the same as `convolution`, computed in float32 by XLA.

    x, weight, bias, repeats, gain, shift, onto, doubled, halved, past, past_at: as for `convolution`.
    """
    result = join_past(x, past, past_at)
    if gain is not None:
        result = norm_silu(result, gain, shift)
    if doubled:
        result = jnp.repeat(jnp.repeat(result, 2, axis=3), 2, axis=4)
    above, reach = weight.shape[3] // 2, weight.shape[4] // 2
    widths = (0, 0), (0, 0), (0, 0), (above, above), (reach, reach)
    result = jax.lax.conv_general_dilated(
        jnp.pad(result, widths, mode="edge" if repeats else "constant").astype(jnp.float32),
        weight.astype(jnp.float32),
        window_strides=(1, 1, 1),
        padding="VALID",
        precision=jax.lax.Precision.HIGHEST,
    )
    result = result if bias is None else result + bias.astype(jnp.float32)[:, None, None, None]
    result = result[:, :, :, 1::2, 1::2] if halved else result
    return (result if onto is None else result + onto).astype(x.dtype)


def convolution(
    x: Frames,
    weight: KernelWeight,
    bias: Bias | None,
    *,
    repeats: bool,
    gain: Gain | None = None,
    shift: Gain | None = None,
    onto: Result | None = None,
    doubled: bool = False,
    halved: bool = False,
    past: tuple[Past, ...] = (),
    past_at: int = 0,
    interpret: Interpret = False,
) -> Result:
    """Return the convolution of `x` with stride 1, on the mesh in context, which may be of one chip.

    Height and width stay. The result has (window frames - 1) fewer frames. Raises `NotImplementedError` if the kernel
    does not support the weights.

    x: frames, `[1, channels, frames, height, width]`, with rows and columns split over the mesh.
    weight: with odd numbers of rows and columns. bias: None for none. repeats: edges are repeated, not padded by zeros.
    gain, shift: with a gain, `norm_silu` of all frames comes first; a shift is optional.
    onto: residual of the result's shape that is added to it; None with `halved`.
    doubled: each pixel of `x` is repeated to two rows and two columns first.
    halved: only every second row and column of the result is returned, without the first.
    past, past_at: earlier frames, and the frame of `x` before which they are inserted.
    interpret: see `hardware.Interpret`.
    """
    assert onto is None or not halved
    KernelUnsupported(kernel=registry.CONVOLUTION, reasons=_weight_reasons(weight)).check()
    if bias is None:
        bias = jnp.zeros(len(weight), weight.dtype)
    form = ConvolutionConfig(
        window=weight.shape[2:], repeats=repeats, factor=1 + doubled, halved=halved, past_at=past_at,
        columns_each=1 + doubled if x.dtype.itemsize == 2 else 1, limit_mib=_limit_mib(),
    )  # fmt: skip
    around = FusedOps(gain=gain, shift=shift, onto=onto)
    return _convolve_on_mesh((x, *past), around, weight, bias, form=form, interpret=interpret)


# Inlined, so that programs stay the same, but traced once for equal shapes, which decoders repeat.
@functools.partial(jax.jit, static_argnames=("form", "interpret"), inline=True)
def _convolve_on_mesh(
    videos: tuple[Array, ...], around: FusedOps, weight: Array, bias: Array, *, form: ConvolutionConfig,
    interpret: Interpret,
) -> Array:  # fmt: skip
    """Return the result of `convolution` for the `videos`: frames and past."""
    image = P(None, None, None, ROWS, COLUMNS)
    local = functools.partial(_convolve, form=form, interpret=interpret)
    specs = image, FusedOps(gain=P(), shift=P(), onto=image), P(), P()
    return jax.shard_map(local, in_specs=specs, out_specs=image, check_vma=False)(videos, around, weight, bias)


def _convolve(
    videos: tuple[Array, ...], around: FusedOps, weight: Array, bias: Array, *, form: ConvolutionConfig,
    interpret: Interpret,
) -> Array:  # fmt: skip
    """Return one chip's part, `[1, out, frames, height, width]`; videos: frames and past, `[1, in, ...]`."""
    outs, (_, rows, columns) = len(weight), form.window
    # [frames, height, width, channels]
    videos, onto = jax.tree.map(lambda x: jnp.moveaxis(x[0], 0, -1), (videos, around.onto))
    if form.columns_each < form.factor:
        videos = tuple(jnp.repeat(x, form.factor, axis=2) for x in videos)
    within, past_at, repeats = form.columns_each, form.past_at, form.repeats
    places, above, reach = videos[0].shape[2], rows // 2, columns // 2
    width = within * places

    def join(cut: tuple[slice, ...]) -> Array:
        """Return a small part of all frames, in order. Full frames are joined in the kernel."""
        now, *past = (x[cut] for x in videos)
        return jnp.concatenate([now[:past_at], *past, now[past_at:]], axis=0)

    first, final = (join((slice(None), cut)) for cut in (slice(0, 1), slice(-1, None)))
    ends = _neighbours(first, final, ROWS, repeats=repeats) if above else ()

    def with_ends(cut: slice) -> Array:
        middle = join((slice(None), slice(None), cut))
        return jnp.concatenate([*(x[:, :, cut] for x in ends[:1]), middle, *(x[:, :, cut] for x in ends[1:])], axis=1)

    # The columns after a row's full registers are followed by its neighbours on the right and left, as on a circle.
    full = width // PACKED_ROWS * PACKED_ROWS
    room = max(PACKED_ROWS, round_up(width + 2 * reach, PACKED_ROWS) - full)
    last = jnp.repeat(with_ends(slice(full // within, None)), within, axis=2)
    if reach:
        outermost = with_ends(slice(0, 1)), with_ends(slice(places - 1, None))
        left, right = _neighbours(*outermost, COLUMNS, repeats=repeats)
        empty = jnp.zeros_like(left, shape=(*left.shape[:2], room - last.shape[2] - 2, left.shape[3]))
        last = jnp.concatenate([last, right, empty, left], axis=2)
    last = jnp.pad(last, ((0, 0), (0, 0), (0, room - last.shape[2]), (0, 0)))
    inside = None
    if around.shift is not None and not repeats:
        inside = _inside(ROWS, (0, 1), 2), _inside(COLUMNS, (room - 1, width - full), room)
    around = replace(around, onto=onto, inside=inside)
    kernel, offset = _arrange(weight, bias, form.limit_mib)
    result = _call(videos, ends, last, kernel, offset, around, outs=outs, form=form, interpret=interpret)
    result = jnp.moveaxis(result, 2, 0) if outs <= MAX_SUBLANE_CHANNELS else jnp.moveaxis(result[..., :outs], -1, 0)
    return (result[:, :, 1::2, 1::2] if form.halved else result)[None]


def _neighbours(first: Array, last: Array, name: str, *, repeats: bool) -> tuple[Array, Array]:
    """Return the rows or columns next to `first` and `last` of a chip, which its neighbours on axis `name` hold."""
    chips, index = jax.lax.axis_size(name), jax.lax.axis_index(name)

    def receive(own: Array, sent: Array, hop: int, edge: int) -> Array:
        # A chip without a sender gets zeros.
        pairs = [(chip, chip + hop) for chip in range(chips) if 0 <= chip + hop < chips]
        received = jax.lax.ppermute(sent, name, pairs) if pairs else jnp.zeros_like(sent)
        return jnp.where(index == edge, own, received) if repeats else received

    return receive(first, last, 1, 0), receive(last, first, -1, chips - 1)


def _inside(name: str, places: tuple[int, int], count: int) -> Array:
    """Return a mask `[count, 1]`, 0 at the `places` before the first and after the last chip of axis `name`, else 1."""
    ends = 0, jax.lax.axis_size(name) - 1
    index = jnp.arange(count)[:, None]
    outside = [(index == place) & (jax.lax.axis_index(name) == end) for place, end in zip(places, ends, strict=True)]
    return jnp.where(outside[0] | outside[1], 0.0, 1.0)


def _apart(weight: Shaped, limit_mib: int) -> int | None:
    """Return the lanes between a window's columns in a product.

    None if two buffers of weights exceed 2/5 of the `limit_mib` of VMEM.
    """
    outs, ins, time, rows, columns = weight.shape
    if outs * columns <= LANES:
        return LANES // columns  # an image's three channels: one register holds all
    lane_bytes = 2 * time * rows * round_up(ins, LANES) * columns * weight.dtype.itemsize
    limit = 2 * limit_mib * MIB // 5 // lane_bytes
    return next((size for size in (256, 384, LANES) if round_up(outs, LANES) % size == 0 and size <= limit), None)


def _limit_mib() -> int:
    """Return the MiB of VMEM that the kernel may use on a chip of the mesh in context, by this machine's fallbacks."""
    return ((vmem_mib() or MIN_VMEM_MIB) - RESERVED_MIB) // (1 + uses_small_tiles(registry.CONVOLUTION))


def _arrange(weight: Array, bias: Array, limit_mib: int) -> tuple[Array, Array]:
    """Return the weights as `[frames, rows, columns, out, in]` and the bias as `[blocks, 1, block]` float32.

    If all columns of all outputs fit into one register, the weights have one column, with the outputs `_apart` lanes
    apart. XLA stores wide weights in this order. With outputs as lanes the kernel takes 1/40 (96 channels) to 1/3
    (1024) less time, but transposing 1024 x 1024 channels at every call takes longer than the product (docs/LOG.md,
    2026-11-27).
    """
    outs, ins, time, rows, columns = weight.shape
    block = _apart(weight, limit_mib)
    assert block is not None  # `convolution` has checked it
    wide = round_up(outs, block)
    kernel = jnp.pad(weight, ((0, wide - outs), (0, -ins % LANES), (0, 0), (0, 0), (0, 0))).transpose(2, 3, 4, 0, 1)
    if columns * block < LANES:
        kernel = kernel.reshape(time, rows, 1, columns * block, -1)
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, 0), (0, LANES - columns * block), (0, 0)))
    offset = jnp.pad(bias, (0, wide - outs)).astype(jnp.float32).reshape(-1, 1, block)
    return kernel, jnp.pad(offset, ((0, 0), (0, 0), (0, -block % LANES)))


def _call(
    videos: tuple[Array, ...], ends: tuple[Array, ...], last: Array, kernel: Array, offset: Array, around: FusedOps,
    *, outs: int, form: ConvolutionConfig, interpret: Interpret,
) -> Array:  # fmt: skip
    """Call the kernel. Returns `[frames, height, width, out]`, or `[frames, height, out, width]` with few channels.

    videos: `[frames, height, width, in]` each. ends: rows above and below all frames, in order.
    last: of each row of all frames and of the ends, the columns after its full registers. outs: output channels.
    kernel, offset: weights and bias as `_arrange` returns them.
    """
    time, rows, _ = form.window
    _, height, width, ins = videos[0].shape
    num_frames, width, dtype = len(last), form.columns_each * width, last.dtype
    blocks, lanes = len(offset), kernel.shape[4]
    depth, across = time * rows * lanes, kernel.shape[2] * kernel.shape[3] // blocks
    frames, block_lanes, above = num_frames - time + 1, offset.shape[2], rows // 2
    wide = width // PACKED_ROWS * PACKED_ROWS + last.shape[2]
    limit = form.limit_mib
    # Half of VMEM for two buffers of inputs and outputs and the joined rows; weights, sums and spills use the rest.
    results = 1 if around.onto is None else 2
    row_bytes = form.factor * wide * dtype.itemsize * (3 * num_frames * lanes + 2 * results * frames * block_lanes)
    num_rows = _most(height, limit * MIB // 2 // row_bytes - 2 * above)
    block = form.factor * num_rows
    together = _most(block, MAX_PRODUCTS // (wide // 8 * -(-depth // 256) * -(-across // 256)))

    def row_spec(x: Array, missing: int) -> pl.BlockSpec:
        # Blocks share rows, so they are placed by element: none begins before the array, some end after it.
        shape = (x.shape[0], num_rows + 2 * above, *x.shape[2:])
        return pl.BlockSpec(
            tuple(pl.Element(size, (0, 2 * missing * (axis == 1))) for axis, size in enumerate(shape)),
            lambda out, at: (0, jnp.maximum(at * num_rows - missing, 0), 0, 0),
        )

    out_lanes = outs if blocks == 1 else blocks * block_lanes
    shape = frames, form.factor * height, width, out_lanes
    result = pl.BlockSpec((frames, block, width, min(block_lanes, out_lanes)), lambda out, at: (0, at, 0, out))
    if outs <= MAX_SUBLANE_CHANNELS:
        shape = *shape[:2], outs, width
        result = pl.BlockSpec((frames, block, outs, width), lambda out, at: (0, at, 0, 0))
    onto = around.onto if outs > MAX_SUBLANE_CHANNELS or around.onto is None else jnp.moveaxis(around.onto, -1, 2)
    gain, shift = jax.tree.map(
        lambda x: jnp.pad(x.astype(jnp.float32), (0, lanes - ins))[None], (around.gain, around.shift)
    )
    around = FusedOps(gain=gain, shift=shift, inside=around.inside)
    whole = jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda out, at: (0, 0)), around)
    around, specs = replace(around, onto=onto), replace(whole, onto=None if onto is None else result)
    return pl.pallas_call(
        functools.partial(_body, form=form, together=together, is_turned=outs <= MAX_SUBLANE_CHANNELS),
        grid=(blocks, height // num_rows),
        in_specs=[
            tuple(row_spec(video, above) for video in videos),
            tuple(pl.BlockSpec(end.shape, lambda out, at: (0, 0, 0, 0)) for end in ends),
            row_spec(last, 0),
            pl.BlockSpec((*kernel.shape[:3], kernel.shape[3] // blocks, lanes), lambda out, at: (0, 0, 0, out, 0)),
            pl.BlockSpec((None, 1, block_lanes), lambda out, at: (out, 0, 0)),
            specs,
        ],
        out_specs=result,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        scratch_shapes=[pltpu.VMEM((num_frames, block + 2 * above, wide, lanes), dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=limit * MIB
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * frames * form.factor * height * width * kernel.size,
            transcendentals=0,
            bytes_accessed=(num_frames * ins + frames * form.factor * out_lanes) * height * width * dtype.itemsize,
        ),
        interpret=interpret,
        name=registry.CONVOLUTION,
    )(videos, ends, last, kernel, offset, around)


def _most(total: int, limit: int) -> int:
    """Return the largest divisor of `total` that is at most `limit`, or 1."""
    return max(n for n in range(1, total + 1) if total % n == 0 and (n == 1 or n <= limit))


def _body(
    videos: tuple[Ref, ...], ends: tuple[Ref, ...], last: Ref, kernel: Ref, offset: Ref, around: FusedOps, out: Ref,
    joined: Ref, *,
    form: ConvolutionConfig, together: int, is_turned: bool,
) -> None:  # fmt: skip
    """Compute a block of rows, `together` rows of a frame at a time; `is_turned`: with columns as lanes."""
    (time, rows, columns), past_at = form.window, form.past_at
    frames, block = out.shape[:2]
    num_frames, high, wide, lanes = joined.shape
    ins, full, above, row_block = last.shape[3], wide - last.shape[2], rows // 2, pl.program_id(1)
    rows_each, columns_each = form.factor, form.columns_each
    num_past = num_frames - videos[0].shape[0]
    starts = [0, *(past_at + sum(video.shape[0] for video in videos[1:index]) for index in range(1, len(videos)))]

    def put(place: tuple, row: Array) -> None:
        joined[*place, :full, :ins] = _twice(row) if columns_each > 1 else row

    def join(video: Ref, start: int, index: Array, _: None) -> None:
        frame, row = index // high, index % high
        source = (row + above * (rows_each - 1)) // rows_each
        # The past frames are inserted between frames of the first video.
        target = jnp.where(frame >= past_at, frame + num_past, frame) if video is videos[0] else frame + start
        if ins < lanes:
            joined[target, row] = jnp.zeros((wide, lanes), joined.dtype)
        if full:
            # The first block has no row in front. Any row may be copied there, because the end replaces it.
            source_row = jnp.maximum(source - jnp.where(row_block == 0, above, 0), 0)
            put((target, row), video[frame, source_row, : full // columns_each, :])
        joined[target, row, full:, :ins] = last[target, source]

    for video, start in zip(videos, starts, strict=True):
        jax.lax.fori_loop(0, video.shape[0] * high, functools.partial(join, video, start), None)
    for end, row, edge in zip(ends if full else (), (0, high - 1), (0, pl.num_programs(1) - 1), strict=False):

        @pl.when(row_block == edge)
        def _(end: Ref = end, row: int = row) -> None:
            for frame in range(num_frames):
                put((frame, row), end[frame, 0, : full // columns_each, :])

    if around.gain is not None:
        _norm(joined, around, full)
    for row, edge in zip((0, high - 1), (0, pl.num_programs(1) - 1), strict=True):
        if around.inside is not None and above:

            @pl.when(row_block == edge)
            def _(row: int = row) -> None:
                mask = around.inside[0][min(row, 1) : min(row, 1) + 1]
                for frame in range(num_frames):
                    joined[frame, row] = (joined[frame, row].astype(jnp.float32) * mask).astype(joined.dtype)

    turns = block // together

    def turn(index: Array, _: None) -> None:
        frame, row = index // turns, index % turns * together
        places = [(frame + dt, pl.ds(row + dy, together)) for dt in range(time) for dy in range(rows)]
        sight = jnp.concatenate([joined[place].reshape(together * wide, lanes) for place in places], axis=1)
        weights = [kernel[dt, dy].reshape(-1, lanes) for dt in range(time) for dy in range(rows)]
        parts = jax.lax.dot_general(
            sight, jnp.concatenate(weights, axis=1), (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32, precision=hardware.matmul_precision(out.dtype),
        )  # fmt: skip
        total = _sum_columns(parts.reshape(together, wide, -1), offset, columns)
        total = jnp.swapaxes(total, 1, 2) if is_turned else total
        total, place = total[:, : out.shape[2], : out.shape[3]], (frame, pl.ds(row, together))
        total = total if around.onto is None else total + around.onto[place].astype(jnp.float32)
        out[place] = total.astype(out.dtype)

    jax.lax.fori_loop(0, frames * turns, turn, None)


def _norm(joined: Ref, around: FusedOps, full: int) -> None:
    """Apply `norm_silu` to all rows, in place; lanes after the channels, and outside columns, stay zero."""
    num_frames, high, wide, lanes = joined.shape
    rows = _most(high, NORM_MIB * MIB // (wide * lanes * 4))
    turns = high // rows
    read = FusedOps(gain=around.gain[...], shift=None if around.shift is None else around.shift[...])

    def turn(index: Array, _: None) -> None:
        place = index // turns, pl.ds(index % turns * rows, rows)
        joined[place] = _activate(joined[place].astype(jnp.float32), read, -1).astype(joined.dtype)
        if around.inside is not None:
            last = *place, slice(full, None)
            joined[last] = (joined[last].astype(jnp.float32) * around.inside[1][...]).astype(joined.dtype)

    jax.lax.fori_loop(0, num_frames * turns, turn, None)


def _sum_columns(parts: Array, offset: Ref, columns: int) -> Array:
    """Return the sum over the window's columns, a pixel apart in `parts` `[rows, columns, lanes]`, plus the bias."""
    wide, block = parts.shape[1], offset.shape[1]
    total = offset[...]
    for by in range(columns):
        if parts.shape[2] > LANES:
            part = parts[:, :, by * block : (by + 1) * block]
        else:
            start = by * (LANES // columns)
            part = pltpu.roll(parts, LANES - start, 2) if start else parts
        moved = (columns // 2 - by) % wide
        total = total + (pltpu.roll(part, moved, 1) if moved else part)
    return total


def _twice(row: Array) -> Array:
    """Return `row` `[columns, lanes]` of bfloat16 with each column twice: neighbours are the halves of a word."""
    word = pltpu.bitcast(row.astype(jnp.float32), jnp.uint32)
    return pltpu.bitcast(word | (word >> 16), jnp.bfloat16)
