"""Arithmetic that cancels, exactly, for every number including NaN, Inf and the sign of zero."""

from __future__ import annotations

import math

import torch

from fxkit.patterns.conditions import (
    every,
    floating,
    is_number,
    keeps_type,
    signed,
    unpromoted,
)
from fxkit.patterns.language import any_of, computed, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule


@rule(at="aten.mul", where=keeps_type)
def multiply_by_one(x):
    """Multiplying by one changes nothing.

    Rewrites:
        x * 1  →  x
    """
    return x * 1, x


@rule(at="aten.div", where=keeps_type)
def divide_by_one(x):
    """Dividing by one changes nothing; an integer would become floating point.

    Rewrites:
        x / 1  →  x
    """
    return x / 1, x


@rule(at="aten.sub", where=keeps_type)
def subtract_zero(x):
    """Subtracting zero changes nothing, not even the sign of zero (adding zero would).

    Rewrites:
        x - 0  →  x
    """
    return x - 0, x


@rule(at="aten.pow", where=keeps_type)
def power_of_one(x):
    """The first power is the number.

    Rewrites:
        x ** 1  →  x
    """
    return x**1, x


@rule(at=("aten.square", "aten.pow"), where=every(unpromoted("x")))
def square_as_product(x):
    """A square is a product, which every backend has as one instruction; of bool, it is another.

    Rewrites:
        torch.square(x)  →  x * x
    """
    return any_of(torch.square, lambda v: v**2)(x), x * x


@rule(at="aten.neg", where=keeps_type)
def double_negation(x):
    """Two negations cancel.

    Rewrites:
        torch.neg(torch.neg(x))  →  x
    """
    return torch.neg(torch.neg(x)), x


@rule(at="aten.add", where=unpromoted("x", "y"))
def add_negated(x, y):
    """Adding the negative is subtracting.

    Rewrites:
        x + torch.neg(y)  →  x - y
    """
    return x + torch.neg(y), x - y


@rule(at="aten.sub", where=unpromoted("x", "y"))
def subtract_negated(x, y):
    """Subtracting the negative is adding.

    Rewrites:
        x - torch.neg(y)  →  x + y
    """
    return x - torch.neg(y), x + y


@rule(at="aten.mul", where=unpromoted("x", "y"), benefit=2)
def product_of_negations(x, y):
    """Two negative signs of a product cancel.

    Rewrites:
        torch.neg(x) * torch.neg(y)  →  x * y
    """
    return torch.neg(x) * torch.neg(y), x * y


@rule(at="aten.div", where=floating("x", "y"))
def quotient_of_negations(x, y):
    """Two negative signs of a quotient cancel.

    Rewrites:
        torch.neg(x) / torch.neg(y)  →  x / y
    """
    return torch.neg(x) / torch.neg(y), x / y


@rule(at="aten.abs", where=signed("x"))
def absolute_of_negation(x):
    """The absolute value does not see the sign; that of an unsigned integer would wrap around.

    Rewrites:
        torch.abs(torch.neg(x))  →  torch.abs(x)
    """
    return torch.abs(torch.neg(x)), torch.abs(x)


@rule(at="aten.abs")
def absolute_of_absolute(x):
    """A second absolute value changes nothing.

    Rewrites:
        torch.abs(torch.abs(x))  →  torch.abs(x)
    """
    return torch.abs(torch.abs(x)), torch.abs(x)


@rule(at="aten.abs")
def absolute_of_positive(x):
    """What is never negative is its own absolute value.

    Rewrites:
        torch.abs(torch.sigmoid(x))  →  torch.sigmoid(x)
    """
    positive = any_of(torch.sigmoid, torch.exp)(x)
    return torch.abs(positive), positive


def _keeps_signed_type(match: Match) -> bool | str:
    verdict = keeps_type(match)
    return signed("x")(match) if verdict is True else verdict


@rule(at=("aten.mul", "aten.div"), where=_keeps_signed_type)
def multiply_by_minus_one(x):
    """A product or quotient with minus one is the negative.

    Rewrites:
        x * -1  →  torch.neg(x)
    """
    return any_of(lambda v: v * -1, lambda v: v / -1)(x), torch.neg(x)


@rule(
    at="aten.mul",
    where=[floating("x"), {"c": operand(value=is_number)}],
    samples=({"c": 0.75}, {"c": -2}, {"c": 0}),
)
def scale_of_negation(x, c):
    """A constant factor takes the sign.

    Rewrites:
        torch.neg(x) * c  →  x * -c
    """
    return torch.neg(x) * c, x * computed(lambda c: -float(c))(c)


@rule(
    at="aten.neg",
    where=[floating("x"), {"c": operand(value=is_number)}],
    samples=({"c": 0.75}, {"c": -2}, {"c": 0}),
)
def negation_of_scale(x, c):
    """A constant factor takes the sign.

    Rewrites:
        torch.neg(x * c)  →  x * -c
    """
    return torch.neg(x * c), x * computed(lambda c: -float(c))(c)


def _is_power_of_two(value: object) -> bool:
    """Accept powers whose inverse is a normal number in float16 too; one has a rule of its own."""
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        return False
    mantissa, exponent = math.frexp(abs(float(value)))  # type: ignore[arg-type]
    return mantissa == 0.5 and abs(exponent) <= 14 and abs(float(value)) != 1  # type: ignore[arg-type]


@rule(
    at="aten.div",
    where=[floating("x"), {"c": operand(value=_is_power_of_two)}],
    samples=({"c": 8.0}, {"c": -4}, {"c": 0.5}, {"c": 8192}),
)
def divide_by_power_of_two(x, c):
    """The inverse of a power of two is exact, and multiplying is faster than dividing.

    Rewrites:
        x / c  →  x * (1 / c)
    """
    return x / c, x * computed(lambda c: 1.0 / c)(c)


@rule(at="aten.where", where=[keeps_type, {"c": operand(dtype=torch.bool)}])
def where_of_same(c, x):
    """A choice between a value and itself.

    Rewrites:
        torch.where(c, x, x)  →  x
    """
    return torch.where(c, x, x), x


@rule(at=("aten.bitwise_not", "aten.logical_not"), where=keeps_type)
def double_not(x):
    """Two negations cancel, of a condition or of bits.

    Rewrites:
        torch.bitwise_not(torch.bitwise_not(x))  →  x
    """
    twice = any_of(
        lambda v: torch.bitwise_not(torch.bitwise_not(v)),
        lambda v: torch.logical_not(torch.logical_not(v)),
    )
    return twice(x), x
