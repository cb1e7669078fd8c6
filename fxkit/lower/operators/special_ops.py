"""Special functions, tests of numbers, and filling: more rows of the table of operators."""

from __future__ import annotations

import math

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.scalar_table import (
    Computes,
    call,
    const_like,
    floats_only,
    needs_full_width,
    row,
    select,
)

# --- tests of numbers


@row("aten.isposinf", computes=Computes.OWN)
def _isposinf(self: Ref) -> Ref:
    return self.equals(math.inf) if self.is_float else self.differs(self)


@row("aten.isneginf", computes=Computes.OWN)
def _isneginf(self: Ref) -> Ref:
    return self.equals(-math.inf) if self.is_float else self.differs(self)


@row("aten.isreal", computes=Computes.OWN)
def _isreal(self: Ref) -> Ref:
    return self.equals(self) | self.differs(self)


@row("aten.signbit", computes=Computes.OWN)
def _signbit(self: Ref) -> Ref:
    if self.dtype == torch.bool:
        return self.differs(self)
    return call("copysign", const_like(self, 1.0), self) < 0 if self.is_float else self < 0


@row("aten.heaviside")
def _heaviside(self: Ref, values: Ref) -> Ref:
    return select(self.equals(0), values, (self > 0).cast(self.dtype))


@row("aten.angle")
def _angle(self: Ref) -> Ref:
    floats_only(self, "the angle")
    angle = select(self < 0, const_like(self, math.pi), const_like(self, 0))
    return select(self.differs(self), self, angle)


# --- filling


@row("aten.zeros_like")
def _zeros_like(self: Ref) -> Ref:
    return const_like(self, 0)


@row("aten.ones_like")
def _ones_like(self: Ref) -> Ref:
    return const_like(self, 1)


@row("aten.full_like")
def _full_like(self: Ref, fill_value: Ref) -> Ref:
    return fill_value


@row("aten.fill")
def _fill(self: Ref, value: Ref) -> Ref:
    return value


@row("aten.copy")
def _copy(self: Ref, src: Ref) -> Ref:
    return src


# --- special functions


@row("aten.hypot", tolerance=3)
def _hypot(self: Ref, other: Ref) -> Ref:
    return call("hypot", self, other)


@row("aten.nextafter")
def _nextafter(self: Ref, other: Ref, *, result_dtype: torch.dtype) -> Ref:
    needs_full_width(self, result_dtype)
    return call("nextafter", self, other)


@row("aten.logaddexp2", tolerance=6)
def _logaddexp2(self: Ref, other: Ref) -> Ref:
    power = call("exp2", -call("abs", self - other))
    sum_ = call("max", self, other) + call("log2", 1.0 + power)
    return select(call("abs", self).equals(math.inf) & self.equals(other), self, sum_)


@row("aten.sinc", tolerance=5)
def _sinc(self: Ref) -> Ref:
    angle = self * math.pi
    return select(self.equals(0), const_like(self, 1), call("sin", angle) / angle)


@row("aten.special_xlog1py", tolerance=5)
def _xlog1py(self: Ref, other: Ref) -> Ref:
    product = select(self.equals(0), const_like(self, 0), self * call("log1p", other))
    return select(other.differs(other), other, product)


@row("aten.special_entr", tolerance=5)
def _entr(self: Ref) -> Ref:
    outside = select(self.equals(0), const_like(self, 0), const_like(self, -math.inf))
    inside = select(self > 0, -self * call("log", self), outside)
    return select(self.differs(self), self, inside)


@row("aten.special_ndtr", tolerance=3)
def _ndtr(self: Ref) -> Ref:
    return 0.5 * call("erfc", self * -math.sqrt(0.5))


@row("aten.deg2rad", tolerance=1)
def _deg2rad(self: Ref) -> Ref:
    return self * (math.pi / 180)


@row("aten.rad2deg", tolerance=1)
def _rad2deg(self: Ref) -> Ref:
    return self * (180 / math.pi)


# Bernoulli's numbers: B(2n) / 2n from n = 7 down to n = 1.
_BERNOULLI = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)

# From here on the series for large numbers is exact.
_DIGAMMA_FROM = 10


@row("aten.digamma", tolerance=16)
def _digamma(self: Ref, *, result_dtype: torch.dtype) -> Ref:
    needs_full_width(self, result_dtype)
    if self.dtype != torch.float32:
        raise Unfusable("in float64 its error near poles is a cancellation's, which eager has")
    is_low = self < 0.5
    x = select(is_low, 1.0 - self, self)
    below = const_like(self, 0)
    for _ in range(_DIGAMMA_FROM):
        is_small = x < float(_DIGAMMA_FROM)
        below = select(is_small, below + 1.0 / x, below)
        x = select(is_small, x + 1.0, x)
    square = 1.0 / (x * x)
    series = const_like(self, 0)
    for coefficient in _BERNOULLI:
        series = (series + coefficient) * square
    value = call("log", x) - 0.5 / x - series - below
    # Its reflection, of the distance to the nearest pole.
    distance = self - call("rint", self)
    reflected = value - math.pi / call("tan", distance * math.pi)
    reflected = select(distance.equals(0), const_like(self, math.nan), reflected)
    at_zero = call("copysign", const_like(self, math.inf), -self)
    reflected = select(self.equals(0), at_zero, reflected)
    return select(is_low, reflected, value)
