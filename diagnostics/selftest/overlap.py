"""Checks of compiler options, one by one, and of transfers that overlap computation: no result bit may change.

Each attempt is one program: a loop that gathers weights, exchanges tokens and sums partial results between the chips,
while each computes independent residual norms, by XLA or by the kernel. The transferred values are small integers, so
that sums are exact in any order.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...kernels import dispatch, registry, residual_norm
from ...sharding.mesh import Device, Mesh, make_mesh
from ...sharding.shape import MeshShape
from ...tpu_runtime.machine import fallbacks, record
from ...tpu_runtime.machine.fallbacks import OVERLAP, Fallbacks, Unsupported, classify_compile_error
from ...tpu_runtime.machine.record import MachineRecord
from ...tpu_runtime.programs.program import step_compiler_options
from .checks import Check, CheckFailed, Measurement

FAMILY = "options"
TITLE = "transfers beside a kernel"
NUM_LAYERS = 4
# Lanes and tokens per chip. On a TPU each iteration gathers 16 MiB, like the weights of a block.
ON_TPU, SIMULATED = (2048, 2048), (256, 32)
# Options are tried without kernels, so that a kernel that halts is not mistaken for a faulty option.
_NO_KERNEL = dispatch.KernelFallbacks(off=(registry.RESIDUAL_NORM,))
WHAT = ("gathered weights", "exchanged tokens", "sums", "norms")


def check_options(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield a check per compiler option of a denoising step."""
    all_options = _options(devices)
    if not all_options:
        note = f"none are given for {devices[0].device_kind}"
        yield Check(family=FAMILY, stage="none", precision="", run=lambda progress: Measurement(note=note))
    for name, value in all_options.items():
        without = MachineRecord(fallbacks=Fallbacks(options=(name,)))
        yield Check(
            family=FAMILY, stage=name, precision="", if_lost=without,
            run=lambda progress, name=name, value=value: _same(devices, {name: value}),
        )  # fmt: skip


def check_overlap(devices: Sequence[Device]) -> Iterator[Check]:
    """Yield the check of all supported options together, with the kernel."""
    dropped = fallbacks.option_prefixes(OVERLAP)
    yield Check(
        family="chips", stage=TITLE, precision="", run=lambda progress: _together(devices),
        if_lost=MachineRecord(fallbacks=Fallbacks(options=dropped)),
    )  # fmt: skip


def _options(devices: Sequence[Device]) -> dict[str, str]:
    """Return the options of all meshes: `tp` and `sp` have different ones."""
    shapes = [MeshShape(sp=len(devices)), MeshShape(tp=len(devices))]
    return {name: value for shape in shapes for name, value in step_compiler_options(make_mesh(devices, shape)).items()}


def _same(devices: Sequence[Device], given: Mapping[str, str]) -> None:
    """Raise Wrong if the compiler rejects the options, or if they change a result."""
    wrong = _differences(devices, given, _NO_KERNEL)
    if wrong:
        raise CheckFailed(f"With {', '.join(given)} these differ: {', '.join(wrong)}.")


def _together(devices: Sequence[Device]) -> Measurement:
    """Check all options together; if results differ, omit overlap options in order until they are equal."""
    known = record.read_record(record.machine_key(devices[0].device_kind, len(devices))).fallbacks
    taken, rungs = known.left(_options(devices)), known.kernels
    wrong = _differences(devices, taken, rungs)
    if not wrong:
        by = "XLA, because the kernel is off" if registry.RESIDUAL_NORM in rungs.off else "the kernel"
        return Measurement(note=f"{len(taken)} options; norms by {by}")
    problem = f"Next to a kernel these differ: {', '.join(wrong)}"
    for count in range(1, len(OVERLAP) + 1):
        without = Fallbacks(options=fallbacks.option_prefixes(OVERLAP[:count]))
        if not _differences(devices, without.left(taken), rungs):
            raise CheckFailed(f"{problem}; not without {', '.join(OVERLAP[:count])}.", MachineRecord(fallbacks=without))
    raise CheckFailed(f"{problem}; without options too.")


