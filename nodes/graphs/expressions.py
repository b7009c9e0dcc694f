"""Evaluates the expressions of ComfyMathExpression as that node does, for numbers only and with bounds.

The node evaluates them by simpleeval. Here the syntax tree is walked: arithmetic, comparisons, conditions and calls of
the node's functions. Anything else is left to the node.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from .known import NotKnown

# Longer expressions, and larger results in between, are left to the node.
MAX_LENGTH, MAX_NUMBER, MAX_EXPONENT = 1000, 2**128, 128

Number: TypeAlias = bool | int | float


def _sum(*values: Any) -> Number:
    return sum(values[0]) if len(values) == 1 and isinstance(values[0], list) else sum(values)


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_EXPONENT:
        raise NotKnown
    return pow(base, exponent)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": _sum, "min": min, "max": max, "abs": abs, "round": round, "pow": _power, "sqrt": math.sqrt,
    "ceil": math.ceil, "floor": math.floor, "log": math.log, "log2": math.log2, "log10": math.log10, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "int": int, "float": float,
}  # fmt: skip
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_UNARY: Mapping[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_COMPARED: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


def evaluate(expression: str, values: Mapping[str, Number]) -> tuple[float, int, bool]:
    """Return the node's three outputs: the result as FLOAT, INT and BOOLEAN.

    values: by name; all of them are also the list `values`.
    Raises NotKnown for an expression that is not evaluated here, and ArithmeticError, TypeError or ValueError for one
    that the node refuses.
    """
    if len(expression) > MAX_LENGTH:
        raise NotKnown
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        result = _evaluate(tree.body, {**values, "values": list(values.values())})
    except (SyntaxError, RecursionError, MemoryError):
        raise NotKnown from None
    if not math.isfinite(number := float(_check(result))):
        raise NotKnown
    return number, int(result), bool(result)


def _evaluate(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return _check(value)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _check(_BINARY[type(op)](*_numbers((left, right), names)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _check(_UNARY[type(op)](*_numbers((operand,), names)))
        case ast.BoolOp(op=op, values=parts):
            value: Any = None
            for part in parts:
                value = _check(_evaluate(part, names))
                if bool(value) is isinstance(op, ast.Or):
                    break
            return value
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARED for op in ops):
            first = _check(_evaluate(left, names))
            for op, other in zip(ops, others, strict=True):
                second = _check(_evaluate(other, names))
                if not _COMPARED[type(op)](first, second):
                    return False
                first = second
            return True
        case ast.IfExp(test=test, body=body, orelse=other):
            return _evaluate(body if _check(_evaluate(test, names)) else other, names)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _check(_FUNCTIONS[name](*(_evaluate(arg, names) for arg in args)))
    raise NotKnown


def _numbers(nodes: Iterable[ast.AST], names: Mapping[str, Any]) -> list[Number]:
    return [_check(_evaluate(node, names)) for node in nodes]


def _check(value: Any) -> Number:
    """Return a number; NotKnown for any other value, and for one that is too large."""
    if not isinstance(value, bool | int | float) or (isinstance(value, int) and abs(value) > MAX_NUMBER):
        raise NotKnown
    return value
