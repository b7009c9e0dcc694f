"""Linear layers with int8 products, twice as fast as bfloat16: approximate, and only used on request.

A weight is quantized with one scale per output when it is loaded. Tokens are quantized with one scale each, in the
kernel, where a block of them stays while all outputs are computed. Sums are exact, in int32. Before quantization both
are rotated by the same orthogonal matrix. It leaves their product unchanged and spreads a channel far larger than the
others over `block` lanes (QuaRot, https://arxiv.org/abs/2404.00456). `docs/quality.md` states the accuracy.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from . import registry
from .dispatch import KernelUnsupported, should_use, uses_small_tiles
from .hardware import INT8_ROWS, LANES, MIB, RESERVED_MIB, VMEM_MIB, Interpret, Ref, Slice, device_kind, round_up

INT8_MAX = 127
EPS = 1e-30  # added to the largest magnitude of a token or a weight, so that no scale is zero
TOKENS = (256, 128)  # tokens of a grid step: the second if the first leaves no VMEM for weights
RESULTS_PER_PIECE = (
    256 * 1536
)  # results computed at once: enough to overlap the epilogue of some with products of others
MXU_WIDTH = 256
COMPILER_BYTES = 8 * MIB
# "gelu": of each product. "silu": of the first of two products, which then multiplies the second.
Activation = Literal["gelu", "silu"]
ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu, None: lambda x: x}


class Int8Weight(NamedTuple):
    """A quantized weight, with arrays, refs or partition specs as its fields."""

    numbers: Any  # int8 `[outs, ins]` or `[ins, outs]`, or `[layers, ...]` of all layers
    worth: Any  # scale of each output, `[outs]` float32
    bias: Any = None  # `[outs]` or None

    def outs(self, turned: bool) -> int:
        """Return the number of outputs. turned: whether the weight is `[ins, outs]`."""
        return self.numbers.shape[-1 if turned else -2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Int8Tokens:
    """Quantized tokens, rotated, with arrays or partition specs as its fields."""

    numbers: Any  # int8 `[rows, tokens, lanes]`
    worth: Any  # scale of each token, `[rows, tokens, 1]` float32
    # Of the tokens before, and of the results of products with them.
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


class GatedResidual(NamedTuple):
    """Residual sum with a product: `x + gate * product`, with arrays, refs or partition specs as its fields."""

    x: Any  # `[rows, tokens, outs]`
    gate: Any  # `[rows or 1, outs]`


def quantize(x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Return `x` quantized to int8, `[...]`, and its scale, shared along `axes`, which it lacks.

    A NaN makes its scale NaN, because no integer is.
    """
    x = x.astype(jnp.float32)
    scale = (jnp.max(jnp.abs(x), axis=axes, keepdims=True) + EPS) / INT8_MAX
    scale = scale + 0 * jnp.sum(x, axis=axes, keepdims=True)
    return jnp.round(x / scale).astype(jnp.int8), jnp.squeeze(scale, axes)


