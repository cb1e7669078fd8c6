"""Integer expressions over loop variables: bounds of loops, indices of axes, conditions.

They are trees of a few operators of C, whose operands are never negative, so that `/` and `%` are
the same rounded down or towards zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxkit.errors import InvalidGraphError

# How strongly an operator binds, in C.
_STRENGTH = {"%": 5, "/": 5, "*": 5, "+": 4, "-": 4, "<": 3, "==": 2, "min": 0}

_COMPUTE: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "==": operator.eq,
}

# Operands on the right, `n`, that leave the one on the left as it is.
_NEUTRAL = {"+": 0, "-": 0, "*": 1, "/": 1}


@dataclass(frozen=True, slots=True)
class IndexExpr:
    """An operator of C and its operands; a variable is an operator without any.

    Attributes:
        op: `+`, `-`, `*`, `/`, `%`, `<`, `==`, `min`, or the name of a variable.
        operands: Two expressions or integers; none for a variable.
    """

    op: str
    operands: tuple[IndexValue, ...] = ()

    @property
    def is_condition(self) -> bool:
        """Whether it is true or false."""
        return self.op in ("<", "==")

    def __str__(self) -> str:
        return text_of(self)


IndexValue = IndexExpr | int


def variable(name: str) -> IndexExpr:
    """Return the value of a loop variable, or of what a nest defines under a name."""
    return IndexExpr(name)


def binary(op: str, left: IndexValue, right: IndexValue) -> IndexValue:
    """Return an operator's result; operators on integers, and neutral ones, vanish."""
    if _NEUTRAL.get(op) == right:
        return left
    if op == "%" and right == 1:
        return 0
    if isinstance(left, int) and isinstance(right, int):
        return int(_COMPUTE[op](left, right))
    return IndexExpr(op, (left, right))


def less(left: IndexValue, right: IndexValue) -> IndexExpr:
    """Return the condition that one expression is below another one."""
    return IndexExpr("<", (left, right))


def equal(left: IndexValue, right: IndexValue) -> IndexExpr:
    """Return the condition that two expressions are the same."""
    return IndexExpr("==", (left, right))


def smaller(left: IndexValue, right: IndexValue) -> IndexExpr:
    """Return the smaller one of two expressions."""
    return IndexExpr("min", (left, right))


def text_of(expression: IndexValue) -> str:
    """Return an expression as C++, with the parentheses that it needs."""
    if isinstance(expression, int) or not expression.operands:
        return str(expression) if isinstance(expression, int) else expression.op
    if expression.op == "min":
        left, right = map(text_of, expression.operands)
        return f"{left} < {right} ? {left} : {right}"
    strength = _STRENGTH[expression.op]
    left, right = expression.operands
    return f"{_part(left, strength)} {expression.op} {_part(right, strength + 1)}"


def _part(operand: IndexValue, least: int) -> str:
    text = text_of(operand)
    if isinstance(operand, int) or not operand.operands or _STRENGTH[operand.op] >= least:
        return text
    return f"({text})"


def value_of(expression: IndexValue, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression.

    Args:
        expression: The expression.
        known: Integers, or tensors of them that broadcast to each other, by name of the variable.
    """
    if isinstance(expression, int):
        return expression
    if not expression.operands:
        return known[expression.op]
    left, right = (value_of(o, known) for o in expression.operands)
    if expression.op == "min":
        return left - (left - right) * (left > right)
    return _COMPUTE[expression.op](left, right)


def variables_of(expression: IndexValue) -> Iterator[str]:
    """Yield the names of an expression's variables."""
    if isinstance(expression, int):
        return
    if not expression.operands:
        yield expression.op
    for operand in expression.operands:
        yield from variables_of(operand)


Range = tuple[int, int]


def range_of(expression: IndexValue, known: Mapping[str, Range]) -> Range:
    """Return the least and the largest value of an expression.

    Args:
        expression: The expression.
        known: Name of a variable → its least and its largest value.

    Raises:
        InvalidGraphError: When a variable is not known.
    """
    if isinstance(expression, int):
        return expression, expression
    if not expression.operands:
        if expression.op not in known:
            raise InvalidGraphError(
                f"expected variables that are defined, got {expression.op!r}",
                hint="define it, or open the loop over it, around the statement that reads it",
            )
        return known[expression.op]
    (low, high), (least, most) = (range_of(o, known) for o in expression.operands)
    if expression.op == "-":
        return low - most, high - least
    if expression.op == "%":
        return (low, high) if low >= 0 and high < least else (0, most - 1)
    if expression.op == "min":
        return min(low, least), min(high, most)
    if expression.is_condition:
        return 0, 1
    corners = [_COMPUTE[expression.op](a, b) for a in (low, high) for b in (least, most)]
    return min(corners), max(corners)