def _differences(devices: Sequence[Device], given: Mapping[str, str], rungs: dispatch.KernelFallbacks) -> list[str]:
    """Return the names of results that differ from arithmetic or, for the norms, from a run without transfers.

    devices: that run the loop. given: compiler options. rungs: kernel fallbacks.
    """
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))
    lanes, tokens = ON_TPU if devices[0].platform == "tpu" else SIMULATED
    weights, exchanged, partial, x = _arrays(len(devices), lanes, tokens)
    results = _run(mesh, given, rungs, (weights, exchanged, partial), x)
    alone = _run(mesh, {}, rungs, (None, None, None), x)[-1]
    count = len(devices)
    pieces = exchanged.reshape(NUM_LAYERS, count, tokens, count, lanes // count)
    expected = (
        weights,
        np.moveaxis(pieces, 3, 1).reshape(NUM_LAYERS, count * count * tokens, lanes // count),
        partial.reshape(NUM_LAYERS, count, count * 8, lanes).sum(1),
        alone,
    )
    pairs = zip(WHAT, results, expected, strict=True)
    return [name for name, actual, want in pairs if not np.array_equal(actual, want)]


def _arrays(count: int, lanes: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Return integers of at most 8 bits, whose sums are exact in bfloat16, and tokens to be normed."""
    random = np.random.default_rng(7)

    def integers(*shape: int) -> np.ndarray:
        return random.integers(-15, 16, shape).astype(jnp.bfloat16)

    weights = integers(NUM_LAYERS, count * 128, lanes)
    exchanged = integers(NUM_LAYERS, count * tokens, lanes // count * count)
    partial = integers(NUM_LAYERS, count * count * 8, lanes)
    return weights, exchanged, partial, random.normal(size=(count, tokens, lanes)).astype(jnp.bfloat16)


def _run(
    mesh: Mesh,
    given: Mapping[str, str],
    rungs: dispatch.KernelFallbacks,
    sent: tuple[np.ndarray | None, ...],
    x: np.ndarray,
) -> list[np.ndarray]:
    """Return the loop's results for the arrays `sent`, compiled with the options `given`.

    mesh: of the loop. rungs: kernel fallbacks. sent: weights, tokens and partial sums, None if absent. x: tokens
    `[chips, tokens, lanes]` to be normed. Raises Wrong if an option is rejected.
    """
    arrays = x, *sent
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), arrays, _specs(arrays))
    try:
        compiled = lower_step(mesh, rungs, placed).compile(compiler_options=dict(given))
    except Exception as error:  # of any kind: only a rejected option is a finding
        refused = classify_compile_error(error, TITLE, given)
        if refused is None or refused.kind != "option":
            raise
        raise _option_rejected(refused) from error
    return [np.asarray(array) for array in compiled(*placed) if array is not None]


def _specs(arrays: tuple[Any, ...]) -> tuple[P | None, ...]:
    """Return the sharding of each array, None for an absent one."""
    along = P("sp"), *(P(None, "sp", None),) * 3
    return tuple(None if array is None else spec for array, spec in zip(arrays, along, strict=True))


def lower_step(mesh: Mesh, rungs: dispatch.KernelFallbacks, arrays: tuple[Any, ...]) -> jax.stages.Lowered:
    """Lower the loop for `arrays` or their shapes: tokens, then weights, tokens and partial sums, None if absent.

    mesh: of the loop. rungs: kernel fallbacks.
    """
    interpret = mesh.devices.flat[0].platform != "tpu"

    def layer(x: jax.Array, split: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        weight, tokens, partial = split
        moved = None, None, None
        if weight is not None:
            moved = (
                jax.lax.all_gather(weight, "sp", axis=0, tiled=True),
                jax.lax.all_to_all(tokens, "sp", 1, 0, tiled=True),
                jax.lax.psum_scatter(partial.astype(jnp.float32), "sp", scatter_dimension=0, tiled=True),
            )
        ones = jnp.ones((1, x.shape[-1]), jnp.float32)
        for _ in range(2):
            _, x = residual_norm.residual_norm(x, x, None, ones, 0 * ones, eps=1e-6, kernel=True, interpret=interpret)
        return x, moved

    def loop(x: jax.Array, *split: Any) -> tuple[Any, ...]:
        x, moved = jax.lax.scan(layer, x, split, length=NUM_LAYERS)
        return (*moved, x)

    specs = _specs(arrays)
    tokens, weights, *others = specs
    out = (None if weights is None else P(), *others, tokens)
    mapped = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))
    with dispatch.use_fallbacks(rungs), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return mapped.lower(*arrays)


def _option_rejected(refused: Unsupported) -> CheckFailed:
    return CheckFailed(
        f"The compiler rejects {', '.join(refused.names)} ({refused.reason}).",
        MachineRecord(fallbacks=Fallbacks(options=refused.names)),
    )
