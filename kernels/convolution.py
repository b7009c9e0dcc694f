"""A convolution of a video or picture by a Pallas kernel, where rows and columns are split over the chips of a TPU.

Channels are a register's lanes and columns its sublanes. For some rows of a frame at once, the pixels that a kernel's
frames and rows see are side by side as lanes, without being moved: one product is what each of the kernel's columns
adds, in lanes of its own, and their sums, a column apart, are the result.
"""

import functools
from dataclasses import dataclass
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
ROWS, COLUMNS = "dp", "sp"  # the mesh's axes over which a picture is split

Frames = Float[Array, "1 channels frames height width"]
Past = Float[Array, "1 channels past_frames height width"]
KernelWeight = Float[Array, "out channels time rows columns"]
Bias = Float[Array, " out"]
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


def reference(
    x: Frames,
    weight: KernelWeight,
    bias: Bias | None,
    *,
    repeats: bool,
    doubled: bool = False,
    halved: bool = False,
    past: Past | None = None,
    past_at: int = 0,
) -> Float[Array, "1 out _ _ _"]:
    """As `convolution`, in float32 by XLA."""
    found = x if past is None else jnp.concatenate([x[:, :, :past_at], past, x[:, :, past_at:]], axis=2)
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
    return (found[:, :, :, 1::2, 1::2] if halved else found).astype(x.dtype)


def convolution(
    x: Frames,
    weight: KernelWeight,
    bias: Bias | None,
    *,
    repeats: bool,
    doubled: bool = False,
    halved: bool = False,
    past: Past | None = None,
    past_at: int = 0,
    interpret: Interpret = False,
) -> Float[Array, "1 out _ _ _"]:
    """Stride 1, of odd rows and columns, on the mesh in context, which may be of one chip; height and width stay, of
    frames as many are lost as the kernel has, less one. `repeats` edges, or zeros are beyond them.

    `doubled`: of `x` with each pixel as two rows and two columns. `halved`: every second row and column of the result,
    the first left out. Frames of the `past` stand before frame `past_at`. Raises `NotImplementedError` where the kernel
    refuses the weights.
    """
    KernelRefusal(kernel=names.CONVOLUTION, reasons=_weight_reasons(weight)).check()
    if bias is None:
        bias = jnp.zeros(len(weight), weight.dtype)
    picture = P(None, None, None, ROWS, COLUMNS)
    form = ConvolutionForm(
        window=weight.shape[2:], repeats=repeats, factor=1 + doubled, halved=halved, past_at=past_at,
        columns_each=1 + doubled if x.dtype.itemsize == 2 else 1,
    )  # fmt: skip
    local = functools.partial(_convolved, form=form, interpret=interpret)
    videos = (x,) if past is None else (x, past)
    specs = (picture,) * len(videos), P(), P()
    return jax.shard_map(local, in_specs=specs, out_specs=picture, check_vma=False)(videos, weight, bias)


def _convolved(
    videos: tuple[Array, ...], weight: Array, bias: Array, *, form: ConvolutionForm, interpret: Interpret
) -> Array:
    """A chip's part `[1, in, frames, height, width]`."""
    outs, (_, rows, columns) = len(weight), form.window
    videos = tuple(jnp.moveaxis(x[0], 0, -1) for x in videos)  # [frames, height, width, in]
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
    found = _call(videos, ends, last, *_arranged(weight, bias), outs=outs, form=form, interpret=interpret)
    if form.halved:
        found = found[:, 1::2, 1::2]
    return jnp.moveaxis(found[..., :outs], -1, 0)[None]


def _neighbours(first: Array, last: Array, name: str, *, repeats: bool) -> tuple[Array, Array]:
    """The places before the first and after the last, which neighbours on axis `name` hold."""
    chips, index = jax.lax.axis_size(name), jax.lax.axis_index(name)

    def got(own: Array, sent: Array, hop: int, edge: int) -> Array:
        # A chip that nobody sends to gets zeros.
        pairs = [(chip, chip + hop) for chip in range(chips) if 0 <= chip + hop < chips]
        received = jax.lax.ppermute(sent, name, pairs) if pairs else jnp.zeros_like(sent)
        return jnp.where(index == edge, own, received) if repeats else received

    return got(first, last, 1, 0), got(last, first, -1, chips - 1)


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


def _arranged(weight: Array, bias: Array) -> tuple[Array, ...]:
    """`[blocks, places * in, lanes]`, where a place is a frame and row that is seen, and `[blocks, 1, each]`.

    The lanes of a kernel's columns follow each other, `each` apart.
    """
    outs, ins, time, rows, columns = weight.shape
    each, lanes = _apart(weight), round_up(ins, LANES)
    assert each is not None  # `convolution` has checked it
    wide = round_up(outs, each)
    kernel = jnp.pad(weight, ((0, wide - outs), (0, lanes - ins), (0, 0), (0, 0), (0, 0)))
    kernel = kernel.reshape(-1, each, lanes, time, rows, columns).transpose(0, 3, 4, 2, 5, 1)
    kernel = kernel.reshape(-1, time * rows * lanes, columns * each)
    offset = jnp.pad(bias, (0, wide - outs)).astype(jnp.float32).reshape(-1, 1, each)
    return tuple(jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES))) for x in (kernel, offset))


