"""What names stand for while a function is read: terms, numbers, tuples, functions, modules."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fxkit.authoring.operators.primitives import term
from fxkit.authoring.operators.row_values import RowValue
from fxkit.authoring.operators.source import FunctionSource
from fxkit.authoring.operators.terms import CONST, Term, const
from fxkit.lower.loop_ir.bits import Bits


@dataclass(frozen=True)
class Unset:
    """Stands for a name that is set on some paths only."""

    name: str


Names = Mapping[str, Any]


@dataclass(frozen=True)
class LocalFunction:
    """A lambda that is an argument of a call.

    Attributes:
        arity: How many arguments it takes.
        read: Returns what it computes of values.
    """

    arity: int
    read: Callable[[tuple[Any, ...]], Any]


def is_number(value: object) -> bool:
    """Tell whether a value is a Python number that is known when the function is read."""
    return isinstance(value, (bool, int, float))


def plain(value: Any) -> Any:
    """Return a constant as the number that it is, and anything else as it is."""
    return value.value if isinstance(value, Term) and value.op == CONST else value


def as_term(value: Any, source: FunctionSource, node: ast.AST) -> Term:
    """Return a value as a term, or refuse it."""
    if isinstance(value, Term):
        return value
    if is_number(value):
        return const(value)
    if isinstance(value, RowValue):
        raise source.refusal(
            node,
            "expected a number, got a row",
            "compute with its elements: [2 * x for x in row], or sum(x for x in row)",
        )
    kind = "a lambda" if isinstance(value, LocalFunction) else type(value).__name__
    raise source.refusal(
        node,
        f"expected a scalar, got {kind}",
        "compute with numbers: tuples, strings and other objects have no place in a kernel",
    )


def chosen(
    condition: Term, a: Any, b: Any, source: FunctionSource, node: ast.AST, name: str
) -> Any:
    """Return what a name stands for where two paths meet."""
    if a is b or (is_number(a) and is_number(b) and Bits(a) == Bits(b)):
        return a
    if isinstance(a, Unset) or isinstance(b, Unset):
        return Unset(name)
    if isinstance(a, RowValue) and isinstance(b, RowValue) and a.condition is b.condition:
        item = chosen(condition, a.item, b.item, source, node, name)
        return RowValue(item, a.condition)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        pairs = zip(a, b, strict=True)
        return tuple(chosen(condition, x, y, source, node, name) for x, y in pairs)
    if not (isinstance(a, Term) or is_number(a)) or not (isinstance(b, Term) or is_number(b)):
        raise source.refusal(
            node,
            f"expected scalars for {name!r} on both paths, got {type(a).__name__} and "
            f"{type(b).__name__}",
            "let both paths set it to a number, or to tuples of the same length",
        )
    return term("select", condition, as_term(a, source, node), as_term(b, source, node))


def joined(
    condition: Term, a: Names, b: Names, source: FunctionSource, node: ast.AST
) -> dict[str, Any]:
    """Return the names where two paths meet; `condition` holds on the first."""
    found: dict[str, Any] = {}
    for name in {**a, **b}:
        ours, other = a.get(name, Unset(name)), b.get(name, Unset(name))
        found[name] = chosen(condition, ours, other, source, node, name)
    return found
