"""Division, shifts and bits of integers: more rows of the table of pointwise operators.

Division by a tensor of integers is left to eager, which raises when an element is zero.
"""

from __future__ import annotations

import torch

from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators.scalar_table import call, number, row, select


def truncated_quotient(self: Ref, other: Ref) -> Ref:
    """Return the quotient of integers, rounded towards zero."""
    return -self if _divisor(self, other) == -1 else self / other


def floored_quotient(self: Ref, other: Ref) -> Ref:
    """Return the quotient of integers, rounded down."""
    if _divisor(self, other) == -1:
        return -self
    rest = call("mod", self, other)
    return select(_is_below(rest, other), self / other - 1, self / other)


def truncated_rest(self: Ref, other: Ref) -> Ref:
    """Return the rest of the division of integers; it has the sign of the dividend."""
    return self ^ self if _divisor(self, other) == -1 else call("mod", self, other)


def floored_rest(self: Ref, other: Ref) -> Ref:
    """Return the rest of the division of integers; it has the sign of the divisor."""
    rest = truncated_rest(self, other)
    return select(_is_below(rest, other), rest + other, rest)


def _is_below(rest: Ref, divisor: Ref) -> Ref:
    """Tell whether rounding towards zero went up."""
    return rest.differs(0) & ((rest < 0) ^ (divisor < 0))


def _divisor(self: Ref, other: Ref) -> int:
    """Return the number that is divided by; -1 stands apart, since -2^63 / -1 is a trap."""
    if self.dtype == torch.bool:
        raise Unfusable("division of bools is left to eager")
    divisor = number(other)
    if not divisor:
        raise Unfusable(
            "division of integers by other than a constant is left to eager, which raises for zero"
        )
    return int(divisor)


@row("aten.bitwise_left_shift", "aten.__lshift__")
def _left_shift(self: Ref, other: Ref) -> Ref:
    bits = _bits(self)
    is_within = (other >= 0) & (other < bits)
    return select(is_within, call("shl", self, select(is_within, other, 0)), 0)


@row("aten.bitwise_right_shift", "aten.__rshift__")
def _right_shift(self: Ref, other: Ref) -> Ref:
    most = _bits(self) - (self.dtype != torch.uint8)
    is_within = (other >= 0) & (other < most)
    return call("shr", self, select(is_within, other, most))


def _bits(x: Ref) -> int:
    if x.is_float or x.dtype == torch.bool:
        raise Unfusable("a shift of other than integers is left to eager")
    return torch.iinfo(x.dtype).bits


@row("aten.__and__")
def _and(self: Ref, other: Ref) -> Ref:
    return self & other


@row("aten.__or__")
def _or(self: Ref, other: Ref) -> Ref:
    return self | other


@row("aten.__xor__")
def _xor(self: Ref, other: Ref) -> Ref:
    return self ^ other
