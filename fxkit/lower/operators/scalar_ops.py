"""Pointwise operators: operator identity → scalar expression. One function is one row of the table.

A row's positional parameters are operands, tensors or numbers, already converted to the dtype in
which the operator computes; its keyword-only parameters are plain attributes. Both have the names
of ATen's schema. The row says what eager computes for one element, in loop IR; the printers, the
fuser, the tests and the docs read nothing else. bf16 and f16 are computed in float32 and rounded
once, at the end of the operator, as eager does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Ref
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.operators import (
    activation_ops,
    elementary_ops,
    gradient_ops,
    integer_ops,
    special_ops,
)
from fxkit.lower.operators.integer_ops import (
    floored_quotient,
    floored_rest,
    truncated_quotient,
    truncated_rest,
)
from fxkit.lower.operators.scalar_table import (
    TABLE,
    Computes,
    call,
    const_like,
    multiply_add,
    needs_full_width,
    number,
    rounded_number,
    row,
    select,
)

__all__ = [
    "TABLE",
    "activation_ops",
    "elementary_ops",
    "gradient_ops",
    "integer_ops",
    "special_ops",
]


# --- arithmetic


@row("aten.add", tolerance=1)
def _add(self: Ref, other: Ref, *, alpha: Number, result_dtype: torch.dtype) -> Ref:
    if self.dtype == torch.bool:
        return self | other if alpha else self
    if alpha == 1:
        return self + other
    return multiply_add(other, rounded_number(self, alpha, result_dtype), self)


@row("aten.sub", tolerance=1)
def _sub(self: Ref, other: Ref, *, alpha: Number, result_dtype: torch.dtype) -> Ref:
    if alpha == 1:
        return self - other
    return multiply_add(other, rounded_number(self, -alpha, result_dtype), self)


@row("aten.rsub", tolerance=1)
def _rsub(self: Ref, other: Ref, *, alpha: Number, result_dtype: torch.dtype) -> Ref:
    return _sub(other, self, alpha=alpha, result_dtype=result_dtype)


@row("aten.mul", exact_numbers=("self", "other"), exact_single=True)
def _mul(self: Ref, other: Ref) -> Ref:
    return self & other if self.dtype == torch.bool else self * other


@row("aten.div", exact_numbers=("self", "other"), exact_single=True, tolerance=1)
def _div(
    self: Ref, other: Ref, *, rounding_mode: str | None = None, result_dtype: torch.dtype
) -> Ref:
    if rounding_mode is None:
        is_reflected = number(self) is not None and number(other) is None
        # Eager divides a number by a tensor in two steps.
        return (1.0 / other).cast(result_dtype) * self if is_reflected else self / other
    if rounding_mode == "trunc":
        is_float = self.is_float
        return call("trunc", self / other) if is_float else truncated_quotient(self, other)
    return _floor_divide(self, other)


@row("aten.floor_divide", exact_numbers=("other",), exact_single=True, tolerance=1)
def _floor_divide(self: Ref, other: Ref) -> Ref:
    if not self.is_float:
        return floored_quotient(self, other)
    rest = call("fmod", self, other)
    ratio = (self - rest) / other
    is_below = rest.differs(0) & ((other < 0) ^ (rest < 0))
    ratio = select(is_below, ratio - 1, ratio)
    floor = call("floor", ratio)
    floor = select(ratio - floor > 0.5, floor + 1, floor)
    zero = call("copysign", const_like(self, 0.0), self / other)
    floor = select(ratio.differs(0), floor, zero)
    return select(other.equals(0), self / other, floor)


@row("aten.fmod")
def _fmod(self: Ref, other: Ref) -> Ref:
    if not self.is_float:
        return truncated_rest(self, other)
    return call("fmod", self, other)


@row("aten.remainder")
def _remainder(self: Ref, other: Ref) -> Ref:
    if not self.is_float:
        return floored_rest(self, other)
    rest = call("fmod", self, other)
    return select(rest.differs(0) & ((other < 0) ^ (rest < 0)), rest + other, rest)


@row("aten.neg")
def _neg(self: Ref) -> Ref:
    return -self


@row("aten.to", "aten._to_copy", "aten.clone")
def _same(self: Ref) -> Ref:
    return self


@row("aten.type_as")
def _type_as(self: Ref, other: Ref) -> Ref:
    return self


@row("aten.abs")
def _abs(self: Ref) -> Ref:
    return self if self.dtype in (torch.bool, torch.uint8) else call("abs", self)


@row("aten.sign", "aten.sgn")
def _sign(self: Ref) -> Ref:
    if self.dtype == torch.bool:
        return self
    return (self > 0).cast(self.dtype) - (self < 0).cast(self.dtype)


@row("aten.square")
def _square(self: Ref) -> Ref:
    return self * self


@row("aten.reciprocal", tolerance=1)
def _reciprocal(self: Ref) -> Ref:
    return 1.0 / self


@row("aten.pow", tolerance=4)
def _pow(self: Ref, exponent: Ref, *, result_dtype: torch.dtype) -> Ref:
    power = number(exponent)
    if not self.is_float:
        return _integer_power(self, power)
    if power in (0.5, -0.5) and result_dtype == torch.float16:
        # Eager takes no root of them: the power of -0.0 is 0.0, that of -inf is inf.
        root = select(self.equals(-math.inf), const_like(self, math.inf), call("sqrt", self) + 0.0)
        return root if power == 0.5 else 1.0 / root
    if power in _POWERS:
        return _POWERS[power](self)
    return call("pow", self, exponent)


_POWERS: dict[Any, Callable[[Ref], Ref]] = {
    0: lambda x: const_like(x, 1.0),
    0.5: lambda x: call("sqrt", x),
    1: lambda x: x,
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    -0.5: lambda x: 1.0 / call("sqrt", x),
    -1: lambda x: 1.0 / x,
    -2: lambda x: 1.0 / (x * x),
}


def _integer_power(base: Ref, power: Number | None) -> Ref:
    if power is None or not 0 <= power <= 8 or base.dtype == torch.bool:
        raise Unfusable("an integer power is fused for a constant exponent from 0 to 8")
    result = const_like(base, 1)
    for _ in range(int(power)):
        result = result * base
    return result


@row("aten.float_power", tolerance=4)
def _float_power(self: Ref, exponent: Ref, *, result_dtype: torch.dtype) -> Ref:
    return _pow(self, exponent, result_dtype=result_dtype)


@row("aten.addcmul", tolerance=2)
def _addcmul(self: Ref, tensor1: Ref, tensor2: Ref, *, value: Number) -> Ref:
    scaled = tensor1 if value == 1 else tensor1 * value
    return multiply_add(scaled, tensor2, self)


@row("aten.addcdiv", tolerance=2)
def _addcdiv(self: Ref, tensor1: Ref, tensor2: Ref, *, value: Number) -> Ref:
    return self + (tensor1 / tensor2 if value == 1 else tensor1 * value / tensor2)


@row("aten.lerp", tolerance=2, exact_numbers=("weight",))
def _lerp(self: Ref, end: Ref, weight: Ref) -> Ref:
    step = end - self
    is_near_start = call("abs", weight) < 0.5
    factor = select(is_near_start, weight, weight - 1.0)
    return multiply_add(factor, step, select(is_near_start, self, end))


@row("aten.maximum")
def _maximum(self: Ref, other: Ref) -> Ref:
    return self | other if self.dtype == torch.bool else call("max", self, other)


@row("aten.minimum")
def _minimum(self: Ref, other: Ref) -> Ref:
    return self & other if self.dtype == torch.bool else call("min", self, other)


@row("aten.fmax")
def _fmax(self: Ref, other: Ref) -> Ref:
    return select((self >= other) | other.differs(other), self, other)


@row("aten.fmin")
def _fmin(self: Ref, other: Ref) -> Ref:
    return select((self <= other) | other.differs(other), self, other)


@row("aten.clamp")
def _clamp(self: Ref, min: Ref | None, max: Ref | None) -> Ref:
    raised = self if min is None else call("max", self, min)
    return raised if max is None else call("min", raised, max)


@row("aten.clamp_min")
def _clamp_min(self: Ref, min: Ref) -> Ref:
    return call("max", self, min)


@row("aten.clamp_max")
def _clamp_max(self: Ref, max: Ref) -> Ref:
    return call("min", self, max)


@row("aten.copysign")
def _copysign(self: Ref, other: Ref) -> Ref:
    return call("copysign", self, other)


@row("aten.where")
def _where(condition: Ref, self: Ref, other: Ref) -> Ref:
    return select(condition.cast(torch.bool), self, other)


@row("aten.masked_fill")
def _masked_fill(self: Ref, mask: Ref, value: Ref) -> Ref:
    return select(mask.cast(torch.bool), value, self)


# --- rounding


def _rounding(function: str) -> Callable[..., Ref]:
    def build(self: Ref) -> Ref:
        return call(function, self) if self.is_float else self

    return build


for _name, _function in {"floor": "floor", "ceil": "ceil", "trunc": "trunc"}.items():
    row(f"aten.{_name}")(_rounding(_function))


@row("aten.round")
def _round(self: Ref, *, decimals: int = 0, result_dtype: torch.dtype) -> Ref:
    if not self.is_float:
        return self
    if not decimals:
        return call("rint", self)
    needs_full_width(self, result_dtype)
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return call("rint", self / scale) * scale
    return call("rint", self * scale) / scale


@row("aten.frac")
def _frac(self: Ref) -> Ref:
    return self - call("trunc", self)


# --- comparisons and logic


def _comparison(compare: Callable[[Ref, Ref], Ref]) -> Callable[..., Ref]:
    def build(self: Ref, other: Ref) -> Ref:
        return compare(self, other)

    return build


def _logic(compare: Callable[[Ref, Ref], Ref]) -> Callable[..., Ref]:
    def build(self: Ref, other: Ref) -> Ref:
        return compare(self.cast(torch.bool), other.cast(torch.bool))

    return build


for _name, _compare in {
    "eq": lambda a, b: a.equals(b),
    "ne": lambda a, b: a.differs(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}.items():
    row(f"aten.{_name}", computes=Computes.COMMON)(_comparison(_compare))

for _name, _compare in {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}.items():
    row(f"aten.logical_{_name}", computes=Computes.COMMON)(_logic(_compare))
    row(f"aten.bitwise_{_name}")(_comparison(_compare))


@row("aten.logical_not", computes=Computes.BOOL)
@row("aten.bitwise_not")
def _not(self: Ref) -> Ref:
    return ~self


@row("aten.isnan", computes=Computes.OWN)
def _isnan(self: Ref) -> Ref:
    return self.differs(self)


@row("aten.isinf", computes=Computes.OWN)
def _isinf(self: Ref) -> Ref:
    if not self.is_float:
        return self.differs(self)
    return call("abs", self).equals(math.inf)


@row("aten.isfinite", computes=Computes.OWN)
def _isfinite(self: Ref) -> Ref:
    if not self.is_float:
        return self.equals(self)
    return call("abs", self) < math.inf


@row("aten.nan_to_num")
def _nan_to_num(
    self: Ref,
    *,
    nan: float | None,
    posinf: float | None,
    neginf: float | None,
    result_dtype: torch.dtype,
) -> Ref:
    if not self.is_float:
        return self
    largest = torch.finfo(result_dtype).max
    posinf = largest if posinf is None else posinf
    neginf = -largest if neginf is None else neginf
    result = select(self.differs(self), const_like(self, nan or 0.0), self)
    result = select(self.equals(math.inf), const_like(self, posinf), result)
    return select(self.equals(-math.inf), const_like(self, neginf), result)
