"""Rows of tensors while a function is read: what stands for a list of numbers of unknown length."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from fxkit.authoring.operators.primitives import term
from fxkit.authoring.operators.terms import ROW, Term, const, in_order, number

# The number of elements of a row, among the numeric parameters of an operator.
LENGTH = "length()"


@dataclass(frozen=True)
class RowValue:
    """A list with one item for each element of a row.

    Attributes:
        item: The item at any place: a term, a number, or a tuple of these.
        condition: Where the list has the item; None for everywhere.
        is_given: Whether it is a parameter, which has the methods of `RowList`.
    """

    item: Any
    condition: Term | None = None
    is_given: bool = False


@dataclass(frozen=True)
class RowMethod:
    """A method of a row that is a parameter, before it is called."""

    name: str
    row: RowValue


_widths: weakref.WeakKeyDictionary[Term, bool] = weakref.WeakKeyDictionary()


def is_wide(found: Term) -> bool:
    """Tell whether a term has a value for each element of a row, rather than one a row."""
    if found not in _widths:
        for one in in_order([found]):
            if one not in _widths:
                is_reduced = one.op.startswith("reduce_")
                varies = any(_widths[operand] for operand in one.operands)
                _widths[one] = one.op == ROW or (varies and not is_reduced)
    return _widths[found]


def row_length() -> Term:
    """Return the number of elements of a row."""
    return number(LENGTH)


def total_of(found: Term) -> Term:
    """Return the sum of a term along the row."""
    if is_wide(found):
        return term("reduce_add", found)
    return term("mul", found, row_length())


def extreme_of(op: str, found: Term) -> Term:
    """Return the largest or smallest value of a term along the row; `op` is `max` or `min`."""
    return term(f"reduce_{op}", found) if is_wide(found) else found


def running(op: str, found: Term) -> Term:
    """Return, for each element of a row, what folds it with all before it: a scan.

    Args:
        op: `add`, `max` or `min`.
        found: A term with a value for each element.
    """
    return term(f"scan_{op}", found)


def widened(found: Term, row: Term) -> Term:
    """Return a term with a value for each element of a row."""
    return found if is_wide(found) else term("row_wide", found, row)


def where_held(row: RowValue, otherwise: float) -> Term | None:
    """Return the items of a row, with a number in the place of those that the list lacks."""
    item = row.item if isinstance(row.item, Term) else None
    if item is None and isinstance(row.item, (bool, int, float)):
        item = const(row.item)
    if item is None or row.condition is None:
        return item
    return term("select", row.condition, item, const(otherwise))
