"""Scalar expressions: what an authored operator computes for one element, before it has dtypes.

A term is an operand, a number or a primitive of other terms. Equal terms are one object (hash
consing), so that an expression is a graph and not a tree, and what is computed twice in a program's
text is computed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from fxkit.lower.loop_ir.bits import Bits, Number

OPERAND, ROW, NUMBER, CONST = "operand", "row", "number", "const"


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Term:
    """A value of a scalar expression; terms are made by `operand`, `number`, `const` and `term`.

    Attributes:
        op: `operand`, `row`, `number`, `const`, or the name of a primitive.
        operands: What the primitive is applied to.
        value: The name of an operand or of a numeric parameter; the number of a constant.
    """

    op: str
    operands: tuple[Term, ...] = ()
    value: str | Number | None = None

    def __repr__(self) -> str:
        # Not of its operands: what they share would be written again and again.
        return f"<{self.op}{'' if self.value is None else f' {self.value}'}>"


_known: weakref.WeakValueDictionary[object, Term] = weakref.WeakValueDictionary()


def _made(op: str, operands: tuple[Term, ...], value: str | Number | None) -> Term:
    # Operands live as long as the term that is kept under their addresses.
    key = (
        op,
        tuple(map(id, operands)),
        value if isinstance(value, str) else Bits(0 if value is None else value),
    )
    found = _known.get(key)
    if found is None:
        found = Term(op, operands, value)
        _known[key] = found
    return found


def operand(name: str) -> Term:
    """Return a tensor operand."""
    return _made(OPERAND, (), name)


def row(name: str) -> Term:
    """Return an element of a row of a tensor operand, one for each place in the row."""
    return _made(ROW, (), name)


def number(name: str) -> Term:
    """Return a numeric parameter, which is a Python number when the operator is called."""
    return _made(NUMBER, (), name)


def const(value: Number) -> Term:
    """Return a constant."""
    return _made(CONST, (), value)


def apply(op: str, *operands: Term) -> Term:
    """Return a primitive of terms, as it is; see `primitives.term` for one that is simplified."""
    return _made(op, operands, None)


def is_const(found: Term, value: Number | None = None) -> bool:
    """Tell whether a term is a constant, or a certain one."""
    return found.op == CONST and (value is None or found.value == value)


def in_order(results: Iterable[Term]) -> list[Term]:
    """Return all terms that results are made of, each after its operands."""
    found: dict[Term, None] = {}
    stack = [(result, False) for result in reversed(list(results))]
    while stack:
        term, is_ready = stack.pop()
        if term in found:
            continue
        if is_ready or not term.operands:
            found[term] = None
            continue
        stack.append((term, True))
        stack.extend((operand, False) for operand in reversed(term.operands))
    return list(found)
