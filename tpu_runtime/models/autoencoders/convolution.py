"""A convolution of a video or picture by a Pallas kernel, where rows and columns are split over the chips of a TPU.

Channels are a register's lanes and columns its sublanes. For some rows of a frame at once, the pixels that a kernel's
frames and rows see lie side by side as lanes, without being moved: one product gives what each of the kernel's columns
adds, in lanes of its own, and their sums, a column apart, are the result.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ....attention.tiles import RESERVED_MIB, VMEM_MIB, round_up

if TYPE_CHECKING:
    import jax

LANES, SUBLANES = 128, 16
MIB = 2**20
LEAST_MIB = 64  # of VMEM; a chip with less keeps XLA's convolutions
# Products of 8 pixels by 256 x 256 weights that are written out: twice as many instructions, 2 to 3 s to compile.
MAX_PRODUCTS = 1300
ROWS, COLUMNS = "dp", "sp"


def takes_kernel(weight: "jax.Array") -> bool:
    """Whether programs are being traced for chips that have room for the kernel and these weights, and the weights have
    more than one place.
    """
    if vmem_mib() < LEAST_MIB or _apart(weight) is None:
        return False
    return math.prod(weight.shape[2:]) > 1 and max(weight.shape[3:]) <= 3


def vmem_mib() -> int:
    """Of a chip of the mesh in context; 0 where that is no TPU."""
    import jax

    device = jax.sharding.get_abstract_mesh().abstract_device
    return VMEM_MIB.get(device.device_kind, 0) if device is not None else 0


def convolution(
    x: "jax.Array",
    weight: "jax.Array",
    bias: "jax.Array | None",
    *,
    repeats: bool,
    doubled: bool = False,
    halved: bool = False,
    past: "jax.Array | None" = None,
    past_at: int = 0,
    interpret: bool = False,
) -> "jax.Array":
    """`layers.convolution` on the mesh in context, which may be of one chip. `repeats` edges, or nothing is there.

    `doubled`: of `x` with each pixel as two rows and two columns. `halved`: every second row and column of the result,
    the first left out. Frames of the `past` stand before frame `past_at`.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    if bias is None:
        bias = jnp.zeros(len(weight), weight.dtype)
    picture = P(None, None, None, ROWS, COLUMNS)
    how = {"repeats": repeats, "factor": 1 + doubled, "halved": halved, "past_at": past_at, "interpret": interpret}
    local = partial(_convolved, **how)
    videos = (x,) if past is None else (x, past)
    specs = (picture,) * len(videos), P(), P()
    return jax.shard_map(local, in_specs=specs, out_specs=picture, check_vma=False)(videos, weight, bias)


