"""What functions of Python make of rows."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxkit.authoring.operators.primitives import term, truth
from fxkit.authoring.operators.row_values import (
    RowValue,
    extreme_of,
    is_wide,
    row_length,
    running,
    total_of,
    where_held,
)
from fxkit.authoring.operators.terms import Term, const

# What folds a row: a reduction, and what stands for elements that a condition leaves out.
_FOLDS: dict[Any, tuple[str, float]] = {
    sum: ("add", 0.0),
    math.fsum: ("add", 0.0),
    max: ("max", -math.inf),
    min: ("min", math.inf),
}


def mean(values: Sequence[float]) -> float:
    """Return the mean of a list, as `statistics.mean` does, which is slow to import."""
    return sum(values) / len(values)


# The methods of a row, and the functions of what they fold.
METHODS: dict[str, Callable[..., Any]] = {"sum": sum, "max": max, "min": min, "mean": mean}


def is_of_rows(callee: Any) -> bool:
    """Tell whether rows have a function that is known otherwise, or is written in Python."""
    return callee in (any, all) or _is_mean(callee)


def _is_mean(callee: Any) -> bool:
    home, name = getattr(callee, "__module__", None), getattr(callee, "__name__", None)
    return callee is mean or (home == "statistics" and name in ("mean", "fmean"))


# By what `itertools.accumulate` folds a row up to each element.
_SCANS: dict[Any, str] = {operator.add: "add", max: "max", min: "min"}


def call_of_rows(callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call makes of rows; None where rows have no such function.

    Args:
        callee: The function.
        args: Its arguments, at least one of them a row.
        kwargs: Those that were given by name.
    """
    if callee is zip:
        is_whole = all(isinstance(arg, RowValue) and arg.condition is None for arg in args)
        return RowValue(tuple(arg.item for arg in args)) if is_whole else None
    if callee is itertools.accumulate:
        return _scan(args, kwargs)
    values, *more = args
    if not isinstance(values, RowValue):
        return None
    if callee is sum and len(more) + len(kwargs) == 1 and set(kwargs) <= {"start"}:
        (start,) = (*more, *kwargs.values())
        total, start = call_of_rows(sum, (values,), {}), _number(start)
        return None if total is None or start is None else term("add", start, total)
    if callee in (max, min) and set(kwargs) == {"default"} and not more:
        return _or_default(callee, values, _number(kwargs["default"]))
    if more or kwargs:
        return None
    if _is_mean(callee):
        total = call_of_rows(sum, (values,), {})
        return None if total is None else term("div", total, _count(values))
    if callee in (any, all):
        return _whether(callee, values)
    if callee in (list, tuple):
        return values
    if callee is len:
        return row_length() if values.condition is None else None
    op, otherwise = _FOLDS.get(callee, ("", 0.0))
    item = where_held(values, otherwise) if op else None
    if item is None:
        return None
    return total_of(item) if op == "add" else extreme_of(op, item)


def _scan(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RowValue | None:
    values, *functions = (*args, *kwargs.values())
    op = _SCANS.get(functions[0] if functions else operator.add)
    if op is None or len(functions) > 1 or not set(kwargs) <= {"func"}:
        return None
    is_whole = isinstance(values, RowValue) and values.condition is None
    if not is_whole or not isinstance(values.item, Term) or not is_wide(values.item):
        return None
    return RowValue(running(op, values.item))


def _number(value: Any) -> Term | None:
    if isinstance(value, (bool, int, float)):
        return const(value)
    return value if isinstance(value, Term) else None


def _count(values: RowValue) -> Term:
    """Return how many elements a list has."""
    if values.condition is None:
        return row_length()
    return total_of(term("select", values.condition, const(1), const(0)))


def _whether(callee: Any, values: RowValue) -> Term | None:
    """Return whether any, or all, elements of a list are other than zero."""
    item = where_held(RowValue(values.item), 0.0)
    if item is None:
        return None
    held, is_any = truth(item), callee is any
    if values.condition is not None:
        left_out = values.condition if is_any else term("not", values.condition)
        held = term("and" if is_any else "or", left_out, held)
    found = term("select", held, const(1), const(0))
    return truth(extreme_of("max" if is_any else "min", found))


def _or_default(callee: Any, values: RowValue, default: Term | None) -> Any:
    """Return the largest or smallest element, or a default where the list has none."""
    found = call_of_rows(callee, (values,), {})
    if values.condition is None or found is None or default is None:
        return None if default is None else found
    return term("select", truth(_count(values)), found, default)


def mapped(
    function: Callable[[tuple[Any, ...]], Any], values: Sequence[Any]
) -> RowValue | tuple[Any, ...] | None:
    """Return what `map` makes of rows, or of tuples; None where it has no place for them.

    Args:
        function: Takes the items of one place.
        values: Rows, or tuples.
    """
    if values and all(isinstance(value, tuple) for value in values):
        return tuple(function(items) for items in zip(*values, strict=False))
    if not values or not all(isinstance(value, RowValue) for value in values):
        return None
    conditions = {value.condition for value in values}
    if len(values) > 1 and conditions != {None}:
        return None
    return RowValue(function(tuple(value.item for value in values)), conditions.pop())
