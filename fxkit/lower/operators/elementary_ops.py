"""Elementary functions: exponentials, logarithms, roots, trigonometric and hyperbolic ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.operators.scalar_table import call, const_like, row, select


def _elementary(function: str) -> Callable[..., Ref]:
    def build(self: Ref) -> Ref:
        return call(function, self)

    return build


row("aten.sqrt", tolerance=1)(_elementary("sqrt"))
for _name in ("exp", "log", "tanh", "erf", "sigmoid"):
    row(f"aten.{_name}", tolerance=3)(_elementary(_name))
for _name in (
    "expm1 log1p log2 exp2 sin cos asin acos atan sinh cosh asinh acosh atanh erfc"
).split():
    row(f"aten.{_name}", tolerance=5)(_elementary(_name))


@row("aten.rsqrt", tolerance=1)
def _rsqrt(self: Ref) -> Ref:
    return 1.0 / call("sqrt", self)


# The C library's vector versions of log10, tan and atan2 err more than twice as much as eager's.


@row("aten.log10", tolerance=5)
def _log10(self: Ref) -> Ref:
    if self.dtype != torch.float32:
        return call("log10", self)
    log = call("log", self)
    # Two parts of 1 / ln(10), of one sign, so that infinities stay what they are.
    return call("fma", log, float.fromhex("0x1.bcb7bp-2"), log * float.fromhex("0x1.526e5p-26"))


@row("aten.tan", tolerance=5)
def _tan(self: Ref) -> Ref:
    if self.dtype != torch.float32:
        return call("tan", self)
    return call("sin", self) / call("cos", self)


@row("aten.atan2", tolerance=5)
def _atan2(self: Ref, other: Ref) -> Ref:
    if self.dtype != torch.float32:
        return call("atan2", self, other)
    rise, run = call("abs", self), call("abs", other)
    least, most = call("min", rise, run), call("max", rise, run)
    divisor = select(most.equals(0), const_like(most, 1.0), most)
    is_one = least.equals(divisor)  # also of two infinities
    ratio = select(is_one, const_like(least, 1.0), least / divisor)
    # What the rounded quotient leaves out, times the slope there, about 1 / (1 + ratio^2).
    left = call("fma", -ratio, divisor, least) / divisor
    square = ratio * ratio
    left = select(most < math.inf, left * (0.957 - 0.5 * square), const_like(least, 0.0))
    low = call("fma", square * _atan_rest(square), ratio, left)
    # The angle is one of 0, pi / 2 and pi, more or less the least one: `high` plus `low`.
    is_steep, is_back = rise > run, call("copysign", const_like(other, 1.0), other) < 0
    is_less = is_steep ^ is_back
    high, low = select(is_less, -ratio, ratio), select(is_less, -low, low)
    flat = select(is_back, const_like(high, math.pi), const_like(high, 0.0))
    turn = select(is_steep, const_like(high, math.pi / 2), flat)
    angle = turn + high
    low = (turn - angle) + high + (turn * _PI_REST + low)
    return call("copysign", angle + low, self)


# What the float next to pi leaves out, as a part of it.
_PI_REST = -2.7827534e-8


def _atan_rest(square: Ref) -> Ref:
    """Return (atan(x) - x) / x^3 of the square of an x of at most 1."""
    rest = const_like(square, -0.0017912840703502297)
    for coefficient in (
        0.010903620161116123, -0.031156206503510475, 0.05793443322181702, -0.08401991426944733,
        0.10951638966798782, -0.14264124631881714, 0.1999853551387787, -0.33333298563957214,
    ):  # fmt: skip
        rest = call("fma", rest, square, coefficient)
    return rest
