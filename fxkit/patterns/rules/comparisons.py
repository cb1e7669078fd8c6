"""Negated comparisons. A NaN makes every order false, so only integers may be turned around."""

from __future__ import annotations

import torch

from fxkit.ir.types import TensorType
from fxkit.patterns.conditions import UNKNOWN
from fxkit.patterns.language import any_of
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule


def _are_integers(match: Match) -> bool | str:
    for name in ("x", "y"):
        known = match.type(name)
        if not isinstance(known, (TensorType, int, float)):
            return UNKNOWN
        if isinstance(known, float):
            return f"{known} is no integer"
        if isinstance(known, TensorType) and (
            known.dtype.is_floating_point or known.dtype.is_complex
        ):
            return f"{known} may be NaN, which every comparison denies"
    return True


def _negated(value):
    return any_of(torch.logical_not, torch.bitwise_not)(value)


@rule(at=("aten.logical_not", "aten.bitwise_not"))
def negated_equal(x, y):
    """What is not equal is unequal, also for NaN.

    Rewrites:
        torch.logical_not(torch.eq(x, y))  →  torch.ne(x, y)
    """
    return _negated(torch.eq(x, y)), torch.ne(x, y)


@rule(at=("aten.logical_not", "aten.bitwise_not"))
def negated_not_equal(x, y):
    """What is not unequal is equal, also for NaN.

    Rewrites:
        torch.logical_not(torch.ne(x, y))  →  torch.eq(x, y)
    """
    return _negated(torch.ne(x, y)), torch.eq(x, y)


@rule(at=("aten.logical_not", "aten.bitwise_not"), where=_are_integers)
def negated_less(x, y):
    """An integer that is not less is greater or equal.

    Rewrites:
        torch.logical_not(torch.lt(x, y))  →  torch.ge(x, y)
    """
    return _negated(torch.lt(x, y)), torch.ge(x, y)


@rule(at=("aten.logical_not", "aten.bitwise_not"), where=_are_integers)
def negated_less_or_equal(x, y):
    """An integer that is not less or equal is greater.

    Rewrites:
        torch.logical_not(torch.le(x, y))  →  torch.gt(x, y)
    """
    return _negated(torch.le(x, y)), torch.gt(x, y)


@rule(at=("aten.logical_not", "aten.bitwise_not"), where=_are_integers)
def negated_greater(x, y):
    """An integer that is not greater is less or equal.

    Rewrites:
        torch.logical_not(torch.gt(x, y))  →  torch.le(x, y)
    """
    return _negated(torch.gt(x, y)), torch.le(x, y)


@rule(at=("aten.logical_not", "aten.bitwise_not"), where=_are_integers)
def negated_greater_or_equal(x, y):
    """An integer that is not greater or equal is less.

    Rewrites:
        torch.logical_not(torch.ge(x, y))  →  torch.lt(x, y)
    """
    return _negated(torch.ge(x, y)), torch.lt(x, y)
