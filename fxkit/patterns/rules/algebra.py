"""Arithmetic that cancels, exactly, for every number including NaN, Inf and the sign of zero."""

from __future__ import annotations

import torch

from fxkit.ir.types import TensorType
from fxkit.patterns.matching import Match
from fxkit.patterns.rewriting import rule


def _keeps_type(match: Match) -> bool | str:
    """Accept when the operand has the very type of the result: no promotion, no broadcasting."""
    before, after = match.type("x"), _result(match)
    if not isinstance(before, TensorType) or after is None:
        return "the types are not known; call propagate_types first"
    if before.dtype != after.dtype:
        return f"the operation turns {before} into {after}"
    if before.shape != after.shape:
        return f"the operation broadcasts {before} to {after}"
    return True if before.stride == after.stride else "the operation changes the memory layout"


def _result(match: Match) -> TensorType | None:
    from fxkit.ir.types import type_of

    known = type_of(match.root)
    return known if isinstance(known, TensorType) else None


@rule(where=_keeps_type)
def multiply_by_one(x):
    """Multiplying by one changes nothing.

    Rewrites:
        x * 1  →  x
    """
    return x * 1, x


@rule(where=_keeps_type)
def divide_by_one(x):
    """Dividing by one changes nothing; an integer would become floating point.

    Rewrites:
        x / 1  →  x
    """
    return x / 1, x


@rule(where=_keeps_type)
def subtract_zero(x):
    """Subtracting zero changes nothing, not even the sign of zero (adding zero would).

    Rewrites:
        x - 0  →  x
    """
    return x - 0, x


@rule(where=_keeps_type)
def power_of_one(x):
    """The first power is the number.

    Rewrites:
        x ** 1  →  x
    """
    return x**1, x


@rule
def square_as_product(x):
    """A square is a product, which every backend has as one instruction.

    Rewrites:
        torch.square(x)  →  x * x
    """
    return torch.square(x), x * x


@rule(where=_keeps_type)
def double_negation(x):
    """Two negations cancel.

    Rewrites:
        torch.neg(torch.neg(x))  →  x
    """
    return torch.neg(torch.neg(x)), x


@rule
def relu_of_relu(x):
    """A second relu has nothing left to cut.

    Rewrites:
        torch.relu(torch.relu(x))  →  torch.relu(x)
    """
    return torch.relu(torch.relu(x)), torch.relu(x)


@rule
def absolute_of_absolute(x):
    """A second absolute value changes nothing.

    Rewrites:
        torch.abs(torch.abs(x))  →  torch.abs(x)
    """
    return torch.abs(torch.abs(x)), torch.abs(x)
