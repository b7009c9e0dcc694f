"""Wasteful operations of a compiled program, in sentences that name the operation and its source.

Each check returns no sentence if it finds nothing. `plan --explain` prints them; tests require their absence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core, source_info_util

from ..cost_model import flops, hlo
from ..cost_model.bundles import Cost
from ..cost_model.hlo import Instruction, Module
from ..cost_model.kernels import find_kernels, parse_kernel
from ..cost_model.step_time import Timing
from ..programs.program import Program
from ..units import GIB, MIB

_MOVES = ("copy", "transpose", "pad", "slice", "concatenate", "dynamic-slice", "dynamic-update-slice", "broadcast")
# Arrays that chips exchange around a kernel have the kernel's layout, too.
_SEE_THROUGH = (
    "bitcast", "get-tuple-element", "reshape", "copy-start", "copy-done", "parameter", "constant", "all-to-all",
)  # fmt: skip


def find_scatters(text: str) -> list[str]:
    """Return operations written as scatters, whatever the compiler made of them.

    `text` is that of the compiled program.
    """
    module = hlo.parse_module(text)
    scatters: dict[tuple[str, str], Instruction] = {}
    for computation in module.computations.values():
        for op in computation.instructions:
            # The function that joins two values of a scatter has parameters called "scatter".
            has_name = op.opcode != "parameter" and op.op_name.rpartition("/")[2].startswith("scatter")
            if has_name or op.opcode == "scatter":
                scatters.setdefault((op.op_name, module.source(op)), op)
    return [
        f"scatter {_where(module, op)} writes {_shape(op)}: a TPU does that element by element. Build the array "
        "from its parts (stack, concatenate, where) instead."
        for op in scatters.values()
    ]


def find_float32_scores(text: str, limit: int = 256 * MIB) -> list[str]:
    """Return matrix products whose float32 result of more than `limit` bytes goes through memory.

    Attention without a kernel is an example.
    """
    module = hlo.parse_module(text)
    sentences = []
    for op in iterate_scheduled(module):
        large = [array for array in op.arrays if array.is_score and array.size_bytes > limit]
        if large and _multiplies(module, op):
            sentences.append(
                f"{op.opcode} {_where(module, op)} writes a matrix product of {large[0].size_bytes / MIB:.0f} MiB "
                f"in float32, {large[0]}. Attention scores belong in the attention kernel, other products in bfloat16."
            )
    return sentences


def find_huge_matmuls(program: Program, limit: int = 2 * GIB) -> list[str]:
    """Return traced float32 matrix products of more than `limit` bytes per device.

    No compiler builds a program with attention scores that large, so they are detected before it tries.
    """
    sentences = []
    for equation, devices in _products(flops.trace_program(program).jaxpr, program.mesh.size):
        result = equation.outvars[0].aval
        assert isinstance(result, ShapedArray)
        share = result.size * result.dtype.itemsize // devices
        if share > limit and hlo.Array(dtype="f32", dims=result.shape).is_score and result.dtype == jnp.float32:
            sentences.append(
                f"{program.name}: {equation.source_info.name_stack}/dot_general at "
                f"{source_info_util.summarize(equation.source_info)} makes a float32 matrix product of "
                f"{share / GIB:.1f} GiB per device, {result.str_short()}. Attention scores belong in a kernel."
            )
    return list(dict.fromkeys(sentences))


def _products(jaxpr: core.Jaxpr, devices: int) -> Iterator[tuple[core.JaxprEqn, int]]:
    """Yield every matrix product outside kernels, and the number of devices that divide its result."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation, devices
        elif equation.primitive.name != "pallas_call":
            for inner in flops.inner_jaxprs(equation):
                jaxpr = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                yield from _products(jaxpr, 1 if equation.primitive.name == "shard_map" else devices)


