"""Reading a Python function of scalars as the definition of an operator."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable
from typing import Any

from fxkit.authoring.operators.definition import Definition, Parameter
from fxkit.authoring.operators.kernel_form import RESERVED
from fxkit.authoring.operators.row_values import RowValue, widened
from fxkit.authoring.operators.statements import FunctionReader
from fxkit.authoring.operators.terms import Term, const, in_order, number, operand, row
from fxkit.errors import UnsupportedError

# Larger expressions take a compiler too long.
_MAX_TERMS = 20_000


def definition_of(function: Callable[..., Any], name: str) -> Definition:
    """Return what an operator computes for one element.

    Raises:
        UnsupportedError: When the function can't be read; the message has line and remedy.
    """
    parameters = _checked(function, name)
    arguments = {p.name: operand(p.name) if p.is_tensor else number(p.name) for p in parameters}
    found = FunctionReader().read(function, arguments)
    values = found if isinstance(found, tuple) else (found,)
    for value in values:
        if not hasattr(value, "op") and not isinstance(value, (bool, int, float)):
            raise UnsupportedError(
                f"expected {name} to return scalars, got {type(value).__name__}",
                source=_place(function),
                hint="return a number, or a tuple of numbers",
            )
    results = tuple(v if hasattr(v, "op") else const(v) for v in values)
    _check_size(results, function)
    return Definition(name, parameters, results, isinstance(found, tuple))


def row_definition_of(function: Callable[..., Any], name: str) -> Definition:
    """Return what an operator on rows computes: a function of lists.

    Raises:
        UnsupportedError: When the function can't be read; the message has line and remedy.
    """
    parameters = _checked(function, name)
    known = inspect.signature(function).parameters
    rows = [p.name for p in parameters if p.is_tensor and not _is_number(known[p.name])]
    if not rows:
        raise UnsupportedError(
            "expected at least one parameter that is a row, got numbers",
            source=_place(function),
            hint="leave out the annotation of what is a list",
        )
    arguments: dict[str, Any] = {p.name: number(p.name) for p in parameters if not p.is_tensor}
    arguments |= {p.name: operand(p.name) for p in parameters if p.is_tensor}
    arguments |= {name: RowValue(row(name), is_given=True) for name in rows}
    found = FunctionReader().read(function, arguments)
    values = found if isinstance(found, tuple) else (found,)
    results = tuple(_row_result(value, row(rows[0]), function) for value in values)
    _check_size(results, function)
    wide = tuple(isinstance(value, RowValue) for value in values)
    is_tuple = isinstance(found, tuple)
    return Definition(name, parameters, results, is_tuple, rows=frozenset(rows), wide=wide)


def _row_result(value: Any, row: Term, function: Callable[..., Any]) -> Term:
    is_list = isinstance(value, RowValue)
    item = value.item if is_list else value
    if isinstance(item, (bool, int, float)):
        item = const(item)
    if not isinstance(item, Term) or (is_list and value.condition is not None):
        raise UnsupportedError(
            f"expected {function.__name__} to return numbers and whole rows of them, got another",
            source=_place(function),
            hint="return [f(x) for x in row], without a condition, or a number",
        )
    return widened(item, row) if is_list else item


def _is_number(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (bool, int, float, "bool", "int", "float")


def _checked(function: Callable[..., Any], name: str) -> tuple[Parameter, ...]:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UnsupportedError(
            f"expected a name for the operator, got {name!r}", hint="pass name= to fxkit.operator"
        )
    if not inspect.isfunction(function):
        raise UnsupportedError(
            f"expected a Python function of scalars, got {type(function).__name__} {name}",
            hint="write it with def; methods and callable objects can't be read",
        )
    return _parameters(function)


def _check_size(results: tuple[Term, ...], function: Callable[..., Any]) -> None:
    terms = len(in_order(results))
    if terms > _MAX_TERMS or not results:
        raise UnsupportedError(
            f"expected an operator of 1 to {_MAX_TERMS} operations, got {terms}",
            source=_place(function),
            hint="make its loops shorter",
        )


def _parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    found = [_parameter(p, function) for p in inspect.signature(function).parameters.values()]
    if not any(parameter.is_tensor for parameter in found):
        raise UnsupportedError(
            "expected at least one parameter without a default, which is a tensor, got none",
            source=_place(function),
            hint="leave out the default of what is a tensor",
        )
    return tuple(found)


def _parameter(parameter: inspect.Parameter, function: Callable[..., Any]) -> Parameter:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise UnsupportedError(
            f"expected parameters with names, got *{parameter.name}",
            source=_place(function),
            hint="an operator has a fixed number of operands: name each",
        )
    if parameter.name in RESERVED:
        raise UnsupportedError(
            f"expected another name than {parameter.name!r} for a parameter",
            source=_place(function),
            hint="rename it: operators have a parameter of that name already",
        )
    is_named = parameter.kind is parameter.KEYWORD_ONLY
    if parameter.default is parameter.empty:
        return Parameter(parameter.name, None, is_named)
    default = parameter.default
    if not isinstance(default, (bool, int, float)) or default != default or abs(default) > 1e300:
        raise UnsupportedError(
            f"expected a finite number as the default of {parameter.name!r}, got {default!r}",
            source=_place(function),
            hint="parameters with defaults are numbers; tensors have none",
        )
    return Parameter(parameter.name, default, is_named)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} in {function.__name__}"