def _convolved(
    videos: "tuple[jax.Array, ...]",
    weight: "jax.Array",
    bias: "jax.Array",
    *,
    repeats: bool,
    factor: int,
    halved: bool,
    past_at: int,
    interpret: bool,
) -> "jax.Array":
    """A chip's part `[1, in, frames, height, width]`."""
    import jax.numpy as jnp

    outs, _, time, rows, columns = weight.shape
    videos = tuple(jnp.moveaxis(x[0], 0, -1) for x in videos)  # [frames, height, width, in]
    if factor > 1 and videos[0].dtype.itemsize > 2:
        videos = tuple(jnp.repeat(x, factor, axis=2) for x in videos)
    within = factor if videos[0].dtype.itemsize == 2 else 1  # what the kernel does of it
    places, above, reach = videos[0].shape[2], rows // 2, columns // 2
    width = within * places

    def joined(cut: tuple[slice, ...]) -> "jax.Array":
        """A part of all frames in order, and small: what is whole is joined in the kernel."""
        now, *past = (x[cut] for x in videos)
        return jnp.concatenate([now[:past_at], *past, now[past_at:]], axis=0)

    first, final = (joined((slice(None), cut)) for cut in (slice(0, 1), slice(-1, None)))
    ends = _beside(first, final, ROWS, repeats=repeats) if above else ()

    def with_ends(cut: slice) -> "jax.Array":
        middle = joined((slice(None), slice(None), cut))
        return jnp.concatenate([*(x[:, :, cut] for x in ends[:1]), middle, *(x[:, :, cut] for x in ends[1:])], axis=1)

    # What stands beside a row follows it, as if it closed to a circle; in front of that, its last part register.
    whole = width // SUBLANES * SUBLANES
    room = max(SUBLANES, round_up(width + 2 * reach, SUBLANES) - whole)
    last = jnp.repeat(with_ends(slice(whole // within, None)), within, axis=2)
    if reach:
        outermost = with_ends(slice(0, 1)), with_ends(slice(places - 1, None))
        left, right = _beside(*outermost, COLUMNS, repeats=repeats)
        empty = jnp.zeros_like(left, shape=(*left.shape[:2], room - last.shape[2] - 2, left.shape[3]))
        last = jnp.concatenate([last, right, empty, left], axis=2)
    last = jnp.pad(last, ((0, 0), (0, 0), (0, room - last.shape[2]), (0, 0)))
    found = _call(
        videos, ends, last, *_arranged(weight, bias), outs=outs, window=(time, rows, columns), past_at=past_at,
        rows_each=factor, columns_each=within, interpret=interpret,
    )  # fmt: skip
    if halved:
        found = found[:, 1::2, 1::2]
    return jnp.moveaxis(found[..., :outs], -1, 0)[None]


def _beside(first: "jax.Array", last: "jax.Array", name: str, *, repeats: bool) -> "tuple[jax.Array, jax.Array]":
    """What stands before the first and after the last place, which neighbours on axis `name` hold."""
    import jax
    import jax.numpy as jnp

    chips, index = jax.lax.axis_size(name), jax.lax.axis_index(name)

    def got(own: "jax.Array", sent: "jax.Array", hop: int, edge: int) -> "jax.Array":
        # A chip that nobody sends to gets zeros.
        pairs = [(chip, chip + hop) for chip in range(chips) if 0 <= chip + hop < chips]
        received = jax.lax.ppermute(sent, name, pairs) if pairs else jnp.zeros_like(sent)
        return jnp.where(index == edge, own, received) if repeats else received

    return got(first, last, 1, 0), got(last, first, -1, chips - 1)


def _apart(weight: "jax.Array") -> int | None:
    """How many lanes lie between a kernel's columns: a block's channels. None where two buffers of a block's weights
    would take over two fifths of the on-chip memory: rows have half of it.
    """
    outs, ins, time, rows, columns = weight.shape
    if outs * columns <= LANES:
        return LANES // columns  # a picture's three channels: one register has all
    lane_bytes = 2 * time * rows * round_up(ins, LANES) * columns * weight.dtype.itemsize
    most = 2 * _limit_mib() * MIB // 5 // lane_bytes
    return next((each for each in (256, 384, LANES) if round_up(outs, LANES) % each == 0 and each <= most), None)


def _limit_mib() -> int:
    return (vmem_mib() or LEAST_MIB) - RESERVED_MIB


def _arranged(weight: "jax.Array", bias: "jax.Array") -> "tuple[jax.Array, ...]":
    """`[blocks, places * in, lanes]`, where a place is a frame and row that is seen, and `[blocks, 1, each]`.

    The lanes of a kernel's columns follow each other, `each` apart.
    """
    import jax.numpy as jnp

    outs, ins, time, rows, columns = weight.shape
    each, lanes = _apart(weight), round_up(ins, LANES)
    assert each is not None
    wide = round_up(outs, each)
    kernel = jnp.pad(weight, ((0, wide - outs), (0, lanes - ins), (0, 0), (0, 0), (0, 0)))
    kernel = kernel.reshape(-1, each, lanes, time, rows, columns).transpose(0, 3, 4, 2, 5, 1)
    kernel = kernel.reshape(-1, time * rows * lanes, columns * each)
    offset = jnp.pad(bias, (0, wide - outs)).astype(jnp.float32).reshape(-1, 1, each)
    whole = (jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES))) for x in (kernel, offset))
    return tuple(whole)


