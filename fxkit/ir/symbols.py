"""Numbers that are known as expressions: sizes under dynamic shapes, sizes that depend on data.

torch computes with `SymInt`, whose comparison is a question to the program's guards. What a type
records must be compared, hashed and printed freely, so it holds a `Symbol`: the bare expression.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from fxkit.errors import UnsupportedError

# An attribute of a torch `ShapeEnv`: symbol of torch → the name that we show.
NAMES = "fxkit_symbol_names"

SYM_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Symbol:
    """A number known as an expression, such as `2*s0+1`, or `u0` for one that the data decide.

    Two are equal when their expressions are. Arithmetic gives expressions; order is not known.

    Args:
        expression: A sympy expression.
        node: The `SymNode` of torch that it was read from, if there is one.
        kind: `int`, `float` or `bool`.
    """

    __slots__ = ("expression", "kind", "node")

    def __init__(self, expression: Any, node: Any = None, kind: type = int) -> None:
        self.expression = expression
        self.node = node
        self.kind = kind

    @property
    def is_data_dependent(self) -> bool:
        """Whether the numbers in a tensor decide it, such as how many `nonzero` finds."""
        return any(is_data_symbol(str(symbol)) for symbol in self.expression.free_symbols)

    def __str__(self) -> str:
        return str(self.expression).replace(" ", "")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Symbol):
            return self.expression == other.expression
        return False

    def __hash__(self) -> int:
        return hash(self.expression)

    def __mul__(self, other: Any) -> Any:
        return _number(self.expression * _expression(other), self.kind)

    def __add__(self, other: Any) -> Any:
        return _number(self.expression + _expression(other), self.kind)

    def __sub__(self, other: Any) -> Any:
        return _number(self.expression - _expression(other), self.kind)

    def __rsub__(self, other: Any) -> Any:
        return _number(_expression(other) - self.expression, self.kind)

    def __neg__(self) -> Any:
        return _number(-self.expression, self.kind)

    __rmul__ = __mul__
    __radd__ = __add__

    def _unknown(self, *_: object) -> Any:
        raise UnsupportedError(
            f"expected a number, got the expression {self}",
            hint="propagate types without dynamic_shapes, or ask isinstance(size, int) first",
        )

    __lt__ = __le__ = __gt__ = __ge__ = __index__ = __int__ = __float__ = __bool__ = _unknown
    __truediv__ = __floordiv__ = __mod__ = _unknown


def is_data_symbol(name: str) -> bool:
    """Tell whether a symbol of this name stands for what the data decide."""
    return re.fullmatch(r"(u|zuf)\d+", name) is not None


def read_number(value: Any) -> Any:
    """Return what a type records for a number: torch's symbolic ones as a `Symbol` or a number."""
    if not isinstance(value, SYM_TYPES):
        return value
    node = value.node
    expression = node.expr
    names = getattr(node.shape_env, NAMES, None)
    if names:
        expression = expression.xreplace(names)
    return _number(expression, node.pytype, node)


def _number(expression: Any, kind: type, node: Any = None) -> Any:
    if expression.is_number:
        return kind(expression)
    return Symbol(expression, node, kind)


def _expression(value: Any) -> Any:
    return value.expression if isinstance(value, Symbol) else value
