"""Powers, roots, exponentials and logarithms, to the function that says it in one step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxkit.patterns.conditions import (
    contiguous,
    every,
    floating,
    is_number,
    keeps_type,
    no_gradient,
    same_shape,
    signed,
)
from fxkit.patterns.language import any_of, computed, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule


# Minus zero stays minus zero, where the sum would have made it zero.
@rule(at="aten.add", where=keeps_type, exact=False)
def add_zero(x):
    """Adding zero changes nothing but the sign of zero; `sum` of Python begins with it.

    Rewrites:
        x + 0  →  x
    """
    return x + 0, x


# Equal numbers give a zero of the other sign.
@rule(at="aten.neg", where=signed("x", "y"), exact=False)
def negated_difference(x, y):
    """The negative of a difference is the difference the other way round.

    Rewrites:
        torch.neg(x - y)  →  y - x
    """
    return torch.neg(x - y), y - x


def _is_moderate(match: Match) -> bool | str:
    """The product must be a normal number in every dtype."""
    product = abs(match["a"] * match["b"])
    return True if 2**-14 <= product <= 2**15 else f"the product is {match['a'] * match['b']}"


@rule(
    at="aten.mul",
    where=[
        floating("x"),
        _is_moderate,
        {"a": operand(value=is_number), "b": operand(value=is_number)},
    ],
    exact=False,
    samples=({"a": 0.7, "b": 3.0}, {"a": -3, "b": 5}),
)
def scale_of_scale(x, a, b):
    """Two constant factors are one, which rounds once.

    Rewrites:
        x * a * b  →  x * (a * b)
    """
    return x * a * b, x * computed(lambda a, b: float(a * b))(a, b)


# Dividing costs more than multiplying, so not where the divisor is broadcast.
@rule(at="aten.mul", where=every(floating("x", "y"), same_shape("x", "y")), exact=False)
def multiply_by_reciprocal(x, y):
    """A product with the inverse is a quotient, which rounds once.

    Rewrites:
        x * torch.reciprocal(y)  →  x / y
    """
    return x * any_of(torch.reciprocal, lambda v: 1 / v)(y), x / y


@rule(at="aten.pow", where=floating("x"), exact=False)
def square_root_by_power(x):
    """The power of one half is the square root; torch computes it so.

    Rewrites:
        x ** 0.5  →  torch.sqrt(x)
    """
    return x**0.5, torch.sqrt(x)


@rule(at="aten.pow", where=floating("x"), exact=False)
def reciprocal_by_power(x):
    """The power of minus one is the inverse; torch computes it so.

    Rewrites:
        x ** -1  →  torch.reciprocal(x)
    """
    return x**-1, torch.reciprocal(x)


@rule(at=("aten.reciprocal", "aten.div", "aten.pow"), where=floating("x"), exact=False, benefit=2)
def reciprocal_root(x):
    """The inverse of the square root, in all its spellings.

    Rewrites:
        1 / torch.sqrt(x)  →  torch.rsqrt(x)
    """
    root = any_of(torch.sqrt, lambda v: v**0.5)(x)
    inverse = any_of(torch.reciprocal, lambda v: 1 / v, lambda v: v**-1)(root)
    return any_of(lambda _: inverse, lambda v: v**-0.5)(x), torch.rsqrt(x)


# A square that overflows or underflows loses the number, the absolute value does not.
@rule(at="aten.sqrt", where=floating("x"), exact=False, finite_only=True, benefit=2)
def root_of_square(x):
    """The square root of a square is the absolute value.

    Rewrites:
        torch.sqrt(x * x)  →  torch.abs(x)
    """
    return torch.sqrt(any_of(lambda v: v * v, torch.square)(x)), torch.abs(x)


@rule(at=("aten.sub", "aten.add"), where=floating("x"), exact=False)
def exponential_minus_one(x):
    """Near zero the difference cancels; `expm1` keeps its digits.

    Rewrites:
        torch.exp(x) - 1  →  torch.expm1(x)
    """
    return any_of(lambda v: v - 1, lambda v: v + -1)(torch.exp(x)), torch.expm1(x)


@rule(at="aten.log", where=floating("x"), exact=False)
def logarithm_of_one_plus(x):
    """Near zero the sum loses its digits; `log1p` keeps them.

    Rewrites:
        torch.log(1 + x)  →  torch.log1p(x)
    """
    return torch.log(1 + x), torch.log1p(x)


# torch's kernel of logsigmoid makes its result contiguous.
@rule(at="aten.log", where=every(floating("x"), contiguous("x")), exact=False, benefit=2)
def logarithm_of_sigmoid(x):
    """The logarithm of a small probability, without losing it to rounding.

    Rewrites:
        torch.log(torch.sigmoid(x))  →  F.logsigmoid(x)
    """
    return torch.log(torch.sigmoid(x)), F.logsigmoid(x)


@rule(at="aten.sub", where=floating("x"), exact=False)
def complement_of_sigmoid(x):
    """The probability of the opposite, without cancellation.

    Rewrites:
        1 - torch.sigmoid(x)  →  torch.sigmoid(torch.neg(x))
    """
    return 1 - torch.sigmoid(x), torch.sigmoid(torch.neg(x))


# The operator works its derivative out from its rounded result: 1 - t * t, of a t near -1.
_NEARER_BY_HAND = "is nearer to the true one by hand where the function saturates"


@rule(
    at="aten.sub",
    where=every(floating("x"), no_gradient("x", why=_NEARER_BY_HAND)),
    exact=False,
    benefit=2,
)
def hyperbolic_tangent_by_sigmoid(x):
    """The hyperbolic tangent is a sigmoid, stretched; where no gradient is wanted.

    Rewrites:
        2 * torch.sigmoid(2 * x) - 1  →  torch.tanh(x)
    """
    return 2 * torch.sigmoid(2 * x) - 1, torch.tanh(x)


# The general power of a number makes its result contiguous.
@rule(at="aten.pow", where=every(floating("x"), contiguous("x")), exact=False)
def power_of_two(x):
    """Two to a power has a function of its own.

    Rewrites:
        2 ** x  →  torch.exp2(x)
    """
    return 2**x, torch.exp2(x)
