"""A convolution of a video or picture by a Pallas kernel, where rows and columns are split over the chips of a TPU.

Channels are a register's lanes and columns its sublanes. For some rows of a frame at once, the pixels that a kernel's
frames and rows see are side by side as lanes, without being moved: one product is what each of the kernel's columns
adds, in lanes of its own, and their sums, a column apart, are the result. What an autoencoder's residual block does
around a convolution, norm and activation before it and the sum behind it, is done to the same rows, in one pass over
memory.
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

from . import chip, names
from .chip import LANES, MIB, PACKED_ROWS, RESERVED_MIB, Interpret, round_up
from .choice import NO_TPU, KernelRefusal, is_small

LEAST_MIB = 64  # of VMEM; a chip with less keeps XLA's convolutions
# Products of 8 pixels by 256 x 256 weights that are written out: twice as many instructions, 2 to 3 s to compile.
MAX_PRODUCTS = 1300
# Of a picture's channels the columns are lanes: three would be 3 of 128, and what reads the result 40 times as large.
FEW_CHANNELS = 4
NORM_MIB = 3  # of rows in float32 that are normed at once
LEAST_LENGTH = 1e-12  # of a pixel's channels, that of `torch.nn.functional.normalize`
ROWS, COLUMNS = "dp", "sp"  # the mesh's axes over which a picture is split

Frames = Float[Array, "1 channels frames height width"]
Past = Float[Array, "1 channels _ height width"]
KernelWeight = Float[Array, "out channels time rows columns"]
Bias = Float[Array, " out"]
Gain = Float[Array, " channels"]
Result = Float[Array, "1 out _ _ _"]
Shaped = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class ConvolutionForm:
    """How a kernel of `window` (frames, rows, columns) goes over a video; see `convolution`.

    A pixel stands for `factor` rows and as many columns, of which it becomes `columns_each` in the kernel.
    """

    window: tuple[int, ...]
    repeats: bool
    factor: int
    halved: bool
    past_at: int
    columns_each: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Around:
    """What is done to rows before and behind a convolution, or not; of arrays, or of what stands for them in a tree.

    `inside`, beside a `shift`, which makes something of zeros: of the rows above and below, and of the places that
    follow a row's full registers, ones for those that are in the picture and zeros for those that are not.
    """

    gain: Any = None
    shift: Any = None
    inside: Any = None
    onto: Any = None


def refusal(weight: Shaped) -> KernelRefusal:
    """Why the kernel does not take a convolution by `weight` on the chips of the mesh in context."""
    return KernelRefusal(kernel=names.CONVOLUTION, reasons=(*chip_reasons(), *_weight_reasons(weight)))


def chip_reasons() -> tuple[str, ...]:
    """Why a chip of the mesh in context does not run kernels that hold rows of a picture."""
    kind, mib = chip.device_kind(), vmem_mib()
    if not kind.startswith("TPU"):
        return (NO_TPU,)
    return () if mib >= LEAST_MIB else (f"{kind} has {mib} MiB of on-chip memory (VMEM), less than {LEAST_MIB}",)


def _weight_reasons(weight: Shaped) -> tuple[str, ...]:
    reasons, shape = [], " x ".join(map(str, weight.shape))
    if max(weight.shape[3:]) > 3:
        reasons.append(f"a kernel of {weight.shape[3]} rows and {weight.shape[4]} columns has more than 3")
    if _apart(weight) is None:
        reasons.append(f"weights of {shape} leave no room for rows in {_limit_mib()} MiB of on-chip memory (VMEM)")
    return tuple(reasons)


def vmem_mib() -> int:
    """Of a chip of the mesh in context; 0 where that is no TPU."""
    return chip.VMEM_MIB.get(chip.device_kind(), 0)


def normed_silu(
    x: Float[Array, "1 channels _ height width"], gain: Gain, shift: Gain | None = None
) -> Float[Array, "1 channels _ height width"]:
    """SiLU of an RMS norm of each pixel's channels, `x / |x| * gain`, in float32 and rounded once; with a `shift`,
    where both come from a norm's sums, of `x * gain + shift`.
    """
    around = jax.tree.map(lambda each: each[:, None, None, None], Around(gain=gain, shift=shift))
    return _activated(x.astype(jnp.float32), around, 1).astype(x.dtype)


def _activated(x: Array, around: Around, axis: int) -> Array:
    """Channels are along `axis`."""
    if around.shift is not None:
        return jax.nn.silu(x * around.gain + around.shift)
    square = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    return jax.nn.silu(x * jax.lax.rsqrt(jnp.maximum(square, LEAST_LENGTH**2)) * around.gain)


def in_order(x: Frames, past: tuple[Past, ...], past_at: int) -> Float[Array, "1 channels _ height width"]:
    """All frames, those of the `past` before frame `past_at`."""
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
    """As `convolution`, in float32 by XLA."""
    found = in_order(x, past, past_at)
    if gain is not None:
        found = normed_silu(found, gain, shift)
    if doubled:
        found = jnp.repeat(jnp.repeat(found, 2, axis=3), 2, axis=4)
    above, reach = weight.shape[3] // 2, weight.shape[4] // 2
    widths = (0, 0), (0, 0), (0, 0), (above, above), (reach, reach)
    found = jax.lax.conv_general_dilated(
        jnp.pad(found, widths, mode="edge" if repeats else "constant").astype(jnp.float32),
        weight.astype(jnp.float32),
        window_strides=(1, 1, 1),
        padding="VALID",
        precision=jax.lax.Precision.HIGHEST,
    )
    found = found if bias is None else found + bias.astype(jnp.float32)[:, None, None, None]
    found = found[:, :, :, 1::2, 1::2] if halved else found
    return (found if onto is None else found + onto).astype(x.dtype)


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
    """Stride 1, of odd rows and columns, on the mesh in context, which may be of one chip; height and width stay;
    the result has (kernel frames - 1) fewer frames. `repeats` edges, or zeros are beyond them.

    `doubled`: of `x` with each pixel as two rows and two columns. `halved`: every second row and column of the result,
    the first left out, and nothing can be added to it. Frames of the `past` stand before frame `past_at`. With a
    `gain`, and perhaps a `shift`, it is of `normed_silu` of all frames; the result is added `onto` what has its shape.
    Raises `NotImplementedError` where the kernel refuses the weights.
    """
    assert onto is None or not halved
    KernelRefusal(kernel=names.CONVOLUTION, reasons=_weight_reasons(weight)).check()
    if bias is None:
        bias = jnp.zeros(len(weight), weight.dtype)
    picture = P(None, None, None, ROWS, COLUMNS)
    form = ConvolutionForm(
        window=weight.shape[2:], repeats=repeats, factor=1 + doubled, halved=halved, past_at=past_at,
        columns_each=1 + doubled if x.dtype.itemsize == 2 else 1,
    )  # fmt: skip
    local = functools.partial(_convolved, form=form, interpret=interpret)
    specs = picture, Around(gain=P(), shift=P(), onto=picture), P(), P()
    mapped = jax.shard_map(local, in_specs=specs, out_specs=picture, check_vma=False)
    return mapped((x, *past), Around(gain=gain, shift=shift, onto=onto), weight, bias)


def _convolved(
    videos: tuple[Array, ...], around: Around, weight: Array, bias: Array, *, form: ConvolutionForm,
    interpret: Interpret,
) -> Array:  # fmt: skip
    """A chip's part `[1, in, frames, height, width]`."""
    outs, (_, rows, columns) = len(weight), form.window
    # [frames, height, width, channels]
    videos, onto = jax.tree.map(lambda x: jnp.moveaxis(x[0], 0, -1), (videos, around.onto))
    if form.columns_each < form.factor:
        videos = tuple(jnp.repeat(x, form.factor, axis=2) for x in videos)
    within, past_at, repeats = form.columns_each, form.past_at, form.repeats
    places, above, reach = videos[0].shape[2], rows // 2, columns // 2
    width = within * places

    def joined(cut: tuple[slice, ...]) -> Array:
        """A small part of all frames in order: full frames are joined in the kernel."""
        now, *past = (x[cut] for x in videos)
        return jnp.concatenate([now[:past_at], *past, now[past_at:]], axis=0)

    first, final = (joined((slice(None), cut)) for cut in (slice(0, 1), slice(-1, None)))
    ends = _neighbours(first, final, ROWS, repeats=repeats) if above else ()

    def with_ends(cut: slice) -> Array:
        middle = joined((slice(None), slice(None), cut))
        return jnp.concatenate([*(x[:, :, cut] for x in ends[:1]), middle, *(x[:, :, cut] for x in ends[1:])], axis=1)

    # After a row's full registers its rest follows, then what neighbours it right and left, as on a circle.
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
    kernel, offset = _arranged(weight, bias)
    found = _call(videos, ends, last, kernel, offset, around, outs=outs, form=form, interpret=interpret)
    found = jnp.moveaxis(found, 2, 0) if outs <= FEW_CHANNELS else jnp.moveaxis(found[..., :outs], -1, 0)
    return (found[:, :, 1::2, 1::2] if form.halved else found)[None]


