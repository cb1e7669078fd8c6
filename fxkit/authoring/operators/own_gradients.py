"""Gradients that the author of an operator gives, in the place of its derivative."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fxkit.authoring.operators.composed import reference
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.row_values import RowValue
from fxkit.authoring.operators.statements import FunctionReader
from fxkit.authoring.operators.terms import Term, const, number, operand, row
from fxkit.errors import NumericsError, UnsupportedError

# Points at which gradients are compared, and the step of the differences.
_POINTS, _STEP = 512, 1e-5

# The length of rows there.
_ROW = 7

# At so many of them an operator may have a kink within the step.
_KINKS = 0.02


def with_gradient(definition: Definition, function: Callable[..., Any]) -> Definition:
    """Return a definition with gradients that a function of scalars gives.

    Args:
        definition: What the operator computes.
        function: Takes the gradient of each result, then what the operator takes.

    Raises:
        UnsupportedError: When it can't be read, or takes or returns another number of values.
    """
    names = list(inspect.signature(function).parameters)
    wanted = [*definition.grad_names, *(p.name for p in definition.parameters)]
    if len(names) != len(wanted):
        raise UnsupportedError(
            f"expected a gradient of {len(wanted)} parameters, got {len(names)}",
            hint=f"let it take {', '.join(wanted)}",
        )
    numbers = set(definition.numbers)
    rows = (definition.rows or frozenset()) | {
        name for name, wide in zip(definition.grad_names, definition.wide, strict=False) if wide
    }
    leaves = [
        RowValue(row(name), is_given=True)
        if name in rows
        else number(name)
        if name in numbers
        else operand(name)
        for name in wanted
    ]
    found = FunctionReader().read(function, dict(zip(names, leaves, strict=True)))
    values = found if isinstance(found, tuple) else (found,)
    if len(values) != len(definition.tensors):
        raise UnsupportedError(
            f"expected the gradients of {', '.join(definition.tensors)}, got {len(values)} values",
            hint="return one gradient for each tensor, in their order",
        )
    items = [value.item if isinstance(value, RowValue) else value for value in values]
    terms = tuple(v if isinstance(v, Term) else const(float(v)) for v in items)
    return dataclasses.replace(definition, gradients=terms)


def check_gradients(definition: Definition) -> None:
    """Compare the gradients of a definition with central differences of what it computes.

    Raises:
        NumericsError: When they differ at more points than kinks explain.
    """
    if definition.rows is not None:
        _check_rows(definition)
        return
    generator = torch.Generator().manual_seed(0)
    shape = (len(definition.tensors), _POINTS)
    points = torch.randn(shape, dtype=torch.float64, generator=generator) * 2
    grads = torch.randn(
        (len(definition.results), _POINTS), dtype=torch.float64, generator=generator
    )
    for position, name in enumerate(definition.tensors):
        gradient = definition.gradient(name)
        (found,) = reference(gradient, [*grads, *points], definition.numbers)
        step = torch.zeros_like(points)
        step[position] = _STEP
        above = reference(definition, list(points + step), definition.numbers)
        below = reference(definition, list(points - step), definition.numbers)
        slopes = [(a - b) / (2 * _STEP) for a, b in zip(above, below, strict=True)]
        expected = sum(g * slope for g, slope in zip(grads, slopes, strict=True))
        _compare(found, torch.as_tensor(expected), points, definition, name)


def _check_rows(definition: Definition) -> None:
    """Compare the gradients of rows: the slope along random directions with differences."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    rows = definition.rows or frozenset()
    shapes = [(_POINTS, _ROW) if name in rows else (_POINTS,) for name in definition.tensors]
    points = [torch.randn(shape, **options) * 2 for shape in shapes]
    grads = [torch.randn((_POINTS, _ROW)[: 1 + w], **options) for w in definition.wide]
    for position, name in enumerate(definition.tensors):
        (found,) = reference(definition.gradient(name), [*grads, *points], definition.numbers)
        direction = torch.randn(shapes[position], **options)
        above, below = [
            reference(
                definition,
                [p + s * direction if i == position else p for i, p in enumerate(points)],
                definition.numbers,
            )
            for s in (_STEP, -_STEP)
        ]
        changes = [(a - b) / (2 * _STEP) for a, b in zip(above, below, strict=True)]
        expected = sum(_by_row(g * c) for g, c in zip(grads, changes, strict=True))
        first = torch.stack([p.reshape(_POINTS, -1)[:, 0] for p in points])
        _compare(_by_row(found * direction), torch.as_tensor(expected), first, definition, name)


def _by_row(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1) if x.ndim > 1 else x


def _compare(
    found: torch.Tensor,
    expected: torch.Tensor,
    points: torch.Tensor,
    definition: Definition,
    name: str,
) -> None:
    is_near = torch.isclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    is_near |= ~torch.isfinite(expected)
    if (~is_near).double().mean() <= _KINKS:
        return
    worst = int((~is_near).nonzero()[0])
    at = ", ".join(
        f"{operand}={value:.4g}"
        for operand, value in zip(definition.tensors, points[:, worst].tolist(), strict=True)
    )
    raise NumericsError(
        f"expected the gradient of {definition.name} with respect to {name} to be "
        f"{float(expected[worst]):.6g} at {at}, got {float(found[worst]):.6g}",
        hint="correct gradient=, or pass check_gradient=False for one that is to differ",
    )
