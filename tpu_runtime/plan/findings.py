"""What is wasteful in a compiled program, in sentences that name the operation and its source.

Each check returns no sentence where there is nothing to say. `plan --explain` prints them; tests demand their absence.
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
from ..cost_model.kernels import find, kernel_of
from ..cost_model.step_time import Timing
from ..programs.program import Program
from ..units import GIB, MIB

_MOVES = ("copy", "transpose", "pad", "slice", "concatenate", "dynamic-slice", "dynamic-update-slice", "broadcast")
# What chips exchange around a kernel has its layout too.
_SEE_THROUGH = (
    "bitcast", "get-tuple-element", "reshape", "copy-start", "copy-done", "parameter", "constant", "all-to-all",
)  # fmt: skip


def find_scatters(text: str) -> list[str]:
    """Operations written as scatters, whatever the compiler made of them. `text` is that of the compiled program."""
    module = hlo.parse(text)
    found: dict[tuple[str, str], Instruction] = {}
    for each in (one for computation in module.computations.values() for one in computation.instructions):
        # The function that joins two values of a scatter has parameters called "scatter".
        named = each.opcode != "parameter" and each.op_name.rpartition("/")[2].startswith("scatter")
        if named or each.opcode == "scatter":
            found.setdefault((each.op_name, module.source(each)), each)
    return [
        f"scatter {_where(module, each)} writes {_shape(each)}: a TPU does that element by element. Build the array "
        "from its parts (stack, concatenate, where) instead."
        for each in found.values()
    ]


def float32_scores(text: str, limit: int = 256 * MIB) -> list[str]:
    """Matrix products whose float32 result of more than `limit` bytes goes through memory: attention without a
    kernel is of this kind.
    """
    module = hlo.parse(text)
    found = []
    for each in scheduled(module):
        large = [array for array in each.arrays if array.is_score and array.size_bytes > limit]
        if large and _multiplies(module, each):
            found.append(
                f"{each.opcode} {_where(module, each)} writes a matrix product of {large[0].size_bytes / MIB:.0f} MiB "
                f"in float32, {large[0]}. Attention scores belong in the attention kernel, other products in bfloat16."
            )
    return found


def huge_products(program: Program, limit: int = 2 * GIB) -> list[str]:
    """Traced float32 matrix products of more than `limit` bytes per device: of attention scores that large no compiler
    makes a program, so they are looked for before it tries.
    """
    found = []
    for equation, devices in _products(flops.traced(program).jaxpr, program.mesh.size):
        result = equation.outvars[0].aval
        assert isinstance(result, ShapedArray)
        share = result.size * result.dtype.itemsize // devices
        if share > limit and hlo.Array(dtype="f32", dims=result.shape).is_score and result.dtype == jnp.float32:
            found.append(
                f"{program.name}: {equation.source_info.name_stack}/dot_general at "
                f"{source_info_util.summarize(equation.source_info)} makes a float32 matrix product of "
                f"{share / GIB:.1f} GiB per device, {result.str_short()}. Attention scores belong in a kernel."
            )
    return list(dict.fromkeys(found))


def _products(jaxpr: core.Jaxpr, devices: int) -> Iterator[tuple[core.JaxprEqn, int]]:
    """Every matrix product outside kernels, and over how many devices its result is divided; in a shard_map, over 1."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation, devices
        elif equation.primitive.name != "pallas_call":
            for inner in flops.inner_jaxprs(equation):
                jaxpr = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
                yield from _products(jaxpr, 1 if equation.primitive.name == "shard_map" else devices)