def _neighbours(first: Array, last: Array, name: str, *, repeats: bool) -> tuple[Array, Array]:
    """The places before the first and after the last, which neighbours on axis `name` hold."""
    chips, index = jax.lax.axis_size(name), jax.lax.axis_index(name)

    def got(own: Array, sent: Array, hop: int, edge: int) -> Array:
        # A chip that nobody sends to gets zeros.
        pairs = [(chip, chip + hop) for chip in range(chips) if 0 <= chip + hop < chips]
        received = jax.lax.ppermute(sent, name, pairs) if pairs else jnp.zeros_like(sent)
        return jnp.where(index == edge, own, received) if repeats else received

    return got(first, last, 1, 0), got(last, first, -1, chips - 1)


def _inside(name: str, places: tuple[int, int], count: int) -> Array:
    """Of `count` places ones, but for that before the first and that after the last of axis `name`: `[count, 1]`."""
    ends = 0, jax.lax.axis_size(name) - 1
    at = jnp.arange(count)[:, None]
    outside = [(at == place) & (jax.lax.axis_index(name) == end) for place, end in zip(places, ends, strict=True)]
    return jnp.where(outside[0] | outside[1], 0.0, 1.0)


def _apart(weight: Shaped) -> int | None:
    """How many lanes are between a kernel's columns: a block's channels. None where two buffers of a block's weights
    would take over two fifths of the on-chip memory: rows have half of it.
    """
    outs, ins, time, rows, columns = weight.shape
    if outs * columns <= LANES:
        return LANES // columns  # a picture's three channels: one register has all
    lane_bytes = 2 * time * rows * round_up(ins, LANES) * columns * weight.dtype.itemsize
    most = 2 * _limit_mib() * MIB // 5 // lane_bytes
    return next((each for each in (256, 384, LANES) if round_up(outs, LANES) % each == 0 and each <= most), None)


