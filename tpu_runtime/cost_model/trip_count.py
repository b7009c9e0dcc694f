"""How often a while loop of a compiled program runs: its counter's first value, step and bound, all constants.

XLA drops the trip count it knew from the final text, so it is derived again. Loops whose end depends on data have none.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .hlo import Computation, Instruction, Module

_PASSES_ON = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start", "optimization-barrier")
_TRIPS: Mapping[str, Callable[[int, int, int], float]] = {
    "LT": lambda first, bound, step: (bound - first) / step,
    "LE": lambda first, bound, step: (bound - first + 1) / step,
    "GT": lambda first, bound, step: (first - bound) / -step,
    "GE": lambda first, bound, step: (first - bound + 1) / -step,
    "NE": lambda first, bound, step: (bound - first) / step,
}
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, kw_only=True)
class Symbolic:
    """An integer: `offset`, plus the loop's parameter element `element` if that is not None."""

    offset: int
    element: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A computation with what is known of its parameters: by element of its one tuple, or by parameter number."""

    module: Module
    computation: Computation
    elements: Mapping[int, Symbolic] = field(default_factory=dict)
    parameters: Mapping[int, Symbolic | None] = field(default_factory=dict)

    def value(self, name: str) -> Symbolic | None:
        """What scalar `name` is, or None if it is no integer known here."""
        found = self.computation.by_name.get(name)
        if found is None:
            return None
        if found.opcode == "constant":
            return Symbolic(offset=int(found.operand_text)) if re.fullmatch(r"-?\d+", found.operand_text) else None
        if found.opcode == "parameter":
            return self.parameters.get(int(found.operand_text))
        if found.opcode in _PASSES_ON:
            return self.value(found.operands[0])
        if found.opcode in ("add", "subtract"):
            return self._sum(found)
        if found.opcode == "get-tuple-element":
            return self._element(found)
        if found.opcode == "fusion":
            scope = self._inside(found)
            return scope.value(scope.computation.root.name)
        return None

    def _inside(self, fusion: Instruction) -> "Scope":
        called = self.module.computations[fusion.computation("calls")]
        return Scope(
            module=self.module,
            computation=called,
            parameters={number: self.value(operand) for number, operand in enumerate(fusion.operands)},
        )

    def _sum(self, found: Instruction) -> Symbolic | None:
        left, right = (self.value(operand) for operand in found.operands)
        if left is None or right is None or (right.element is not None and found.opcode == "subtract"):
            return None
        if left.element is not None and right.element is not None:
            return None
        sign = 1 if found.opcode == "add" else -1
        element = left.element if left.element is not None else right.element
        return Symbolic(offset=left.offset + sign * right.offset, element=element)

    def _element(self, found: Instruction) -> Symbolic | None:
        index = int(found.needed("index"))
        source = self.computation.by_name[found.operands[0]]
        if source.opcode == "parameter":
            return self.elements.get(index, Symbolic(offset=0, element=index))
        if source.opcode == "tuple":
            return self.value(source.operands[index])
        if source.opcode == "fusion":
            scope = self._inside(source)
            root = scope.computation.root
            return scope.value(root.operands[index]) if root.opcode == "tuple" else None
        return None


def body_scope(loop: Instruction, outer: Scope) -> Scope:
    """The loop's body, knowing the elements that no iteration changes."""
    body = outer.module.computations[loop.computation("body")]
    inside = Scope(module=outer.module, computation=body)
    known = {}
    for index, first in enumerate(_firsts(loop, outer)):
        if first is not None and _next(inside, index) == Symbolic(offset=0, element=index):
            known[index] = first
    return Scope(module=outer.module, computation=body, elements=known)


def trip_count(loop: Instruction, outer: Scope) -> int:
    """How often the body of `loop` runs each time `outer` reaches it.

    Raises `NotImplementedError` that names the loop if this depends on data.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known.group(1))
    inside = body_scope(loop, outer)
    condition = Scope(
        module=outer.module,
        computation=outer.module.computations[loop.computation("condition")],
        elements=inside.elements,
    )
    compare, scope = _comparison(condition)
    if compare is None:
        raise _unknown(loop)
    counter, bound = (scope.value(operand) for operand in compare.operands)
    direction = compare.needed("direction")
    if counter is not None and counter.element is None:
        counter, bound, direction = bound, counter, _MIRRORED.get(direction, direction)
    if counter is None or bound is None or counter.element is None or bound.element is not None:
        raise _unknown(loop)
    first = _firsts(loop, outer)[counter.element]
    following = _next(inside, counter.element)
    if first is None or first.element is not None or following is None or following.element != counter.element:
        raise _unknown(loop)
    if not following.offset or direction not in _TRIPS:
        raise _unknown(loop)
    return max(0, math.ceil(_TRIPS[direction](first.offset + counter.offset, bound.offset, following.offset)))


def _unknown(loop: Instruction) -> NotImplementedError:
    return NotImplementedError(
        f"loop {loop.name} ({loop.op_name or 'no source known'}) runs a number of times that depends on data; "
        "its time cannot be predicted. Give it a constant count (lax.scan, lax.fori_loop with constants)."
    )


def _firsts(loop: Instruction, outer: Scope) -> list[Symbolic | None]:
    """The first values of the loop's tuple; None for what is no integer."""
    start = outer.computation.by_name[loop.operands[0]]
    if start.opcode != "tuple":
        return [None] * len(loop.arrays)
    scalars = [outer.computation.by_name[operand] for operand in start.operands]
    return [outer.value(scalar.name) if scalar.shape[:5] in ("s32[]", "u32[]") else None for scalar in scalars]


def _next(inside: Scope, index: int) -> Symbolic | None:
    """What element `index` of the loop's tuple is after one iteration."""
    root = inside.computation.root
    return inside.value(root.operands[index]) if root.opcode == "tuple" else None


def _comparison(condition: Scope) -> tuple[Instruction | None, Scope]:
    """The compare that decides, and where its operands are to be looked up."""
    scope, root = condition, condition.computation.root
    while root.opcode == "fusion":
        scope = scope._inside(root)
        root = scope.computation.root
    return (root if root.opcode == "compare" else None), scope