def replicated_weights(program: Program, limit: int = 64 * MIB) -> list[str]:
    """Replicated arguments of more than `limit` bytes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(program.arguments)
    return [
        f"{program.name}: argument {jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} of "
        f"{size_of(leaf) / MIB:.0f} MiB is replicated on all {program.mesh.size} devices; if that is not "
        "meant, give it a parameter rule that divides it."
        for path, leaf in leaves
        if program.mesh.size > 1 and size_of(leaf) > limit and leaf.sharding.is_fully_replicated
    ]


def layout_copies(text: str, timing: Timing) -> list[str]:
    """Copies, pads, slices and transposes between a kernel and the next computation: layouts that do not fit."""
    module = hlo.parse(text)
    cost = {operation.name: operation.cycles for operation in timing.operations}
    found = []
    for computation in _schedules(module):
        kernels = [each.name for each in computation.instructions if kernel_of(each) is not None]
        users = _users(computation)
        before = _reached(kernels, lambda name, c=computation: c.by_name[name].operands, module, computation)
        after = _reached(kernels, lambda name, u=users: u.get(name, ()), module, computation)
        for side, names in (("before", before), ("after", after)):
            for each in (computation.by_name[name] for name in sorted(names) if cost.get(name)):
                share = 100 * cost[each.name] / timing.cycles
                found.append((share, f"{share:.1f} %: {side} a kernel, {_where(module, each)}, {_shape(each)}."))
    return [sentence for _, sentence in sorted(found, reverse=True)]


def float32_arrays(text: str, limit: int = 64 * MIB) -> list[str]:
    """Float32 results of more than `limit` bytes made from bfloat16 ones: upcasts that go through memory."""
    module = hlo.parse(text)
    found = []
    for computation in _schedules(module):
        for each in computation.instructions:
            large = [array for array in each.arrays if array.dtype == "f32" and array.size_bytes > limit]
            if large and each.opcode in ("fusion", "convert") and _reads_bfloat16(computation, each):
                found.append((large[0].size_bytes, f"float32 result {_where(module, each)}: {large[0]}."))
    return list(dict.fromkeys(sentence for _, sentence in sorted(found, reverse=True)))


def exposed_collectives(timing: Timing) -> list[str]:
    """Collectives that computation waits for."""
    waiting = sorted(timing.collectives, key=lambda each: each.exposed_s, reverse=True)
    return [
        f"{each.kind} {each.name} ({each.op_name or 'no source known'}; {each.source}): {each.times:.0f} x "
        f"{each.bytes / MIB:.1f} MiB on the busiest link, waited for {each.exposed_s:.4f} of {each.seconds:.4f} s."
        for each in waiting
        if not each.overlapped and each.exposed_s > 0
    ]


def kernel_costs(module: Module, timing: Timing, costs: Mapping[str, Cost]) -> list[str]:
    """The parts of each kernel's time."""
    times = {operation.name: operation.times for operation in timing.operations}
    return [
        f"{kernel.name}: {times.get(kernel.name, 0):.0f} x {cost.steps} steps x {cost.step} bundles; "
        f"{cost.cycles / 1e6:.2f} Mcycles a call"
        + (f", {cost.cycles_at_best / 1e6:.2f} by its shortest way" if cost.cycles_at_best < cost.cycles else "")
        + (f", {cost.rerun / 1e6:.2f} more if all is repeated in the exact form" if cost.rerun else "")
        + ("" if cost.estimated is None else f" (libtpu's own estimate: {cost.estimated / 1e6:.2f})")
        for kernel in find(module)
        for cost in (costs[kernel.key],)
    ]


def size_of(leaf: Any) -> int:
    """Bytes of an abstract array, over all devices."""
    return leaf.size * leaf.dtype.itemsize


def scheduled(module: Module) -> Iterator[Instruction]:
    """The instructions that run as such: not those within fusions, nor the functions of reductions."""
    for computation in _schedules(module):
        yield from computation.instructions


def _schedules(module: Module) -> list[hlo.Computation]:
    names, waiting = {}, [module.entry]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names[name] = module.computations[name]
        for each in names[name].instructions:
            if each.opcode in ("while", "conditional", "call"):
                waiting += [word for word in hlo.names(each.attributes) if word in module.computations]
    return list(names.values())


def _multiplies(module: Module, each: Instruction) -> bool:
    if each.opcode in ("convolution", "dot"):
        return "conv_general" not in each.op_name
    if each.opcode != "fusion":
        return False
    called = module.computations[each.computation("calls")]
    return any(_multiplies(module, inner) for inner in called.instructions)


def _moves(module: Module, each: Instruction) -> bool:
    """Whether `each` only moves data."""
    if each.opcode != "fusion":
        return each.opcode in _MOVES or each.opcode in _SEE_THROUGH
    called = module.computations[each.computation("calls")]
    return all(_moves(module, inner) for inner in called.instructions)


def _users(computation: hlo.Computation) -> Mapping[str, list[str]]:
    users: dict[str, list[str]] = {}
    for each in computation.instructions:
        for operand in each.operands:
            users.setdefault(operand, []).append(each.name)
    return users


def _reached(
    kernels: list[str], neighbours: Callable[[str], Iterable[str]], module: Module, computation: hlo.Computation
) -> set[str]:
    """What is next to `kernels`, through instructions that only move data."""
    found: set[str] = set()
    waiting = [near for kernel in kernels for near in neighbours(kernel)]
    while waiting:
        name = waiting.pop()
        if name not in found and name in computation.by_name and _moves(module, computation.by_name[name]):
            found.add(name)
            waiting += neighbours(name)
    return found


def _reads_bfloat16(computation: hlo.Computation, each: Instruction) -> bool:
    read = [computation.by_name[name] for name in each.operands if name in computation.by_name]
    largest = max((array for operand in read for array in operand.arrays), key=lambda a: a.size_bytes, default=None)
    return largest is not None and largest.dtype == "bf16"


def _where(module: Module, each: Instruction) -> str:
    return f"{each.name} ({each.op_name or 'no source known'}; {module.source(each) or 'no file known'})"


def _shape(each: Instruction) -> str:
    return " ".join(map(str, each.arrays[:3])) or "nothing"


def listed(sentences: Iterable[str], count: int) -> list[str]:
    """The first `count`, and how many more there are."""
    every = list(sentences)
    return every[:count] + ([f"... and {len(every) - count} more."] if len(every) > count else [])