def _limit_mib() -> int:
    return ((vmem_mib() or LEAST_MIB) - RESERVED_MIB) // (1 + is_small(names.CONVOLUTION))


def _arranged(weight: Array, bias: Array) -> tuple[Array, Array]:
    """`[frames, rows, columns, out, in]` of the kernel, and `[blocks, 1, each]`. Outputs that fit into a register with
    all columns are one column, in which those are `each` apart.

    XLA keeps wide weights so. With outputs as lanes the kernel takes a fortieth less (96 channels) to a third (1024),
    but to turn 1024 x 1024 channels, at every call, takes longer than to multiply by them (docs/LOG.md, 2026-11-27).
    """
    outs, ins, time, rows, columns = weight.shape
    each = _apart(weight)
    assert each is not None  # `convolution` has checked it
    wide = round_up(outs, each)
    kernel = jnp.pad(weight, ((0, wide - outs), (0, -ins % LANES), (0, 0), (0, 0), (0, 0))).transpose(2, 3, 4, 0, 1)
    if columns * each < LANES:
        kernel = kernel.reshape(time, rows, 1, columns * each, -1)
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, 0), (0, LANES - columns * each), (0, 0)))
    offset = jnp.pad(bias, (0, wide - outs)).astype(jnp.float32).reshape(-1, 1, each)
    return kernel, jnp.pad(offset, ((0, 0), (0, 0), (0, -each % LANES)))