def _call(
    videos: "tuple[jax.Array, ...]",
    ends: "tuple[jax.Array, ...]",
    last: "jax.Array",
    kernel: "jax.Array",
    offset: "jax.Array",
    *,
    outs: int,
    window: tuple[int, int, int],
    past_at: int,
    rows_each: int,
    columns_each: int,
    interpret: bool,
) -> "jax.Array":
    """`[frames, height, width, out]` of `videos` `[some frames, height, width, in]`. Of all frames in order: rows at
    the `ends`, and of each row, theirs included, what is `last` after whole registers. A pixel of a video stands for
    some rows and columns.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    time, rows, _ = window
    _, height, width, ins = videos[0].shape
    seen, width, dtype = len(last), columns_each * width, last.dtype
    blocks, depth, across = kernel.shape
    frames, each, above = seen - time + 1, offset.shape[2], rows // 2
    lanes, wide = depth // time // rows, width // SUBLANES * SUBLANES + last.shape[2]
    limit = _limit_mib()
    # Two buffers of what comes and goes, and what is made of it. Weights, sums and what spills have the rest.
    row_bytes = rows_each * wide * dtype.itemsize * (3 * seen * lanes + 2 * frames * each)
    given = _most(height, limit * MIB // 2 // row_bytes - 2 * above)
    block = rows_each * given
    together = _most(block, MAX_PRODUCTS // (wide // 8 * -(-depth // 256) * -(-across // 256)))

    def rows_of(x: "jax.Array", missing: int) -> Any:
        # Blocks share rows, so they are placed by element: none begins before the array, some end after it.
        shape = (x.shape[0], given + 2 * above, *x.shape[2:])
        return pl.BlockSpec(
            tuple(pl.Element(size, (0, 2 * missing * (axis == 1))) for axis, size in enumerate(shape)),
            lambda out, at: (0, jnp.maximum(at * given - missing, 0), 0, 0),
        )

    out_lanes = outs if blocks == 1 else blocks * each
    return pl.pallas_call(
        partial(
            _body,
            window=window,
            past_at=past_at,
            together=together,
            num_videos=len(videos),
            num_ends=len(ends),
            columns_each=columns_each,
        ),
        grid=(blocks, height // given),
        in_specs=[
            *(rows_of(video, above) for video in videos),
            *(pl.BlockSpec(end.shape, lambda out, at: (0, 0, 0, 0)) for end in ends),
            rows_of(last, 0),
            pl.BlockSpec((None, depth, across), lambda out, at: (out, 0, 0)),
            pl.BlockSpec((None, 1, each), lambda out, at: (out, 0, 0)),
        ],
        out_specs=pl.BlockSpec((frames, block, width, min(each, out_lanes)), lambda out, at: (0, at, 0, out)),
        out_shape=jax.ShapeDtypeStruct((frames, rows_each * height, width, out_lanes), dtype),
        scratch_shapes=[pltpu.VMEM((seen, block + 2 * above, wide, lanes), dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=limit * MIB
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * frames * rows_each * height * width * kernel.size,
            transcendentals=0,
            bytes_accessed=(seen * ins + frames * rows_each * out_lanes) * height * width * dtype.itemsize,
        ),
        interpret=interpret,
        name="convolution",
    )(*videos, *ends, last, kernel, offset)


def _most(whole: int, limit: int) -> int:
    """The largest part of `whole` that divides it and is within a limit, or 1."""
    return max(n for n in range(1, whole + 1) if whole % n == 0 and (n == 1 or n <= limit))


def _body(
    *refs: Any,
    window: tuple[int, int, int],
    past_at: int,
    together: int,
    num_videos: int,
    num_ends: int,
    columns_each: int,
) -> None:
    """`together` rows of a frame at a time."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    videos, ends = refs[:num_videos], refs[num_videos : num_videos + num_ends]
    last, kernel, offset, out, joined = refs[num_videos + num_ends :]
    time, rows, columns = window
    frames, block = out.shape[:2]
    seen, high, wide, lanes = joined.shape
    ins, whole, above, at = last.shape[3], wide - last.shape[2], rows // 2, pl.program_id(1)
    rows_each = block // (last.shape[1] - 2 * above)
    # Stated for bfloat16 too: a user's default of "highest" does not compile in a kernel.
    precision = jax.lax.Precision.HIGHEST if out.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    num_past = seen - videos[0].shape[0]

    def put(place: tuple, row: "jax.Array") -> None:
        joined[*place, :whole, :ins] = _twice(row) if columns_each > 1 else row

    def join(video: Any, index: "jax.Array", _: None) -> None:
        frame, row = index // high, index % high
        source = (row + rows_each - 1) // rows_each
        # The others stand between frames of the first video.
        target = jnp.where(frame >= past_at, frame + num_past, frame) if video is videos[0] else frame + past_at
        if ins < lanes:
            joined[target, row] = jnp.zeros((wide, lanes), joined.dtype)
        if whole:
            # The first block has no row in front; what is taken for it is no matter.
            given = jnp.maximum(source - jnp.where(at == 0, above, 0), 0)
            put((target, row), video[frame, given, : whole // columns_each, :])
        joined[target, row, whole:, :ins] = last[target, source]

    for video in videos:
        jax.lax.fori_loop(0, video.shape[0] * high, partial(join, video), None)
    for end, row, edge in zip(ends if whole else (), (0, high - 1), (0, pl.num_programs(1) - 1), strict=False):

        @pl.when(at == edge)
        def _(end: Any = end, row: int = row) -> None:
            for frame in range(seen):
                put((frame, row), end[frame, 0, : whole // columns_each, :])

    turns = block // together

    def turn(index: "jax.Array", _: None) -> None:
        frame, row = index // turns, index % turns * together
        places = [(frame + dt, pl.ds(row + dy, together)) for dt in range(time) for dy in range(rows)]
        sight = jnp.concatenate([joined[place].reshape(together * wide, lanes) for place in places], axis=1)
        parts = jnp.dot(sight, kernel[...], preferred_element_type=jnp.float32, precision=precision)
        total = _summed(parts.reshape(together, wide, -1), offset, columns)
        out[frame, pl.ds(row, together)] = total[:, : out.shape[2], : out.shape[3]].astype(out.dtype)

    jax.lax.fori_loop(0, frames * turns, turn, None)


def _summed(parts: "jax.Array", offset: Any, columns: int) -> "jax.Array":
    """What a kernel's columns add, which in `parts` lies a pixel apart and in lanes of its own."""
    from jax.experimental.pallas import tpu as pltpu

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


def _twice(row: "jax.Array") -> "jax.Array":
    """Each of `[columns, lanes]` of bfloat16 twice: two neighbours are the halves of a word."""
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    word = pltpu.bitcast(row.astype(jnp.float32), jnp.uint32)
    return pltpu.bitcast(word | (word >> 16), jnp.bfloat16)
