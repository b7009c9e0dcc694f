"""Checks of the Pallas kernels against float32 on the host: compiled on a TPU, else in interpret mode.

Interpret mode uses small tiles. Padding is NaN, and one row has a single key, so that a mask that is off by one is
detected with any bound. On a TPU kernels run in bfloat16, as they do for users; the families' float32 runs use them in
float32 too.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...attention.api import attention
from ...attention.policy import AttentionPolicy
from ...attention.prologue import HeadLayout
from ...attention.tiles import SlidingTileMask, Tiling
from ...kernels import convolution, dispatch, linear_int8, modulation, registry, residual_norm
from ...kernels.attention_config import AttentionConfig, choose_config
from ...kernels.hardware import VMEM_MIB
from ...kernels.linear_int8 import Activation
from ...kernels.number_formats import FORMATS, LINEAR_CHIPS, SCORE_CHIPS, NumberFormat
from ...kernels.prologue import Norm
from ...sharding.mesh import Device, make_mesh
from ...sharding.shape import MeshShape
from ...tpu_runtime.machine.fallbacks import Fallbacks, classify_compile_error
from ...tpu_runtime.machine.record import MachineRecord
from .checks import Arrays, Check, CheckFailed, Tolerance, compare_arrays

Pair = tuple[jax.Array, jax.Array]
FAMILY = "kernels"
HEAD_SIZES = (64, 128)
# For sums in another order; in bfloat16 also for eight bits of every probability and of the result.
BOUNDS = {"float32": Tolerance(error=2e-5, slope=1e-4), "bfloat16": Tolerance(error=2e-2, slope=3e-3)}
# Tiles that interpret mode runs in a second, and enough keys for loops, remainders and several blocks.
SMALL = AttentionConfig(block_q=128, step=32, online_step=32)
# On a TPU two blocks of queries, of which the second is partial.
NUM_SMALL, NUM_LARGE = (131, 229), (4000, 5003)
SMALL_BLOCK, LARGE_BLOCK = 96, 1024
EPS = 1e-6
# The form whose keys after the sampled ones are so large that blocks are computed again. Scores are near 200, so their
# rounding errors are 200 times those of 1.
RERUN, RERUN_FACTOR, SAMPLED = "sampled maximum that fails", 40, 256
# Not exact: the bound covers the rounding of both factors, for values of this number and distribution.
INT8 = "int8 scores"
LEFT_OUT = f"{INT8} and blocks left out"
FORMS = ("bounded scores", "sampled maximum", RERUN, "running maximum", "keys in the grid", INT8, LEFT_OUT)
RERUN_BOUNDS = {"float32": Tolerance(error=8e-5, slope=1e-4), "bfloat16": BOUNDS["bfloat16"]}
QUANTIZED_BOUND = Tolerance(error=8e-2, slope=2e-2)


def checks(device: Device, host: Device) -> Iterator[Check]:
    """Yield the checks of the kernels on one chip; `host` runs the reference."""
    precision = "bfloat16" if device.platform == "tpu" else "float32"

    def check(kernel: str, stage: str, run: Callable[[], tuple[Arrays, Arrays]]) -> Check:
        bound = (
            QUANTIZED_BOUND
            if INT8 in stage or kernel in registry.LINEARS
            else (RERUN_BOUNDS if RERUN in stage else BOUNDS)[precision]
        )
        return Check(
            family=FAMILY, stage=stage, precision=precision, bound=bound, if_lost=_without_kernel(kernel),
            run=lambda progress: _run_with_small_tiles(kernel, run, bound),
        )  # fmt: skip

    for head_dim in HEAD_SIZES:
        for name, form in _forms(device, head_dim).items():
            yield check(
                form.kernel,
                f"attention, {name}, heads of {head_dim}",
                lambda name=name, head_dim=head_dim: _attention(device, host, name, head_dim),
            )
        yield check(
            registry.PROLOGUE,
            f"norm and rotation, heads of {head_dim}",
            lambda head_dim=head_dim: _prologue(device, host, head_dim),
        )
    yield check(registry.RESIDUAL_NORM, "residual norm", lambda: _residual_norm(device, host))
    for name, row in FORMATS.items():
        if device.platform != "tpu" or device.device_kind in LINEAR_CHIPS[name]:
            yield check(
                row.kernel, f"{name} linear layers", lambda row=row: _compare_quantized_linear(device, host, row)
            )
    if device.platform != "tpu" or VMEM_MIB.get(device.device_kind, 0) >= convolution.MIN_VMEM_MIB:
        yield check(registry.CONVOLUTION, "convolution", lambda: _convolution(device, host))
        yield check(registry.MODULATION, "modulation", lambda: _modulation(device, host))


def _without_kernel(kernel: str) -> MachineRecord:
    return MachineRecord(fallbacks=Fallbacks(kernels=dispatch.KernelFallbacks(off=(kernel,))))


def _run_with_small_tiles(
    kernel: str, run: Callable[[], tuple[Arrays, Arrays]], bound: Tolerance
) -> tuple[Arrays, Arrays]:
    """Return the result of `run`. Raises Wrong if the kernel does not compile.

    The error's message says whether smaller tiles help. kernel: its name. bound: the tolerance.
    """
    try:
        return run()
    except Exception as error:  # of any kind: only those of the compiler are findings
        if (refused := classify_compile_error(error, f"the kernel {kernel}")) is None:
            raise
        reason = refused.reason
    small = dispatch.KernelFallbacks(small=(kernel,))
    try:
        with dispatch.use_fallbacks(small):
            *_, problem = compare_arrays(*run(), bound)
    except Exception as error:  # of any kind, as above
        if classify_compile_error(error, kernel) is None:
            raise
        problem = str(error)
    if problem:
        raise CheckFailed(f"{kernel} does not compile ({reason}), and smaller tiles do not help: XLA computes instead.")
    learnt = MachineRecord(fallbacks=Fallbacks(kernels=small))
    raise CheckFailed(f"{kernel} does not compile ({reason}): smaller tiles are used.", learnt)


def _forms(device: Device, head_dim: int) -> dict[str, AttentionConfig]:
    """Return the variants of the attention kernel, with the tiles that it would choose."""
    form, int8, block = SMALL, replace(SMALL, scores="int8"), SMALL_BLOCK
    if device.platform == "tpu":
        (q_seq, kv_seq), block = NUM_LARGE, LARGE_BLOCK
        size = {"q_seq": q_seq, "kv_rows": [kv_seq], "heads": 2, "head_dim": head_dim, "itemsize": 2}
        form = choose_config(device.device_kind, "sampled", **size)
        int8 = choose_config(device.device_kind, "sampled", scores="int8", **size)
    forms = {
        INT8: int8,
        LEFT_OUT: int8,
        "bounded scores": replace(form, maximum="zero"),
        "sampled maximum": replace(form, maximum="sampled"),
        RERUN: replace(form, maximum="sampled"),
        "running maximum": replace(form, maximum="online"),
        "keys in the grid": replace(form, maximum="online", block_kv=block),
    }
    has_int8 = device.platform != "tpu" or device.device_kind in SCORE_CHIPS["int8"]
    return {name: forms[name] for name in FORMS if has_int8 or INT8 not in name}


def _attention(device: Device, host: Device, name: str, head_dim: int) -> tuple[Arrays, Arrays]:
    """Check four rows of different lengths: all keys, one key, full tiles, and some."""
    form = _forms(device, head_dim)[name]
    if name == LEFT_OUT:
        return _sliding_tiles(device, host, form, head_dim)
    q_seq, kv_seq = NUM_LARGE if device.platform == "tpu" else NUM_SMALL
    kv_seq += SAMPLED // 2 if name == RERUN else 0
    lengths = np.array([kv_seq, 1, 128, kv_seq - 32], np.int32)
    random = np.random.default_rng(head_dim)
    q, k, v = (_to_device_dtype(random.normal(size=(4, seq, 2, head_dim)), device) for seq in (q_seq, kv_seq, kv_seq))
    if name == RERUN:
        k[:, SAMPLED:] *= RERUN_FACTOR
    is_padding = np.arange(kv_seq)[None, :] >= lengths[:, None]
    k, v = (np.where(is_padding[:, :, None, None], np.nan, x).astype(x.dtype) for x in (k, v))

    def run(on: Device, policy: AttentionPolicy) -> np.ndarray:
        mesh = make_mesh([on], MeshShape())
        return _run(on, lambda q, k, v, n: attention(q, k, v, kv_length=n, mesh=mesh, policy=policy), q, k, v, lengths)

    ours = run(device, AttentionPolicy(kernel="pallas", form=form))
    return {"attention": ours}, {"attention": run(host, AttentionPolicy(kernel="reference"))}


def _sliding_tiles(device: Device, host: Device, form: AttentionConfig, head_dim: int) -> tuple[Arrays, Arrays]:
    """Check twelve tiles, each of which attends to four; rows between them are NaN."""
    tiles = Tiling(sizes=(12, 16, 15), tile=(1, 16, 15))
    random = np.random.default_rng(head_dim)
    q, k, v = (_to_device_dtype(random.normal(size=(1, len(tiles.row_tokens), 2, head_dim)), device) for _ in range(3))
    for x in (k, v):
        x[:, np.setdiff1d(np.arange(x.shape[1]), tiles.token_rows)] = np.nan

    def run(on: Device, policy: AttentionPolicy) -> Arrays:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, is_sparse: jax.Array) -> jax.Array:
            nearby = SlidingTileMask(tiles=tiles, is_sparse=is_sparse)
            return attention(q, k, v, mesh=make_mesh([on], MeshShape()), policy=policy, nearby=nearby)

        return {"attention": _run(on, attend, q, k, v, np.array(True))[:, tiles.token_rows]}

    return run(device, AttentionPolicy(kernel="pallas", form=form)), run(host, AttentionPolicy(kernel="reference"))


def _prologue(device: Device, host: Device, head_dim: int) -> tuple[Arrays, Arrays]:
    """Check the norm of each head and the rotation, in the layout that chips exchange, and back."""
    seq, heads = 139, 1024 // head_dim
    random = np.random.default_rng(head_dim)
    x = _to_device_dtype(random.normal(size=(2, seq, heads * head_dim)), device)
    weight, angles = random.normal(size=head_dim), np.repeat(random.normal(size=(seq, head_dim // 2)), 2, axis=1)
    tables = np.cos(angles)[None].astype(np.float32), np.sin(angles)[None].astype(np.float32)

    def run(on: Device, *, kernel: bool) -> Arrays:
        layout = HeadLayout(head_dim=head_dim, kernel=kernel, interpret=on.platform != "tpu")

        def both(x: jax.Array, weight: jax.Array, tables: Pair) -> tuple[list[jax.Array], jax.Array]:
            divided = layout.divide(x, 2, 2, Norm(weight=weight, eps=EPS), tables)
            return divided, layout.join(divided)

        divided, joined = _run(on, both, x, weight.astype(np.float32), tables)
        return {"first part": divided[0], "second part": divided[1], "joined": joined}

    return run(device, kernel=True), run(host, kernel=False)


def _residual_norm(device: Device, host: Device) -> tuple[Arrays, Arrays]:
    """Check a residual sum and the norm after it, with other vectors for the first tokens."""
    random = np.random.default_rng(3)
    x, update = (_to_device_dtype(random.normal(size=(2, 139, 384)), device) for _ in range(2))
    gate, shift = (random.normal(size=(2, 2, 384)).astype(np.float32) for _ in range(2))
    scale, leading = random.normal(size=(1, 384)).astype(np.float32), np.array(130, np.int32)

    def run(on: Device, *, kernel: bool) -> Arrays:
        def fused(*arrays: jax.Array) -> Pair:
            how = {"eps": EPS, "kernel": kernel, "interpret": on.platform != "tpu", "num_leading": arrays[-1]}
            return residual_norm.residual_norm(*arrays[:-1], **how)

        summed, normed = _run(on, fused, x, update, gate, scale, shift, leading)
        return {"sum": summed, "norm": normed}

    return run(device, kernel=True), run(host, kernel=False)


def _compare_quantized_linear(device: Device, host: Device, row: NumberFormat) -> tuple[Arrays, Arrays]:
    """Check linear layers in a format as blocks use them, within a stack of layers.

    Two of one input, with a GELU, a gated pair, of tokens that were rounded before, and one that is added to tokens.
    The reference multiplies unrounded values.
    """
    random = np.random.default_rng(4)
    tokens, ins, outs, layer = (4000, 1024, 1536, 1) if device.platform == "tpu" else (139, 128, 256, 1)
    block = linear_int8.rotation_block(ins, chips=1)
    x = _to_device_dtype(random.normal(size=(1, tokens, ins)), device)
    first, second = (_to_device_dtype(random.normal(size=(3, outs, ins)) / math.sqrt(ins), device) for _ in range(2))
    bias, gate = (_to_device_dtype(random.normal(size=size), device) for size in (outs, (1, outs)))
    onto = _to_device_dtype(random.normal(size=(1, tokens, outs)), device)

    def run(on: Device, *, kernel: bool) -> Arrays:
        interpret = on.platform != "tpu"

        def exact(x: Any, factors: Sequence[Any], activation: Activation | None, onto: Any = None) -> list[jax.Array]:
            outs = [x @ factor[layer].T if bias is None else x @ factor[layer].T + bias for factor, bias in factors]
            outs = linear_int8.apply_activation(outs, activation)
            return outs if onto is None else [onto.x + onto.gate * outs[0]]

        def rounded(x: Any, factors: Sequence[Any], activation: Activation | None, onto: Any = None) -> list[jax.Array]:
            weights = []
            for factor, bias in factors:
                numbers, scale = row.quantize_weight(factor, (2,), chips=1)
                weights.append(linear_int8.Int8Weight(numbers, scale[layer], bias))
            how = {"block": block, "activation": activation, "turned": False, "layer": jnp.int32(layer)}
            if activation == "silu" and row.quantize_tokens is not None:
                x = row.quantize_tokens(x, block=block, kernel=True, interpret=interpret)
            return row.multiply_in_kernel([x], weights, **how, onto=onto, interpret=interpret)

        def all_ways(x: Any, first: Any, second: Any, bias: Any, onto: Any, gate: Any) -> Arrays:
            apply = rounded if kernel else exact
            two = apply(x, [(first, bias), (second, None)], None)
            (gelu,), (gated,) = apply(x, [(first, bias)], "gelu"), apply(x, [(first, None), (second, None)], "silu")
            (added,) = apply(x, [(first, bias)], None, linear_int8.GatedResidual(onto, gate))
            return {"first": two[0], "second": two[1], "with a GELU": gelu, "gated": gated, "added": added}

        with jax.set_mesh(make_mesh([on], MeshShape())):
            return _run(on, all_ways, x, first, second, bias, onto, gate)

    return run(device, kernel=True), run(host, kernel=False)


def _convolution(device: Device, host: Device) -> tuple[Arrays, Arrays]:
    """Check convolutions as decoders and encoders use them.

    With past frames, with a norm before and a residual, normed per pixel or over all, to an image's channels, with each
    pixel doubled, and with stride 2.
    """
    random = np.random.default_rng(5)
    # Columns of whole registers and a rest; outputs of one block, and of several.
    ins, outs, frames, rows, columns = (256, 512, 4, 48, 90) if device.platform == "tpu" else (5, 7, 4, 8, 40)
    x, past = (_to_device_dtype(random.normal(size=(1, ins, n, rows, columns)), device) for n in (frames, 2))
    volume, picture = (
        _to_device_dtype(random.normal(size=(outs, ins, *places)) / math.sqrt(ins * math.prod(places)), device)
        for places in ((3, 3, 3), (1, 3, 3))
    )
    bias, gain = (_to_device_dtype(random.normal(size=count), device) for count in (outs, ins))
    onto = _to_device_dtype(random.normal(size=(1, outs, frames, rows, columns)), device)

    def run(on: Device, *, kernel: bool) -> Arrays:
        def all_ways(x: Any, past: Any, volume: Any, picture: Any, bias: Any, gain: Any, onto: Any) -> Arrays:
            apply = convolution.reference
            if kernel:
                apply = partial(convolution.convolution, interpret=on.platform != "tpu")
            return {
                "behind the past": apply(x, volume, bias, repeats=False, past=(past,)),
                "normed and added": apply(x, picture, bias, repeats=False, gain=math.sqrt(ins) * gain, onto=onto),
                "scaled and shifted": apply(x, picture, bias, repeats=False, gain=gain, shift=1 + gain),
                "to three channels": apply(x, picture[:3], bias[:3], repeats=False),
                "edges repeated": apply(x, volume, bias, repeats=True),
                "doubled": apply(x, picture, bias, repeats=False, doubled=True),
                "halved": apply(x, picture, bias, repeats=False, halved=True),
            }

        with jax.set_mesh(make_mesh([on], MeshShape())):
            return _run(on, all_ways, x, past, volume, picture, bias, gain, onto)

    return run(device, kernel=True), run(host, kernel=False)


def _modulation(device: Device, host: Device) -> tuple[Arrays, Arrays]:
    """Check an image whose second map has half of its rows."""
    random = np.random.default_rng(6)
    channels, rows, columns = (256, 48, 90) if device.platform == "tpu" else (24, 8, 40)
    x = _to_device_dtype(random.normal(size=(1, channels, 3, rows, columns)), device)
    scale, offset = (
        _to_device_dtype(random.normal(size=(1, channels, 3, rows // 2, columns)), device) for _ in range(2)
    )
    factor, shift = (random.normal(size=channels).astype(np.float32) for _ in range(2))

    def run(on: Device, *, kernel: bool) -> np.ndarray:
        how = partial(modulation.modulate, interpret=on.platform != "tpu") if kernel else modulation.reference
        with jax.set_mesh(make_mesh([on], MeshShape())):
            return _run(on, how, x, factor, shift, scale, offset)

    return {"modulated": run(device, kernel=True)}, {"modulated": run(host, kernel=False)}


def _to_device_dtype(x: np.ndarray, device: Device) -> np.ndarray:
    """Return `x` `[...]` in the dtype of the device's runs."""
    return x.astype(jnp.bfloat16 if device.platform == "tpu" else np.float32)


def _run(device: Device, function: Callable[..., Any], *arrays: Any) -> Any:
    """Return the function's result in float32 on the host. The reference gets the same values in float32."""
    if device.platform != "tpu":
        arrays = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    with jax.default_device(device):
        result = jax.jit(function)(*jax.device_put(arrays, device))
    return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)), result)