def _call(
    videos: tuple[Array, ...], ends: tuple[Array, ...], last: Array, kernel: Array, offset: Array, around: Around,
    *, outs: int, form: ConvolutionForm, interpret: Interpret,
) -> Array:  # fmt: skip
    """`[frames, height, width, out]`, or of few channels `[frames, height, out, width]`, of `videos` `[some frames,
    height, width, in]`. Of all frames in order: rows at the `ends`, and of each row, theirs included, what is `last`
    after full registers.
    """
    time, rows, _ = form.window
    _, height, width, ins = videos[0].shape
    seen, width, dtype = len(last), form.columns_each * width, last.dtype
    blocks, lanes = len(offset), kernel.shape[4]
    depth, across = time * rows * lanes, kernel.shape[2] * kernel.shape[3] // blocks
    frames, each, above = seen - time + 1, offset.shape[2], rows // 2
    wide = width // PACKED_ROWS * PACKED_ROWS + last.shape[2]
    limit = _limit_mib()
    # Two buffers of inputs and outputs, and the joined rows. Weights, sums and spilled registers have the rest.
    results = 1 if around.onto is None else 2
    row_bytes = form.factor * wide * dtype.itemsize * (3 * seen * lanes + 2 * results * frames * each)
    given = _most(height, limit * MIB // 2 // row_bytes - 2 * above)
    block = form.factor * given
    together = _most(block, MAX_PRODUCTS // (wide // 8 * -(-depth // 256) * -(-across // 256)))

    def rows_of(x: Array, missing: int) -> Any:
        # Blocks share rows, so they are placed by element: none begins before the array, some end after it.
        shape = (x.shape[0], given + 2 * above, *x.shape[2:])
        return pl.BlockSpec(
            tuple(pl.Element(size, (0, 2 * missing * (axis == 1))) for axis, size in enumerate(shape)),
            lambda out, at: (0, jnp.maximum(at * given - missing, 0), 0, 0),
        )

    out_lanes = outs if blocks == 1 else blocks * each
    shape = frames, form.factor * height, width, out_lanes
    result = pl.BlockSpec((frames, block, width, min(each, out_lanes)), lambda out, at: (0, at, 0, out))
    if outs <= FEW_CHANNELS:
        shape = *shape[:2], outs, width
        result = pl.BlockSpec((frames, block, outs, width), lambda out, at: (0, at, 0, 0))
    onto = around.onto if outs > FEW_CHANNELS or around.onto is None else jnp.moveaxis(around.onto, -1, 2)
    gain, shift = jax.tree.map(
        lambda x: jnp.pad(x.astype(jnp.float32), (0, lanes - ins))[None], (around.gain, around.shift)
    )
    around = Around(gain=gain, shift=shift, inside=around.inside)
    whole = jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda out, at: (0, 0)), around)
    around, specs = replace(around, onto=onto), replace(whole, onto=None if onto is None else result)
    return pl.pallas_call(
        functools.partial(_body, form=form, together=together, is_turned=outs <= FEW_CHANNELS),
        grid=(blocks, height // given),
        in_specs=[
            tuple(rows_of(video, above) for video in videos),
            tuple(pl.BlockSpec(end.shape, lambda out, at: (0, 0, 0, 0)) for end in ends),
            rows_of(last, 0),
            pl.BlockSpec((*kernel.shape[:3], kernel.shape[3] // blocks, lanes), lambda out, at: (0, 0, 0, out, 0)),
            pl.BlockSpec((None, 1, each), lambda out, at: (out, 0, 0)),
            specs,
        ],
        out_specs=result,
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        scratch_shapes=[pltpu.VMEM((seen, block + 2 * above, wide, lanes), dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=limit * MIB
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * frames * form.factor * height * width * kernel.size,
            transcendentals=0,
            bytes_accessed=(seen * ins + frames * form.factor * out_lanes) * height * width * dtype.itemsize,
        ),
        interpret=interpret,
        name=names.CONVOLUTION,
    )(videos, ends, last, kernel, offset, around)


def _most(total: int, limit: int) -> int:
    """The largest divisor of `total` within a limit, or 1."""
    return max(n for n in range(1, total + 1) if total % n == 0 and (n == 1 or n <= limit))


def _body(
    videos: Any, ends: Any, last: Any, kernel: Any, offset: Any, around: Any, out: Any, joined: Any, *,
    form: ConvolutionForm, together: int, is_turned: bool,
) -> None:  # fmt: skip
    """`together` rows of a frame at a time. Where the result `is_turned` its columns are lanes."""
    (time, rows, columns), past_at = form.window, form.past_at
    frames, block = out.shape[:2]
    seen, high, wide, lanes = joined.shape
    ins, full, above, at = last.shape[3], wide - last.shape[2], rows // 2, pl.program_id(1)
    rows_each, columns_each = form.factor, form.columns_each
    num_past = seen - videos[0].shape[0]
    starts = [0, *(past_at + sum(video.shape[0] for video in videos[1:index]) for index in range(1, len(videos)))]

    def put(place: tuple, row: Array) -> None:
        joined[*place, :full, :ins] = _twice(row) if columns_each > 1 else row

    def join(video: Any, start: int, index: Array, _: None) -> None:
        frame, row = index // high, index % high
        source = (row + above * (rows_each - 1)) // rows_each
        # The past is between frames of the first video.
        target = jnp.where(frame >= past_at, frame + num_past, frame) if video is videos[0] else frame + start
        if ins < lanes:
            joined[target, row] = jnp.zeros((wide, lanes), joined.dtype)
        if full:
            # The first block has no row in front; any row may stand for it, for the end replaces it.
            given = jnp.maximum(source - jnp.where(at == 0, above, 0), 0)
            put((target, row), video[frame, given, : full // columns_each, :])
        joined[target, row, full:, :ins] = last[target, source]

    for video, start in zip(videos, starts, strict=True):
        jax.lax.fori_loop(0, video.shape[0] * high, functools.partial(join, video, start), None)
    for end, row, edge in zip(ends if full else (), (0, high - 1), (0, pl.num_programs(1) - 1), strict=False):

        @pl.when(at == edge)
        def _(end: Any = end, row: int = row) -> None:
            for frame in range(seen):
                put((frame, row), end[frame, 0, : full // columns_each, :])

    if around.gain is not None:
        _norm(joined, around, full)
    for row, edge in zip((0, high - 1), (0, pl.num_programs(1) - 1), strict=True):
        if around.inside is not None and above:

            @pl.when(at == edge)
            def _(row: int = row) -> None:
                own = around.inside[0][min(row, 1) : min(row, 1) + 1]
                for frame in range(seen):
                    joined[frame, row] = (joined[frame, row].astype(jnp.float32) * own).astype(joined.dtype)

    turns = block // together

    def turn(index: Array, _: None) -> None:
        frame, row = index // turns, index % turns * together
        places = [(frame + dt, pl.ds(row + dy, together)) for dt in range(time) for dy in range(rows)]
        sight = jnp.concatenate([joined[place].reshape(together * wide, lanes) for place in places], axis=1)
        weights = [kernel[dt, dy].reshape(-1, lanes) for dt in range(time) for dy in range(rows)]
        parts = jax.lax.dot_general(
            sight, jnp.concatenate(weights, axis=1), (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32, precision=chip.precision(out.dtype),
        )  # fmt: skip
        total = _summed(parts.reshape(together, wide, -1), offset, columns)
        total = jnp.swapaxes(total, 1, 2) if is_turned else total
        total, place = total[:, : out.shape[2], : out.shape[3]], (frame, pl.ds(row, together))
        total = total if around.onto is None else total + around.onto[place].astype(jnp.float32)
        out[place] = total.astype(out.dtype)

    jax.lax.fori_loop(0, frames * turns, turn, None)


def _norm(joined: Any, around: Around, full: int) -> None:
    """`normed_silu` of all rows, in place. Lanes beyond the channels are zeros, and so are columns that are not
    `inside` the picture.
    """
    seen, high, wide, lanes = joined.shape
    rows = _most(high, NORM_MIB * MIB // (wide * lanes * 4))
    turns = high // rows
    read = Around(gain=around.gain[...], shift=None if around.shift is None else around.shift[...])

    def turn(index: Array, _: None) -> None:
        place = index // turns, pl.ds(index % turns * rows, rows)
        joined[place] = _activated(joined[place].astype(jnp.float32), read, -1).astype(joined.dtype)
        if around.inside is not None:
            last = *place, slice(full, None)
            joined[last] = (joined[last].astype(jnp.float32) * around.inside[1][...]).astype(joined.dtype)

    jax.lax.fori_loop(0, seen * turns, turn, None)


def _summed(parts: Array, offset: Any, columns: int) -> Array:
    """The sum over a kernel's columns, which in `parts` are a pixel apart and in lanes of their own."""
    wide, each = parts.shape[1], offset.shape[1]
    total = offset[...]
    for by in range(columns):
        if parts.shape[2] > LANES:
            part = parts[:, :, by * each : (by + 1) * each]
        else:
            start = by * (LANES // columns)
            part = pltpu.roll(parts, LANES - start, 2) if start else parts
        moved = (columns // 2 - by) % wide
        total = total + (pltpu.roll(part, moved, 1) if moved else part)
    return total


def _twice(row: Array) -> Array:
    """Each of `[columns, lanes]` of bfloat16 twice: two neighbours are the halves of a word."""
    word = pltpu.bitcast(row.astype(jnp.float32), jnp.uint32)
    return pltpu.bitcast(word | (word >> 16), jnp.bfloat16)
