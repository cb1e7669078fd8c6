"""Activations that were spelled out by hand, back to the operator they are."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fxkit.ir.types import TensorType
from fxkit.patterns.conditions import (
    every,
    floating,
    is_number,
    keeps_type,
    no_gradient,
)
from fxkit.patterns.language import any_of, computed, operand, optional
from fxkit.patterns.match_results import Match
from fxkit.patterns.rewriting import rule


def _is_near(number: float):
    """Accept a constant that models write with fewer digits than there are."""
    return operand(
        value=lambda value: type(value) is float and math.isclose(value, number, rel_tol=1e-6)
    )


def _is_precise(name: str, number: float):
    """Accept rounded constants, but not where every digit of them shows in the result."""

    def accept(match: Match) -> bool | str:
        known, value = match.type("x"), match.bindings.get(name)
        if not isinstance(known, TensorType) or known.dtype != torch.float64 or value is None:
            return True
        exact = math.isclose(value, number, rel_tol=1e-15)
        return True if exact else f"{value} has too few digits for {known}"

    return accept


def _halved(x, other):
    """0.5 * x * other, in the orders in which people write it."""
    return any_of(
        lambda v, w: v * 0.5 * w,
        lambda v, w: v * (0.5 * w),
        lambda v, w: 0.5 * (v * w),
    )(x, other)


_ROOT = {"root": _is_near(math.sqrt(2.0)), "inverse": _is_near(math.sqrt(0.5))}


# torch's float32 kernel of gelu gives NaN at +Inf on some CPUs, where the long form gives +Inf.
@rule(
    at="aten.mul",
    where=[
        floating("x"),
        _is_precise("root", math.sqrt(2.0)),
        _is_precise("inverse", math.sqrt(0.5)),
        _ROOT,
    ],
    exact=False,
    finite_only=True,
    benefit=4,
    samples=({"root": math.sqrt(2.0), "inverse": math.sqrt(0.5)},),
)
def gelu_by_erf(x, root, inverse):
    """The exact GELU, as many models write it; `root` is √2, `inverse` its inverse.

    Rewrites:
        x * 0.5 * (1.0 + torch.erf(x / root))  →  F.gelu(x)

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, equation 1.
    """
    scaled = any_of(lambda v: v / root, lambda v: v * inverse)(x)
    return _halved(x, 1.0 + torch.erf(scaled)), F.gelu(x)


_TANH_SCALE = math.sqrt(2.0 / math.pi)


@rule(
    at="aten.mul",
    where=[floating("x"), _is_precise("c", _TANH_SCALE), {"c": _is_near(_TANH_SCALE)}],
    exact=False,
    benefit=4,
    samples=({"c": _TANH_SCALE},),
)
def gelu_by_tanh(x, c):
    """The tanh approximation of GELU, as GPT-2 writes it; `c` is √(2/π).

    Rewrites:
        0.5 * x * (1.0 + torch.tanh(c * (x + 0.044715 * x**3)))  →  F.gelu(x, approximate="tanh")

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, section 2.
    """
    cube = any_of(lambda v: 0.044715 * v**3.0, lambda v: 0.044715 * v * v * v,
                  lambda v: 0.044715 * (v * v * v))(x)  # fmt: skip
    inner = any_of(lambda v: c * (v + cube), lambda v: v * c * (1.0 + 0.044715 * v * v))(x)
    return _halved(x, 1.0 + torch.tanh(inner)), F.gelu(x, approximate="tanh")


@rule(at=("aten.mul", "aten.div"), where=floating("x"), exact=False, benefit=3)
def silu_by_sigmoid(x):
    """SiLU, also called swish.

    Rewrites:
        x * torch.sigmoid(x)  →  F.silu(x)
    """
    return any_of(
        lambda v: v * torch.sigmoid(v), lambda v: v / (1 + torch.exp(torch.neg(v)))
    )(x), F.silu(x)  # fmt: skip


# The operator works its derivative out from its rounded result, by which units that are nearly
# saturated lose it: s * (1 - s) is 0 in bfloat16 from 6.3 on, where by hand it is 0.002.
_NEARER_BY_HAND = "is nearer to the true one by hand where the function saturates"


@rule(
    at=("aten.div", "aten.reciprocal"),
    where=every(floating("x"), no_gradient("x", why=_NEARER_BY_HAND)),
    exact=False,
    benefit=2,
)
def sigmoid_by_exp(x):
    """The logistic function written out, where no gradient is wanted.

    Rewrites:
        1 / (1 + torch.exp(-x))  →  torch.sigmoid(x)
    """
    return any_of(
        lambda v: 1 / (1 + torch.exp(-v)), lambda v: torch.reciprocal(1 + torch.exp(-v))
    )(x), torch.sigmoid(x)  # fmt: skip


@rule(at=("aten.log", "aten.log1p"), where=floating("x"), exact=False, benefit=3)
def softplus_by_log(x):
    """Softplus written out, which overflows where the operator does not.

    Rewrites:
        torch.log(1 + torch.exp(x))  →  F.softplus(x)
    """
    power = torch.exp(x)
    return any_of(lambda v: torch.log(1 + v), torch.log1p)(power), F.softplus(x)


@rule(at="aten.mul", where=floating("x"), exact=False, benefit=3)
def mish_by_softplus(x):
    """Mish written out.

    Rewrites:
        x * torch.tanh(F.softplus(x))  →  F.mish(x)

    Source: Misra, Mish: A Self Regularized Non-Monotonic Activation Function.
    """
    return x * torch.tanh(F.softplus(x)), F.mish(x)


# Of -Inf the product is NaN; at zero and below it the sign of zero differs.
@rule(
    at="aten.mul", where=every(floating("x"), keeps_type), exact=False, finite_only=True, benefit=2
)
def relu_by_mask(x):
    """A relu as a product with where the operand is positive.

    Rewrites:
        x * (x > 0)  →  torch.relu(x)
    """
    positive = x > 0
    return any_of(lambda v: v * positive, lambda v: v * positive.to(dtype=torch.float32))(
        x
    ), torch.relu(x)


# At zero, maximum shares the gradient among both operands.
@rule(at=("aten.maximum", "aten.max"), where=[no_gradient("x"), floating("x")], exact=False)
def relu_by_maximum(x):
    """A relu as the larger one of the operand and zeros.

    Rewrites:
        torch.maximum(x, torch.zeros_like(x))  →  torch.relu(x)
    """
    return any_of(torch.maximum, torch.max)(x, torch.zeros_like(x)), torch.relu(x)


@rule(
    at="aten.where",
    where=[floating("x"), {"slope": operand(value=is_number)}],
    benefit=2,
    samples=({"slope": 0.25}, {"slope": -0.5}),
)
def leaky_relu_by_choice(x, slope):
    """A leaky relu as a choice; NaN takes the second branch, and stays NaN, in both.

    Rewrites:
        torch.where(x > 0, x, x * slope)  →  F.leaky_relu(x, slope)
    """
    return torch.where(x > 0, x, x * slope), F.leaky_relu(x, slope)


@rule(
    at="aten.where",
    where=[floating("x"), {"alpha": operand(value=is_number)}],
    exact=False,
    benefit=3,
    samples=({"alpha": 1.5},),
)
def elu_by_choice(x, alpha):
    """An exponential linear unit as a choice, whose gradient is NaN for large operands.

    Rewrites:
        torch.where(x > 0, x, alpha * (torch.exp(x) - 1))  →  F.elu(x, alpha)
    """
    below = any_of(lambda v: torch.exp(v) - 1, torch.expm1)(x)
    scaled = optional(lambda v: alpha * v)(below)
    factor = computed(lambda alpha: 1.0 if alpha is None else alpha)(alpha)
    return torch.where(x > 0, x, scaled), F.elu(x, factor)


def _three_up(x):
    """relu6(x + 3), in the ways that people bound it."""
    return any_of(
        F.relu6, lambda v: F.hardtanh(v, 0.0, 6.0), lambda v: torch.clamp(v, 0, 6)
    )(x + 3)  # fmt: skip


@rule(
    at=("aten.div", "aten.mul"),
    where=every(floating("x"), no_gradient("x")),
    exact=False,
    benefit=2,
)
def hard_sigmoid_by_bounds(x):
    """The piecewise linear sigmoid; `clamp` has another gradient at its bounds.

    Rewrites:
        F.relu6(x + 3) / 6  →  F.hardsigmoid(x)
    """
    return any_of(lambda v: v / 6, lambda v: v * (1 / 6))(_three_up(x)), F.hardsigmoid(x)


@rule(
    at=("aten.div", "aten.mul"),
    where=every(floating("x"), no_gradient("x")),
    exact=False,
    benefit=3,
)
def hard_swish_by_bounds(x):
    """The piecewise linear swish, as MobileNet v3 writes it.

    Rewrites:
        x * F.relu6(x + 3) / 6  →  F.hardswish(x)

    Source: Howard et al., Searching for MobileNetV3, section 5.2.
    """
    bounded = _three_up(x)
    sixth = any_of(lambda v: v / 6, lambda v: v * (1 / 6))
    return any_of(
        lambda v: sixth(v * bounded), lambda v: v * sixth(bounded), lambda v: v * F.hardsigmoid(v)
    )(x), F.hardswish(x)  # fmt: skip
