"""Linear layers with products of int8 numbers, for twice the pace of bfloat16's: not exact, and asked for by name.

A weight is rounded with one scale an output, while it is loaded; tokens with one each, in the kernel, where a block of
them stays while all outputs are computed. Sums are exact, in int32. Before, both are rotated by the same orthogonal
matrix, which leaves their product as it is and spreads a channel far wider than the others over `block` lanes (QuaRot,
https://arxiv.org/abs/2404.00456). `docs/quality.md` says what it costs.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from . import names
from .chip import INT8_ROWS, LANES, MIB, RESERVED_MIB, VMEM_MIB, Interpret, device_kind, round_up
from .choice import KernelRefusal, accepted, is_small

# Chips whose matrix units multiply int8 twice as fast as bfloat16.
TAKES_INT8 = ("TPU v5 lite", "TPU v6 lite")
LARGEST = 127
LEAST = 1e-30  # of a token's or a weight's largest value, lest a scale be zero
TOKENS = (256, 128)  # a grid step, of fewer where many would leave no room
PIECE = 256 * 1536  # results at once: enough for what becomes of some to run beside products of others
MXU_WIDTH = 256
COMPILER_BYTES = 8 * MIB
# Of a first product alone, or what multiplies its pair's.
Activation = Literal["gelu", "silu"]
ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=True), "silu": jax.nn.silu, None: lambda x: x}


class Rounded(NamedTuple):
    """A weight as whole numbers in int8, `[outs, ins]` or `[ins, outs]`, or those of all layers; what one of an output
    is worth, float32 `[outs]`; a bias `[outs]` or None. Or what stands for each of these, such as its place on a mesh.
    """

    numbers: Any
    worth: Any
    bias: Any = None

    def outs(self, turned: bool) -> int:
        return self.numbers.shape[-1 if turned else -2]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["numbers", "worth"], meta_fields=["dtype"])
@dataclass(frozen=True, kw_only=True)
class RoundedTokens:
    """Tokens as the kernel rounds them: rotated, as whole numbers in int8 `[rows, tokens, lanes]`, what one of a token
    is worth, float32 `[rows, tokens, 1]`, and the format that they had.
    """

    numbers: Any
    worth: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


class Residual(NamedTuple):
    """What a product is added to, `[rows, tokens, outs]`, and what it is multiplied by before, `[rows or 1, outs]`."""

    x: Any
    gate: Any


def rounded(x: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """`x` as whole numbers of at most 127, and what one is worth, the same along `axes`. What holds a NaN is worth NaN:
    no whole number is.
    """
    x = x.astype(jnp.float32)
    worth = (jnp.max(jnp.abs(x), axis=axes, keepdims=True) + LEAST) / LARGEST
    worth = worth + 0 * jnp.sum(x, axis=axes, keepdims=True)
    return jnp.round(x / worth).astype(jnp.int8), jnp.squeeze(worth, axes)


def block_of(*lanes: int, chips: int) -> int:
    """How many lanes are rotated together: as many as fill a matrix unit, if they divide what each of `chips` has of
    `lanes`, else the largest power of two that does.
    """
    return math.gcd(MXU_WIDTH, *(size if size % chips else size // chips for size in lanes))


def rotation(block: int) -> np.ndarray:
    """`[block, block]` of ones with signs; times itself transposed it is `block` times the identity. Hadamard's matrix
    behind signs that are a bent function (Rudin and Shapiro's): what is the same in all lanes is spread over all, too.
    """
    lane = np.arange(block)
    signs = np.bitwise_count(lane & lane >> 1)[:, None] + np.bitwise_count(lane[:, None] & lane)
    return 1 - 2.0 * (signs % 2)


def rotated_weight(weight: Float[Array, "..."], axis: int, block: int) -> Float[Array, "..."]:
    """In float32; `axis` is the last over which a product sums. By the inverse of what rotates tokens."""
    x = jnp.moveaxis(weight.astype(jnp.float32), axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, block)
    found = jnp.matmul(blocks, rotation(block) / block, precision="highest")
    return jnp.moveaxis(found.reshape(x.shape), -1, axis)


def _rotated(x: Float[Array, "... lanes"], matrix: Any) -> Float[Array, "... lanes"]:
    """In float32, exactly: of bfloat16 a matrix unit sums the same numbers."""
    precision = "default" if x.dtype == jnp.bfloat16 else "highest"
    over = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, matrix.astype(x.dtype), over, precision=precision, preferred_element_type=jnp.float32)


def round_tokens(
    x: Float[Array, "rows tokens lanes"], *, block: int, kernel: bool, interpret: Interpret = False
) -> RoundedTokens:
    """Tokens rounded for several products, or before chips exchange them, in place of in `linear_int8`; `block` and
    `kernel` as there.
    """
    rows, seq, size = x.shape
    if not (kernel and accepted(refusal([size], [LANES]))):
        blocks = _rotated(x.reshape(rows, seq, -1, block), jnp.asarray(rotation(block)))
        numbers, worth = rounded(blocks.reshape(x.shape), (2,))
        return RoundedTokens(numbers=numbers, worth=worth[..., None], dtype=x.dtype)
    total, tokens = rows * seq, TOKENS[-1]
    rotating = _rotating([size], block, x.dtype)

    def lanes(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((tokens, width), lambda at: (at, 0))

    def body(matrix: Any, x: Any, numbers: Any, worth: Any, lanes: Any) -> None:
        worth[...] = _round_tokens([x], matrix, lanes, numbers)

    numbers, worth = pl.pallas_call(
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
        name=names.ROUND_TOKENS,
    )(rotating, x.reshape(total, size))
    return RoundedTokens(numbers=numbers.reshape(x.shape), worth=worth.reshape(rows, seq, 1), dtype=x.dtype)


def linear_int8(
    parts: Sequence[Float[Array, "rows tokens _"] | RoundedTokens],
    weights: Sequence[Rounded],
    *,
    block: int,
    activation: Activation | None = None,
    turned: bool = False,
    layer: Int[Array, ""] | None = None,
    onto: Residual | None = None,
    kernel: bool,
    interpret: Interpret = False,
) -> list[Float[Array, "rows tokens _"]]:
    """The lanes of all `parts`, side by side, times each of `weights`, with its bias. A part that was rounded before is
    the only one.

    With "gelu" each product is activated; with "silu" the first is, and multiplies the second, which is all there is
    then. `block`: lanes that are rotated together, as those of the weights were; it divides those of each part.
    `turned`: numbers are `[ins, outs]`. Of those of all layers, those of `layer` are taken. `onto`: the only product is
    added to this, which is read and written once, in float32. `kernel`: by Pallas, unless it refuses the shapes.
    """
    assert onto is None or (len(weights) == 1 and activation is None)
    run = by_reference
    if kernel and accepted(refusal([part.shape[2] for part in parts], [each.outs(turned) for each in weights])):
        run = functools.partial(by_kernel, interpret=interpret)
    return run(parts, weights, block=block, activation=activation, turned=turned, layer=layer, onto=onto)


def by_reference(
    parts: Sequence[Array | RoundedTokens],
    weights: Sequence[Rounded],
    *,
    block: int,
    activation: Activation | None,
    turned: bool,
    layer: Int[Array, ""] | None = None,
    onto: Residual | None = None,
) -> list[Array]:
    """By XLA."""
    x = parts[0]
    if not isinstance(x, RoundedTokens):
        given: list[Any] = [*parts]
        x = round_tokens(jnp.concatenate(given, axis=-1), block=block, kernel=False)

    def product(weight: Rounded) -> Array:
        over = (((2,), (0 if turned else 1,)), ((), ()))
        factor = weight.numbers if layer is None else jax.lax.dynamic_index_in_dim(weight.numbers, layer, 0, False)
        sums = jax.lax.dot_general(x.numbers, factor, over, preferred_element_type=jnp.int32)
        found = sums.astype(jnp.float32) * x.worth * weight.worth
        return found if weight.bias is None else found + weight.bias.astype(jnp.float32)

    found = activated([*map(product, weights)], activation)
    if onto is not None:
        found = [onto.x.astype(jnp.float32) + onto.gate[:, None].astype(jnp.float32) * found[0]]
    return [each.astype(x.dtype) for each in found]


def activated(products: list[Array], activation: Activation | None) -> list[Array]:
    """In float32: each, or of a pair the first, which multiplies the second."""
    function = ACTIVATIONS[activation]
    if activation == "silu":
        first, second = products
        return [function(first) * second]
    return [*map(function, products)]


class Tiles(NamedTuple):
    """`tokens` a grid step; of each weight a `groups`-th in VMEM at once."""

    tokens: int
    groups: int


def tiles_for(ins: int, outs: Sequence[int], itemsize: int = 2, arrays: int = 1) -> Tiles | None:
    """What fits the chip of the mesh in context: all weights if they do, which are then read once; None: nothing. So
    many `arrays` as large as the results are read or written.
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
    return (VMEM_MIB.get(device_kind(), 128) - RESERVED_MIB) * MIB // (1 + is_small(names.LINEAR_INT8))


def refusal(ins: Sequence[int], outs: Sequence[int]) -> KernelRefusal:
    """Why the kernel does not multiply parts of so many lanes by weights with so many outputs."""
    reasons = []
    if sizes := [size for size in (*ins, *outs) if size % LANES]:
        reasons.append(f"{sizes[0]} lanes are not a multiple of {LANES}")
    elif tiles_for(sum(ins), outs) is None:
        reasons.append(f"weights of {sum(ins)} x {sum(outs)} do not fit the chip")
    return KernelRefusal(kernel=names.LINEAR_INT8, reasons=tuple(reasons))


def by_kernel(
    parts: Sequence[Array | RoundedTokens], weights: Sequence[Rounded], *, block: int,
    activation: Activation | None, turned: bool, layer: Int[Array, ""] | None = None, onto: Residual | None = None,
    interpret: Interpret = False,
) -> list[Array]:  # fmt: skip
    """Raises `NotImplementedError` where the kernel refuses the shapes."""
    first, ins = parts[0], [part.shape[2] for part in parts]
    is_rounded = isinstance(first, RoundedTokens)
    given_parts: list[Any] = [first.numbers, first.worth] if is_rounded else [*parts]
    dtype, shape = first.dtype, first.shape[:2]
    # Tokens of all rows follow each other, unless a gate is of a row.
    rows, seq = shape if onto is not None and len(onto.gate) > 1 else (1, math.prod(shape))
    outs = [each.outs(turned) for each in weights]
    refusal(ins, outs).check()
    arrays = 1 if onto is None else 2
    tiles = tiles_for(sum(ins), outs, dtype.itemsize, arrays) or Tiles(TOKENS[-1], 1)
    tokens = round_up(-(-seq // -(-seq // tiles.tokens)), INT8_ROWS)
    groups, results = tiles.groups, outs[:1] if activation == "silu" else outs

    def vector(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, size // groups), lambda group, row, at, layer: (0, group))

    def lanes(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, tokens, size // groups), lambda group, row, at, layer: (row, at, group))

    def matrix(size: int) -> pl.BlockSpec:
        shape, at = (None, sum(ins), size // groups), lambda group, row, at, layer: (layer[0], 0, group)
        if not turned:
            shape, at = (None, shape[2], shape[1]), lambda group, row, at, layer: (layer[0], group, 0)
        return pl.BlockSpec(shape, at, pipeline_mode=pl.Buffered(1))

    def vectors(weight: Rounded) -> tuple[Array, Array | None]:
        return jax.tree.map(lambda v: v.astype(jnp.float32)[None], (weight.worth, weight.bias))

    given = [Rounded(each.numbers if layer is not None else each.numbers[None], *vectors(each)) for each in weights]
    specs = [
        Rounded(matrix(size), vector(size), None if each.bias is None else vector(size))
        for each, size in zip(given, outs, strict=True)
    ]
    added = added_specs = None
    if onto is not None:
        added = Residual(onto.x.reshape(rows, seq, *outs), onto.gate.astype(jnp.float32)[:, None])
        gate = pl.BlockSpec((None, 1, outs[0] // groups), lambda group, row, at, layer: (row, 0, group))
        added_specs = Residual(lanes(*outs), gate)
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
    (found,) = pl.pallas_call(
        functools.partial(_body, activation=activation, turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(groups, rows, -(-seq // tokens)),
            in_specs=[
                None if rotating is None else pl.BlockSpec(rotating.shape, lambda group, row, at, layer: (0, 0)),
                tuple(
                    pl.BlockSpec((None, tokens, part.shape[2]), lambda group, row, at, layer: (row, at, 0))
                    for part in given_parts
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
            bytes_accessed=sum(part.nbytes for part in given_parts)
            + total * arrays * sum(results) * dtype.itemsize
            + sum(ins) * sum(outs),
        ),
        interpret=interpret,
        name=names.LINEAR_INT8,
    )(
        jnp.asarray(0 if layer is None else layer, jnp.int32)[None],
        rotating,
        tuple(part.reshape(rows, seq, part.shape[2]) for part in given_parts),
        given,
        added,
    )
    return [each.reshape(*shape, each.shape[2]) for each in found]


def _body(
    layer: Any, matrix: Any, parts: Sequence[Any], weights: Sequence[Any], onto: Residual | None, outs: Sequence[Any],
    *scratch: Any, activation: Activation | None, turned: bool,
) -> None:  # fmt: skip
    if scratch:
        lanes, numbers, worth = scratch
        worth[...] = jnp.broadcast_to(_round_tokens(parts, matrix, lanes, numbers), worth.shape)
    else:
        numbers, worth = parts
    each = [([out], [weight]) for out, weight in zip(outs, weights, strict=activation != "silu")]
    together = [(outs, weights)] if activation == "silu" else each
    for results, factors in together:
        size = results[0].shape[1]
        columns = _columns(size, numbers.shape[0] * len(factors))

        def piece(
            index: Array, _: None, results: Any = results, factors: Any = factors, columns: int = columns
        ) -> None:
            at = pl.ds(pl.multiple_of(index * columns, columns), columns)
            products = [_product(numbers, worth, weight, at, turned) for weight in factors]
            for out, found in zip(results, activated(products, activation), strict=True):
                if onto is not None:
                    found = onto.x[:, at].astype(jnp.float32) + onto.gate[:, at] * found
                out[:, at] = found.astype(out.dtype)

        jax.lax.fori_loop(0, size // columns, piece, None)


def _columns(size: int, rows: int) -> int:
    """Outputs at once, a part of `size`: whole matrix units if possible."""
    most = max(LANES, PIECE // rows)
    fitting = [each for each in range(LANES, min(size, most) + 1, LANES) if size % each == 0]
    whole = [each for each in fitting if each % MXU_WIDTH == 0]
    return max(whole or fitting)


def _product(numbers: Any, worth: Any, weight: Any, at: Any, turned: bool) -> Array:
    factor = weight.numbers[:, at] if turned else weight.numbers[at, :]
    over = (((1,), (0 if turned else 1,)), ((), ()))
    sums = jax.lax.dot_general(numbers[...], factor, over, preferred_element_type=jnp.int32)
    found = sums.astype(jnp.float32) * worth[:, :1] * weight.worth[:, at]
    return found if weight.bias is None else found + weight.bias[:, at]


def _rotating(ins: Sequence[int], block: int, dtype: Any) -> Array:
    """The rotation of a matrix unit's lanes, or of half of them where some part has no more."""
    side = LANES if any(size % MXU_WIDTH for size in ins) else MXU_WIDTH
    return jnp.asarray(np.kron(np.eye(side // block), rotation(block)), dtype)


def _round_tokens(parts: Sequence[Any], matrix: Any, lanes: Any, numbers: Any) -> Float[Array, "tokens 1"]:
    """Writes tokens, rotated, as whole numbers, and as they are to `lanes`; what one of a token is worth."""
    side, at = matrix.shape[0], 0
    top, total = 0.0, 0.0
    for part in parts:
        for start in range(0, part.shape[1], side):
            found = _rotated(part[:, pl.ds(start, side)], matrix[...])
            size = jnp.abs(found)
            top, total = jnp.maximum(top, size), total + size
            lanes[:, pl.ds(at, side)] = found.astype(lanes.dtype)
            at += side
    top, total = jnp.max(top, axis=1, keepdims=True) + LEAST, jnp.sum(total, axis=1, keepdims=True)
    factor = LARGEST / top
    for start in range(0, at, LANES):
        found = lanes[:, pl.ds(start, LANES)].astype(jnp.float32)
        whole = jnp.round(found * factor).astype(jnp.int32)  # a register at a time, which packs in fewer steps
        numbers[:, pl.ds(start, LANES)] = whole.astype(jnp.int8)
    return top / LARGEST + 0 * total