def find_replicated_weights(program: Program, limit: int = 64 * MIB) -> list[str]:
    """Return replicated arguments of more than `limit` bytes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(program.arguments)
    return [
        f"{program.name}: argument {jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} of "
        f"{array_bytes(leaf) / MIB:.0f} MiB is replicated on all {program.mesh.size} devices; if that is not "
        "intended, give it a parameter rule that divides it."
        for path, leaf in leaves
        if program.mesh.size > 1 and array_bytes(leaf) > limit and leaf.sharding.is_fully_replicated
    ]


def find_layout_copies(text: str, timing: Timing) -> list[str]:
    """Return copies, pads, slices and transposes between a kernel and the next computation: their layouts differ."""
    module = hlo.parse_module(text)
    cost = {operation.name: operation.cycles for operation in timing.operations}
    copies = []
    for computation in _schedules(module):
        kernels = [op.name for op in computation.instructions if parse_kernel(op) is not None]
        users = _users(computation)
        before = _search(kernels, lambda name, c=computation: c.by_name[name].operands, module, computation)
        after = _search(kernels, lambda name, u=users: u.get(name, ()), module, computation)
        for side, names in (("before", before), ("after", after)):
            for op in (computation.by_name[name] for name in sorted(names) if cost.get(name)):
                share = 100 * cost[op.name] / timing.cycles
                copies.append((share, f"{share:.1f} %: {side} a kernel, {_where(module, op)}, {_shape(op)}."))
    return [sentence for _, sentence in sorted(copies, reverse=True)]


def find_float32_arrays(text: str, limit: int = 64 * MIB) -> list[str]:
    """Return float32 results of more than `limit` bytes that are made from bfloat16: upcasts that go through memory."""
    module = hlo.parse_module(text)
    upcasts = []
    for computation in _schedules(module):
        for op in computation.instructions:
            large = [array for array in op.arrays if array.dtype == "f32" and array.size_bytes > limit]
            if large and op.opcode in ("fusion", "convert") and _reads_bfloat16(computation, op):
                upcasts.append((large[0].size_bytes, f"float32 result {_where(module, op)}: {large[0]}."))
    return list(dict.fromkeys(sentence for _, sentence in sorted(upcasts, reverse=True)))


def find_exposed_collectives(timing: Timing) -> list[str]:
    """Return collectives that computation waits for."""
    waiting = sorted(timing.collectives, key=lambda op: op.exposed_s, reverse=True)
    return [
        f"{op.kind} {op.name} ({op.op_name or 'no source known'}; {op.source}): {op.times:.0f} x "
        f"{op.bytes / MIB:.1f} MiB on the busiest link, waited for {op.exposed_s:.4f} of {op.seconds:.4f} s."
        for op in waiting
        if not op.overlapped and op.exposed_s > 0
    ]


def describe_kernel_costs(module: Module, timing: Timing, costs: Mapping[str, Cost]) -> list[str]:
    """Return sentences on the components of each kernel's time.

    module, timing: of the program. costs: of its kernels, by key.
    """
    times = {operation.name: operation.times for operation in timing.operations}
    return [
        f"{kernel.name}: {times.get(kernel.name, 0):.0f} x {cost.steps} steps x {cost.step} bundles; "
        f"{cost.cycles / 1e6:.2f} Mcycles a call"
        + (f", {cost.cycles_at_best / 1e6:.2f} by its shortest way" if cost.cycles_at_best < cost.cycles else "")
        + (f", {cost.rerun / 1e6:.2f} more if all is repeated in the exact form" if cost.rerun else "")
        + ("" if cost.estimated is None else f" (libtpu's own estimate: {cost.estimated / 1e6:.2f})")
        for kernel in find_kernels(module)
        for cost in (costs[kernel.key],)
    ]


def array_bytes(leaf: Any) -> int:
    """Return the bytes of an abstract array, over all devices."""
    return leaf.size * leaf.dtype.itemsize


def iterate_scheduled(module: Module) -> Iterator[Instruction]:
    """Yield the instructions that run as such: not those in fusions or in the functions of reductions."""
    for computation in _schedules(module):
        yield from computation.instructions


def _schedules(module: Module) -> list[hlo.Computation]:
    names, waiting = {}, [module.entry]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names[name] = module.computations[name]
        for op in names[name].instructions:
            if op.opcode in ("while", "conditional", "call"):
                waiting += [word for word in hlo.parse_names(op.attributes) if word in module.computations]
    return list(names.values())


def _multiplies(module: Module, op: Instruction) -> bool:
    if op.opcode in ("convolution", "dot"):
        return "conv_general" not in op.op_name
    if op.opcode != "fusion":
        return False
    called = module.computations[op.computation("calls")]
    return any(_multiplies(module, inner) for inner in called.instructions)


def _moves(module: Module, op: Instruction) -> bool:
    """Return whether `op` only moves data."""
    if op.opcode != "fusion":
        return op.opcode in _MOVES or op.opcode in _SEE_THROUGH
    called = module.computations[op.computation("calls")]
    return all(_moves(module, inner) for inner in called.instructions)


def _users(computation: hlo.Computation) -> Mapping[str, list[str]]:
    users: dict[str, list[str]] = {}
    for op in computation.instructions:
        for operand in op.operands:
            users.setdefault(operand, []).append(op.name)
    return users


def _search(
    kernels: list[str], neighbours: Callable[[str], Iterable[str]], module: Module, computation: hlo.Computation
) -> set[str]:
    """Return the instructions next to `kernels`, seen through instructions that only move data."""
    reached: set[str] = set()
    waiting = [near for kernel in kernels for near in neighbours(kernel)]
    while waiting:
        name = waiting.pop()
        if name not in reached and name in computation.by_name and _moves(module, computation.by_name[name]):
            reached.add(name)
            waiting += neighbours(name)
    return reached


def _reads_bfloat16(computation: hlo.Computation, op: Instruction) -> bool:
    read = [computation.by_name[name] for name in op.operands if name in computation.by_name]
    largest = max((array for operand in read for array in operand.arrays), key=lambda a: a.size_bytes, default=None)
    return largest is not None and largest.dtype == "bf16"


def _where(module: Module, op: Instruction) -> str:
    return f"{op.name} ({op.op_name or 'no source known'}; {module.source(op) or 'no file known'})"


def _shape(op: Instruction) -> str:
    return " ".join(map(str, op.arrays[:3])) or "nothing"


def truncate_list(sentences: Iterable[str], count: int) -> list[str]:
    """Return the first `count` sentences, and the number of further ones."""
    all_sentences = list(sentences)
    rest = len(all_sentences) - count
    return all_sentences[:count] + ([f"... and {rest} more."] if rest > 0 else [])
