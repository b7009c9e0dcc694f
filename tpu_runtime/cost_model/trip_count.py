"""Trip counts of a compiled program's while loops, from the constant first value, step and bound of their counter.

XLA drops the trip counts from the final text, so they are derived again. Loops that end depending on data have none.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..messages import compose
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
    """Symbolic integer."""

    offset: int
    element: int | None = None  # element of the loop's parameter that is added to `offset`; None: none


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Computation with the known values of its parameters."""

    module: Module
    computation: Computation
    elements: Mapping[int, Symbolic] = field(default_factory=dict)  # of its only parameter, a tuple, by index
    parameters: Mapping[int, Symbolic | None] = field(default_factory=dict)  # by parameter number

    def value(self, name: str) -> Symbolic | None:
        """Return the value of scalar `name`, or None if it is not a known integer."""
        op = self.computation.by_name.get(name)
        if op is None:
            return None
        if op.opcode == "constant":
            return Symbolic(offset=int(op.operand_text)) if re.fullmatch(r"-?\d+", op.operand_text) else None
        if op.opcode == "parameter":
            return self.parameters.get(int(op.operand_text))
        if op.opcode in _PASSES_ON:
            return self.value(op.operands[0])
        if op.opcode in ("add", "subtract"):
            return self._sum(op)
        if op.opcode == "get-tuple-element":
            return self._element(op)
        if op.opcode == "fusion":
            scope = self._inside(op)
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
        index = int(found.require_attribute("index"))
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
    """Return the scope of the loop's body, with the elements that no iteration changes."""
    body = outer.module.computations[loop.computation("body")]
    inside = Scope(module=outer.module, computation=body)
    known = {}
    for index, first in enumerate(_firsts(loop, outer)):
        if first is not None and _next(inside, index) == Symbolic(offset=0, element=index):
            known[index] = first
    return Scope(module=outer.module, computation=body, elements=known)


def trip_count(loop: Instruction, outer: Scope) -> int:
    """Return how often the body of `loop` runs each time that `outer` reaches it.

    Raises `NotImplementedError`, naming the loop, if this depends on data.
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
        raise _make_error(loop)
    counter, bound = (scope.value(operand) for operand in compare.operands)
    direction = compare.require_attribute("direction")
    if counter is not None and counter.element is None:
        counter, bound, direction = bound, counter, _MIRRORED.get(direction, direction)
    if counter is None or bound is None or counter.element is None or bound.element is not None:
        raise _make_error(loop)
    first = _firsts(loop, outer)[counter.element]
    following = _next(inside, counter.element)
    if first is None or first.element is not None or following is None or following.element != counter.element:
        raise _make_error(loop)
    if not following.offset or direction not in _TRIPS:
        raise _make_error(loop)
    return max(0, math.ceil(_TRIPS[direction](first.offset + counter.offset, bound.offset, following.offset)))


def _make_error(loop: Instruction) -> NotImplementedError:
    return NotImplementedError(
        compose("plan.loop_count_unknown", name=loop.name, op_name=loop.op_name or "no source known")
    )


def _firsts(loop: Instruction, outer: Scope) -> list[Symbolic | None]:
    """Return the first values of the loop's tuple; None for values that are not known integers."""
    start = outer.computation.by_name[loop.operands[0]]
    if start.opcode != "tuple":
        return [None] * len(loop.arrays)
    scalars = [outer.computation.by_name[operand] for operand in start.operands]
    return [outer.value(scalar.name) if scalar.shape[:5] in ("s32[]", "u32[]") else None for scalar in scalars]


def _next(inside: Scope, index: int) -> Symbolic | None:
    """Return the value of element `index` of the loop's tuple after one iteration."""
    root = inside.computation.root
    return inside.value(root.operands[index]) if root.opcode == "tuple" else None


def _comparison(condition: Scope) -> tuple[Instruction | None, Scope]:
    """Return the compare that ends the loop, or None, and the scope of its operands."""
    scope, root = condition, condition.computation.root
    while root.opcode == "fusion":
        scope = scope._inside(root)
        root = scope.computation.root
    return (root if root.opcode == "compare" else None), scope