def _call(
    videos: tuple[Array, ...], ends: tuple[Array, ...], last: Array, kernel: Array, offset: Array, *,
    outs: int, form: ConvolutionForm, interpret: Interpret,
) -> Array:  # fmt: skip
    """`[frames, height, width, out]` of `videos` `[some frames, height, width, in]`. Of all frames in order: rows at
    the `ends`, and of each row, theirs included, what is `last` after full registers.
    """
    time, rows, _ = form.window
    _, height, width, ins = videos[0].shape
    seen, width, dtype = len(last), form.columns_each * width, last.dtype
    blocks, depth, across = kernel.shape
    frames, each, above = seen - time + 1, offset.shape[2], rows // 2
    lanes, wide = depth // time // rows, width // PACKED_ROWS * PACKED_ROWS + last.shape[2]
    limit = _limit_mib()
    # Two buffers of inputs and outputs, and the joined rows. Weights, sums and spilled registers have the rest.
    row_bytes = form.factor * wide * dtype.itemsize * (3 * seen * lanes + 2 * frames * each)
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
    return pl.pallas_call(
        functools.partial(_body, form=form, together=together),
        grid=(blocks, height // given),
        in_specs=[
            tuple(rows_of(video, above) for video in videos),
            tuple(pl.BlockSpec(end.shape, lambda out, at: (0, 0, 0, 0)) for end in ends),
            rows_of(last, 0),
            pl.BlockSpec((None, depth, across), lambda out, at: (out, 0, 0)),
            pl.BlockSpec((None, 1, each), lambda out, at: (out, 0, 0)),
        ],
        out_specs=pl.BlockSpec((frames, block, width, min(each, out_lanes)), lambda out, at: (0, at, 0, out)),
        out_shape=jax.ShapeDtypeStruct((frames, form.factor * height, width, out_lanes), dtype),
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
    )(videos, ends, last, kernel, offset)


def _most(total: int, limit: int) -> int:
    """The largest divisor of `total` within a limit, or 1."""
    return max(n for n in range(1, total + 1) if total % n == 0 and (n == 1 or n <= limit))


def _body(
    videos: Any, ends: Any, last: Any, kernel: Any, offset: Any, out: Any, joined: Any, *,
    form: ConvolutionForm, together: int,
) -> None:  # fmt: skip
    """`together` rows of a frame at a time."""
    (time, rows, columns), past_at = form.window, form.past_at
    frames, block = out.shape[:2]
    seen, high, wide, lanes = joined.shape
    ins, full, above, at = last.shape[3], wide - last.shape[2], rows // 2, pl.program_id(1)
    rows_each, columns_each = form.factor, form.columns_each
    num_past = seen - videos[0].shape[0]

    def put(place: tuple, row: Array) -> None:
        joined[*place, :full, :ins] = _twice(row) if columns_each > 1 else row

    def join(video: Any, index: Array, _: None) -> None:
        frame, row = index // high, index % high
        source = (row + rows_each - 1) // rows_each
        # The past is between frames of the first video.
        target = jnp.where(frame >= past_at, frame + num_past, frame) if video is videos[0] else frame + past_at
        if ins < lanes:
            joined[target, row] = jnp.zeros((wide, lanes), joined.dtype)
        if full:
            # The first block has no row in front; any row may stand for it, for the end replaces it.
            given = jnp.maximum(source - jnp.where(at == 0, above, 0), 0)
            put((target, row), video[frame, given, : full // columns_each, :])
        joined[target, row, full:, :ins] = last[target, source]

    for video in videos:
        jax.lax.fori_loop(0, video.shape[0] * high, functools.partial(join, video), None)
    for end, row, edge in zip(ends if full else (), (0, high - 1), (0, pl.num_programs(1) - 1), strict=False):

        @pl.when(at == edge)
        def _(end: Any = end, row: int = row) -> None:
            for frame in range(seen):
                put((frame, row), end[frame, 0, : full // columns_each, :])

    turns = block // together

    def turn(index: Array, _: None) -> None:
        frame, row = index // turns, index % turns * together
        places = [(frame + dt, pl.ds(row + dy, together)) for dt in range(time) for dy in range(rows)]
        sight = jnp.concatenate([joined[place].reshape(together * wide, lanes) for place in places], axis=1)
        parts = jnp.dot(sight, kernel[...], preferred_element_type=jnp.float32, precision=chip.precision(out.dtype))
        total = _summed(parts.reshape(together, wide, -1), offset, columns)
        out[frame, pl.ds(row, together)] = total[:, : out.shape[2], : out.shape[3]].astype(out.dtype)

    jax.lax.fori_loop(0, frames * turns, turn, None)


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