def rotation_block(*lanes: int, chips: int) -> int:
    """Return the number of lanes that are rotated together.

    It is the width of a matrix unit if that divides every size in `lanes`, divided by `chips` where this is possible;
    else the largest power of two that does.
    """
    return math.gcd(MXU_WIDTH, *(size if size % chips else size // chips for size in lanes))


def rotation_matrix(block: int) -> np.ndarray:
    """Return the rotation matrix, `[block, block]` of 1 and -1; times its transpose it is `block` times the identity.

    It is a Hadamard matrix with signs from a bent function (Rudin-Shapiro), so that equal values in all lanes are
    spread over all lanes, too.
    """
    lane = np.arange(block)
    signs = np.bitwise_count(lane & lane >> 1)[:, None] + np.bitwise_count(lane[:, None] & lane)
    return 1 - 2.0 * (signs % 2)


def rotate_weight(weight: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    """Return the weight `[...]` in float32, rotated by the inverse of the tokens' rotation.

    axis: the last dimension over which a product sums. block: lanes that are rotated together.
    """
    x = jnp.moveaxis(weight.astype(jnp.float32), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, block)
    rotated = jnp.matmul(blocks, rotation_matrix(block) / block, precision="highest")
    return jnp.moveaxis(rotated.reshape(x.shape), -1, axis)


def quantize_weight(
    weight: Float[Array, "..."], axes: tuple[int, ...], chips: int
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """Return a weight `[...]` rotated and quantized, and its scale, which lacks `axes`.

    axes: over which a product sums. chips: over which the axes may be split.
    """
    return quantize(rotate_weight(weight, axes[-1], rotation_block(weight.shape[axes[-1]], chips=chips)), axes)


def _rotate(x: Float[Array, "... lanes"], matrix: Float[Array, "lanes lanes"]) -> Float[Array, "... lanes"]:
    """Return `x` times the rotation matrix, `[..., lanes]` float32.

    It is exact: the matrix unit sums bfloat16 products in float32.
    """
    precision = "default" if x.dtype == jnp.bfloat16 else "highest"
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, matrix.astype(x.dtype), dims, precision=precision, preferred_element_type=jnp.float32)


def quantize_tokens(
    x: Float[Array, "rows tokens lanes"], *, block: int, kernel: bool, interpret: Interpret = False
) -> Int8Tokens:
    """Return tokens `x` `[rows, tokens, lanes]` quantized for several products, or before chips exchange them.

    Without it, `linear_int8` quantizes them itself. block: lanes that are rotated together.
    kernel: whether to use Pallas, unless the kernel does not support the shape. interpret: see `hardware.Interpret`.
    """
    rows, seq, size = x.shape
    if not (kernel and should_use(check_support([size], [LANES]))):
        blocks = _rotate(x.reshape(rows, seq, -1, block), jnp.asarray(rotation_matrix(block)))
        numbers, scale = quantize(blocks.reshape(x.shape), (2,))
        return Int8Tokens(numbers=numbers, worth=scale[..., None], dtype=x.dtype)
    total, tokens = rows * seq, TOKENS[-1]
    rotating = _rotating([size], block, x.dtype)

    def lanes(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, width), lambda at: (at, 0))

    def body(matrix: Ref, x: Ref, numbers: Ref, scale: Ref, lanes: Ref) -> None:
        scale[...] = _round_tokens([x], matrix, lanes, numbers)

    numbers, scale = pl.pallas_call(
        body,
        grid=(pl.cdiv(total, tokens),),
        in_specs=[pl.BlockSpec(rotating.shape, lambda at: (0, 0)), lanes(size)],
        out_specs=[lanes(size), lanes(1)],
        scratch_shapes=[pltpu.VMEM((tokens, size), x.dtype)],
        out_shape=[jax.ShapeDtypeStruct((total, size), jnp.int8), jax.ShapeDtypeStruct((total, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_limit_bytes()),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * len(rotating), transcendentals=0, bytes_accessed=x.size * (x.dtype.itemsize + 1)
        ),
        interpret=interpret,
        name=registry.ROUND_TOKENS,
    )(rotating, x.reshape(total, size))
    return Int8Tokens(numbers=numbers.reshape(x.shape), worth=scale.reshape(rows, seq, 1), dtype=x.dtype)


def linear_int8(
    parts: Sequence[Float[Array, "rows tokens _"] | Int8Tokens],
    weights: Sequence[Int8Weight],
    *,
    block: int,
    activation: Activation | None = None,
    turned: bool = False,
    layer: Int[Array, ""] | None = None,
    onto: GatedResidual | None = None,
    kernel: bool,
    interpret: Interpret = False,
) -> list[Float[Array, "rows tokens _"]]:
    """Return the concatenated lanes of all `parts` times each of `weights`, plus its bias; `[rows, tokens, outs]` each.

    parts: tokens, `[rows, tokens, lanes]` each; quantized tokens must be the only part.
    weights: quantized, as many as there are results.
    block: lanes that are rotated together, equal to that of the weights; it divides the lanes of each part.
    activation: "gelu" is applied to each product; "silu" to the first of two, which multiplies the second: one result.
    turned: whether weights are `[ins, outs]`. layer: which layer to use of weights that have all layers.
    onto: residual sum with the only product, read and written once, in float32; None for none.
    kernel: whether to use Pallas, unless the kernel does not support the shapes.
    interpret: how to run without a TPU, see `hardware.Interpret`.
    """
    assert onto is None or (len(weights) == 1 and activation is None)
    run = linear_int8_reference
    if kernel and should_use(
        check_support([part.shape[2] for part in parts], [weight.outs(turned) for weight in weights])
    ):
        run = functools.partial(linear_int8_kernel, interpret=interpret)
    return run(parts, weights, block=block, activation=activation, turned=turned, layer=layer, onto=onto)


def linear_int8_reference(
    parts: Sequence[Array | Int8Tokens],
    weights: Sequence[Int8Weight],
    *,
    block: int,
    activation: Activation | None,
    turned: bool,
    layer: Int[Array, ""] | None = None,
    onto: GatedResidual | None = None,
) -> list[Array]:
    """Return the same as `linear_int8`, `[rows, tokens, outs]` each, computed by XLA.

    parts, weights, block, activation, turned, layer, onto: as for `linear_int8`.
    """
    x = parts[0]
    if not isinstance(x, Int8Tokens):
        arrays = [part for part in parts if not isinstance(part, Int8Tokens)]
        x = quantize_tokens(jnp.concatenate(arrays, axis=-1), block=block, kernel=False)

    def product(weight: Int8Weight) -> Array:
        dims = (((2,), (0 if turned else 1,)), ((), ()))
        factor = weight.numbers if layer is None else jax.lax.dynamic_index_in_dim(weight.numbers, layer, 0, False)
        sums = jax.lax.dot_general(x.numbers, factor, dims, preferred_element_type=jnp.int32)
        result = sums.astype(jnp.float32) * x.worth * weight.worth
        return result if weight.bias is None else result + weight.bias.astype(jnp.float32)

    results = apply_activation([*map(product, weights)], activation)
    if onto is not None:
        results = [onto.x.astype(jnp.float32) + onto.gate[:, None].astype(jnp.float32) * results[0]]
    return [result.astype(x.dtype) for result in results]


def apply_activation(products: list[Array], activation: Activation | None) -> list[Array]:
    """Return the activated products, `[...]` float32 each; "silu" returns one, the product of two."""
    function = ACTIVATIONS[activation]
    if activation == "silu":
        first, second = products
        return [function(first) * second]
    return [*map(function, products)]


class Tiles(NamedTuple):
    """Tile sizes of the kernel."""

    tokens: int  # tokens of a grid step
    groups: int  # groups of outputs that each weight is split into; one is in VMEM at once


def choose_tiles(ins: int, outs: Sequence[int], itemsize: int = 2, arrays: int = 1) -> Tiles | None:
    """Return the largest tiles that fit in the VMEM of the mesh in context, or None.

    One group is preferred, because weights are then read once.

    ins, outs: inputs of the product, and outputs of each weight. itemsize: bytes of a token's element.
    arrays: buffers as large as the results, which are read or written.
    """
    limit = _limit_bytes()
    for groups in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        if any(size % (groups * LANES) for size in outs):
            continue
        width = sum(outs) // groups
        for tokens in TOKENS:
            buffers = tokens * (3 * itemsize * ins + ins + 2 * arrays * itemsize * width)
            if ins * width + buffers + COMPILER_BYTES <= limit:
                return Tiles(tokens, groups)
    return None


def _limit_bytes() -> int:
    return (VMEM_MIB.get(device_kind(), 128) - RESERVED_MIB) * MIB // (1 + uses_small_tiles(registry.LINEAR_INT8))


def check_support(ins: Sequence[int], outs: Sequence[int]) -> KernelUnsupported:
    """Return the reasons why the kernel cannot multiply parts of `ins` lanes each by weights of `outs` outputs each."""
    reasons = []
    if sizes := [size for size in (*ins, *outs) if size % LANES]:
        reasons.append(f"{sizes[0]} lanes are not a multiple of {LANES}")
    elif choose_tiles(sum(ins), outs) is None:
        reasons.append(f"weights of {sum(ins)} x {sum(outs)} do not fit in the chip's VMEM")
    return KernelUnsupported(kernel=registry.LINEAR_INT8, reasons=tuple(reasons))


def linear_int8_kernel(
    parts: Sequence[Array | Int8Tokens], weights: Sequence[Int8Weight], *, block: int,
    activation: Activation | None, turned: bool, layer: Int[Array, ""] | None = None, onto: GatedResidual | None = None,
    interpret: Interpret = False,
) -> list[Array]:  # fmt: skip
    """Return the same as `linear_int8`, `[rows, tokens, outs]` each, by Pallas.

    Raises `NotImplementedError` if the kernel does not support the shapes.
    parts, weights, block, activation, turned, layer, onto, interpret: as for `linear_int8`.
    """
    first, ins = parts[0], [part.shape[2] for part in parts]
    is_rounded = isinstance(first, Int8Tokens)
    operands: list[Any] = [first.numbers, first.worth] if isinstance(first, Int8Tokens) else [*parts]
    dtype, shape = first.dtype, first.shape[:2]
    # Rows are concatenated, unless each has its own gate.
    rows, seq = shape if onto is not None and len(onto.gate) > 1 else (1, math.prod(shape))
    outs = [weight.outs(turned) for weight in weights]
    check_support(ins, outs).check()
    arrays = 1 if onto is None else 2
    tiles = choose_tiles(sum(ins), outs, dtype.itemsize, arrays) or Tiles(TOKENS[-1], 1)
    tokens = round_up(-(-seq // -(-seq // tiles.tokens)), INT8_ROWS)
    groups, results = tiles.groups, outs[:1] if activation == "silu" else outs

    def vector(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, size // groups), lambda group, row, at, layer: (0, group))

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, tokens, size // groups), lambda group, row, at, layer: (row, at, group))

    def matrix(size: int) -> pl.BlockSpec:
        shape, index_map = (None, sum(ins), size // groups), lambda group, row, at, layer: (layer[0], 0, group)
        if not turned:
            shape, index_map = (None, shape[2], shape[1]), lambda group, row, at, layer: (layer[0], group, 0)
        return pl.BlockSpec(shape, index_map, pipeline_mode=pl.Buffered(1))

    def vectors(weight: Int8Weight) -> tuple[Array, Array | None]:
        return jax.tree.map(lambda v: v.astype(jnp.float32)[None], (weight.worth, weight.bias))

    stacked = [Int8Weight(w.numbers if layer is not None else w.numbers[None], *vectors(w)) for w in weights]
    specs = [
        Int8Weight(matrix(size), vector(size), None if weight.bias is None else vector(size))
        for weight, size in zip(stacked, outs, strict=True)
    ]
    added = added_specs = None
    if onto is not None:
        added = GatedResidual(onto.x.reshape(rows, seq, *outs), onto.gate.astype(jnp.float32)[:, None])
        gate = pl.BlockSpec((None, 1, outs[0] // groups), lambda group, row, at, layer: (row, 0, group))
        added_specs = GatedResidual(lanes(*outs), gate)
    total = math.prod(shape)
    rotating = None if is_rounded else _rotating(ins, block, dtype)
    scratch = (
        ()
        if is_rounded
        else (
            pltpu.VMEM((tokens, sum(ins)), dtype),
            pltpu.VMEM((tokens, sum(ins)), jnp.int8),
            pltpu.VMEM((tokens, LANES), jnp.float32),
        )
    )
    (outputs,) = pl.pallas_call(
        functools.partial(_body, activation=activation, turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, rows, -(-seq // tokens)),
            in_specs=[
                None if rotating is None else pl.BlockSpec(rotating.shape, lambda group, row, at, layer: (0, 0)),
                tuple(
                    pl.BlockSpec((None, tokens, part.shape[2]), lambda group, row, at, layer: (row, at, 0))
                    for part in operands
                ),
                specs,
                added_specs,
            ],
            out_specs=[[*map(lanes, results)]],
            scratch_shapes=scratch,
        ),
        out_shape=[[jax.ShapeDtypeStruct((rows, seq, size), dtype) for size in results]],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=_limit_bytes()),
        cost_estimate=pl.CostEstimate(
            flops=2 * total * sum(ins) * sum(outs),
            transcendentals=total * sum(results) if activation else 0,
            bytes_accessed=sum(part.nbytes for part in operands)
            + total * arrays * sum(results) * dtype.itemsize
            + sum(ins) * sum(outs),
        ),
        interpret=interpret,
        name=registry.LINEAR_INT8,
    )(
        jnp.asarray(0 if layer is None else layer, jnp.int32)[None],
        rotating,
        tuple(part.reshape(rows, seq, part.shape[2]) for part in operands),
        stacked,
        added,
    )
    return [output.reshape(*shape, output.shape[2]) for output in outputs]


def _body(
    layer: Ref, matrix: Ref | None, parts: Sequence[Ref], weights: Sequence[Int8Weight], onto: GatedResidual | None,
    outs: Sequence[Ref], *scratch: Ref, activation: Activation | None, turned: bool,
) -> None:  # fmt: skip
    """Compute a block of tokens for one group of outputs. scratch: empty if the tokens are quantized already."""
    if scratch:
        assert matrix is not None
        lanes, numbers, scale = scratch
        scale[...] = jnp.broadcast_to(_round_tokens(parts, matrix, lanes, numbers), scale.shape)
    else:
        numbers, scale = parts
    single = [([out], [weight]) for out, weight in zip(outs, weights, strict=activation != "silu")]
    for results, factors in [(outs, weights)] if activation == "silu" else single:
        size = results[0].shape[1]
        columns = _columns(size, numbers.shape[0] * len(factors))

        def piece(
            index: Array,
            _: None,
            results: Sequence[Ref] = results,
            factors: Sequence[Int8Weight] = factors,
            columns: int = columns,
        ) -> None:
            lanes = pl.ds(pl.multiple_of(index * columns, columns), columns)
            products = [_product(numbers, scale, weight, lanes, turned) for weight in factors]
            for out, result in zip(results, apply_activation(products, activation), strict=True):
                if onto is not None:
                    result = onto.x[:, lanes].astype(jnp.float32) + onto.gate[:, lanes] * result
                out[:, lanes] = result.astype(out.dtype)

        jax.lax.fori_loop(0, size // columns, piece, None)


def _columns(size: int, rows: int) -> int:
    """Return the number of outputs that are computed at once, a divisor of `size`: whole matrix units if possible.

    rows: tokens of the block, times the products that are computed together.
    """
    limit = max(LANES, RESULTS_PER_PIECE // rows)
    divisors = [columns for columns in range(LANES, min(size, limit) + 1, LANES) if size % columns == 0]
    return max([columns for columns in divisors if columns % MXU_WIDTH == 0] or divisors)


def _product(numbers: Ref, scale: Ref, weight: Int8Weight, lanes: Slice, turned: bool) -> Array:
    """Return some `lanes` of the product with a weight, plus its bias, `[tokens, lanes]` float32."""
    factor = weight.numbers[:, lanes] if turned else weight.numbers[lanes, :]
    dims = (((1,), (0 if turned else 1,)), ((), ()))
    sums = jax.lax.dot_general(numbers[...], factor, dims, preferred_element_type=jnp.int32)
    result = sums.astype(jnp.float32) * scale[:, :1] * weight.worth[:, lanes]
    return result if weight.bias is None else result + weight.bias[:, lanes]


def _rotating(ins: Sequence[int], block: int, dtype: DTypeLike) -> Array:
    """Return the rotation matrix of a matrix unit's lanes, or of half of them if some part has no more."""
    side = LANES if any(size % MXU_WIDTH for size in ins) else MXU_WIDTH
    return jnp.asarray(np.kron(np.eye(side // block), rotation_matrix(block)), dtype)


def _round_tokens(parts: Sequence[Ref], matrix: Ref, lanes: Ref, numbers: Ref) -> Float[Array, "tokens 1"]:
    """Write the rotated tokens to `lanes` and quantized to `numbers`, and return their scales, `[tokens, 1]`."""
    side, offset = matrix.shape[0], 0
    top, total = 0.0, 0.0
    for part in parts:
        for start in range(0, part.shape[1], side):
            piece = _rotate(part[:, pl.ds(start, side)], matrix[...])
            size = jnp.abs(piece)
            top, total = jnp.maximum(top, size), total + size
            lanes[:, pl.ds(offset, side)] = piece.astype(lanes.dtype)
            offset += side
    top, total = jnp.max(top, axis=1, keepdims=True) + EPS, jnp.sum(total, axis=1, keepdims=True)
    factor = INT8_MAX / top
    for start in range(0, offset, LANES):
        piece = lanes[:, pl.ds(start, LANES)].astype(jnp.float32)
        integers = jnp.round(piece * factor).astype(jnp.int32)  # one register at a time packs in fewer steps
        numbers[:, pl.ds(start, LANES)] = integers.astype(jnp.int8)
    return top / INT8_MAX + 0 * total
