"""What functions of Python make of rows."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any

from fxkit.authoring.operators.row_values import (
    RowValue,
    extreme_of,
    is_wide,
    row_length,
    running,
    total_of,
    where_held,
)
from fxkit.authoring.operators.terms import Term

# What folds a row: a reduction, and what stands for elements that a condition leaves out.
_FOLDS: dict[Any, tuple[str, float]] = {
    sum: ("add", 0.0),
    math.fsum: ("add", 0.0),
    max: ("max", -math.inf),
    min: ("min", math.inf),
}

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
    if len(args) != 1 or kwargs:
        return None
    (values,) = args
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
